"""Failures that every rank hears of: a rank that stops alone leaves the others waiting in a collective until its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def tried(action: Callable[[], Any], errors: tuple[type[Exception], ...] = (OSError, ValueError)) -> str:
    """'' where the action worked, else why not. errors: what is caught."""
    try:
        action()
    except errors as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def from_rank_0(trouble: str) -> str:
    """Rank 0's words on every rank. Collective over all ranks, and thereby a barrier."""
    heard = [trouble]
    dist.broadcast_object_list(heard, src=0)
    return heard[0]


def from_all(trouble: str) -> str:
    """The first rank's trouble, with its number, on every rank; '' where there is none. Collective over all ranks."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, trouble)
    return next((f"rank {rank}: {words}" for rank, words in enumerate(heard) if words), "")
