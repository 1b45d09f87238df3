"""Signals that ask a run to save and leave: SIGTERM (the scheduler's), SIGUSR1 (the sbatch script's), SIGINT (a person's)."""

from __future__ import annotations

import signal
from types import FrameType

SAVE_AND_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_REQUEUE = 85


class StopRequest:
    """Remembers that a signal came; the loop looks between steps. A second signal changes nothing."""

    def __init__(self) -> None:
        self.name: str | None = None

    def install(self) -> None:
        for number in SAVE_AND_LEAVE:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name

    @property
    def came(self) -> bool:
        return self.name is not None
