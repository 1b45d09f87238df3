"""Real servers that hang and die, in rollouts, in weight updates, and with the run that started them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.errors import ServerError
from megatron_gvpo.rollout.pool import Group, PromptIds
from megatron_gvpo.rollout.server import Endpoint
from megatron_gvpo.rollout.wire import Sampling
from tests.rollout.sender import joined_as_rank_0
from tests.rollout.test_guardian import gone, wait_for
from tests.servers import MAX_LENGTH, VOCAB, TinyModels

# The run: starts two servers, says where they are, and then is busy until it is killed.
RUN = """
import json, os, sys, time
from pathlib import Path
from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout.server import running_servers
model, folder, length = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
with running_servers(model, ServersSection(count=2), run_dir=folder, max_length=length) as endpoints:
    (folder / "part").write_text(json.dumps([vars(endpoint) for endpoint in endpoints]))
    os.rename(folder / "part", folder / "ready")
    time.sleep(600)
"""
PROMPTS = [PromptIds(f"g{i}", [5 + i % 90, 7]) for i in range(24)]
LONG = Sampling(max_new_tokens=50)


def engine_on(*endpoints: Endpoint) -> RolloutEngine:
    rollout = RolloutSection(request_timeout_s=8, sync_timeout_s=20, retries=1)
    return RolloutEngine(endpoints, rollout, vocab_size=VOCAB, max_length=MAX_LENGTH)


def scheduler_of(endpoint: Endpoint, family: list[psutil.Process]) -> psutil.Process:
    """The process that holds the model of the server at this address."""
    port = endpoint.url.rpartition(":")[2]
    guardian = next(p for p in family if "guardian" in " ".join(p.cmdline()) and port in p.cmdline())
    return next(p for p in guardian.children(recursive=True) if "scheduler" in " ".join(p.cmdline()))


def generate_and(engine: RolloutEngine, what: Callable[[], None], count: int = 8) -> list[Group]:
    """All groups; `what` is done to a server as soon as the first of them is there."""
    groups = []
    for group in engine.generate_groups(PROMPTS, count, LONG):
        if not groups:
            what()
        groups.append(group)
    return groups


@pytest.mark.heavy
@pytest.mark.timeout(600)  # two real starts, on a machine that may be busy with other things
def test_servers_that_hang_or_die_are_named_within_the_limits_and_nothing_outlives_a_killed_run(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """One pair of real servers, four misfortunes in a row (a start is dear): a scheduler that hangs in a rollout, whose groups
    the other server takes over; a server that dies in a rollout, the last one; one that dies while it receives weights; SIGKILL
    of the run itself, after which none of its processes is left. Does not cover a machine that vanishes from the network."""
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tiny_models.first), str(tmp_path), str(MAX_LENGTH)])
    family: list[psutil.Process] = []
    try:
        assert wait_for(lambda: (tmp_path / "ready").exists() or run.poll() is not None, seconds=240)
        assert run.poll() is None
        first, second = (Endpoint(**words) for words in json.loads((tmp_path / "ready").read_text()))
        family = psutil.Process(run.pid).children(recursive=True)
        scratch = [Path(p.cmdline()[6]) for p in family if "guardian" in " ".join(p.cmdline()[:4])]
        assert len(scratch) == 2
        assert all((folder / "server.yaml").exists() for folder in scratch)
        stopped = scheduler_of(first, family)

        with engine_on(first, second) as engine:
            groups = generate_and(engine, stopped.suspend)
            assert sorted(group.index for group in groups) == list(range(24))
            assert all(len(group.samples) == 8 for group in groups)
            [(name, why)] = engine.pool.out_of_use.items()
            assert name == str(first)
            assert "no answer within 8 s, and its health check fails" in why

        with engine_on(second) as engine, pytest.raises(ServerError, match=r"no server is left: server1 \(http.*"):
            generate_and(engine, scheduler_of(second, family).kill)

        stopped.resume()
        with engine_on(first) as engine, pytest.raises(ServerError, match=r"server0 \(http.*update_weights_from_distributed"):
            update_and(engine, stopped.kill)
    finally:
        run.kill()
        run.wait(10)
    assert wait_for(lambda: all(gone(process.pid) for process in family), seconds=30)
    assert wait_for(lambda: not any(folder.exists() for folder in scratch))  # they hold the servers' keys
    assert len(family) >= 8  # two guardians, and at least three processes of each server


def update_and(engine: RolloutEngine, kill: Callable[[], None]) -> None:
    """A weight update whose server dies while it waits for the tensors (which never come: what counts is who notices)."""
    with joined_as_rank_0(engine, "doomed"), engine.weights.update("1"):
        loading = engine.weights.update_bucket(["model.norm.weight"], ["float32"], [[64]])
        threading.Timer(0.5, kill).start()
        loading.wait()
