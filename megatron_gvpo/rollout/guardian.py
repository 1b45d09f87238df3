"""Runs one command and makes sure that it, and whatever it started, ends: on a signal, or when our parent dies in any way.

    python guardian.py PARENT_PID GRACE_SECONDS COMMAND...

A killed parent (SIGKILL) cannot clean up after itself, and PR_SET_PDEATHSIG in the parent's own child fires when the *thread*
that started the child ends. So this small process, with one thread and the standard library alone, stands between them: it
looks twice a second whether its parent still lives, and the command dies with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _in_child() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _send(group: int, number: int) -> bool:
    """Send a signal to a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _children() -> list[int]:
    """Pids of our direct children; orphans of the command become ours, for we are their subreaper."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _end(group: int, grace_s: float) -> None:
    """SIGTERM, the grace, SIGKILL; then whatever left the group and landed with us."""
    if grace_s > 0 and _send(group, signal.SIGTERM):
        limit = time.monotonic() + grace_s
        while time.monotonic() < limit and _children():
            _reap()
            time.sleep(0.05)
    _send(group, signal.SIGKILL)
    limit = time.monotonic() + 10.0
    while time.monotonic() < limit:
        _reap()
        left = _children()
        if not left:
            return
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    parent, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # taken one by one with sigtimedwait below
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_child)  # safe: this process has one thread
    code: int | None = None
    while code is None and os.getppid() == parent:
        arrived = signal.sigtimedwait(_SIGNALS, _POLL_S)
        if arrived is not None and arrived.si_signo != signal.SIGCHLD:
            break
        code = child.poll()
    _end(child.pid, grace_s)
    return 1 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
