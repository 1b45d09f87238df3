"""Recorded rollouts in place of live ones: the same run again, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.samples import Sample, read_samples
from megatron_gvpo.report.names import SAMPLES_DIR
from megatron_gvpo.train.clock import StepClock
from megatron_gvpo.train.learn import without_trainer_signals


class Replay:
    """Samples of a run's directory (or its `samples` folder), step by step; or of one file, the same for every step."""

    def __init__(self, path: Path) -> None:
        self._single = path if path.is_file() else None
        folder = path / SAMPLES_DIR if (path / SAMPLES_DIR).is_dir() else path
        if self._single is None and not any(folder.glob("step_*.jsonl")):
            raise DataError(f"{path}: neither a samples file nor a run directory with {SAMPLES_DIR}/step_*.jsonl")
        self._folder = folder

    def rollout(self, step: int, clock: StepClock) -> tuple[list[Sample], dict[str, float]]:
        with clock.part("rollout"):
            path = self._single or self._folder / f"step_{step:06d}.jsonl"
            samples = [without_trainer_signals(s) for s in read_samples(path)]
        rewards = [s.reward for s in samples if s.reward is not None]
        return samples, dict(_mean_and_spread(rewards))

    def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        return {}, []


def _mean_and_spread(rewards: list[float]) -> Iterator[tuple[str, float]]:
    if rewards:
        mean = sum(rewards) / len(rewards)
        yield "reward/mean", mean
        yield "reward/std", (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
