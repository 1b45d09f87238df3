"""Stop requests and dead ranks in real processes, at the places where a rank cannot look by itself.

Servers are fakes that stall on demand. Does not cover srun (tests/slurm), nor what a resumed run then does (test_journal).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.train.signals import StopNow, StopRequest
from tests.ranks import free_port
from tests.rollout.fake_server import fake_servers, hang
from tests.train.fakes import Sampler, servers
from tests.train.runs import QUIET, Running, all_gone, checkpoints, command, config_of, descendants, read_state

LIMIT = 30.0  # seconds from the signal to the last rank's end


def test_a_request_ends_a_wait_once_and_is_remembered() -> None:
    """Why: a second signal, such as the scheduler's after the script's, must not end the saving."""
    stop = StopRequest()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    try:
        stop.install()
        with pytest.raises(StopNow, match="SIGUSR1"), stop.interruptible():
            _signalled(5.0)
        os.kill(os.getpid(), signal.SIGTERM)  # outside: noted, nothing raised
        assert stop.name == "SIGUSR1"
        with pytest.raises(StopNow, match="SIGUSR1"), stop.interruptible():
            pytest.fail("a wait was begun after the request")
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def _signalled(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(seconds)


@pytest.mark.heavy
def test_sigterm_to_one_rank_while_the_servers_are_stalled(tmp_path: Path) -> None:
    """Why: acceptance 41. Rank 1 waits in a collective for rank 0, which waits for servers: neither runs Python of its own."""
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        sampler.stall_after(2 * 3 + 1)
        config = config_of(
            tmp_path, rollout=servers(fake, prompts_per_step=3, request_timeout_s=300.0), parallel={"gpus_per_node": 2}
        )
        run_dir = tmp_path / "run"
        page = run_dir / "journal" / "step_00000003.jsonl"
        with Running(config) as running:
            running.wait_for(page.exists)
            everyone = descendants(running.process.pid)
            begin = time.monotonic()
            os.kill(running.ranks()[1], signal.SIGTERM)
            time.sleep(1.0)
            os.kill(running.ranks()[1], signal.SIGTERM)  # impatient schedulers send more than one
            assert running.wait(LIMIT) == 85, running.output
            assert time.monotonic() - begin < LIMIT
        assert "saved after step 2 of 10 because of SIGTERM to rank 1" in running.output
        assert checkpoints(run_dir) == ["step_00000002"]
        assert read_state(run_dir, 2)["extra"]["position"]["position"] == 6
        assert all_gone(everyone) == []


@pytest.mark.heavy
def test_a_signal_in_a_stalled_weight_update_and_the_deadline(tmp_path: Path) -> None:
    """Why: the step is done, so it is that step that is saved, and the metrics have its row. Then the resumed run meets its
    deadline while the server is silent."""
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        sections: dict[str, Any] = {"rollout": servers(fake, prompts_per_step=3, request_timeout_s=300.0, sync_timeout_s=300.0)}
        config = config_of(tmp_path, **sections)
        run_dir = tmp_path / "run"
        samples = run_dir / "samples" / "step_000002.jsonl"
        with Running(config) as running:
            running.wait_for(lambda: (run_dir / "samples" / "step_000001.jsonl").exists())
            fake.on("/update_weights_from_disk", hang)
            running.wait_for(lambda: samples.exists() or fake.count("/update_weights_from_disk") > 1)
            running.wait_for(lambda: fake.asked[-1][0] == "/update_weights_from_disk")
            running.process.send_signal(signal.SIGUSR1)
            assert running.wait(LIMIT) == 85, running.output
        (saved,) = checkpoints(run_dir)
        done = int(saved.removeprefix("step_"))
        assert f"saved after step {done} of 10 because of SIGUSR1" in running.output
        assert read_state(run_dir, done)["extra"]["position"]["position"] == 3 * done

        fake.behaviours.pop("/update_weights_from_disk")
        sampler.stall_after(3)
        config_of(tmp_path, **sections, train={"deadline_s": 20.0})
        with Running(config, "--resume") as running:
            assert running.wait(20.0 + 90.0) == 85, running.output
        assert "because of train.deadline_s" in running.output
        assert checkpoints(run_dir)[-1] == f"step_{done + 1:08d}"


@pytest.mark.heavy
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_the_others_down_without_a_launcher(tmp_path: Path, victim: int) -> None:
    """Why: srun and torchrun start the ranks themselves; peers of a dead one would wait for a collective's half hour."""
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        sampler.stall_after(2)
        config = config_of(
            tmp_path,
            rollout=servers(fake, prompts_per_step=3, request_timeout_s=300.0),
            parallel={"gpus_per_node": 2},
            train={"peer_timeout_s": 8.0, "collective_timeout_s": 600.0},
        )
        page = tmp_path / "run" / "journal" / "step_00000001.jsonl"
        port = str(free_port())
        ranks, logs = [], []
        try:
            for rank in range(2):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = {**os.environ, **QUIET, **{name: str(value) for name, value in place.items()}}
                logs.append(tmp_path / f"rank{rank}.log")
                with logs[-1].open("wb") as out:
                    ranks.append(subprocess.Popen(command(config), env=environment, stdout=out, stderr=subprocess.STDOUT))
            deadline = time.monotonic() + 90.0
            while not page.exists():
                assert time.monotonic() < deadline, [log.read_text() for log in logs]
                time.sleep(0.05)
            time.sleep(6.0)  # both have been heard of
            ranks[victim].kill()
            survivor = 1 - victim
            assert ranks[survivor].wait(45.0) == 1
            assert f"rank {victim}" in logs[survivor].read_text().splitlines()[-1]
        finally:
            for process in ranks:
                process.kill()
                process.wait(10.0)


@pytest.mark.heavy
def test_an_evaluation_that_was_cut_short_is_made_up_for(tmp_path: Path) -> None:
    """Why: the last evaluation is the run's result, and the step that it belongs to is saved already."""
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        held = tmp_path / "held.jsonl"
        held.parent.mkdir(exist_ok=True)
        held.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
        sections: dict[str, Any] = {"rollout": servers(fake, prompts_per_step=3, request_timeout_s=300.0)}
        sections |= {"data": {"eval": str(held)}, "train": {"steps": 2}, "optimizer": {"warmup_steps": 0}}
        config = config_of(tmp_path, **sections)
        run_dir = tmp_path / "run"
        sampler.stall_after(2 + 2 * 3)  # the first evaluation, and all steps
        with Running(config) as running:
            running.wait_for(lambda: sum(sampler.asked.values()) > 2 + 2 * 3)
            running.process.send_signal(signal.SIGTERM)
            assert running.wait(LIMIT) == 85, running.output
        assert checkpoints(run_dir) == ["step_00000002"]
        sampler.resume()
        with Running(config, "--resume") as running:
            assert running.wait(90.0) == 0, running.output
    from megatron_gvpo.report.jsonl import read_rows

    last = read_rows(run_dir / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert {"loss", "eval/greedy"} <= last.keys()
