"""Checkpoints that were damaged on the disk, and disks that take none: the one before is used, and the older state stays whole.

The checkpoints are a real run's. Does not cover damage while a checkpoint is being read, nor file systems that lie about fsync.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.mcore.checkpoint_files import changed, find, large_files, problem
from tests.train.runs import checkpoints, config_of, record_samples, rows_of
from tests.train.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_samples(tmp_path_factory.mktemp("recorded"), 6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote, recorded: Path) -> Path:
    """The folder of a finished run of 4 steps on two ranks, with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    config = config_of(folder, **_SECTIONS)
    assert zygote.run(config, world=2, replay=recorded) == [0, 0], zygote.log(config)
    return folder


_SECTIONS: dict[str, Any] = {
    "train": {"steps": 4},
    "optimizer": {"schedule": "constant"},
    "checkpoint": {"every": 2},
    "parallel": {"gpus_per_node": 2},
}


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _remove(path: Path) -> None:
    path.unlink()


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.heavy
def test_each_file_of_the_newest_one(trained: Path, tmp_path: Path) -> None:
    """Why: acceptance 40, for every file and three kinds of damage, the large ones too, whose size does not change."""
    saved = trained / "run" / "checkpoints"
    assert checkpoints(trained / "run") == ["step_00000002", "step_00000004"]
    files = sorted(path.relative_to(saved / "step_00000004") for path in (saved / "step_00000004").iterdir())
    assert {"state.json", "manifest.json", ".metadata", "common.pt"} <= {str(name) for name in files}
    assert any(str(name) in large_files(saved / "step_00000004") for name in files)
    for name in files:
        for damage in (_truncate, _remove, _flip):
            root = tmp_path / "checkpoints"
            shutil.copytree(saved, root)
            damage(root / "step_00000004" / name)
            found, warnings = _whole(root)
            assert found == "step_00000002", (name, damage.__name__)
            assert len(warnings) == 1
            assert str(name) in warnings[0], (name, damage.__name__)
            shutil.rmtree(root)
    for damage in (_truncate, _remove, _flip):  # the pointer to the newest one
        shutil.copytree(saved, tmp_path / "checkpoints")
        damage(tmp_path / "checkpoints" / "latest")
        assert _whole(tmp_path / "checkpoints")[0] == "step_00000004"
        shutil.rmtree(tmp_path / "checkpoints")


def _whole(root: Path) -> tuple[str, list[str]]:
    """What a resume would take, as `newest` finds it with one rank."""
    damaged: dict[str, str] = {}
    while True:
        seen = find(root, damaged)
        assert seen.path is not None
        assert problem(seen.path) == ""
        if not (damage := changed(seen.path, large_files(seen.path))):
            return seen.path.name, seen.warnings
        damaged[seen.path.name] = damage


@pytest.mark.heavy
def test_a_run_goes_on_from_the_one_before(trained: Path, tmp_path: Path, zygote: Zygote, recorded: Path) -> None:
    """Why: the damage has to be found by `--resume` on two ranks, each of which reads a part, and steps 3, 4 come anew."""
    shutil.copytree(trained, tmp_path / "copy")
    newest = tmp_path / "copy" / "run" / "checkpoints" / "step_00000004"
    name = large_files(newest)[-1]
    _flip(newest / name)
    config = config_of(tmp_path / "copy", **_SECTIONS, log={"dir": str(tmp_path / "copy" / "run")})
    assert zygote.run(config, world=2, resume=True, replay=recorded) == [0, 0], zygote.log(config)
    assert f"step_00000004 is damaged and passed over: {name} has changed" in zygote.log(config)
    assert rows_of(tmp_path / "copy" / "run") == rows_of(trained / "run")
    assert problem(newest) == ""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that the student's first checkpoint fits into, and the second does not (13 MB each)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "gvpo-test", str(folder)], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


@pytest.mark.heavy
@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(tmp_path: Path, small_disk: Path, zygote: Zygote, recorded: Path, on_error: str, asynchronous: bool) -> None:
    """Why: the disk fills in the middle of the night. The older checkpoint stays, and the run stops, or goes on without. Its last
    checkpoint it does need, so then it fails in the end. Needs the right to mount (root)."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to(small_disk)
    config = config_of(
        tmp_path,
        train={"steps": 5},
        optimizer={"schedule": "constant"},
        checkpoint={"every": 2, "on_error": on_error, "asynchronous": asynchronous},
    )
    assert zygote.run(config, resume=True, replay=recorded) == [1]
    log = zygote.log(config)
    assert "the checkpoint of step 4 could not be written: rank 0: " in log
    assert "No space left on device" in log
    assert "older checkpoints are whole" in log
    # In the background it is noticed a step later.
    assert len(rows_of(run_dir)) == (4 if on_error == "stop" and not asynchronous else 5)
    assert checkpoints(run_dir) == ["step_00000002"]
    assert problem(run_dir / "checkpoints" / "step_00000002") == ""


@pytest.mark.heavy
def test_a_path_that_cannot_be_written(tmp_path: Path, zygote: Zygote, recorded: Path) -> None:
    """Why: a checkpoint folder on a snapshot or a full quota. Root may write anywhere, so the path leads through a file."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "file").write_text("")
    (run_dir / "checkpoints").symlink_to(tmp_path / "file" / "below")
    config = config_of(tmp_path, train={"steps": 3}, optimizer={"schedule": "constant"})
    assert zygote.run(config, resume=True, replay=recorded) == [1]
    assert "the checkpoint of step 3 could not be written" in zygote.log(config)


@pytest.mark.heavy
def test_in_the_background_it_is_the_same_checkpoint(trained: Path, tmp_path: Path, zygote: Zygote, recorded: Path) -> None:
    """Why: what is written while the next step changes the weights must be the weights before it. The run is killed after step 3,
    and goes on from the checkpoint of step 2 that was written during step 3."""
    config = config_of(tmp_path, **{**_SECTIONS, "checkpoint": {"every": 2, "asynchronous": True}})
    codes = zygote.run(config, world=2, replay=recorded, kill_when="run/checkpoints/latest", kill_after=0.0)
    assert codes == [None, None]
    assert checkpoints(tmp_path / "run") == ["step_00000002"]
    assert zygote.run(config, world=2, resume=True, replay=recorded) == [0, 0], zygote.log(config)
    assert "resumed after step 2" in zygote.log(config)
    assert rows_of(tmp_path / "run") == rows_of(trained / "run")
