"""The split of a batch over data-parallel ranks and micro-batches: equal counts everywhere, and the work balanced.

Unequal counts hang the collectives of the ranks that have more. A plan is a pure function of its arguments, so that every
rank computes the same one without talking.

A micro-batch is a rectangle: its samples are padded to the longest of them, so it costs (samples x longest) tokens. Samples
are therefore cut into micro-batches in the order of their length.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of samples; an empty list is a filler that only keeps the collectives in step."""


def plan_micro_batches(
    lengths: Sequence[int],
    dp: int,
    *,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    pad_multiple: int = 1,
    count_multiple: int = 1,
    groups: Sequence[Hashable] | None = None,
) -> Plan:
    """Each data-parallel rank's micro-batches, as lists of sample indices: the same number on every rank.

    lengths: tokens of each sample. max_tokens: padded tokens of a micro-batch at most; a longer sample gets one of its own.
    max_samples: samples of a micro-batch at most. pad_multiple: padded lengths are multiples of it. count_multiple: the number
    of micro-batches per rank is one (interleaved pipelines want the number of stages). groups: each sample's group; a group
    then stays whole on one rank.

    The result holds as few micro-batches as this cut allows, made as equal in padded tokens as that number allows; a rank's
    own come largest first, so that the ranks' n-th ones are alike and memory peaks at the start. Every index appears once.
    Only where there are fewer samples than micro-batches are there fillers. ValueError for limits below 1.
    """
    limits = {"dp": dp, "max_tokens": max_tokens, "max_samples": max_samples, "pad_multiple": pad_multiple}
    for name, value in {**limits, "count_multiple": count_multiple}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if groups is not None and len(groups) != len(lengths):
        raise ValueError(f"{len(groups)} groups for {len(lengths)} samples: give one per sample")
    widths = [max(-(-length // pad_multiple), 1) * pad_multiple for length in lengths]
    longest_first = sorted(range(len(widths)), key=lambda i: (-widths[i], i))
    cut = _Cutter(widths, max_tokens, max_samples)
    if groups is None:
        shares = [longest_first]
    else:
        shares = _whole_groups(longest_first, widths, groups, dp)
    ranks_per_share = dp // len(shares)
    needed = max(len(cut.within(share, max_tokens)) for share in shares)
    per_rank = -(-needed // ranks_per_share)
    per_rank = max(-(-per_rank // count_multiple), 1) * count_multiple
    plan: Plan = []
    for share in shares:
        plan += _deal(cut.into(share, per_rank * ranks_per_share), cut, ranks_per_share)
    return plan


def padded_tokens(members: Sequence[int], lengths: Sequence[int], pad_multiple: int = 1) -> int:
    """Tokens that one micro-batch costs: its samples times the longest of them, padded. 0 for a filler."""
    if not members:
        return 0
    return len(members) * max(-(-max(lengths[i] for i in members) // pad_multiple), 1) * pad_multiple


class _Cutter:
    """Cuts samples, longest first, into neighbours that share a micro-batch."""

    def __init__(self, widths: Sequence[int], max_tokens: int | None, max_samples: int | None) -> None:
        self.widths = widths
        self.max_tokens = max_tokens
        self.max_samples = max_samples

    def area(self, members: Sequence[int]) -> int:
        """Padded tokens of neighbours (longest first)."""
        return len(members) * self.widths[members[0]] if members else 0

    def within(self, order: Sequence[int], tokens: int | None) -> list[list[int]]:
        """The fewest micro-batches of at most `tokens`: each takes as many samples as fit beside its longest one."""
        parts: list[list[int]] = []
        start = 0
        while start < len(order):
            room = len(order) if tokens is None else max(tokens // self.widths[order[start]], 1)
            stop = start + min(room, self.max_samples or room)
            parts.append(list(order[start:stop]))
            start = stop
        return parts

    def into(self, order: Sequence[int], count: int) -> list[list[int]]:
        """`count` micro-batches whose largest is as small as possible; empty ones only where samples run out."""
        if not order:
            return [[] for _ in range(count)]
        low, high = 1, self.max_tokens or len(order) * self.widths[order[0]]
        while low < high:
            middle = (low + high) // 2
            if len(self.within(order, middle)) <= count:
                high = middle
            else:
                low = middle + 1
        parts = self.within(order, high)
        return self._split(parts, count)

    def _split(self, parts: list[list[int]], count: int) -> list[list[int]]:
        """Halve the largest until there are `count`, so that no rank computes a filler while another has two samples."""
        heap = [(-self.area(part), part[0], part) for part in parts if len(part) > 1]
        heapq.heapify(heap)
        done = [part for part in parts if len(part) == 1]
        while heap and len(done) + len(heap) < count:
            _, _, part = heapq.heappop(heap)
            middle = (len(part) + 1) // 2
            for half in (part[:middle], part[middle:]):
                if len(half) > 1:
                    heapq.heappush(heap, (-self.area(half), half[0], half))
                else:
                    done.append(half)
        done += [part for _, _, part in heap]
        return done + [[] for _ in range(count - len(done))]


def _deal(parts: list[list[int]], cut: _Cutter, ranks: int) -> list[list[list[int]]]:
    """The same number of micro-batches to every rank, the largest left to the rank with the least work so far."""
    room = len(parts) // ranks
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for part in sorted(parts, key=lambda p: (-cut.area(p), p[:1])):
        tokens, rank = heapq.heappop(load)
        dealt[rank].append(sorted(part))
        if len(dealt[rank]) < room:
            heapq.heappush(load, (tokens + cut.area(part), rank))
    return dealt


def _whole_groups(order: Sequence[int], widths: Sequence[int], groups: Sequence[Hashable], dp: int) -> list[list[int]]:
    """Each rank's samples, longest first: the largest group left to the rank with the fewest tokens so far."""
    members: dict[Hashable, list[int]] = {}
    for index in order:
        members.setdefault(groups[index], []).append(index)
    sizes = [(-sum(widths[i] for i in group), min(group), group) for group in members.values()]
    load = [(0, rank) for rank in range(dp)]
    shares: list[list[int]] = [[] for _ in range(dp)]
    for size, _, group in sorted(sizes):
        tokens, rank = heapq.heappop(load)
        shares[rank] += group
        heapq.heappush(load, (tokens - size, rank))
    return [sorted(share, key=lambda i: (-widths[i], i)) for share in shares]
