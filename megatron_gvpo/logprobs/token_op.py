"""Log-prob of the target and, if asked for, the entropy of each row: the torch reference of the Triton kernels.

With z = logits / temperature, M the row's maximum and S = sum_v exp(z_v - M), over all ranks:

    logprob = (z_y - M) - log S                       d logprob/dz_v = [v = y] - p_v
    H       = log S - sum_v p_v (z_v - M)             d H/dz_v       = -p_v (log p_v + H)

M and log S are kept apart: with logits of 1e4 their sum would lose the digits that p needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.logprobs import kernels
from megatron_gvpo.logprobs.row_op import LOWEST, Finished, RowOp, ScoreOp
from megatron_gvpo.logprobs.rows import block_bytes, block_rows, spans
from megatron_gvpo.logprobs.shard import VocabShard


@dataclass(frozen=True)
class TokenOp(ScoreOp):
    """outputs: logprob, and entropy if `entropy`. state: M, log S, and the entropy."""

    shard: VocabShard
    targets_R: Tensor
    entropy: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.targets_R,)

    def recipe(self) -> Callable[[tuple[Any, ...]], RowOp]:
        return functools.partial(_token_op, self.shard, self.entropy)

    @property
    def fixed_bytes(self) -> int:
        return 2 * block_bytes(self.shard.planned_width, self.targets_R.device, torch.float32.itemsize)

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        """Columns: maximum, sum of exp(z - maximum), the target's logit (0 where another rank holds it), and
        sum of exp(z - maximum) (z - maximum) with entropy."""
        column_C, here_C = self.shard.local(self.targets_R[first : first + z_CV.shape[0]])
        return row_stats(z_CV, column_C, here_C, self.entropy)

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        all_WRN = self.shard.gather(partial_RN)
        top_WR, sum_WR, target_WR = all_WRN[..., 0], all_WRN[..., 1], all_WRN[..., 2]
        top_R = top_WR.amax(0)
        share_WR = (top_WR - top_R).exp()
        total_R = (share_WR * sum_WR).sum(0)
        log_total_R = total_R.log()
        logprob_R = (target_WR.sum(0) - top_R) - log_total_R
        if not self.entropy:
            return Finished((logprob_R,), torch.stack([top_R, log_total_R], 1))
        # A rank's moment was taken about its own maximum: move it to the common one.
        moment_R = (share_WR * (all_WRN[..., 3] + (top_WR - top_R).clamp(min=LOWEST) * sum_WR)).sum(0)
        entropy_R = log_total_R - moment_R / total_R
        return Finished((logprob_R, entropy_R), torch.stack([top_R, log_total_R, entropy_R], 1))

    def gradient_(self, z_CV: Tensor, first: int, state_CS: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        column_C, here_C = self.shard.local(self.targets_R[first : first + z_CV.shape[0]])
        row_gradient_(z_CV, column_C, here_C, state_CS, grads[0], grads[1] if self.entropy else None)

    def score_gradient_(self, z_CV: Tensor, first: int, partial_CN: Tensor, state_CS: Tensor, coefficients_C: Tensor) -> None:
        column_C, here_C = self.shard.local(self.targets_R[first : first + z_CV.shape[0]])
        if kernels.usable(z_CV):
            kernels.row_gradient_(z_CV, column_C, here_C, state_CS, coefficients_C, None)
            return
        # `partial` left exp(z - this rank's maximum): one multiplication makes it -coefficient * p.
        scale_C = (partial_CN[:, 0] - state_CS[:, 0] - state_CS[:, 1]).exp()
        z_CV.mul_((-coefficients_C * scale_C).unsqueeze(1))
        _add_at_target_(z_CV, column_C, here_C, coefficients_C)


def _token_op(shard: VocabShard, entropy: bool, tensors: tuple[Any, ...]) -> RowOp:
    (targets_R,) = tensors
    return TokenOp(shard, targets_R, entropy)


def row_stats(z_CV: Tensor, column_C: Tensor, here_C: Tensor, entropy: bool) -> Tensor:
    """[C, 3] or [C, 4], see `TokenOp.partial`. Leaves exp(z - maximum) in `z`, or, by a kernel, `z` itself.

    A rank without a real id contributes nothing.
    """
    rows, width = z_CV.shape
    stats_CN = z_CV.new_zeros(rows, 4 if entropy else 3)
    # Not -inf: a shard whose ids are all banned must not make NaN out of (-inf) - (-inf).
    stats_CN[:, 0] = torch.finfo(z_CV.dtype).min
    if width == 0 or rows == 0:
        return stats_CN
    if kernels.usable(z_CV):
        return kernels.row_stats(z_CV, column_C, here_C, entropy)
    lowest = torch.finfo(z_CV.dtype).min
    stats_CN[:, 2] = torch.where(here_C, z_CV.gather(1, column_C.unsqueeze(1)).squeeze(1), 0.0)
    for a, b in spans(rows, block_rows(width, z_CV.device)):
        z_BV = z_CV[a:b]
        top_B = z_BV.amax(1).clamp_(min=lowest)
        z_BV.sub_(top_B.unsqueeze(1))
        stats_CN[a:b, 0] = top_B
        if entropy:
            e_BV = z_BV.exp()
            stats_CN[a:b, 1] = e_BV.sum(1)
            stats_CN[a:b, 3] = z_BV.clamp_(min=LOWEST).mul_(e_BV).sum(1)
            z_BV.copy_(e_BV)
        else:
            stats_CN[a:b, 1] = z_BV.exp_().sum(1)
    return stats_CN


def row_gradient_(
    z_CV: Tensor,
    column_C: Tensor,
    here_C: Tensor,
    state_CS: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> None:
    """z := grad_logprob ([v = y] - p) - grad_entropy p (log p + H), from state columns M, log S and, for entropy, H."""
    rows, width = z_CV.shape
    if width == 0 or rows == 0:
        return
    if kernels.usable(z_CV):
        kernels.row_gradient_(z_CV, column_C, here_C, state_CS, grad_logprob_C, grad_entropy_C)
        return
    top_C, log_total_C = state_CS[:, 0], state_CS[:, 1]
    g_C = torch.zeros_like(top_C) if grad_logprob_C is None else grad_logprob_C
    scale_C = (-log_total_C).exp()
    if grad_entropy_C is None:
        constant_C, slope_C = -g_C * scale_C, None
    else:
        # -p (g + h (log p + H)) = exp(z - M) (constant + slope (z - M))
        constant_C = -(g_C + grad_entropy_C * (state_CS[:, 2] - log_total_C)) * scale_C
        slope_C = -grad_entropy_C * scale_C
    for a, b in spans(rows, block_rows(width, z_CV.device)):
        z_BV = z_CV[a:b].sub_(top_C[a:b, None])
        if slope_C is None:
            z_BV.exp_().mul_(constant_C[a:b, None])
        else:
            e_BV = z_BV.exp()
            z_BV.clamp_(min=LOWEST).mul_(slope_C[a:b, None]).add_(constant_C[a:b, None]).mul_(e_BV)
    if grad_logprob_C is not None:
        _add_at_target_(z_CV, column_C, here_C, grad_logprob_C)


def _add_at_target_(z_CV: Tensor, column_C: Tensor, here_C: Tensor, value_C: Tensor) -> None:
    if z_CV.shape[1]:
        # Added, not written: rows whose target another rank holds point at column 0 with a value of 0.
        z_CV.scatter_add_(1, column_C.unsqueeze(1), value_C.masked_fill(~here_C, 0.0).unsqueeze(1))
