"""The ranks of a run on one machine, as child processes. torchrun does this as well, but hides its ranks' exit codes.

Rank 0 has the terminal; the others write to `rank_N.log`. The first rank that fails takes the rest down, within a limit, and
gives the run its exit code. SIGTERM, SIGINT and SIGUSR1 are passed on to every rank, which save and leave with 85. Whatever
happens to this process, SIGKILL included, no rank stays behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

EXIT_CONFIG = 2
EXIT_REQUEUE = 85
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Limits:
    """Seconds. After a rank has failed, its peers get `grace` to say why they cannot go on; after one has ended well, or a
    signal was passed on, the others get `leave` to finish what they are saving."""

    grace: float = 10.0
    leave: float = 900.0


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, srun or this module started the process as one rank of a run."""
    return "RANK" in environ or "SLURM_PROCID" in environ


def rank_of(environ: Mapping[str, str]) -> int:
    """The process's rank, where `is_rank` says that it is one."""
    return int(environ.get("RANK", environ.get("SLURM_PROCID", "0")))


def run_local_ranks(
    argv: Sequence[str], world: int, env: Mapping[str, str], log_dir: str | Path, limits: Limits | None = None
) -> int:
    """Run `argv` as `world` ranks with torchrun's variables set, and return the run's exit code: 0, 2, 85 or 1.

    `env` is added to this process's environment. Call it from the main thread (it handles signals), before threads are started.
    """
    limits = limits or Limits()
    log_dir = Path(log_dir)
    log_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        port = stack.enter_context(_reserved_port())
        signals = stack.enter_context(_noted_signals())
        ranks: list[_Rank] = []
        stack.callback(_end_all, ranks)
        for rank in range(world):
            ranks.append(_Rank(rank, argv, _environment(rank, world, port, env), log_dir))
        return _watch(ranks, signals, limits)


def _environment(rank: int, world: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    return {
        # Ranks share the machine's cores: spinning or many-threaded ranks make each other crawl.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        **env,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that no other program is given while the ranks start. Rank 0 may still listen on it: this socket is bound with
    SO_REUSEADDR and never listens."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Signals that came, in order; passing them on is the watching loop's business."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


class _Rank:
    """One child process, the leader of a session of its own."""

    def __init__(self, rank: int, argv: Sequence[str], env: Mapping[str, str], log_dir: Path) -> None:
        self.rank = rank
        self.log = log_dir / f"rank_{rank}.log" if rank else None
        self.code: int | None = None
        output: IO[bytes] | None = self.log.open("ab") if self.log else None
        try:
            self.process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on once
                preexec_fn=_die_with(os.getpid()),  # safe: the launcher has one thread
            )
        finally:
            if output:
                output.close()

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal that killed it); what it left running ends with it."""
        if self.code is None:
            # Look without reaping: as long as the dead leader is there, its group's number belongs to nobody else.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._kill_group()
            self.code = self.process.wait()
        return self.code

    def pass_on(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.poll() is None:
            self._kill_group()
            self.code = self.process.wait()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # between fork and setsid it leads no group yet

    def how_it_ended(self) -> str:
        assert self.code is not None
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ended with exit code {self.code}"

    def last_line(self) -> str:
        if self.log is None or not (lines := self.log.read_text(errors="replace").split("\n")[:-1]):
            return ""
        return f"; {self.log}: {lines[-1].strip()}"


def _watch(ranks: Sequence[_Rank], signals: Sequence[int], limits: Limits) -> int:
    deadline, passed_on = float("inf"), 0
    first_failed: _Rank | None = None
    while alive := [rank for rank in ranks if rank.poll() is None]:
        if first_failed is None and (failed := [rank for rank in ranks if rank.code not in (None, 0, EXIT_REQUEUE)]):
            first_failed = failed[0]
            deadline = min(deadline, time.monotonic() + limits.grace)
        if len(alive) < len(ranks) or passed_on:
            deadline = min(deadline, time.monotonic() + limits.leave)
        for number in signals[passed_on:]:
            passed_on += 1
            for rank in alive:
                rank.pass_on(number)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return _verdict(ranks, alive, first_failed, signals)


def _verdict(ranks: Sequence[_Rank], late: Sequence[_Rank], first_failed: _Rank | None, signals: Sequence[int]) -> int:
    codes = [rank.code for rank in ranks]
    # A signal that comes before a rank has its handlers ends it at once. It has nothing to save, and wants to run again.
    if signals and not late and all(code in (0, EXIT_REQUEUE) or (code is not None and -code in signals) for code in codes):
        return EXIT_REQUEUE if any(codes) else 0
    failed = first_failed or next((rank for rank in ranks if rank.code not in (None, 0, EXIT_REQUEUE)), None)
    if failed is None and not late:
        return EXIT_REQUEUE if EXIT_REQUEUE in codes else 0
    names = ", ".join(str(rank.rank) for rank in late)
    if failed is None:
        print(f"error: rank {names} did not end with the others and was stopped", file=sys.stderr)
        return 1
    if EXIT_CONFIG in codes:  # the rank that refused the input has said why; its peers only lost it
        return EXIT_CONFIG
    stopped = f"; rank {names} was stopped" if late else ""
    print(f"error: {failed.how_it_ended()}{stopped}{failed.last_line()}", file=sys.stderr)
    return 1


def _end_all(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.end()
