"""How the groups' gradients stand to each other: cosines, conflicts, noise scale. Estimated from sketches, a few KiB a group.

Inner products of gradients of the head's size are kept by a signed sum of rows into a few buckets (count sketch): each pair's
error is about 1/sqrt(64 buckets) of the product of the norms, whatever the gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.gupo.posterior import mix
from megatron_gvpo.gupo.rows import RowSet
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives.base import Comm

_TILE = 64  # rows with sign patterns of their own
_BUCKETS = 64
_MOST_COLUMNS = 1024
_MOST_NUMBERS = 1 << 25  # of all groups' sketches together, per rank


class GradientSketches:
    """Sketches of this rank's groups, filled block of rows by block of rows."""

    def __init__(self, groups: int, shard: VocabShard, hidden_size: int, seed: int, dtype: torch.dtype, device: torch.device):
        self._shard, self._hidden = shard, hidden_size
        self._columns = min(hidden_size, _MOST_COLUMNS)
        self._buckets = max(8, min(_BUCKETS, _MOST_NUMBERS // max(1, groups * self._columns)))
        generator = torch.Generator().manual_seed(mix(seed) & 0x7FFFFFFF)

        def signs(*shape: int) -> Tensor:
            return (torch.randint(0, 2, shape, generator=generator) * 2 - 1).to(device, dtype)

        # Drawn for the whole layer, so that every layout has the same.
        self._tile_signs = signs(_TILE, hidden_size)
        rows = slice(shard.start, shard.start + shard.valid)
        self._row_signs = signs(shard.size)[rows]
        self._bucket_of_row = torch.randint(0, self._buckets, (shard.size,), generator=generator)[rows].to(device)
        self._tile_of_row = (torch.arange(shard.valid) + shard.start).remainder(_TILE).to(device)
        self._sketch_G = torch.zeros(groups, self._buckets, self._columns, dtype=dtype, device=device)

    def add(self, group: int, gradient_RH: Tensor, rows: RowSet) -> None:
        """gradient_RH: these rows of the group's gradient; overwritten."""
        if not len(rows):
            return
        signs_RH = self._tile_signs.index_select(0, rows.take(self._tile_of_row))
        gradient_RH.mul_(signs_RH).mul_(rows.take(self._row_signs)[:, None])
        bucket_R = rows.take(self._bucket_of_row)
        for a in range(0, self._hidden, self._columns):
            part = gradient_RH[:, a : a + self._columns]
            self._sketch_G[group, :, : part.shape[1]].index_add_(0, bucket_R, part)

    def gram(self, comm: Comm, share: float = 1.0) -> Tensor:
        """[G, G] float64: inner products of all groups' gradients. share: of the layer's rows that were added."""
        # Summed over tensor-parallel ranks before the product: rows of two ranks share buckets like any others.
        flat = comm.sum(self._shard.reduce_(self._sketch_G)).flatten(1)
        return (flat @ flat.t()).to("cpu", torch.float64) / share


@dataclass(frozen=True)
class GradientGeometry:
    """cosine_GG: of group gradients, 0 in the rows of inactive groups. conflict_rate: share of negative pairs of active groups.

    noise_scale: tr(covariance of a group's gradient) / |mean gradient|^2, in groups (arXiv 1812.06162, the simple noise scale,
    with unbiased estimates of both); infinite where the estimate of |mean gradient|^2 is not positive.
    """

    cosine_GG: Tensor
    conflict_rate: float
    mean_cosine: float
    noise_scale: float


def geometry(gram_GG: Tensor, active_G: Tensor) -> GradientGeometry:
    norms_G = gram_GG.diagonal().clamp(min=0).sqrt()
    active_G = active_G & (norms_G > 0)
    scale_GG = norms_G[:, None] * norms_G[None, :]
    both_GG = active_G[:, None] & active_G[None, :]
    cosine_GG = torch.where(both_GG, gram_GG / scale_GG.clamp(min=1e-300), torch.zeros_like(gram_GG)).clamp(-1.0, 1.0)
    pairs = cosine_GG[both_GG & torch.ones_like(both_GG).triu(1)]
    conflicts = float((pairs < 0).to(torch.float64).mean()) if pairs.numel() else 0.0
    mean_cosine = float(pairs.mean()) if pairs.numel() else 0.0
    return GradientGeometry(cosine_GG, conflicts, mean_cosine, _noise_scale(gram_GG))


def _noise_scale(gram_GG: Tensor) -> float:
    """Groups without gradient count: they are part of the batch."""
    count = gram_GG.shape[0]
    if count < 2:
        return float("inf")
    single = float(gram_GG.diagonal().mean())
    whole = float(gram_GG.mean())
    signal = (count * whole - single) / (count - 1)
    noise = (single - whole) / (1.0 - 1.0 / count)
    return noise / signal if signal > 0 else float("inf")
