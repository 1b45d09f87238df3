"""The launcher of local ranks, with small real processes in place of trainers: exit codes, signals, and that nothing stays.

Does not cover a real training run (tests/train) or srun, which starts its ranks itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_gvpo.launch.local import Limits, is_rank, run_local_ranks

# Every rank writes its pid, then does what its line says.
RANK = """
import os, pathlib, signal, socket, subprocess, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(folder / f"pid{rank}").write_text(str(os.getpid()))
"""
SAVES = """
def leave(*_):
    (folder / f"saved{rank}").touch()
    sys.exit(85)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, leave)
(folder / f"ready{rank}").touch()
time.sleep(60)
"""


def launch(folder: Path, body: str, world: int = 3, **limits: float) -> int:
    return run_local_ranks([sys.executable, "-c", RANK + body, str(folder)], world, {}, folder, Limits(**limits))


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("pid*"))]


def gone(pid: int) -> bool:
    """Ended, reaped or not: in a container nobody may reap an orphan."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(true: object, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen within the limit"
        time.sleep(0.02)


def test_ranks_get_their_place_and_meet_at_the_port(tmp_path: Path) -> None:
    """Why: the port is held open by the launcher, and rank 0 must still be able to listen on it, as a TCPStore does."""
    body = """
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0, timeout=timedelta(seconds=30))
store.set(f"r{rank}", os.environ["WORLD_SIZE"] + os.environ["LOCAL_RANK"] + os.environ["EXTRA"])
other = store.get(f"r{1 - rank}").decode()
(folder / f"out{rank}").write_text(other)
store.set(f"done{rank}", "1"), store.get(f"done{1 - rank}"), time.sleep(0.2 * (1 - rank))
"""
    argv = [sys.executable, "-c", RANK + body, str(tmp_path)]
    assert run_local_ranks(argv, 2, {"EXTRA": "x"}, tmp_path) == 0
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == ["21x", "20x"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (85, 85), (2, 2), (1, 1), (7, 1)])
def test_the_exit_code_of_the_ranks_is_the_runs(tmp_path: Path, code: int, expected: int) -> None:
    """Why: torchrun turns 85 into 1, and then the scheduler does not requeue."""
    assert launch(tmp_path, f"sys.exit({code})", world=2) == expected


def test_the_first_failure_takes_the_others_down(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Why: peers of a dead rank wait in a collective for half an hour."""
    body = "print('out of luck', file=sys.stderr) or sys.exit(3) if rank == 1 else time.sleep(60)"
    assert launch(tmp_path, body, grace=0.3) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"error: rank 1 ended with exit code 3; rank 0, 2 was stopped; {tmp_path}/rank_1.log: out of luck"
    assert all(gone(pid) for pid in pids(tmp_path))


def test_a_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Why: the kernel's out-of-memory killer leaves no other trace."""
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == 2 else time.sleep(60)"
    assert launch(tmp_path, body, grace=0.3) == 1
    assert "rank 2 was killed by SIGKILL" in capfd.readouterr().err


def test_refused_input_wins_over_the_peers_that_lost_a_rank(tmp_path: Path) -> None:
    assert launch(tmp_path, "time.sleep(0.3 * (rank == 0)); sys.exit(2 if rank == 0 else 1)", grace=10) == 2


def test_a_rank_that_does_not_end_with_the_others_is_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(tmp_path, "time.sleep(60 * (rank == 1))", leave=0.3) == 1
    assert "rank 1 did not end with the others" in capfd.readouterr().err


def test_what_a_rank_left_running_ends_with_it(tmp_path: Path) -> None:
    """Why: reward workers of a rank that crashed would keep its cores busy."""
    body = "(folder / f'pid{rank}b').write_text(str(subprocess.Popen(['sleep', '60']).pid))"
    assert launch(tmp_path, body, world=2) == 0
    wait_until(lambda: all(gone(pid) for pid in pids(tmp_path)))


LAUNCHER = """
import sys
from megatron_gvpo.launch.local import run_local_ranks
sys.exit(run_local_ranks([sys.executable, "-c", sys.argv[2], sys.argv[1]], 2, {}, sys.argv[1]))
"""


def start_launcher(folder: Path, body: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(folder), RANK + body])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_rank_and_85_comes_back(tmp_path: Path, number: int) -> None:
    launcher = start_launcher(tmp_path, SAVES)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        launcher.send_signal(number)
        assert launcher.wait(20) == 85
    finally:
        launcher.kill()
    assert len(list(tmp_path.glob("saved*"))) == 2


def test_a_signal_before_the_ranks_listen_asks_for_a_requeue(tmp_path: Path) -> None:
    """Why: a preemption in the first seconds, while libraries load, must not end the job for good."""
    launcher = start_launcher(tmp_path, "time.sleep(60)")
    try:
        wait_until(lambda: len(pids_written(tmp_path)) == 2)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(20) == 85
    finally:
        launcher.kill()


def pids_written(folder: Path) -> list[Path]:
    return [file for file in folder.glob("pid*") if file.read_text()]


def test_no_rank_survives_a_killed_launcher(tmp_path: Path) -> None:
    """Why: after kill -9 nobody is left to clean up, and a forgotten rank holds its GPU."""
    launcher = start_launcher(tmp_path, SAVES)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(20)
    wait_until(lambda: all(gone(pid) for pid in pids(tmp_path)))


def test_a_process_knows_whether_it_is_a_rank() -> None:
    assert is_rank({"RANK": "0"})
    assert is_rank({"SLURM_PROCID": "3"})
    assert not is_rank({"SLURM_JOB_ID": "3"})
