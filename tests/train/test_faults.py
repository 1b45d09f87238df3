"""Servers that fail in the middle of a run: an error that names the server, within the limit that the config sets.

Does not cover servers that this run starts itself (test_live) nor those that hang for good (tests/rollout).
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import free_port, run_ranks
from tests.rollout.fake_server import Behaviour, broken, fake_servers, hang, status
from tests.train.fakes import Sampler, servers
from tests.train.runs import config_of

# name: path, what the server answers there (the last stays), and a part of the error
FAULTS: dict[str, tuple[str, list[Behaviour], str]] = {
    "500s in a rollout": ("/generate", [status(500)], "500"),
    "stalls in a rollout": ("/generate", [hang], "request_timeout_s"),
    "dies in a rollout": ("/generate", [broken], "server"),
    "500s in a weight update": ("/update_weights_from_disk", [status(500)], "loading from disk"),
    "stalls in a weight update": ("/update_weights_from_disk", [hang], "loading from disk"),
    "dies in a weight update": ("/update_weights_from_disk", [broken], "loading from disk"),
    "does not pause": ("/pause_generation", [status(400)], "pausing"),
}


def _faulty_runs(rank: int, world: int, folder: str) -> dict[str, tuple[str, float]]:
    """The error of each run and the seconds that it took."""
    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.train.rank import Options, run_rank

    found = {}
    for number, (name, (path, behaviours, _)) in enumerate(FAULTS.items()):
        with fake_servers(1) as (fake,):
            Sampler(fake)
            fake.on(path, *behaviours)
            found[name] = _error_of(run_rank, load_config, Path(folder) / str(number), Options(), servers(fake, **_LIMITS))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        rollout = {**_LIMITS, "weight_sync": "disk", "servers": {"launch": "none", "api_key": "key"}}
        rollout["servers"]["urls"] = [f"http://127.0.0.1:{nobody.getsockname()[1]}"]
        found["down at the start"] = _error_of(run_rank, load_config, Path(folder) / "down", Options(), rollout)
    return found


_LIMITS: dict[str, Any] = {"request_timeout_s": 2.0, "sync_timeout_s": 2.0, "retries": 1}


def _error_of(run_rank: Any, load_config: Any, folder: Path, options: Any, rollout: dict[str, Any]) -> tuple[str, float]:
    os.environ["MASTER_PORT"] = str(free_port())
    config = load_config(config_of(folder, rollout=rollout, train={"steps": 4}))
    begin = time.monotonic()
    try:
        run_rank(config, Path(config.log.dir), options)
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


def test_a_failing_server_is_named_within_its_limit(tmp_path: Path) -> None:
    """Why: acceptance of a run on somebody else's servers: each failure ends it in one line, and none makes it wait for ever."""
    (found,) = run_ranks(_faulty_runs, 1, str(tmp_path), timeout=150.0, init=False)
    for name, (_, _, part) in FAULTS.items():
        error, seconds = found[name]
        assert "server0 (http://127.0.0.1:" in error, (name, error)
        assert part in error, (name, error)
        assert "\n" not in error, name
        assert seconds < 60, (name, seconds)  # a limit, not a measurement: the defaults are ten minutes
    assert "server0 (http://127.0.0.1:" in found["down at the start"][0]


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"train": {"step": 3}}, "did you mean"),
        ({"train": {"steps": 0}}, "train.steps"),
        ({"data": {"train": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"objective": {"name": "gvpoo"}}, "gvpoo"),
    ],
)
def test_mistakes_in_the_config_end_at_once_with_2(
    tmp_path: Path, section: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why: one line and no rank started, from `train` itself and not only from `validate`."""
    from megatron_gvpo.cli.app import main

    path = config_of(tmp_path, **section)
    assert main(["train", str(path)]) == 2
    errors = capsys.readouterr().err
    assert part in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()
