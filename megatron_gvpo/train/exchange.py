"""What rank 0 tells the others: samples, decisions, and its own failures, so that nobody waits for a rank that gave up.

Goes over a gloo group of its own, whose limit allows for the longest rollout; the collectives of the model keep their short one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_gvpo.config.schema import Config
from megatron_gvpo.train.signals import StopNow, StopRequest

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOMENT_S = 2.0


class ControllerError(RuntimeError):
    """Rank 0 failed; its message is the same on every rank."""


def patience(config: Config) -> timedelta:
    """How long the other ranks wait for rank 0: the limits of everything it may be doing, added up."""
    rollout, teacher = config.rollout, config.teacher
    seconds = (
        config.train.collective_timeout_s
        + rollout.request_timeout_s * (rollout.retries + 1)
        + rollout.sync_timeout_s
        + rollout.servers.start_timeout_s
        + config.reward.timeout_s
        + (teacher.request_timeout_s * (teacher.retries + 1) + teacher.servers.start_timeout_s) * (teacher.where == "served")
    )
    return timedelta(seconds=seconds)


class Exchange:
    """The control group of all ranks. Every method is collective.

    stop: what may end the waits that are marked `interruptible`.
    """

    def __init__(self, config: Config, stop: StopRequest | None = None) -> None:
        self.rank = dist.get_rank()
        self.stop = stop or StopRequest()
        group = dist.new_group(backend="gloo", timeout=patience(config))
        assert isinstance(group, dist.ProcessGroup)  # this rank is in it
        self._group = group

    @property
    def is_controller(self) -> bool:
        return self.rank == 0

    def from_controller(self, produce: Callable[[], T], *, interruptible: bool = False) -> T:
        """`produce()` on rank 0, its value on every rank. Where it raises, rank 0 re-raises; the others get ControllerError.

        interruptible: a request to leave ends it; then StopNow is raised on every rank.
        """
        if not self.is_controller:
            return self._receive()
        try:
            with self.stop.interruptible() if interruptible else nullcontext():
                value = produce()
        except StopNow as request:
            self._send(None, None, str(request))
            raise
        except Exception as error:
            if interruptible and self._asked_to_leave():
                log.warning("left because of %s, which may be why this failed: %s", self.stop.name, error)
                self._send(None, None, self.stop.name)
                raise StopNow(self.stop.name) from error
            self._send(None, f"{type(error).__name__}: {error}", None)
            raise
        self._send(value, None, None)
        return value

    def _asked_to_leave(self) -> bool:
        """Whether a request has come, or comes in a moment: whoever stops a job tells its servers at the same time."""
        deadline = time.monotonic() + _MOMENT_S
        while not self.stop.came and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.stop.came

    def local(self, produce: Callable[[], T], *, interruptible: bool = False) -> T | None:
        """`produce()` on rank 0, None elsewhere; where it raises, every rank stops (see `from_controller`)."""
        made: list[T] = []

        def make() -> None:
            made.append(produce())

        self.from_controller(make, interruptible=interruptible)
        return made[0] if made else None

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.most(int(flag)) > 0

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def barrier(self) -> None:
        self.most(0)

    def _send(self, value: Any, error: str | None, stop: str | None) -> None:
        dist.broadcast_object_list([value, error, stop], src=0, group=self._group, device=torch.device("cpu"))

    def _receive(self) -> Any:
        box: list[Any] = [None, None, None]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        value, error, stop = box
        if stop is not None:
            raise StopNow(stop)
        if error is not None:
            raise ControllerError(f"rank 0 failed: {error}")
        return value
