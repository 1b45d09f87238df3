"""The rank launcher itself: a launcher that hides a failure, or hangs on one, makes every test above it worthless."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def _sum(rank: int, world: int, start: int) -> tuple[float, int]:
    value = torch.tensor([float(start + rank)])
    dist.all_reduce(value)
    return float(value), os.getpid()


def _one_fails(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def _sleeps(rank: int, world: int) -> None:
    time.sleep(600)


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_values_come_back_in_rank_order_and_nothing_is_left_running() -> None:
    """Values of real collectives, one a rank; the children are gone. Does not cover several nodes."""
    results = run_ranks(_sum, 2, 10)
    assert [value for value, _ in results] == [21.0, 21.0]
    assert all(_gone(pid) for _, pid in results)


def test_a_failed_rank_is_named_with_its_traceback_and_its_peers_are_stopped() -> None:
    """One rank raises while the other waits in a barrier: the error must carry the cause and not wait for the limit."""
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(_one_fails, 2, timeout=120)


def test_ranks_past_the_limit_are_named() -> None:
    """A hang ends at the limit and says who was late."""
    with pytest.raises(RankError, match="rank 0 had not finished"):
        run_ranks(_sleeps, 1, timeout=12)
