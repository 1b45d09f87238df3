"""Where a step's wall time goes, part by part; what no part claims is `other`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("rollout", "reward", "teacher", "logprobs", "gupo", "forward_backward", "optimizer", "sync", "checkpoint", "eval")


class StepClock:
    """Seconds per part of one step. Parts do not nest."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to `name`."""
        if name not in PARTS:
            raise ValueError(f"{name!r} is no part of a step; the parts: {', '.join(PARTS)}")
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def carry(self, name: str, seconds: float) -> None:
        """Count seconds that were spent before this step began."""
        if seconds:
            self._start -= seconds
            self.add(name, seconds)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Credit `target` with seconds that were measured inside `source`."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def metrics(self) -> dict[str, float]:
        """`time/<part>` for the parts that happened, `time/other` and `time/step`, in seconds, up to now."""
        total = time.perf_counter() - self._start
        spent = {f"time/{name}": seconds for name, seconds in self._spent.items()}
        return {**spent, "time/other": max(total - sum(self._spent.values()), 0.0), "time/step": total}
