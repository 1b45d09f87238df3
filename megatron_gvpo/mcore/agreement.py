"""Failures that every rank hears of: a rank that stops alone leaves the others waiting in a collective until its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def attempt(action: Callable[[], Any]) -> Exception | None:
    """What went wrong, for the ranks to talk about before this one raises it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not be left waiting; the caller raises it
        return error
    return None


def words(error: Exception | None) -> str:
    """One line; '' for no error."""
    if error is None:
        return ""
    name, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, (OSError, ValueError)) and text:
        return text
    return f"{name}: {text[:300]}"


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
