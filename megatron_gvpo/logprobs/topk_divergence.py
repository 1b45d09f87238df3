"""Divergence from a teacher of whom only the top-k log-probs are known: the rest of the vocabulary is one tail bucket.

Both distributions are put in K + 1 buckets, the teacher's ids and the tail, and compared there. The student's tail is a
log-sum-exp over its ids outside the top-k, not 1 minus a sum, so it keeps its digits however small it is. Truncating the
sum to the top-k, or renormalising it there, would be another, biased loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.logprobs.divergence_math import LOG_ZERO, Kind, terms
from megatron_gvpo.logprobs.row_op import Finished, RowOp
from megatron_gvpo.logprobs.rows import block_rows, spans
from megatron_gvpo.logprobs.shard import VocabShard

# A teacher tail of 0 would make KL(q||p) infinite: it is taken as this mass there.
_LEAST_TAIL = 1e-12


@dataclass(frozen=True)
class TopKDivergenceOp(RowOp):
    """output: the divergence. state: the student tail's maximum and log-sum, then the K + 1 buckets' gradients.

    ids [R, K] (-1: an unused place) and, in the forward pass only, the teacher's logprobs [R, K] and its log tail mass [R].
    """

    shard: VocabShard
    kind: Kind
    beta: float
    ids_RK: Tensor
    logprobs_RK: Tensor | None = None
    log_tail_R: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.ids_RK,)

    def recipe(self) -> Callable[[tuple[Any, ...]], RowOp]:
        return functools.partial(_topk_op, self.shard, self.kind, self.beta)

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        """[C, K + 2]: the logits of the teacher's ids (0 where another rank holds them), the tail's maximum and sum."""
        rows, width = z_CV.shape
        column_CK, here_CK = self.shard.local(self.ids_RK[first : first + rows])
        partial_CN = z_CV.new_zeros(rows, column_CK.shape[1] + 2)
        partial_CN[:, -2] = torch.finfo(z_CV.dtype).min
        if width == 0:
            return partial_CN
        partial_CN[:, :-2] = z_CV.gather(1, column_CK).masked_fill_(~here_CK, 0.0)
        _ban_(z_CV, column_CK, here_CK)
        for a, b in spans(rows, block_rows(width, z_CV.device)):
            top_B = z_CV[a:b].amax(1).clamp_(min=torch.finfo(z_CV.dtype).min)
            partial_CN[a:b, -2] = top_B
            partial_CN[a:b, -1] = z_CV[a:b].sub_(top_B[:, None]).exp_().sum(1)
        return partial_CN

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        assert self.logprobs_RK is not None
        assert self.log_tail_R is not None
        rows = slice(first, first + partial_RN.shape[0])
        all_WRN = self.shard.gather(partial_RN)
        kept_RK = all_WRN[..., :-2].sum(0).masked_fill(self.ids_RK[rows] < 0, -torch.inf)
        tail_top_R = all_WRN[..., -2].amax(0)
        tail_sum_R = ((all_WRN[..., -2] - tail_top_R).exp() * all_WRN[..., -1]).sum(0)
        top_R = torch.maximum(kept_RK.amax(1), tail_top_R) if kept_RK.shape[1] else tail_top_R
        log_tail_R = (tail_top_R - top_R) + tail_sum_R.log()
        buckets_RB = torch.cat([kept_RK - top_R[:, None], log_tail_R[:, None]], 1)
        logq_RB = buckets_RB.log_softmax(1).clamp(min=LOG_ZERO)
        logp_RB = torch.cat([self.logprobs_RK[rows], self.log_tail_R[rows, None]], 1).to(logq_RB.dtype)
        f_RB, qa_RB = terms(self.kind, logp_RB.clamp(min=LOG_ZERO), logq_RB, self.beta)
        gradient_RB = qa_RB - logq_RB.exp() * qa_RB.sum(1, keepdim=True)
        # An empty tail has a sum of 0: any finite log will do, since every one of its columns is banned.
        tail_log_sum_R = torch.where(tail_sum_R > 0, tail_sum_R.log(), 0.0)
        state_RS = torch.cat([tail_top_R[:, None], tail_log_sum_R[:, None], gradient_RB], 1)
        return Finished((f_RB.sum(1),), state_RS)

    def gradient_(self, z_CV: Tensor, first: int, state_CS: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        (grad_C,) = grads
        assert grad_C is not None
        rows, width = z_CV.shape
        if width == 0:
            return
        column_CK, here_CK = self.shard.local(self.ids_RK[first : first + rows])
        _ban_(z_CV, column_CK, here_CK)
        # The tail's gradient is shared out among its ids by their probability inside it.
        tail_C = state_CS[:, -1] * grad_C
        for a, b in spans(rows, block_rows(width, z_CV.device)):
            z_CV[a:b].sub_(state_CS[a:b, 0:1]).sub_(state_CS[a:b, 1:2]).exp_().mul_(tail_C[a:b, None])
        kept_CK = (state_CS[:, 2:-1] * grad_C[:, None]).masked_fill(~here_CK, 0.0)
        z_CV.scatter_add_(1, column_CK, kept_CK)


def _topk_op(shard: VocabShard, kind: Kind, beta: float, tensors: tuple[Any, ...]) -> RowOp:
    (ids_RK,) = tensors
    return TopKDivergenceOp(shard, kind, beta, ids_RK)


def _ban_(z_CV: Tensor, column_CK: Tensor, here_CK: Tensor) -> None:
    """z := -inf at the given columns. Added, because places of other ranks' ids point at column 0 and must add nothing."""
    nothing_CK = z_CV.new_zeros(column_CK.shape)
    z_CV.scatter_add_(1, column_CK, nothing_CK.masked_fill_(here_CK, -torch.inf))


def log_tail_mass(kind: Kind, ids_RK: Tensor, logprobs_RK: Tensor, size: int) -> Tensor:
    """[R] float64: log of the teacher's mass outside its top-k, 1 - sum p, from below clamped at 0.

    In float64, because the difference of nearly equal numbers has few digits in float32. Where the ids are the whole
    vocabulary there is no tail. In KL(q||p) a tail below 1e-12 is taken as 1e-12.
    """
    known_R = logprobs_RK.double().exp().sum(1)
    tail_R = (1.0 - known_R).clamp(min=0.0)
    log_tail_R = torch.where(tail_R > 0, tail_R.log(), LOG_ZERO)
    if kind == "reverse_kl":
        log_tail_R = log_tail_R.clamp(min=math.log(_LEAST_TAIL))
    whole_R = (ids_RK >= 0).sum(1) >= size
    return log_tail_R.masked_fill(whole_R, LOG_ZERO)
