"""Divergences between a teacher's and the student's next-token distributions, over a sharded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.logprobs.divergence_math import LOG_ZERO, Kind, check_kind
from megatron_gvpo.logprobs.full_divergence import FullDivergenceOp
from megatron_gvpo.logprobs.row_op import RowOp, run
from megatron_gvpo.logprobs.rows import Chunking, Rows, rows_that_are_active
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.source import HeadSource, LogitsSource, Source
from megatron_gvpo.logprobs.topk_divergence import TopKDivergenceOp, log_tail_mass
from megatron_gvpo.logprobs.weight_grad import WeightGrad, resolve


@dataclass(frozen=True)
class FullTeacher:
    """logits [T, shard.width], not yet divided by the temperature; padding columns are ignored."""

    logits: Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """ids [T, K] int64, distinct in a row, -1 for an unused place; logprobs [T, K], already at the run's temperature."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class HiddenTeacher:
    """The teacher's hidden states and head, sharded like the student's: its logits are made, used and dropped by chunks.

    hidden [T, H'] ([T/W, H'] where the student's are), weight [shard.width, H'], bias [shard.width].
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


Teacher = FullTeacher | TopKTeacher | HiddenTeacher


def divergence(
    kind: str,
    logits: Tensor,
    teacher: Teacher,
    shard: VocabShard,
    *,
    temperature: float | Tensor = 1.0,
    beta: float = 0.5,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    active: Tensor | None = None,
) -> Tensor:
    """[T], differentiable with respect to `logits` [T, shard.width] only; the same on every rank of `shard.group`.

    kind: "reverse_kl" KL(student||teacher), "forward_kl" KL(teacher||student), "jsd" beta KL(teacher||m) +
    (1-beta) KL(student||m) with m = beta teacher + (1-beta) student and 0 < beta < 1, "tv" 1/2 sum |teacher - student|.
    Both distributions are softmax(logits / temperature); temperature a number or [T]. `active` [T]: positions that are
    wanted; the others are 0, without gradient, and never computed. float32, float64 for float64 logits.
    ValueError for wrong widths or shapes, ids outside the vocabulary or twice in a row.
    """
    source = LogitsSource(shard, logits)
    rows = rows_that_are_active(active, source.total, temperature)
    op = _operation(check_kind(kind, beta), teacher, source, rows, beta, sequence_parallel=False)
    (result_T,) = run(source, op, rows, Chunking(chunk_tokens, memory_budget))
    return result_T


def linear_divergence(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    beta: float = 0.5,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
    weight_grad: WeightGrad = "auto",
    active: Tensor | None = None,
) -> Tensor:
    """`divergence` of hidden weight^T + bias, recomputed by chunks in backward; arguments as in `linear_token_logprobs`.

    With a `HiddenTeacher` what is kept for backward is both models' hidden states and a few numbers a position.
    """
    source = HeadSource(shard, hidden, weight, bias, sequence_parallel, resolve(weight_grad, weight))
    rows = rows_that_are_active(active, source.total, temperature)
    op = _operation(check_kind(kind, beta), teacher, source, rows, beta, sequence_parallel)
    (result_T,) = run(source, op, rows, Chunking(chunk_tokens, memory_budget))
    return result_T


def _operation(kind: Kind, teacher: Teacher, student: Source, rows: Rows, beta: float, sequence_parallel: bool) -> RowOp:
    if isinstance(teacher, TopKTeacher):
        return _top_k(kind, teacher, student, rows, beta)
    if isinstance(teacher, FullTeacher):
        source: Source = LogitsSource(student.shard, _frozen(teacher.logits, student))
    else:
        hidden = _frozen(teacher.hidden, student, convert=False)
        bias = None if teacher.bias is None else teacher.bias.detach()
        source = HeadSource(student.shard, hidden, teacher.weight.detach(), bias, sequence_parallel)
    if source.total != student.total:
        raise ValueError(f"the teacher has {source.total} positions, the student {student.total}: they must be the same")
    return FullDivergenceOp(source, kind, beta)


def _frozen(x: Tensor, student: Source, convert: bool = True) -> Tensor:
    """The teacher's tensor without gradient; logits in float64 only where the student computes in it."""
    x = x.detach()
    if convert and (x.dtype == torch.float64) != (student.dtype == torch.float64):
        return x.to(student.dtype)
    if not convert and (x.dtype == torch.float64) != (student.dtype == torch.float64):
        raise ValueError(f"the teacher's hidden states are {x.dtype}, the student is computed in {student.dtype}")
    return x


def _top_k(kind: Kind, teacher: TopKTeacher, student: Source, rows: Rows, beta: float) -> RowOp:
    ids_TK, logprobs_TK = teacher.ids, teacher.logprobs
    size, total = student.shard.size, student.total
    if ids_TK.dim() != 2 or ids_TK.shape != logprobs_TK.shape or ids_TK.shape[0] != total or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"top-k teacher: ids (int64) and logprobs must both be [{total}, K], not {ids_TK.dtype} {list(ids_TK.shape)} "
            f"and {list(logprobs_TK.shape)}"
        )
    ids_RK = rows.take(ids_TK)
    if ids_RK.numel():
        sorted_RK = ids_RK.sort(1).values
        twice = ((sorted_RK[:, 1:] == sorted_RK[:, :-1]) & (sorted_RK[:, 1:] >= 0)).any()
        low, high, repeated = torch.stack([ids_RK.amin(), ids_RK.amax(), twice.to(ids_RK.dtype)]).tolist()
        if low < -1 or high >= size:
            raise ValueError(f"top-k teacher: id {high if high >= size else low} is outside the vocabulary of {size} ids")
        if repeated:
            raise ValueError("top-k teacher: an id stands twice in one row")
    logprobs_RK = rows.take(logprobs_TK.detach()).masked_fill(ids_RK < 0, LOG_ZERO)
    log_tail_R = log_tail_mass(kind, ids_RK, logprobs_RK, size)
    return TopKDivergenceOp(student.shard, kind, beta, ids_RK, logprobs_RK, log_tail_R)
