"""Replay of a truncated sampling distribution: log-probs normalised over the ids that top-p or top-k kept.

A server that samples with top-p or top-k draws from softmax over the kept ids only. The trainer's log-prob of the same
draw is then log softmax over the same ids, and the ratio of the two starts at 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.logprobs.divergence_math import LOG_ZERO
from megatron_gvpo.logprobs.row_op import Finished, RowOp, ScoreOp
from megatron_gvpo.logprobs.rows import Rows
from megatron_gvpo.logprobs.shard import VocabShard


@dataclass(frozen=True)
class Support:
    """ids [T, K] int64: the ids kept at each position, distinct in a row, -1 at unused places."""

    ids: Tensor

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Support:
        """From one list of kept ids a position, of any lengths; an empty list where there is no target."""
        width = max((len(ids) for ids in kept), default=0)
        rows = [[*ids, *[-1] * (width - len(ids))] for ids in kept]
        return cls(torch.tensor(rows, dtype=torch.int64, device=device).view(len(kept), width))


@dataclass(frozen=True)
class SupportOp(ScoreOp):
    """outputs: logprob over the kept ids, and their entropy if `entropy`. state [R, K]: log-probs of the kept ids."""

    shard: VocabShard
    entropy: bool
    ids_RK: Tensor
    place_R: Tensor  # where the target stands among the kept ids

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.ids_RK, self.place_R)

    def recipe(self) -> Callable[[tuple[Any, ...]], RowOp]:
        return functools.partial(_support_op, self.shard, self.entropy)

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        """[C, K]: logits of the kept ids, 0 where another rank holds them."""
        column_CK, here_CK = self.shard.local(self.ids_RK[first : first + z_CV.shape[0]])
        if z_CV.shape[1] == 0:
            return z_CV.new_zeros(column_CK.shape)
        return z_CV.gather(1, column_CK).masked_fill_(~here_CK, 0.0)

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        rows = slice(first, first + partial_RN.shape[0])
        kept_RK = self.shard.sum(partial_RN).masked_fill(self.ids_RK[rows] < 0, -torch.inf)
        logq_RK = kept_RK.log_softmax(1)
        outputs = (logq_RK.gather(1, self.place_R[rows, None]).squeeze(1),)
        logq_RK = logq_RK.clamp(min=LOG_ZERO)
        if self.entropy:
            outputs = (*outputs, -(logq_RK.exp() * logq_RK).sum(1))
        return Finished(outputs, logq_RK)

    def gradient_(self, z_CV: Tensor, first: int, state_CS: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        rows = slice(first, first + z_CV.shape[0])
        column_CK, here_CK = self.shard.local(self.ids_RK[rows])
        q_CK = state_CS.exp()
        d_CK = torch.zeros_like(q_CK)
        if grads[0] is not None:
            d_CK -= grads[0][:, None] * q_CK
            d_CK.scatter_add_(1, self.place_R[rows, None], grads[0][:, None])
        if self.entropy and grads[1] is not None:
            entropy_C1 = -(q_CK * state_CS).sum(1, keepdim=True)
            d_CK -= grads[1][:, None] * q_CK * (state_CS + entropy_C1)
        z_CV.zero_()
        if z_CV.shape[1]:
            z_CV.scatter_add_(1, column_CK, d_CK.masked_fill_(~here_CK, 0.0))

    def score_gradient_(self, z_CV: Tensor, first: int, partial_CN: Tensor, state_CS: Tensor, coefficients_C: Tensor) -> None:
        self.gradient_(z_CV, first, state_CS, (coefficients_C, None))


def _support_op(shard: VocabShard, entropy: bool, tensors: tuple[Any, ...]) -> RowOp:
    ids_RK, place_R = tensors
    return SupportOp(shard, entropy, ids_RK, place_R)


def support_op(shard: VocabShard, targets_T: Tensor, support: Support, rows: Rows, entropy: bool) -> SupportOp:
    """ValueError where a target is not among its kept ids: it cannot have been drawn from them."""
    if support.ids.dim() != 2 or support.ids.shape[0] != rows.total or support.ids.dtype != torch.int64:
        raise ValueError(f"support ids must be int64 [{rows.total}, K], not {support.ids.dtype} {list(support.ids.shape)}")
    ids_RK, targets_R = rows.take(support.ids), rows.take(targets_T)
    if rows.count == 0:
        # One column, so that there is a place to point at.
        return SupportOp(shard, entropy, ids_RK.new_zeros(0, 1), targets_R)
    if ids_RK.shape[1] == 0:
        raise ValueError("support ids: a position with a target has no kept id")
    match_RK = ids_RK == targets_R[:, None]
    highest, matches = torch.stack([ids_RK.amax(), match_RK.sum(1).amin()]).tolist()
    if highest >= shard.size:
        raise ValueError(f"support ids: id {highest} is outside the vocabulary of {shard.size} ids")
    if matches == 0:
        row = int((match_RK.sum(1) == 0).nonzero()[0])
        raise ValueError(
            f"support ids: target {int(targets_R[row])} (position {row} of those with a target) is not among the "
            f"{int((ids_RK[row] >= 0).sum())} ids kept there"
        )
    return SupportOp(shard, entropy, ids_RK, match_RK.to(torch.int8).argmax(1))
