"""The process that runs a reward function, so that one that never ends or crashes takes nothing else with it.

Started as `python -m megatron_gvpo.data.reward_worker FD`, where FD is one end of a pipe of pickled messages:
in: (reward name, extraction), then (text, answer, meta) per response; out: ("ready", ""), then (kind, value) per response.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.reward_functions import reward_function

_PR_SET_PDEATHSIG = 1
_LONGEST_ERROR = 300  # characters; parsers like to quote their whole input


def main(fd: int) -> None:
    _die_with_parent()
    os.dup2(2, 1)  # what a reward function prints must not end up in the output of `--json` commands
    pipe: Connection[Any, Any] = Connection(fd)
    name, mode = pipe.recv()
    try:
        function = reward_function(name, mode)
    except DataError as error:
        pipe.send(("refused", str(error)))
        return
    except Exception as error:  # noqa: BLE001  the user's module may raise anything while it is imported
        pipe.send(("refused", f"reward.name: {name} fails while it is imported: {_one_line(error)}"))
        return
    pipe.send(("ready", ""))
    while True:
        try:
            text, answer, meta = pipe.recv()
        except EOFError:  # the trainer has closed its end
            return
        try:
            value = function(text, answer, meta)
        except Exception as error:  # noqa: BLE001  reported to the trainer, which counts and names it
            pipe.send(("error", _one_line(error)))
        else:
            pipe.send(("ok", value))


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 3] + "..."


def _die_with_parent() -> None:
    """A trainer killed by SIGKILL closes nothing; a worker in an endless loop would outlive it."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    main(int(sys.argv[1]))
