"""The journal: groups survive a crash, are trained once, and make the run repeatable.

Rollouts come from a fake server, whose answers are as irreproducible as a real one's; test_live does it with SGLang.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.data.rewards import Score
from megatron_gvpo.data.samples import Sample, read_samples
from megatron_gvpo.train.journal import Journal, JournalError
from tests.ranks import free_port, run_ranks
from tests.rollout.fake_server import fake_servers
from tests.train.fakes import Sampler, servers
from tests.train.runs import Running, config_of, read_state, rows_of

STEPS, PROMPTS, GROUP = 6, 3, 4


def _group(name: str) -> list[Sample]:
    return [Sample(name, [5, 6], [i, 1], [1, 1], rollout_logprobs=[-0.5, -1.0 / 3], weight_versions=[("3", 0)]) for i in (8, 9)]


def test_groups_and_scores_come_back_as_they_were(tmp_path: Path) -> None:
    """Why: a float that came back rounded would make the resumed run another run."""
    journal = Journal(tmp_path, "r")
    page = journal.page(4)
    page.add_group("4:0:a", _group("4:0:a"))
    page.add_scores({"4:0:a": [Score(1.0), Score(0.0, "timeout", "no answer within 3 s")]})
    page.close()
    again = journal.page(4)
    assert again.group("4:0:a", [5, 6], 2) == _group("4:0:a")
    assert again.scores("4:0:a") == [Score(1.0), Score(0.0, "timeout", "no answer within 3 s")]
    assert again.group("4:0:a", [5, 7], 2) is None  # another prompt
    assert again.group("4:0:a", [5, 6], 3) is None  # another group size
    assert len(journal.page(5)) == 0


def test_a_cut_entry_a_flipped_byte_and_another_recipe_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Why: a machine that loses power leaves any of these. What is whole is used, and what comes later starts a new line."""
    journal = Journal(tmp_path, "r")
    page = journal.page(1)
    for name in ("a", "b", "c"):
        page.add_group(name, _group(name))
    page.close()
    path = tmp_path / "step_00000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"[5, 6]", b"[5, 7]") + lines[2][:-20])
    with caplog.at_level(logging.WARNING):
        page = journal.page(1)
    assert [page.group(name, [5, 6], 2) is not None for name in ("a", "b", "c")] == [True, False, False]
    assert ["being written" in caplog.text, f"{path}:2 is damaged" in caplog.text] == [True, True]
    page.add_group("c", _group("c"))
    page.close()
    assert journal.page(1).group("c", [5, 6], 2) == _group("c")
    caplog.clear()
    assert len(Journal(tmp_path, "other").page(1)) == 0
    assert "2 entries were made with other settings" in caplog.text


def test_files_before_the_oldest_checkpoint_go(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r")
    for step in range(1, 5):
        page = journal.page(step)
        page.add_group("a", _group("a"))
        page.close()
    journal.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003.jsonl", "step_00000004.jsonl"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """Why: a group that is not on the disk must not be trained on. /dev/full answers every write with 'no space left'."""
    (tmp_path / "step_00000001.jsonl").symlink_to("/dev/full")
    page = Journal(tmp_path, "r").page(2)
    page._path = tmp_path / "step_00000001.jsonl"
    with pytest.raises(JournalError, match=r"step_00000001.jsonl: the journal cannot be written: No space left on device"):
        page.add_group("a", _group("a"))


def _resume_and_replay(rank: int, world: int, live: str, replayed: str) -> None:
    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.train.rank import Options, run_rank

    config = load_config(live)
    run_dir = Path(config.log.dir)
    assert run_rank(config, run_dir, Options(resume=True)) == 0
    os.environ["MASTER_PORT"] = str(free_port())
    config = load_config(replayed)
    assert run_rank(config, Path(config.log.dir), Options(replay=run_dir)) == 0


@pytest.mark.heavy
def test_what_was_generated_before_a_crash_is_trained_after_it_once(tmp_path: Path) -> None:
    """Why: rollouts are most of a run's cost, and a prompt that is trained twice or never is a bias nobody sees.

    Killed while two groups of step 4 are complete and the third is out; the checkpoint is that of step 2.
    """
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        common: dict[str, Any] = {"train": {"steps": STEPS}, "checkpoint": {"every": 2}}
        live = config_of(tmp_path / "live", rollout=servers(fake, prompts_per_step=PROMPTS, group_size=GROUP), **common)
        replayed = config_of(tmp_path / "replayed", **common)
        run_dir = tmp_path / "live" / "run"
        sampler.stall_after(3 * PROMPTS + 2)
        page = run_dir / "journal" / "step_00000004.jsonl"
        with Running(live) as running:
            running.wait_for(lambda: page.exists() and page.read_bytes().count(b"\n") == 2)
        before = dict(sampler.asked)
        sampler.resume()
        run_ranks(_resume_and_replay, 1, str(live), str(replayed), timeout=150.0, init=False)
        asked_again = {prompt: count - before.get(prompt, 0) for prompt, count in sampler.asked.items()}
    # Steps 3 and 4 come from the journal; the one group that was in flight is drawn again.
    assert sum(before.values()) == 4 * PROMPTS
    assert sum(asked_again.values()) == 1 + 2 * PROMPTS
    assert sorted(sampler.asked.values()) == [1] * (STEPS * PROMPTS - 1) + [2]
    trained = [samples_of(run_dir, step) for step in range(1, STEPS + 1)]
    prompts = [sample.meta["prompt"] for step in trained for sample in step[::GROUP]]
    assert len(set(prompts)) == STEPS * PROMPTS
    assert [sample.weight_versions[0][0] for step in trained for sample in step[::GROUP]] == [
        str(step) for step in range(STEPS) for _ in range(PROMPTS)
    ]
    assert read_state(run_dir, STEPS)["extra"]["position"]["position"] == STEPS * PROMPTS
    assert _comparable(run_dir) == _comparable(tmp_path / "replayed" / "run")


def samples_of(run_dir: Path, step: int) -> list[Sample]:
    return read_samples(run_dir / "samples" / f"step_{step:06d}.jsonl")


def _comparable(run_dir: Path) -> list[dict[str, Any]]:
    """What a replay also has: it draws no prompts itself."""
    return [{key: value for key, value in row.items() if not key.startswith("data/")} for row in rows_of(run_dir)]
