"""Whether what the config names is there: weights, tokenizers, chat templates, data, and the servers' Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_gvpo.config.facts import PROMPT_FILES, Facts, Problem, installed, wrong

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def problems(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    if facts.shape is not None and config.model.init == "pretrained":
        yield from _weights(Path(config.model.path), "model.path")
    # A teacher behind a url has its weights on other machines.
    here = config.teacher.where == "colocated" or config.teacher.servers.launch == "local"
    if facts.teacher_shape is not None and here:
        yield from _weights(Path(config.teacher.path), "teacher.path")
    if facts.shape is not None or config.model.tokenizer:
        yield from _tokenizer(facts)
    for key in ("train", "eval"):
        value = getattr(config.data, key)
        if value.endswith(PROMPT_FILES) and not Path(value).is_file():
            yield wrong(f"no such file: {Path(value).absolute()}", f"data.{key}")
        elif value.startswith("reasoning_gym:") and not installed("reasoning_gym"):
            yield wrong("the package reasoning-gym is not installed", f"data.{key}")
    for key, servers in (("rollout", config.rollout.servers), ("teacher", config.teacher.servers)):
        if servers.launch == "local" and servers.python and shutil.which(servers.python) is None:
            yield wrong(f"no such program: {servers.python}", f"{key}.servers.python")


def _weights(folder: Path, key: str) -> Iterator[Problem]:
    """Every shard that the index names, or the one file. Only safetensors are read: other formats can run code."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            yield wrong(f"{folder}: no model.safetensors (nor an index of several)", key)
        return
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        yield wrong(f"{index}: not an index of safetensors: {error}", key)
        return
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        yield wrong(f"{folder}: {len(missing)} of {len(shards)} weight files are missing, {missing[0]} first", key)


def _tokenizer(facts: Facts) -> Iterator[Problem]:
    config = facts.config
    folder = Path(config.model.tokenizer or config.model.path)
    keys = ("model.tokenizer", "model.path")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield wrong(f"{folder}: no tokenizer there ({', '.join(_TOKENIZERS)})", *keys)
        return
    if config.data.chat_template and not (folder / "chat_template.jinja").is_file():
        settings = folder / "tokenizer_config.json"
        if not settings.is_file() or '"chat_template"' not in settings.read_text(encoding="utf-8"):
            yield wrong(f"the tokenizer in {folder} has no chat template", "data.chat_template")
