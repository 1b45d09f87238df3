"""Run a function on several real gloo ranks and collect what each returned.

Used by every test that needs tensor, context, pipeline or data parallelism. A spawn costs seconds (each child imports
torch anew), so one call should run many cases: start one world per size, loop inside the function, return a dict.

    def _cases(rank: int, world: int, seed: int) -> dict[str, float]: ...   # module level: children import it by name

    results = run_ranks(_cases, 2, 1234)                                     # results[rank]

The function is called as `fn(rank, world, *args)` with the default process group (gloo) up and one thread a rank.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Peers of a failed rank wait in a collective that will never complete; they get this long to fail by themselves.
_GRACE_S = 3.0


class RankError(AssertionError):
    """At least one rank raised, died or ran past the limit; the text holds each one's traceback."""


def free_port() -> int:
    """A TCP port of localhost that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 180.0,
    env: dict[str, str] | None = None,
    init: bool = True,
) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` spawned processes and return their values in rank order.

    `timeout` is in seconds and covers start-up too. `env` is set in every child before torch is imported. `init=False`
    leaves the default process group to `fn` (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set).
    `fn`, its arguments and its value must pickle. Every child, and what it started, is gone on return.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = free_port()
        processes: list[BaseProcess] = []
        try:
            for rank in range(world):
                process = context.Process(
                    target=_child, args=(fn, rank, world, args, folder, port, timeout, dict(env or {}), init)
                )
                process.start()
                processes.append(process)
            late = _wait(processes, timeout)
        finally:
            for process in processes:
                _kill(process)
        return _collect(Path(folder), processes, late, timeout)


def _child(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    args: Sequence[Any],
    folder: str,
    port: int,
    timeout: float,
    env: dict[str, str],
    init: bool,
) -> None:
    _die_with_parent()
    os.setsid()  # so that the parent can end this rank together with whatever it starts
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        # gloo looks its address up by host name, which need not resolve in a container.
        GLOO_SOCKET_IFNAME="lo",
    )
    os.environ.update(env)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if init:
            store = dist.FileStore(str(Path(folder) / "store"), world)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=max(10.0, timeout))
            )
        value = fn(rank, world, *args)
        _publish(Path(folder) / f"{rank}.value", pickle.dumps(value))
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early breaks the sockets its peers still read from
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever ended the rank is published for the parent
        _publish(Path(folder) / f"{rank}.error", traceback.format_exc().encode())
        os._exit(1)  # not sys.exit: it would wait for gloo's threads, and they for the peers
    os._exit(0)


def _publish(path: Path, data: bytes) -> None:
    """Write under another name first: the parent must never read half a file."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.rename(path)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the test process is killed and can no longer do it (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _wait(processes: Sequence[BaseProcess], timeout: float) -> list[int]:
    """Wait until all ended, or one failed and the grace is over, or the limit passed; returns the ranks still alive."""
    deadline = time.monotonic() + timeout
    while True:
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        if not alive or time.monotonic() > deadline:
            return alive
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        processes[alive[0]].join(0.05)


def _kill(process: BaseProcess) -> None:
    """End one child and its own session by its pid."""
    if process.pid is None:
        return
    try:
        # Only a child that reached setsid() leads a group; before that its pid names no group and it has no children.
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join(10.0)


def _collect(folder: Path, processes: Sequence[BaseProcess], late: Sequence[int], timeout: float) -> list[Any]:
    problems: list[str] = []
    values: list[Any] = []
    for rank, process in enumerate(processes):
        error, value = folder / f"{rank}.error", folder / f"{rank}.value"
        if error.exists():
            problems.append(f"--- rank {rank} raised\n{error.read_text()}")
        elif value.exists():
            values.append(pickle.loads(value.read_bytes()))
        elif rank in late:
            problems.append(f"--- rank {rank} had not finished when it was stopped (limit {timeout:.0f} s)")
        else:
            problems.append(f"--- rank {rank} died with exit code {process.exitcode} and returned nothing")
    if problems:
        raise RankError(f"{len(problems)} of {len(processes)} ranks failed\n" + "\n".join(problems))
    return values
