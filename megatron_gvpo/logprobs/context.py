"""Context parallelism: which tokens a rank holds, and sums over sequences that are spread over the context group.

With C context ranks a sequence is cut into 2C equal slices; rank r holds slices r and 2C-1-r, so that causal attention
costs every rank the same. A rank may hold no response token at all: it still takes part in every collective here.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_indices(length: int, world: int, rank: int, device: torch.device | None = None) -> Tensor:
    """[length / world] int64: the positions of a sequence that context rank `rank` of `world` holds, in its order."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside a context-parallel group of {world}")
    if world == 1:
        return torch.arange(length, device=device)
    if length % (2 * world):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {2 * world} slices for {world} context ranks: "
            f"pad it to {-(-length // (2 * world)) * 2 * world}"
        )
    piece = length // (2 * world)
    first, last = rank * piece, (2 * world - 1 - rank) * piece
    steps = torch.arange(piece, device=device)
    return torch.cat([first + steps, last + steps])


def packed_zigzag_indices(boundaries: Tensor, world: int, rank: int) -> Tensor:
    """The positions of a packed row that a context rank holds: `zigzag_indices` of every sequence, one after another.

    boundaries: [S + 1] integers, where each of the S padded sequences starts, and the total length.
    """
    starts = boundaries.tolist()
    pieces = [start + zigzag_indices(stop - start, world, rank, boundaries.device) for start, stop in itertools.pairwise(starts)]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=boundaries.device)


def zigzag_slice(x: Tensor, world: int, rank: int, dim: int = 0) -> Tensor:
    """The part of `x` that a context rank holds, along `dim`."""
    return x.index_select(dim, zigzag_indices(x.shape[dim], world, rank, x.device))


def zigzag_join(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Undoes `zigzag_slice`: every rank's part, in rank order, put together along `dim`."""
    length = sum(part.shape[dim] for part in parts)
    held = torch.cat([zigzag_indices(length, len(parts), rank, parts[0].device) for rank in range(len(parts))])
    return torch.cat(parts, dim).index_select(dim, held.argsort())


class _SumOverRanks(torch.autograd.Function):
    """Every rank gets the total. Backward passes the gradient through unchanged: each rank holds the same loss of the same
    total, so the gradient of a rank's own summand is the gradient of the total, not its sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def sequence_sums(values_T: Tensor, sequence_T: Tensor, count: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """[count]: the sum of each sequence's values over this rank's tokens and, with `group`, over all its context ranks.

    values_T float, sequence_T int64 in [0, count): the sequence each token belongs to. Differentiable, where every rank
    computes the same loss from the sums. A rank without tokens (T = 0) contributes zeros.
    """
    sums = values_T.new_zeros(count).index_add(0, sequence_T, values_T)
    if group is None or dist.get_world_size(group) == 1:
        return sums
    result: Any = _SumOverRanks.apply(sums, group)
    return result
