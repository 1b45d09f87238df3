"""Evidence of a group from the variance of its gradient over the posterior: arXiv 2608.17411, precision and evidence.

    lambda_d = 1/sigma_d^2        e_d = lambda_d^s        mean evidence = mean over the K live dimensions of e_d

A dimension without variance is dead: it is in neither the sum nor K nor any median. sigma has a floor, a share of the group's own
median (an addition of ours: otherwise a few nearly dead dimensions own the mean).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_gvpo.gupo.cost import median_rows
from megatron_gvpo.gupo.gradients import Moments
from megatron_gvpo.gupo.rows import RowSet, one_of_each_stratum, rows_of_shard
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives.base import Comm

EvidenceScale = Literal["paper", "batch", "snr"]

# Dimensions on which a group's median is taken: exact up to this many, a seeded sample of them beyond.
MEDIAN_DIMENSIONS = 1 << 13


@dataclass(frozen=True)
class MedianSample:
    """The rows and columns of the layer on which sigma's medians are taken: the same on every layout."""

    rows: RowSet
    columns: Tensor  # int64
    most_rows: int  # of any tensor-parallel rank

    @classmethod
    def draw(cls, shard: VocabShard, hidden_size: int, seed: int, device: torch.device) -> MedianSample:
        rows = one_of_each_stratum(shard.size, median_rows(shard.size), seed)
        columns = one_of_each_stratum(hidden_size, max(1, MEDIAN_DIMENSIONS // len(rows)), seed + 1)
        mine = rows_of_shard(rows, shard, device)
        most = int(shard.gather(torch.tensor([len(mine)], device=device)).max())
        return cls(mine, torch.tensor(columns, dtype=torch.int64, device=device), most)

    def sigma(self, variance_RH: Tensor, shard: VocabShard) -> Tensor:
        """The sigmas that are not zero at these dimensions over all tensor-parallel ranks, from the variance at `rows`."""
        values = variance_RH.index_select(1, self.columns).sqrt_()
        # Ranks hold different numbers of the rows; zeros, which are dead dimensions anyhow, fill up.
        padded = values.new_zeros(self.most_rows, self.columns.numel())
        padded[: len(self.rows)] = values
        gathered = shard.gather(padded).flatten()
        return gathered[gathered != 0]


@dataclass(frozen=True)
class EvidenceSum:
    """Sum of e over the live dimensions seen so far, and their number; sigma in units of the group's median (not for snr)."""

    total: float = 0.0
    live: int = 0

    def __add__(self, other: EvidenceSum) -> EvidenceSum:
        return EvidenceSum(self.total + other.total, self.live + other.live)


def evidence_sum(moments: Moments, median: float, floor: float, s: float, scale: EvidenceScale) -> EvidenceSum:
    """Of these rows. median: of the group's sigma, in the moments' units; floor: least sigma, as a share of it."""
    variance_RH, mean_RH = moments.variance_RH, moments.mean_RH
    if variance_RH.numel() == 0 or median == 0.0:
        return EvidenceSum()
    dead_RH = variance_RH == 0  # what is not a number is not dead: it has to show
    floored_RH = variance_RH.clamp(min=(floor * median) ** 2)
    if scale == "snr":
        evidence_RH = mean_RH.square().div_(floored_RH)
        evidence_RH = evidence_RH.sqrt_() if s == 0.5 else evidence_RH.pow_(s)
    else:
        floored_RH /= median**2
        evidence_RH = floored_RH.rsqrt_() if s == 0.5 else floored_RH.pow_(-s)
    # A dead dimension may stand at infinity where there is no floor, so it is taken out, not multiplied by zero.
    evidence_RH.masked_fill_(dead_RH, 0.0)
    return EvidenceSum(float(evidence_RH.sum(1).sum(dtype=torch.float64)), variance_RH.numel() - int(dead_RH.sum()))


def mean_evidence(sums: EvidenceSum, median: float, batch_median: float, s: float, scale: EvidenceScale) -> float:
    """The mean over live dimensions in the units that `scale` names; infinite for a group without any (it has no noise).

    median: of the group's sigma in absolute units; batch_median: over all active groups.
    """
    if sums.live == 0:
        return float("inf")
    mean = sums.total / sums.live
    if scale == "snr" or mean != mean:  # a NaN goes on as it is: there may be no median to divide by
        return mean
    unit = median if scale == "paper" else median / batch_median
    return mean * unit ** (-2.0 * s)


def median_over_ranks(values: Tensor, comm: Comm) -> float:
    """The lower median of positive float64 numbers that are spread over data- and context-parallel ranks; 0 for none at all.

    Found digit by digit in the bit patterns, whose order is that of the numbers: a few small reductions, and nothing is gathered.
    Every rank must call it, and all get the same.
    """
    bits = values.to("cpu", torch.float64).view(torch.int64)
    total = int(comm.sum(torch.tensor([float(len(bits))], dtype=torch.float64))[0])
    if total == 0:
        return 0.0
    left = (total - 1) // 2  # numbers below the median among those that share the digits found so far
    found = 0
    for shift in _SHIFTS:
        digits = (bits >> shift) & (_BASE - 1)
        counts = comm.sum(torch.bincount(digits, minlength=_BASE).to(torch.float64))
        upto = counts.cumsum(0)
        digit = int((upto <= left).sum())
        left -= int(upto[digit] - counts[digit])
        found += digit << shift
        bits = bits[digits == digit]
    return float(torch.tensor(found, dtype=torch.int64).view(torch.float64))


# Positive numbers leave the sign bit free: seven digits of nine bits.
_BASE = 1 << 9
_SHIFTS = range(54, -1, -9)
