"""Small real runs of the demo student: a config of a few steps, recorded rollouts, and `train` on the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.data.samples import Sample, write_samples
from megatron_gvpo.report.jsonl import read_rows
from megatron_gvpo.report.names import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "chain_sum" / "student"
TRAIN_DATA = ROOT / "examples" / "chain_sum" / "train.jsonl"
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def config_of(folder: Path, **sections: dict[str, Any]) -> Path:
    """A config file in `folder` whose run directory is `folder/run`; `sections` are laid over the small defaults
    (None takes a default away)."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(STUDENT), "max_length": 32},
        "precision": {"params": "fp32"},
        "objective": {"name": "gvpo", "beta": 0.1},
        "rollout": {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 8},
        "data": {"train": str(TRAIN_DATA)},
        "reward": {"name": "exact"},
        "optimizer": {"lr": 4.0e-4, "warmup_steps": 2, "weight_decay": 0.01, "schedule": "cosine"},
        "train": {"device": "cpu", "steps": 10, "micro_batch_tokens": 128, "collective_timeout_s": 60},
        "checkpoint": {"export": False},
        "log": {"dir": str(folder / "run"), "report": False},
    }
    for name, keys in sections.items():
        merged = {**config.get(name, {}), **keys}
        config[name] = {key: value for key, value in merged.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def record_samples(folder: Path, steps: int, prompts: int = 3, group_size: int = 4, seed: int = 0) -> Path:
    """Recorded rollouts for `train --replay`: prompts of the demo's form, answers right and wrong, made-up log-probs."""
    draw = random.Random(seed)
    samples_dir = folder / "samples"
    samples_dir.mkdir(parents=True)
    for step in range(1, steps + 1):
        samples: list[Sample] = []
        for place in range(prompts):
            prompt = [draw.randrange(8, 34) for _ in range(draw.randrange(4, 9))]
            for _ in range(group_size):
                response = [*(draw.randrange(8, 34) for _ in range(draw.randrange(1, 5))), 1]
                samples.append(
                    Sample(
                        group=f"{step}:{place}",
                        prompt_ids=prompt,
                        response_ids=response,
                        mask=[1] * len(response),
                        reward=float(draw.random() < 0.5),
                        rollout_logprobs=[draw.uniform(-3.0, -0.1) for _ in response],
                        weight_versions=[(str(step - 1), 0)],
                    )
                )
        write_samples(samples_dir / f"step_{step:06d}.jsonl", samples)
    return folder


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics without what depends on the clock."""
    rows = read_rows(run_dir / METRICS_FILE)
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def command(config: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "megatron_gvpo.cli", "train", str(config), *options]


@dataclass(frozen=True)
class Done:
    """How a run ended. errors: what it wrote to stderr, without the progress display."""

    code: int
    output: str
    errors: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error:")]


def run(config: Path, *options: str, timeout: float = 120.0, env: dict[str, str] | None = None) -> Done:
    """`megatron-gvpo train CONFIG OPTIONS`, to its end."""
    done = subprocess.run(
        command(config, *options), env={**os.environ, **QUIET, **(env or {})}, capture_output=True, text=True, timeout=timeout
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Running:
    """A run that was started and is watched; `stop` at the end ends whatever is left of it."""

    def __init__(self, config: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.config = config
        self._log = config.parent / f"output-{time.monotonic_ns()}.txt"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                command(config, *options), env={**os.environ, **QUIET, **(env or {})}, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, what: object, limit: float = 90.0) -> None:
        """Until the callable `what` is true; fails past the limit, or when the run has ended before."""
        deadline = time.monotonic() + limit
        while not what():  # type: ignore[operator]
            assert self.process.poll() is None, f"the run ended early with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"did not happen within {limit:g} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, limit: float = 90.0) -> int:
        return self.process.wait(limit)

    def ranks(self) -> list[int]:
        """Pids of the rank processes, in rank order (as far as they were started)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # its ranks die with it
            self.process.wait(30.0)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid`."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(below for child in children for below in descendants(child))]


def alive(pids: Sequence[int]) -> list[int]:
    """Those that still run; in a container nobody may reap an orphan, so a zombie counts as gone."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.append(pid)
    return found


def all_gone(pids: Sequence[int], limit: float = 20.0) -> list[int]:
    """Those of `pids` that are still there after `limit` seconds."""
    deadline = time.monotonic() + limit
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def checkpoints(run_dir: Path) -> list[str]:
    """Names of the finished checkpoints, oldest first."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*") if not path.name.endswith(".tmp"))


def read_state(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
