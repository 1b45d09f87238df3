"""Which checkpoint counts: pointers move last, damaged and half-written ones are passed over, old ones go."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.mcore.checkpoint_files import begin, commit, find, problem, prune, read_state


def _save(root: Path, step: int) -> Path:
    part = begin(root, step)
    (part / "large.distcp").write_bytes(bytes([step]) * (2 << 20))
    (part / "small.json").write_text(f"[{step}]")
    return commit(root, part, step, {"step": step})


def test_the_latest_whole_one_is_found_with_its_state(tmp_path: Path) -> None:
    """The plain case, and an empty folder, which is no error: the run starts from its model."""
    assert find(tmp_path / "nowhere").path is None
    for step in (10, 20):
        _save(tmp_path, step)
    found = find(tmp_path)
    assert (found.path, found.warnings) == (tmp_path / "step_00000020", [])
    assert read_state(tmp_path / "step_00000020") == {"step": 20}


def _truncate(path: Path) -> None:
    (path / "large.distcp").write_bytes(b"x" * 100)


def _remove(path: Path) -> None:
    (path / "large.distcp").unlink()


def _change(path: Path) -> None:
    (path / "small.json").write_text("[21]")


def _no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _half_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"large.distcp": {"by')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "large.distcp has 100 bytes, not 2097152"),
        (_remove, "large.distcp is missing"),
        (_change, "small.json has changed"),
        (_no_manifest, "it has no manifest.json"),
        (_half_manifest, "its manifest.json cannot be read"),
    ],
)
def test_a_damaged_newest_one_is_passed_over_with_a_warning(damage: object, words: str, tmp_path: Path) -> None:
    """Case 40. Does not cover a large file whose bytes changed while its size did not."""
    _save(tmp_path, 10)
    damage(_save(tmp_path, 20))  # type: ignore[operator]
    found = find(tmp_path)
    assert found.path == tmp_path / "step_00000010"
    assert len(found.warnings) == 1
    assert "step_00000020 is damaged" in found.warnings[0]
    assert words in found.warnings[0]


def test_a_killed_save_leaves_the_former_one(tmp_path: Path) -> None:
    """Killed while writing, and killed between the rename and the pointer: both times the announced one counts."""
    _save(tmp_path, 10)
    (begin(tmp_path, 20) / "large.distcp").write_bytes(b"half")
    assert find(tmp_path).path == tmp_path / "step_00000010"
    _save(tmp_path, 30)
    (tmp_path / "latest").write_text("step_00000010\n")
    assert find(tmp_path).path == tmp_path / "step_00000010"
    # The next save of the same step replaces what was left.
    assert _save(tmp_path, 30) == tmp_path / "step_00000030"
    assert find(tmp_path).path == tmp_path / "step_00000030"
    assert problem(tmp_path / "step_00000030") == ""


def test_a_pointer_to_nothing_falls_back_to_the_newest_with_a_warning(tmp_path: Path) -> None:
    """Somebody deleted the newest one by hand; or the pointer holds rubbish."""
    _save(tmp_path, 10)
    (tmp_path / "latest").write_text("step_00000099\n")
    found = find(tmp_path)
    assert found.path == tmp_path / "step_00000010"
    assert "names 'step_00000099', which is not there" in found.warnings[0]


def test_old_ones_go_but_never_the_latest_and_kept_steps_stay(tmp_path: Path) -> None:
    """keep counts the newest; keep_every keeps milestones."""
    for step in (10, 15, 20, 25, 30):
        _save(tmp_path, step)
    removed = prune(tmp_path, keep=2, keep_every=10)
    assert [path.name for path in removed] == ["step_00000015"]
    assert prune(tmp_path, keep=2) == [tmp_path / "step_00000010", tmp_path / "step_00000020"]
    (tmp_path / "latest").write_text("step_00000025\n")
    _save(tmp_path, 35)
    (tmp_path / "latest").write_text("step_00000025\n")
    prune(tmp_path, keep=1)
    assert find(tmp_path).path == tmp_path / "step_00000025"
