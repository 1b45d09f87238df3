"""Runs one command and makes sure that it, and whatever it started, ends: on a signal, or when our parent dies in any way.

    python guardian.py PARENT_PID GRACE_SECONDS SCRATCH_FOLDER COMMAND...

The scratch folder is the command's own, and goes with it.

A killed parent (SIGKILL) cannot clean up after itself, and PR_SET_PDEATHSIG in the parent's own child fires when the *thread*
that started the child ends. So this small process, with one thread and the standard library alone, stands between them: it
looks twice a second whether its parent still lives, and the command dies with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_HELPERS_S = 2.0
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _in_child() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # nobody is left in it


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


def _all_gone(seconds: float) -> bool:
    """Wait for our children, adopted ones too, to end by themselves; False when some still run after `seconds`."""
    limit = time.monotonic() + seconds
    while True:
        _reap()
        if not _children():
            return True
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM and the grace, then SIGKILL, first to the command alone: its helpers end with it, and one of them, Python's
    resource tracker, then removes the shared memory and semaphores that the command left. Last, whoever is still there."""
    if grace_s > 0:
        child.terminate()
        if _all_gone(grace_s):
            return
    child.kill()
    if _all_gone(_HELPERS_S):
        return
    _send(child.pid, signal.SIGKILL)
    for _ in range(100):
        for pid in _children():  # those that left the group
            os.kill(pid, signal.SIGKILL)
        if _all_gone(0.1):
            return


def main(argv: list[str]) -> int:
    parent, grace_s, scratch, command = int(argv[0]), float(argv[1]), argv[2], argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # taken one by one with sigtimedwait below
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_child)  # safe: this process has one thread
    code: int | None = None
    while code is None and os.getppid() == parent:
        arrived = signal.sigtimedwait(_SIGNALS, _POLL_S)
        if arrived is not None and arrived.si_signo != signal.SIGCHLD:
            break
        code = child.poll()
    _end(child, grace_s)
    shutil.rmtree(scratch, ignore_errors=True)
    return 1 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
