"""Starts training runs by fork from a process that has torch and Megatron loaded, so that twenty kills cost seconds, not minutes.

    with Zygote() as zygote:
        codes = zygote.run(config, world=2, resume=True, kill_after=1.5)     # None: the rank was killed

Every run is made of fresh forked processes with `train`'s own entry for one rank; nothing but imported modules is shared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.train.runs import QUIET, ROOT


class Zygote:
    def __enter__(self) -> Zygote:
        import os

        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **QUIET},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # runs that are still there die with it
        self._process.wait(10.0)

    def run(
        self,
        config: Path,
        *,
        world: int = 1,
        resume: bool = False,
        replay: Path | None = None,
        kill_after: float | None = None,
        kill_when: str = "",
        changes: int = 1,
        limit: float = 100.0,
    ) -> list[int | None]:
        """The ranks' exit codes. kill_after: SIGKILL to all of them at once after so many seconds. kill_when: a pattern of paths
        below the config's folder; kill_after then counts from the moment when so many `changes` (new files, or new contents)
        have been seen there."""
        options = {"resume": resume, "replay": str(replay) if replay else None}
        order = {"config": str(config), "world": world, "options": options, "limit": limit}
        order |= {"after": kill_after, "when": kill_when, "changes": changes}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the forking process has died"
        return json.loads(answer)

    @staticmethod
    def log(config: Path) -> str:
        return (config.parent / "ranks.log").read_text(errors="replace")


def _serve() -> None:
    import contextlib
    import ctypes
    import os
    import signal
    import socket
    import time
    import traceback

    import torch

    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.train.rank import Options, run_rank

    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the test process

    def child(order: dict[str, Any], rank: int, port: int) -> None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        log = os.open(Path(order["config"]).parent / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        config = load_config(order["config"])
        options = order["options"]
        replay = Path(options["replay"]) if options["replay"] else None
        os._exit(run_rank(config, Path(config.log.dir), Options(resume=options["resume"], replay=replay)))

    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def looked_at(folder: Path, pattern: str) -> set[tuple[str, int, int]]:
        found = set()
        for path in folder.glob(pattern) if pattern else ():
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                found.add((path.name, facts.st_ino, facts.st_size))
        return found

    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        port = free_port()
        pids: list[int] = []
        for rank in range(order["world"]):
            pid = os.fork()
            if pid == 0:
                try:
                    child(order, rank, port)
                finally:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        codes: dict[int, int | None] = {}
        begin, folder = time.monotonic(), Path(order["config"]).parent
        kill_at = begin + order["limit"] if order["after"] is None or order["when"] else begin + order["after"]
        waiting, left = order["when"], order["changes"]
        seen = looked_at(folder, waiting)
        while len(codes) < len(pids):
            for pid in pids:
                if pid not in codes:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        codes[pid] = None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
            if waiting and (fresh := looked_at(folder, waiting) - seen):
                seen |= fresh
                left -= len(fresh)
                if left <= 0:
                    waiting, kill_at = "", time.monotonic() + (order["after"] or 0.0)
            if time.monotonic() >= kill_at:
                for pid in pids:
                    if pid not in codes:
                        os.kill(pid, signal.SIGKILL)
                kill_at = float("inf")
            time.sleep(0.002)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


if __name__ == "__main__":
    _serve()
