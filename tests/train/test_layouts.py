"""A run that is resumed at another layout: its next steps are those of the run that kept its own, to rounding.

Whole runs of one model on recorded rollouts; tests/mcore/test_checkpoint compares single weights and more models. Does not cover
context and expert parallelism.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import config_of, record_samples, rows_of
from tests.train.zygote import Zygote

STOP, STEPS = 3, 5


def _sections(world: int, sharded: bool, steps: int = STEPS, **parallel: int) -> dict[str, Any]:
    return {
        "parallel": {"gpus_per_node": world, **parallel},
        "train": {"steps": steps},
        "optimizer": {"distributed": sharded, "schedule": "constant"},
        "checkpoint": {"every": 1, "asynchronous": True},
    }


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_resumed_at_another_layout(tmp_path: Path, sharded: bool) -> None:
    """Why: a run that loses machines, or is given more, goes on as it was. Saved at TP2 x PP2, in the background; resumed at the
    same layout, one rank, DP2 and TP4; with whole and with sharded optimizer state."""
    recorded = record_samples(tmp_path / "recorded", STEPS)
    layouts: dict[str, tuple[int, dict[str, int]]] = {
        "same": (4, {"tensor": 2, "pipeline": 2}),
        "one": (1, {}),
        "dp2": (2, {}),
        "tp4": (4, {"tensor": 4}),
    }
    with Zygote() as zygote:
        saved = config_of(tmp_path / "saved", **_sections(4, sharded, steps=STOP + 1, tensor=2, pipeline=2))
        # Killed when the checkpoint that was written during step 4 counts.
        newest = f"run/checkpoints/step_{STOP:08d}/manifest.json"
        codes = zygote.run(saved, world=4, replay=recorded, kill_when=newest, kill_after=0.2)
        assert set(codes) <= {None, 0}, zygote.log(saved)
        found = {}
        for name, (world, parallel) in layouts.items():
            shutil.copytree(tmp_path / "saved" / "run", tmp_path / name / "run")
            shutil.rmtree(tmp_path / name / "run" / "checkpoints" / f"step_{STOP + 1:08d}", ignore_errors=True)
            (tmp_path / name / "run" / "checkpoints" / "latest").write_text(f"step_{STOP:08d}\n")
            config = config_of(tmp_path / name, **_sections(world, sharded, **parallel))
            assert set(zygote.run(config, world=world, resume=True, replay=recorded)) == {0}, zygote.log(config)
            assert f"resumed after step {STOP}" in zygote.log(config)
            found[name] = rows_of(tmp_path / name / "run")[STOP:]
    for name, rows in found.items():
        assert [row["step"] for row in rows] == [STOP + 1, STEPS]
        for row, same in zip(rows, found["same"], strict=True):
            assert row["loss"] == pytest.approx(same["loss"], rel=1e-5), name
            assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4), name
