"""Nothing that a run starts outlives it. These use plain shells in place of a server; test_server_life has the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_gvpo.rollout import guardian

# A command with a child in a session of its own, which no signal to the process group reaches; both write their pids.
COMMAND = "import os, subprocess, sys, time; from pathlib import Path; folder = Path(sys.argv[1]);\
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);\
(folder / 'child').write_text(str(child.pid)); (folder / 'command').write_text(str(os.getpid()));\
time.sleep(float(sys.argv[2])); sys.exit(int(sys.argv[3]))"


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if what():
            return True
        time.sleep(0.02)
    return False


def gone(pid: int) -> bool:
    """Whether the process ended; a zombie that nobody has collected yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second when it ends between opening and reading
        return True


def guarded(folder: Path, *command_args: str, parent: int | None = None) -> list[str]:
    """The command line of a guardian over COMMAND."""
    head = [sys.executable, "-I", "-S", guardian.__file__, str(parent or os.getpid()), "0", str(folder / "scratch")]
    return [*head, sys.executable, "-c", COMMAND, str(folder), *command_args]


def pids(folder: Path) -> list[int]:
    assert wait_for(lambda: (folder / "command").exists() and (folder / "command").read_text())
    return [int((folder / name).read_text()) for name in ("command", "child")]


def test_sigterm_ends_the_command_and_a_child_that_left_its_group(tmp_path: Path) -> None:
    """`stop()` is this signal. A server's helper in a session of its own would survive a killpg."""
    process = subprocess.Popen(guarded(tmp_path, "600", "0"))
    inside = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.wait(20)
    assert all(gone(pid) for pid in inside)


def test_the_commands_own_end_ends_its_children_and_gives_its_code(tmp_path: Path) -> None:
    """A server that dies by itself leaves no helper behind, and its exit code reaches the error message."""
    process = subprocess.Popen(guarded(tmp_path, "0.3", "7"))
    inside = pids(tmp_path)
    assert process.wait(20) == 7
    assert all(gone(pid) for pid in inside)


def test_a_parent_killed_with_sigkill_takes_everything_with_it(tmp_path: Path) -> None:
    """kill -9 of the trainer: nobody can clean up but the guardian, who sees that its parent is another one now."""
    script = f"import subprocess, os, time; subprocess.Popen({guarded(tmp_path, '600', '0')!r}[:4] + [str(os.getpid())]\
 + {guarded(tmp_path, '600', '0')!r}[5:], start_new_session=True); time.sleep(600)"
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "key").write_text("secret")
    parent = subprocess.Popen([sys.executable, "-c", script])
    inside = pids(tmp_path)
    parent.kill()
    parent.wait(10)
    assert wait_for(lambda: all(gone(pid) for pid in inside))
    assert wait_for(lambda: not (tmp_path / "scratch").exists())  # it held the server's key


def test_a_guardian_killed_with_sigkill_takes_the_command_with_it(tmp_path: Path) -> None:
    """The guardian itself can be killed; the kernel then ends the command. Does not cover children that left the group: a real
    server's helpers ask the kernel for the same."""
    process = subprocess.Popen(guarded(tmp_path, "600", "0"))
    command, child = pids(tmp_path)
    process.kill()
    process.wait(10)
    assert wait_for(lambda: gone(command))
    os.kill(child, signal.SIGKILL)  # ours to clean up
