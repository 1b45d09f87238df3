"""The Gaussian posterior of the output layer, Phi ~ N(Phi_0, 1/(F + delta)): how wide it is, and seeded samples of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_gvpo.gupo.head import Head
from megatron_gvpo.gupo.rows import RowSet
from megatron_gvpo.logprobs.rows import spans
from megatron_gvpo.logprobs.shard import VocabShard

# Rows of the layer that share one seeding of the generator: seeding row by row would cost more than the numbers.
NOISE_ROWS = 64
# Elements that one elementwise pass handles at a time.
_BLOCK = 1 << 22
_SUM_BLOCK = 1 << 17
_MOST_STEPS = 200


def kl_and_slope(fisher_VH: Tensor, delta: float) -> Tensor:
    """[2] float64, of this rank's rows: 1/2 sum F/(F + delta), and its derivative by delta."""
    out = torch.zeros(2, dtype=torch.float64, device=fisher_VH.device)
    flat = fisher_VH.view(-1)
    for a, b in spans(flat.numel(), _SUM_BLOCK):
        inverse = (flat[a:b] + delta).reciprocal_()
        share = flat[a:b] * inverse
        # A block is summed in its own dtype (in pairs, so to a few units in the last place): sums in float64 cost ten times that.
        out += torch.stack([share.sum(), -torch.dot(share, inverse)]).mul_(0.5)
    return out


def expected_kl(fisher_VH: Tensor, delta: float, shard: VocabShard) -> float:
    """Expected KL, nats a token, from the model to a posterior sample: about 1/2 sum_d F_d / (F_d + delta), over all ranks."""
    return float(shard.sum(kl_and_slope(fisher_VH, delta))[0])


def solve_delta(fisher_VH: Tensor, kl_target: float, shard: VocabShard) -> float:
    """The delta whose expected KL is `kl_target`; 1 where every F is zero (then no delta changes anything).

    1/2 sum F/(F + delta) lies between 1/2 sum F / (max F + delta) and 1/2 sum F / delta, which brackets the root; Newton's
    step is taken while it stays inside, a bisection otherwise. ValueError where the target is above 1/2 per dimension.
    """
    local = fisher_VH.new_zeros(2, dtype=torch.float64)
    if fisher_VH.numel():
        local = torch.stack([fisher_VH.sum(1).sum(dtype=torch.float64), fisher_VH.max().to(torch.float64)])
    gathered = shard.gather(local)
    total, largest = float(gathered[:, 0].sum()), float(gathered[:, 1].max())
    if total == 0.0:
        return 1.0

    def excess(delta: float) -> tuple[float, float]:
        value, slope = shard.sum(kl_and_slope(fisher_VH, delta)).tolist()
        return value - kl_target, slope

    high = total / (2.0 * kl_target)
    low = high - largest
    if low <= 0:
        low = high * 1e-30
        while excess(low)[0] < 0:  # only for a target so high that delta is far below every F
            low *= 1e-6
            if low < 1e-280:
                raise ValueError(f"gupo.kl_target of {kl_target} nats cannot be reached, whatever delta is: lower it")
    # Sums in float32 are not steady beyond this; nobody needs delta more exactly.
    return _bracketed_root(excess, low, high, 1e-12 if fisher_VH.dtype == torch.float64 else 1e-6)


def _bracketed_root(excess: Callable[[float], tuple[float, float]], low: float, high: float, tolerance: float) -> float:
    at = high
    for _ in range(_MOST_STEPS):
        value, slope = excess(at)
        if value > 0:
            low = at
        else:
            high = at
        step = at - value / slope if slope else math.inf
        if abs(step - at) <= tolerance * at or high - low <= tolerance * high:
            return at
        # Between bounds of different magnitude the geometric mean halves the exponent, not the value.
        at = step if low < step < high else math.sqrt(low * high)
    return at


def _row_spans(matrix_VH: Tensor) -> list[tuple[int, int]]:
    return list(spans(matrix_VH.shape[0], max(1, _BLOCK // max(1, matrix_VH.shape[1]))))


def noise_into(out_RH: Tensor, seed: int, sample: int, first_row: int) -> Tensor:
    """Standard normal noise of rows [first_row, first_row + R) of the whole layer, for posterior sample `sample`.

    A function of (seed, sample, global row) alone, so that every split of the layer over ranks gets the same noise; drawn in
    float32 whatever the dtype of `out` (contiguous [R, H]). CPU and CUDA have streams of their own.
    """
    count, hidden = out_RH.shape
    generator = torch.Generator(device=out_RH.device)
    stop = first_row + count
    for block in range(first_row // NOISE_ROWS, -(-stop // NOISE_ROWS)):
        generator.manual_seed(_seed(seed, sample, block))
        a, b = block * NOISE_ROWS, (block + 1) * NOISE_ROWS
        if a >= first_row and b <= stop and out_RH.dtype == torch.float32:
            torch.randn((NOISE_ROWS, hidden), generator=generator, out=out_RH[a - first_row : b - first_row])
        else:
            whole = torch.randn((NOISE_ROWS, hidden), generator=generator, dtype=torch.float32, device=out_RH.device)
            keep = slice(max(a, first_row), min(b, stop))
            out_RH[keep.start - first_row : keep.stop - first_row] = whole[keep.start - a : keep.stop - a]
    return out_RH


def _seed(seed: int, sample: int, block: int) -> int:
    """Distinct for all samples below 4096 and blocks below 2^20. The CPU generator reads 32 bits, so they are not hashed."""
    return (mix(seed) + (sample << 20) + block) & 0xFFFFFFFF


def mix(*values: int) -> int:
    """A 64-bit hash of integers (the finaliser of SplitMix64, Steele et al. 2014, chained)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


class PosteriorHeads:
    """Samples Phi^(m) = Phi_0 + noise / sqrt(F + delta) of this rank's rows, in the layer's dtype.

    keep: hold all M of them (M times the shard); otherwise rows are made anew whenever they are asked for, and what is held
    is the standard deviation alone. `fisher_VH` is overwritten.
    """

    def __init__(self, head: Head, fisher_VH: Tensor, delta: float, samples: int, seed: int, keep: bool) -> None:
        self.samples = samples
        self._head = head
        self._seed = seed
        self._deviation_VH: Tensor | None = fisher_VH.add_(delta).rsqrt_()
        self._kept: list[Tensor] | None = None
        if keep:
            self._kept = [self._whole(m) for m in range(samples)]
            self._deviation_VH = None

    def rows(self, sample: int, rows: RowSet) -> Tensor:
        """[R, H] of sample `sample`."""
        if self._kept is not None:
            return rows.take(self._kept[sample])
        parts = []
        # Only the noise blocks that hold a wanted row are made.
        for a, b in rows.covering_spans(NOISE_ROWS, self._head.shard.start):
            made_RH = torch.empty(b - a, self._head.hidden_size, dtype=self._head.weight_VH.dtype, device=self._head.device)
            parts.append(rows.within(a, b).take(self._make(made_RH, sample, a)))
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _whole(self, sample: int) -> Tensor:
        made_VH = torch.empty_like(self._head.rows(), memory_format=torch.contiguous_format)
        for a, b in _row_spans(made_VH):
            self._make(made_VH[a:b], sample, a)
        return made_VH

    def _make(self, out_RH: Tensor, sample: int, first: int) -> Tensor:
        """Rows [first, first + R) of the shard."""
        head, stop = self._head, first + out_RH.shape[0]
        assert self._deviation_VH is not None
        noise_RH = torch.empty(out_RH.shape, dtype=head.dtype, device=head.device)
        noise_into(noise_RH, self._seed, sample, head.shard.start + first)
        noise_RH *= self._deviation_VH[first:stop]
        noise_RH += head.weight_VH[first:stop].detach()
        return out_RH.copy_(noise_RH)
