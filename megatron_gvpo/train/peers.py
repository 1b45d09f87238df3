"""The ranks keep an eye on each other, beside the collectives: a stop request, a failure or a death is known everywhere soon.

A rank that waits in a collective runs no Python: it cannot see a signal, nor that the rank it waits for is gone, until the
collective's own limit. So a thread of each rank talks to the others through the job's key-value store:

    stop            who was asked to save and leave, or that the time is up       -> `StopRequest.ask` on every rank
    failed          the first rank that failed, and why                           -> every other rank ends, with that line
    alive/<rank>    a number that grows as long as the rank's thread runs         -> rank 0 declares one dead that is silent
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_gvpo.train.signals import SAVE_AND_LEAVE, StopRequest

log = logging.getLogger(__name__)

_POLL_S = 0.5
_BEAT_S = 5.0
# What a rank that hears of a failure gets to end by itself, with words of its own; and what the one that failed gets to clean up.
_GRACE_S = 10.0
_OWN_GRACE_S = 60.0
_STORE_S = 30.0
_BLAME_S = 3.0
_STOP, _FAILED = "stop", "failed"


class PeerError(RuntimeError):
    """Another rank is gone, and this one cannot go on."""


class Peers:
    """Starts watching when it is made, by the main thread, on every rank after the job has come together.

    silence_s: after so many seconds without a sign of life a rank counts as dead. deadline_s: seconds from `started` (of
    time.monotonic) after which rank 0 asks the run to leave; 0: never.
    """

    def __init__(self, stop: StopRequest, *, silence_s: float, deadline_s: float = 0.0, started: float | None = None) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._stop = stop
        self._silence_s = silence_s
        self._deadline = (started or time.monotonic()) + deadline_s if deadline_s and self.rank == 0 else float("inf")
        self._store = _own_store() if self.world > 1 else None
        self._told = False
        self._verdict = ""
        self._beats = 0
        self._next_beat = 0.0
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._closing = threading.Event()
        # The signal handler proper runs when the main thread comes back to Python; this end hears of the signal at once.
        self._wake, theirs = socket.socketpair()
        self._wake.setblocking(False)
        theirs.setblocking(False)
        self._theirs = theirs
        self._former_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def failed(self, why: str) -> None:
        """Tell the others that this rank gives up. Harmless when the store is gone."""
        if self._store is None:
            return
        try:
            self._store.compare_set(_FAILED, "", f"rank {self.rank} failed: {why}")
        except (RuntimeError, ValueError) as error:
            log.debug("could not tell the other ranks: %s", error)

    def lost(self, error: BaseException) -> PeerError | None:
        """What to raise in place of a collective's error: who is gone, as far as it is known. None for any other error."""
        text = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo" in text):
            return None
        deadline = time.monotonic() + _BLAME_S
        while self._store is not None and not self._verdict and time.monotonic() < deadline:
            time.sleep(0.1)
        why = self._verdict or "another rank is gone, and its own log says why"
        return PeerError(f"rank {self.rank}: {why} (a collective ended with: {text[:200]})")

    def close(self) -> None:
        """Stop watching; from here on the others' going is no failure."""
        self._closing.set()
        signal.set_wakeup_fd(self._former_fd)
        self._theirs.close()  # wakes the thread
        self._thread.join(_STORE_S)
        self._wake.close()

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._take_signals()
            if time.monotonic() > self._deadline:
                self._stop.ask("train.deadline_s")
            if self._store is None:
                continue
            try:
                trouble = self._talk(self._store)
            except (RuntimeError, ValueError) as error:
                # The store lives in rank 0's process.
                trouble = f"rank 0 is gone: {(str(error).splitlines() or [''])[0]}"
            if trouble:
                self._end(trouble)
                return

    def _take_signals(self) -> None:
        readable, _, _ = select.select([self._wake], [], [], _POLL_S)
        if readable:
            for number in self._wake.recv(64):
                if number in SAVE_AND_LEAVE:
                    self._stop.ask(signal.Signals(number).name)

    def _talk(self, store: Any) -> str:
        """One round; why this rank has to end, or ''."""
        if self._stop.name is not None and not self._told:
            store.set(_STOP, f"{self._stop.name} to rank {self.rank}")
            self._told = True
        elif self._stop.name is None and store.check([_STOP]):
            self._told = True
            self._stop.ask(store.get(_STOP).decode())
        if store.check([_FAILED]):
            return store.get(_FAILED).decode()
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._beats += 1
            store.set(f"alive/{self.rank}", str(self._beats))
            if self.rank == 0:
                return self._look_around(store)
        return ""

    def _look_around(self, store: Any) -> str:
        now = time.monotonic()
        for rank in range(1, self.world):
            key = f"alive/{rank}"
            beat = store.get(key) if store.check([key]) else b""
            former, since = self._heard.get(rank, (None, now))
            if beat != former:
                self._heard[rank] = (beat, now)
            elif now - since > self._silence_s:
                trouble = f"rank {rank} has not been heard of for {now - since:.0f} s (limit train.peer_timeout_s)"
                store.compare_set(_FAILED, "", trouble)
                return trouble
        return ""

    def _end(self, trouble: str) -> None:
        """The main thread may hang in a collective that will never complete: end the process, if it does not end itself."""
        self._verdict = trouble
        own = trouble.startswith(f"rank {self.rank} failed")
        if self._closing.wait(_OWN_GRACE_S if own else _GRACE_S):
            return
        print(f"error: rank {self.rank} stops: {trouble}", file=sys.stderr, flush=True)
        os._exit(1)


def _own_store() -> Any:
    """A connection of this thread's own: the job's is locked while a collective sets itself up. Keys have a prefix."""
    store: Any = c10d._get_default_store()
    if isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    mine = store.clone()
    mine.set_timeout(timedelta(seconds=_STORE_S))
    return c10d.PrefixStore("gvpo-peers", mine)
