"""What a checkpoint remembers beside the weights, what a resume refuses, and which checkpoints stay."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port, run_ranks
from tests.rollout.fake_server import fake_servers
from tests.train.fakes import Sampler, servers
from tests.train.runs import STUDENT, TRAIN_DATA, checkpoints, config_of, read_state

STOP = 2


def _resumes(rank: int, world: int, folder: str) -> dict[str, str]:
    """What each attempt to go on from one and the same checkpoint came to."""
    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.train.rank import Options, run_rank

    base, found = Path(folder), {}
    other = base / "other.jsonl"
    other.write_text("".join(TRAIN_DATA.read_text().splitlines(keepends=True)[:500]))
    tokenizer = base / "tokenizer"
    shutil.copytree(STUDENT, tokenizer)
    (tokenizer / "tokenizer_config.json").write_text((STUDENT / "tokenizer_config.json").read_text() + "\n")

    with fake_servers(1) as (fake,):
        Sampler(fake)
        common: dict[str, Any] = {"rollout": servers(fake), "train": {"steps": 8}, "optimizer": {"schedule": "constant"}}
        common["checkpoint"] = {"every": 1, "keep": 2, "keep_every": 3}

        def attempt(name: str, sections: dict[str, Any], **options: Any) -> None:
            os.environ["MASTER_PORT"] = str(free_port())
            if name != "begin":
                shutil.copytree(base / "begin" / "run", base / name / "run")
            config = load_config(config_of(base / name, **{**common, **sections}))
            try:
                found[name] = str(run_rank(config, Path(config.log.dir), Options(**options)))
            except ValueError as error:
                found[name] = f"{type(error).__name__}: {error}"

        attempt("begin", {}, stop_after=STOP)
        on = {"resume": True}
        attempt("same", {}, **on)
        attempt("lr", {"optimizer": {"lr": 1e-4, "schedule": "constant"}}, stop_after=3, **on)
        attempt("beta", {"objective": {"beta": 0.2}}, **on)
        attempt("beta accepted", {"objective": {"beta": 0.2}}, stop_after=3, accept_changes=True, **on)
        attempt("objective", {"objective": {"name": "rloo", "beta": None}}, **on)
        attempt("data", {"data": {"train": str(other)}}, **on)
        attempt("data accepted", {"data": {"train": str(other)}}, stop_after=3, accept_changes=True, **on)
        attempt("tokenizer", {"model": {"path": str(STUDENT), "tokenizer": str(tokenizer), "max_length": 32}}, **on)
    return found


@pytest.mark.heavy
def test_what_has_changed_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    """Why: a run that silently goes on with other data or another objective is a result that nobody can explain. Also which
    checkpoints stay, and what is in one. One process, so that the nine attempts cost seconds."""
    (found,) = run_ranks(_resumes, 1, str(tmp_path), timeout=200.0, init=False)
    assert (found["begin"], found["same"], found["lr"]) == ("85", "0", "85"), found
    assert (found["beta accepted"], found["data accepted"]) == ("85", "85"), found
    for name, part in (
        ("beta", "objective.beta was 0.1, is 0.2"),
        ("data", "belongs to other training data"),
        ("tokenizer", "the tokenizer's files are others"),
    ):
        assert part in found[name], found[name]
        assert "--accept-changes" in found[name]
    assert "rloo" in found["objective"]

    # Of 8 saves the newest two stay, and those of steps 3 and 6.
    assert checkpoints(tmp_path / "same" / "run") == [f"step_{step:08d}" for step in (3, 6, 7, 8)]
    pages = sorted(path.name for path in (tmp_path / "same" / "run" / "journal").iterdir())
    assert pages == ["step_00000008.jsonl"]
    state = read_state(tmp_path / "same" / "run", 8)["extra"]
    assert (state["step"], state["weight_version"], state["position"]["position"]) == (8, "8", 24)
    assert state["config"]["objective"]["name"] == "gvpo"
    assert state["config"]["rollout"]["servers"]["api_key"] == ""
    assert {"megatron-gvpo", "megatron-core", "torch", "python"} <= state["code"].keys()
    assert read_state(tmp_path / "data accepted" / "run", 3)["extra"]["position"]["position"] == 3
