"""`train --resume` against the run that was never stopped, with recorded rollouts: the same numbers, bit for bit.

Does not cover live rollouts (tests of the journal), signals and kills (test_signals, test_kill), nor other layouts than the one
that saved (tests/mcore/test_checkpoint).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port, run_ranks
from tests.train.runs import checkpoints, config_of, record_samples, rows_of, run

STEPS, STOP = 10, 5


def _stopped_and_straight(rank: int, world: int, folder: str, ports: list[int], parallel: dict[str, Any]) -> None:
    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.train.rank import Options, run_rank

    for name, options in (
        ("straight", Options(replay=Path(folder))),
        ("stopped", Options(replay=Path(folder), stop_after=STOP)),
        ("stopped", Options(replay=Path(folder), resume=True)),
    ):
        os.environ["MASTER_PORT"] = str(ports.pop(0))
        config = load_config(Path(folder) / name / "config.yaml")
        run_dir = Path(config.log.dir)
        (run_dir / "samples").mkdir(parents=True, exist_ok=True)
        code = run_rank(config, run_dir, options)
        assert code == (85 if options.stop_after else 0), (name, code)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "parallel",
    [{}, {"tensor": 2}, {"tensor": 1}],
    ids=["one-rank", "tensor2", "data2"],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Why: acceptance 38. Loss and gradient norm of every later step depend on weights, both moments of Adam, its step count, the
    schedule's place and the order of the samples, so equal numbers mean that all of them came back."""
    world = 2 if parallel else 1
    record_samples(tmp_path, STEPS)
    for name in ("straight", "stopped"):
        config_of(tmp_path / name, parallel={"gpus_per_node": world, **parallel}, optimizer={"distributed": True})
    run_ranks(_stopped_and_straight, world, str(tmp_path), [free_port() for _ in range(3)], parallel, timeout=150.0, init=False)
    straight, stopped = rows_of(tmp_path / "straight" / "run"), rows_of(tmp_path / "stopped" / "run")
    assert [row["step"] for row in straight] == list(range(1, STEPS + 1))
    assert len({row["grad_norm"] for row in straight}) == STEPS  # it did move
    assert stopped == straight


@pytest.mark.heavy
def test_in_processes_of_its_own(tmp_path: Path) -> None:
    """Why: the test above resumes in the process that was stopped, which might remember something. Covers the command line:
    exit code 85, refusal of a directory that holds a run, and where the next step starts (acceptance 38)."""
    replay = ("--replay", str(record_samples(tmp_path / "recorded", STEPS)))
    straight = config_of(tmp_path / "straight")
    stopped = config_of(tmp_path / "stopped")
    assert run(straight, *replay).code == 0
    assert run(stopped, *replay, "--stop-after", "9").code == 85
    assert checkpoints(tmp_path / "stopped" / "run") == ["step_00000009"]
    refused = run(stopped, *replay)
    assert (refused.code, len(refused.error_lines)) == (2, 1)
    assert "--resume" in refused.errors
    assert run(stopped, *replay, "--resume").code == 0
    assert rows_of(tmp_path / "stopped" / "run") == rows_of(tmp_path / "straight" / "run")
