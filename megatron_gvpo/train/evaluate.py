"""Held-out accuracy of a model without training it: servers, prompts, rewards, and no trainer."""

from __future__ import annotations

from pathlib import Path

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.samples import write_samples
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.hf import eos_ids
from megatron_gvpo.train.main import RunDirError


def evaluate(config: Config, log_dir: Path, samples: Path | None = None) -> dict[str, float]:
    """Greedy and sampled accuracy of `config.model.path` on `data.eval`, with standard errors.

    log_dir: where the servers' logs go. samples: a file for the responses that were sampled.
    """
    if not config.data.eval:
        raise RunDirError("data.eval is empty: there is nothing to evaluate on")
    path = Path(config.model.path)
    log_dir.mkdir(parents=True, exist_ok=True)
    with Controller(config, log_dir, vocab_size=read_shape(path).vocab, eos_ids=eos_ids(path), train=False) as controller:
        metrics, drawn = controller.evaluate()
    if samples is not None:
        write_samples(samples, drawn)
    return metrics
