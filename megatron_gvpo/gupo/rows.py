"""Rows of the output layer that are worked on together, and seeded draws of rows and columns that no layout changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.logprobs.shard import VocabShard


@dataclass(frozen=True)
class RowSet:
    """Rows of a shard, counted from its first: [start, stop), or those of `index_R` (int64, ascending) within it."""

    start: int
    stop: int
    index_R: Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.index_R is None else self.index_R.numel()

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> RowSet:
        """The set of these ascending rows; a slice where they have no gap."""
        if not rows:
            return cls(0, 0)
        if rows[-1] - rows[0] + 1 == len(rows):
            return cls(rows[0], rows[-1] + 1)
        return cls(rows[0], rows[-1] + 1, torch.tensor(list(rows), dtype=torch.int64, device=device))

    def take(self, matrix_VH: Tensor) -> Tensor:
        """[R, ...]: these rows of a tensor of the whole shard; a view where they have no gap."""
        return matrix_VH[self.start : self.stop] if self.index_R is None else matrix_VH.index_select(0, self.index_R)

    def locate(self, column_C: Tensor, here_C: Tensor) -> tuple[Tensor, Tensor]:
        """(place in this set, whether it is in the set) of rows of the shard; the place is safe to index with everywhere."""
        if self.index_R is None:
            here_C = here_C & (column_C >= self.start) & (column_C < self.stop)
            return (column_C - self.start).masked_fill(~here_C, 0), here_C
        place_C = torch.searchsorted(self.index_R, column_C).clamp_(max=self.index_R.numel() - 1)
        here_C = here_C & (self.index_R[place_C] == column_C)
        return place_C.masked_fill(~here_C, 0), here_C

    def blocks(self, size: int) -> Iterator[RowSet]:
        """This set cut into pieces of at most `size` rows."""
        for a in range(0, len(self), size):
            b = min(a + size, len(self))
            if self.index_R is None:
                yield RowSet(self.start + a, self.start + b)
            else:
                part_R = self.index_R[a:b]
                yield RowSet(int(part_R[0]), int(part_R[-1]) + 1, part_R)

    def covering_spans(self, granule: int, offset: int) -> list[tuple[int, int]]:
        """Spans [a, b) of the shard that hold all these rows and end where granules of the layer do (or at the set's ends).

        offset: the layer's row at which the shard starts.
        """
        if self.index_R is None:
            return [(self.start, self.stop)]
        wanted = torch.unique((self.index_R + offset) // granule).tolist()
        spans: list[tuple[int, int]] = []
        for block in wanted:
            a = max(block * granule - offset, self.start)
            b = min((block + 1) * granule - offset, self.stop)
            if spans and spans[-1][1] == a:
                spans[-1] = (spans[-1][0], b)
            else:
                spans.append((a, b))
        return spans

    def within(self, a: int, b: int) -> RowSet:
        """The rows that lie in [a, b), counted from a."""
        if self.index_R is None:
            return RowSet(max(self.start, a) - a, min(self.stop, b) - a)
        part_R = self.index_R[(self.index_R >= a) & (self.index_R < b)] - a
        return RowSet(int(part_R[0]), int(part_R[-1]) + 1, part_R)


def one_of_each_stratum(size: int, count: int, seed: int) -> list[int]:
    """`count` of the numbers [0, size), ascending: the range is cut into that many equal parts and one of each is drawn.

    Token ids are roughly in order of frequency, so a draw from each stretch of them estimates a mean over all rows far better
    than a draw from the whole. Everything where count >= size.
    """
    if count >= size:
        return list(range(size))
    draw = random.Random(seed)
    # Bounds in integers, so that every stratum has a member and none is in two.
    return [draw.randrange(size * i // count, size * (i + 1) // count) for i in range(count)]


def rows_of_shard(rows: Sequence[int], shard: VocabShard, device: torch.device) -> RowSet:
    """The members of global `rows` that this shard holds."""
    stop = shard.start + shard.valid
    return RowSet.of([row - shard.start for row in rows if shard.start <= row < stop], device)
