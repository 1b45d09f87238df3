"""Everything in a config that decides what is learnt: what a checkpoint and a journal entry belong to.

Where it runs, what it writes and how long it waits may change between two starts of a run without a word; the rest may not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import Config

_FREE_SECTIONS = ("parallel", "checkpoint", "log", "launch")
_FREE_KEYS = {
    "train": (
        *("device", "threads", "eval_every", "eval_samples", "max_bad_steps", "collective_timeout_s", "peer_timeout_s"),
        *("deadline_s", "micro_batch_size", "micro_batch_tokens"),
    ),
    "rollout": ("servers", "request_timeout_s", "retries", "weight_sync", "bucket_mib", "sync_timeout_s", "logprob_alarm"),
    "teacher": ("servers", "where", "offload", "cache", "batch", "request_timeout_s", "retries", "hedge_after_s"),
    "data": ("eval", "eval_size"),
    "reward": ("workers",),
    "gupo": ("memory_gib",),
    "optimizer": ("distributed", "overlap_grad_reduce", "overlap_param_gather", "cpu_offload"),
}
# What decides how text becomes ids, whatever else the folder holds.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja"),
)


def recipe(config: Config) -> dict[str, Any]:
    """The deciding keys, flat: `section.key` and its JSON value."""
    found: dict[str, Any] = {}
    for section, keys in config.model_dump(mode="json").items():
        if section not in _FREE_SECTIONS:
            free = _FREE_KEYS.get(section, ())
            found.update({f"{section}.{key}": value for key, value in keys.items() if key not in free})
    if config.optimizer.schedule == "constant":
        del found["train.steps"]  # else the learning rate of every step depends on it
    for source in found.get("teacher.by_domain", {}).values():
        source.pop("servers", None)
    return found


def digest(config: Config) -> str:
    return hashlib.sha256(json.dumps(recipe(config), sort_keys=True).encode()).hexdigest()[:16]


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """`key: was ..., is ...` of two recipes, by key."""
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return {key: f"{key} was {json.dumps(before.get(key))}, is {json.dumps(now.get(key))}" for key in keys}


def tokenizer_digest(config: Config) -> str:
    """A digest of the tokenizer's files."""
    folder = Path(config.model.tokenizer or config.model.path)
    found = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            found.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
