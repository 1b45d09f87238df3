"""A run with a real SGLang server that loses its server, and is killed twice: each time nothing stays behind, and it goes on.

Does not cover several servers (tests/slurm) nor the many moments of test_kill.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import STUDENT, Running, all_gone, config_of, descendants, rows_of, run

STEPS = 6


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_lost_server_and_two_kills(tmp_path: Path) -> None:
    """Why: invariant 5 on real parts. First the server's process is killed (the run must say so and end); then the whole run,
    with kill -9, in a rollout, and at the beginning of a save. The end is the run that a replay of its record gives."""
    common: dict[str, Any] = {"train": {"steps": STEPS}, "checkpoint": {"every": 2, "export": True}}
    config = config_of(tmp_path / "live", rollout={"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 8}, **common)
    run_dir = tmp_path / "live" / "run"

    with Running(config) as running:
        running.wait_for(lambda: _batches(run_dir) >= 1, 120.0)
        everyone = descendants(running.process.pid)
        (server,) = [pid for pid in everyone if _is_server(pid)]
        os.kill(server, signal.SIGKILL)
        assert running.wait(60.0) == 1, running.output
        assert "error: server0 (http://127.0.0.1:" in running.output
        assert all_gone(everyone) == []

    begun = _batches(run_dir)
    with Running(config, "--resume") as running:
        running.wait_for(lambda: _batches(run_dir) > max(begun, 2), 120.0)
        everyone = descendants(running.process.pid)
        running.stop()
        assert all_gone(everyone) == []

    with Running(config, "--resume") as running:
        running.wait_for(lambda: list((run_dir / "checkpoints").glob("step_0000000[46].tmp")), 120.0)
        everyone = descendants(running.process.pid)
        running.stop()
        assert all_gone(everyone) == []

    done = run(config, "--resume", timeout=150.0)
    assert done.code == 0, done.errors
    replayed = config_of(tmp_path / "replayed", **common)
    done = run(replayed, "--replay", str(run_dir))
    assert done.code == 0, done.errors
    assert _comparable(rows_of(run_dir)) == _comparable(rows_of(tmp_path / "replayed" / "run"))
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (run_dir, tmp_path / "replayed" / "run")]
    assert weights[0] == weights[1] != (STUDENT / "model.safetensors").read_bytes()


def _batches(run_dir: Path) -> int:
    return len(list((run_dir / "samples").glob("step_*.jsonl")))


def _is_server(pid: int) -> bool:
    """The SGLang server's main process, not its guardian."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return words[1:3] == [b"-m", b"sglang.launch_server"]


def _comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("data/")} for row in rows]
