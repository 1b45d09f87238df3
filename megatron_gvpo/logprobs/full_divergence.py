"""Divergence from a teacher whose logits are there in full, or are made chunk by chunk of its hidden states and head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.logprobs.divergence_math import LOG_ZERO, Kind, student_terms, terms
from megatron_gvpo.logprobs.row_op import Finished, RowOp
from megatron_gvpo.logprobs.rows import Rows, block_bytes, block_rows, spans
from megatron_gvpo.logprobs.source import Reader, Source


@dataclass(frozen=True)
class FullDivergenceOp(RowOp):
    """output: the divergence. state: student's maximum and log-sum, teacher's maximum and log-sum, sum of q a."""

    teacher: Source
    kind: Kind
    beta: float
    reader: Reader | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.teacher.tensors

    def recipe(self) -> Callable[[tuple[Any, ...]], RowOp]:
        return functools.partial(_full_op, self.teacher.recipe(), self.kind, self.beta)

    @property
    def bytes_per_column(self) -> int:
        return self.teacher.bytes_per_column

    @property
    def fixed_bytes(self) -> int:
        # Both models' probabilities and log-probs, their mixture and the terms, a block each.
        return self.teacher.fixed_bytes + 6 * block_bytes(
            self.teacher.shard.planned_width, self.teacher.device, self.teacher.dtype.itemsize
        )

    def open(self, rows: Rows, capacity: int) -> RowOp:
        return replace(self, reader=self.teacher.open(rows, capacity))

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        """[C, 6]: sum of f and of q a over this rank's columns, then both distributions' normalisers over all ranks.

        The normalisers must be known before the sums can be taken: a gather for every chunk.
        """
        y_CV = self._teacher_chunk(first, z_CV.shape[0])
        stats_C4 = torch.cat([_top_and_sum(z_CV), _top_and_sum(y_CV)], 1)
        all_WC4 = self.teacher.shard.gather(stats_C4)
        normal_C4 = torch.cat([_combine(all_WC4[..., :2]), _combine(all_WC4[..., 2:])], 1)
        sums_C2 = z_CV.new_zeros(z_CV.shape[0], 2)
        for a, b in spans(z_CV.shape[0], block_rows(z_CV.shape[1], z_CV.device)):
            logq_BV = _log_softmax_(z_CV[a:b], normal_C4[a:b, 0], normal_C4[a:b, 1])
            logp_BV = _log_softmax_(y_CV[a:b], normal_C4[a:b, 2], normal_C4[a:b, 3])
            f_BV, qa_BV = terms(self.kind, logp_BV, logq_BV, self.beta)
            sums_C2[a:b, 0] = f_BV.sum(1)
            sums_C2[a:b, 1] = qa_BV.sum(1)
        return torch.cat([sums_C2, normal_C4], 1)

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        sums_R2 = self.teacher.shard.sum(partial_RN[:, :2].contiguous())
        state_R5 = torch.cat([partial_RN[:, 2:], sums_R2[:, 1:]], 1)
        return Finished((sums_R2[:, 0].clone(),), state_R5)

    def gradient_(self, z_CV: Tensor, first: int, state_CS: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        (grad_C,) = grads
        assert grad_C is not None
        y_CV = self._teacher_chunk(first, z_CV.shape[0])
        for a, b in spans(z_CV.shape[0], block_rows(z_CV.shape[1], z_CV.device)):
            logq_BV = _log_softmax_(z_CV[a:b], state_CS[a:b, 0], state_CS[a:b, 1])
            logp_BV = _log_softmax_(y_CV[a:b], state_CS[a:b, 2], state_CS[a:b, 3])
            qa_BV = student_terms(self.kind, logp_BV, logq_BV, self.beta)
            # z := grad (q a - q sum(q a)); logq_BV is z's memory.
            logq_BV.exp_().mul_(-state_CS[a:b, 4:5]).add_(qa_BV).mul_(grad_C[a:b, None])

    def _teacher_chunk(self, first: int, count: int) -> Tensor:
        assert self.reader is not None, "the operation was not opened"
        return self.reader.chunk(first, first + count)


def _full_op(make_teacher: Callable[[tuple[Any, ...]], Source], kind: Kind, beta: float, tensors: tuple[Any, ...]) -> RowOp:
    return FullDivergenceOp(make_teacher(tensors), kind, beta)


def _top_and_sum(z_CV: Tensor) -> Tensor:
    """[C, 2]: this rank's maximum, and sum of exp(z - maximum); `z` is left as it is."""
    rows, width = z_CV.shape
    stats_C2 = z_CV.new_zeros(rows, 2)
    stats_C2[:, 0] = torch.finfo(z_CV.dtype).min
    if width == 0:
        return stats_C2
    for a, b in spans(rows, block_rows(width, z_CV.device)):
        top_B = z_CV[a:b].amax(1).clamp_(min=torch.finfo(z_CV.dtype).min)
        stats_C2[a:b, 0] = top_B
        stats_C2[a:b, 1] = (z_CV[a:b] - top_B[:, None]).exp_().sum(1)
    return stats_C2


def _combine(all_WC2: Tensor) -> Tensor:
    """[C, 2]: the maximum over ranks, and the log of the sum of exp(z - maximum) over ranks."""
    top_C = all_WC2[..., 0].amax(0)
    total_C = ((all_WC2[..., 0] - top_C).exp() * all_WC2[..., 1]).sum(0)
    return torch.stack([top_C, total_C.log()], 1)


def _log_softmax_(z_BV: Tensor, top_B: Tensor, log_total_B: Tensor) -> Tensor:
    """z := log softmax, at least LOG_ZERO."""
    return z_BV.sub_(top_B[:, None]).sub_(log_total_B[:, None]).clamp_(min=LOG_ZERO)
