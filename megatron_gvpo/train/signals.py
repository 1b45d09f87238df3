"""What asks a run to save and leave: SIGTERM (the scheduler's), SIGUSR1 (the sbatch script's), SIGINT (a person's), a deadline.

A request is noted at once, whatever the process is doing. Where rank 0 waits for something outside the trainer (servers, rewards)
it is raised as `StopNow`; elsewhere the loop looks at the end of what it is doing. How it reaches the other ranks is `peers`'
business, and which step is saved is decided by rank 0's word to all (`exchange`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAVE_AND_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_REQUEUE = 85


class StopNow(BaseException):
    """The run was asked to save and leave. Not an Exception: code that catches whatever fails must let it pass."""


class StopRequest:
    """Whether a request came, and from where. A second one changes nothing."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._open = False
        self._woken = False

    def install(self) -> None:
        """Take the signals. Belongs to the main thread, as early in the process as possible."""
        for number in SAVE_AND_LEAVE:
            signal.signal(number, self._handle)

    @property
    def came(self) -> bool:
        return self.name is not None

    def ask(self, name: str) -> None:
        """The same as a signal, from any thread: another rank was asked, or the time is up."""
        if self.name is None:
            self.name = name
        if self._open and not self._woken:
            self._woken = True
            # Only a signal to the main thread ends what it waits for.
            signal.pthread_kill(_main_thread(), signal.SIGUSR1)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around waits of the main thread that a request may end, by StopNow, at any place."""
        self._open = True
        try:
            if self.name is not None:
                raise StopNow(self.name)
            yield
        finally:
            self._open = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
        if self._open:
            self._open = False  # once: a second signal must not end the cleaning up after the first
            raise StopNow(self.name)


def _main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident
