"""Which part of the vocabulary a rank holds, and the few collectives over the tensor-parallel group.

Shape suffixes used throughout this package: T positions given by the caller, R positions that are computed (those with
a target), C positions of one chunk, V columns held by this rank, H hidden size, K kept or teacher ids, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """This rank holds the ids [start, stop) of a vocabulary of `size` ids.

    Ids >= size are padding: outside every softmax, their gradient exactly zero. `group` is the tensor-parallel group
    (gloo or nccl); None means that one process holds the whole vocabulary.
    """

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or self.size < 1:
            raise ValueError(
                f"vocabulary shard [{self.start}, {self.stop}) of size {self.size}: 0 <= start <= stop and size >= 1 must hold"
            )

    @classmethod
    def of(
        cls,
        rank: int,
        world: int,
        vocab_size: int,
        padded_size: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> VocabShard:
        """The shard of `rank` when `padded_size` ids (default: `vocab_size`) are split evenly over `world` ranks.

        Where the split is not even, the first ranks hold one id more.
        """
        total = vocab_size if padded_size is None else padded_size
        if total < vocab_size:
            raise ValueError(f"padded vocabulary {total} is smaller than the vocabulary {vocab_size}")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside a tensor-parallel group of {world}")
        share, rest = divmod(total, world)
        start = rank * share + min(rank, rest)
        return cls(start, start + share + (rank < rest), vocab_size, group)

    @property
    def width(self) -> int:
        """Columns this rank holds, padding included."""
        return self.stop - self.start

    @property
    def valid(self) -> int:
        """Columns this rank holds that are real ids; they come first."""
        return max(0, min(self.stop, self.size) - self.start)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def planned_width(self) -> int:
        """Columns a rank holds, as every rank of the group computes it: chunks must have the same size on all of them."""
        return -(-self.size // self.world)

    def check_width(self, width: int, what: str) -> None:
        """Refuse a tensor that is not this shard's: the whole vocabulary where a shard is meant is off by log(TP)."""
        if width != self.width:
            raise ValueError(
                f"{what} has width {width}, but this rank's vocabulary shard [{self.start}, {self.stop}) "
                f"has width {self.width}: pass the shard, not the whole vocabulary"
            )
        if self.world == 1 and self.valid < self.size:
            raise ValueError(
                f"vocabulary shard [{self.start}, {self.stop}) holds {self.valid} of {self.size} ids "
                "but has no group to reduce over: pass the tensor-parallel group"
            )

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(column, here) of global ids: `column` is safe to index with everywhere, `here` says where it means something."""
        column = ids - self.start
        here = (column >= 0) & (column < self.valid)
        return column.masked_fill(~here, 0), here

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, stacked in rank order: [W, *x.shape], the same bits on every rank."""
        if self.world == 1:
            return x.unsqueeze(0)
        flat = x.contiguous().view(-1)
        out = flat.new_empty(self.world * flat.numel())
        dist.all_gather_into_tensor(out, flat, group=self.group)
        return out.view(self.world, *x.shape)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order so that every rank and every run gets the same bits."""
        return x if self.world == 1 else self.gather(x).sum(0)

    def gather_rows(self, x: Tensor) -> Tensor:
        """[T/W, H] of each rank -> [T, H]: undoes sequence parallelism."""
        if self.world == 1:
            return x
        out = x.new_empty(x.shape[0] * self.world, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def reduce_(self, x: Tensor) -> Tensor:
        """In-place sum over ranks of a gradient of replicated rows."""
        if self.world > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """[T, H] partial sums -> this rank's [T/W, H] rows of the total."""
        if self.world == 1:
            return x
        out = torch.empty_like(x[: x.shape[0] // self.world])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self.group)
        return out
