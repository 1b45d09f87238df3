"""What is computed from a row of logits, and the one autograd function that computes it in chunks.

A `RowOp` sees one chunk of this rank's logits at a time. It reduces each row to a few numbers (`partial`), turns those
into results with one gather over the tensor-parallel group (`finish`), and, in backward, overwrites the recomputed
logits with their gradient from a few numbers a row (`gradient_`). No collective is differentiated: gradients are
written by hand, which is why they are exact on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.logprobs.rows import Chunking, Rows, spans
from megatron_gvpo.logprobs.source import HeadReader, Reader, Source

# exp of this is 0 in float32 and float64 alike. Differences from a row's maximum are clamped here before they are
# multiplied by their probability, because -inf (a banned token) times 0 would be NaN.
LOWEST = -1.0e4


@dataclass(frozen=True)
class Finished:
    """Results of some rows, one tensor [R] each, and what backward needs of them: state [R, S]."""

    outputs: tuple[Tensor, ...]
    state_RS: Tensor


class Reduction(ABC):
    """Rows of logits reduced to a few results. Row-wise tensors that it holds have one entry for each of the R rows."""

    @property
    def bytes_per_column(self) -> int:
        """Scratch bytes for one column of one chunk row, beside the logits."""
        return 0

    @property
    def fixed_bytes(self) -> int:
        """Scratch bytes that do not depend on the chunk."""
        return 0

    def open(self, rows: Rows, capacity: int) -> Reduction:
        """The operation made ready for one pass in chunks of at most `capacity` rows."""
        return self

    @abstractmethod
    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        """[C, N]: what this rank's columns of rows [first, first + C) come to. Destroys `z`."""

    @abstractmethod
    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        """Combine the ranks' partial results of rows [first, first + R). One gather; every rank gets the same bits."""


class RowOp(Reduction):
    """A reduction with a gradient."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd keeps for backward."""

    @abstractmethod
    def recipe(self) -> Callable[[tuple[Any, ...]], RowOp]:
        """Makes the same operation of the tensors that autograd gives back; holds no tensor itself."""

    def open(self, rows: Rows, capacity: int) -> RowOp:
        return self

    @abstractmethod
    def gradient_(self, z_CV: Tensor, first: int, state_CS: Tensor, grads: tuple[Tensor | None, ...]) -> None:
        """Overwrite logits `z` with d(sum over rows of grads . outputs)/dz; grads are one [C] tensor an output."""


class ScoreOp(RowOp):
    """A log-prob (output 0) whose gradient can be formed right after `partial` and `finish`, while the chunk is at hand."""

    @abstractmethod
    def score_gradient_(self, z_CV: Tensor, first: int, partial_CN: Tensor, state_CS: Tensor, coefficients_C: Tensor) -> None:
        """Overwrite what `partial` left in `z` with d(sum over rows of coefficient * logprob)/dz."""


@dataclass(frozen=True)
class Pass:
    """Everything about a computation that is not a tensor of the source."""

    source: Source
    op: RowOp
    rows: Rows
    chunking: Chunking

    @property
    def step(self) -> int:
        return rows_per_chunk(self.source, self.op, self.rows, self.chunking)

    def forward(self) -> Finished:
        return reduce_rows(self.source, self.op, self.rows, self.chunking)

    def backward(self, state_RS: Tensor, grads: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of the source's tensors from gradients [R] of the results."""
        reader: Reader = self.source.open(self.rows, self.step, needs)
        op = self.op.open(self.rows, self.step)
        # d/d(logits) = d/d(logits / temperature) / temperature, and everything is linear in the incoming gradient.
        grads = tuple(None if g is None else self.rows.divided(g) for g in grads)
        for a, b in spans(self.rows.count, self.step):
            z_CV = reader.chunk(a, b)
            op.gradient_(z_CV, a, state_RS[a:b], tuple(None if g is None else g[a:b] for g in grads))
            reader.backward(a, b, z_CV)
        if isinstance(reader, HeadReader):
            reader.announce()
        return reader.gradients()


def rows_per_chunk(source: Source, op: Reduction, rows: Rows, chunking: Chunking) -> int:
    """Rows a chunk; the same on every rank of the tensor-parallel group."""
    per_column = source.bytes_per_column + op.bytes_per_column
    fixed = source.fixed_bytes + op.fixed_bytes
    return chunking.rows_per_chunk(source.shard, source.device, per_column, fixed, rows.count)


def reduce_rows(source: Source, op: Reduction, rows: Rows, chunking: Chunking) -> Finished:
    """All rows' results [R], by chunks, without gradient."""
    step = rows_per_chunk(source, op, rows, chunking)
    reader = source.open(rows, step)
    op = op.open(rows, step)
    partials = [op.partial(reader.chunk(a, b), a) for a, b in spans(rows.count, step)]
    if not partials:  # an operation knows its own shapes: ask it about no rows
        partials = [op.partial(reader.chunk(0, 0), 0)]
    return op.finish(partials[0] if len(partials) == 1 else torch.cat(partials), 0)


def run(source: Source, op: RowOp, rows: Rows, chunking: Chunking) -> tuple[Tensor, ...]:
    """Results [T], differentiable with respect to the source's tensors; zeros where nothing was computed."""
    todo = Pass(source, op, rows, chunking)
    results: Any = _RowFunction.apply(todo, *source.tensors)
    return results


class _RowFunction(torch.autograd.Function):
    """Keeps the source's tensors, the op's row-wise tensors and a few numbers a row; recomputes logits in backward."""

    @staticmethod
    def forward(ctx: Any, todo: Pass, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch.autocast(todo.source.device.type, enabled=False):
            finished = todo.forward()
        rows = todo.rows
        per_row = rows.temperature if isinstance(rows.temperature, Tensor) else None
        # Every tensor goes through save_for_backward, none hides in an attribute: hooks that offload or count them see
        # all of it, and autograd notices when one was overwritten meanwhile.
        saved = SavedTensors()
        saved.add(*tensors).add(*todo.op.tensors).add(rows.index_R, per_row, finished.state_RS)
        ctx.save_for_backward(*saved.tensors)
        ctx.cuts = saved.cuts
        ctx.recipes = (todo.source.recipe(), todo.op.recipe(), todo.chunking, rows.total, rows.count, rows.temperature)
        if per_row is not None:
            ctx.recipes = (*ctx.recipes[:-1], None)
        ctx.set_materialize_grads(False)
        return tuple(rows.put(output_R) for output_R in finished.outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator makes ctx position-only
        ctx: Any, *grads_T: Tensor | None
    ) -> tuple[Any, ...]:
        if all(grad is None for grad in grads_T):
            return (None,) * len(ctx.needs_input_grad)
        source_tensors, op_tensors, (index_R, per_row, state_RS) = SavedTensors.cut(ctx.saved_tensors, ctx.cuts)
        make_source, make_op, chunking, total, count, temperature = ctx.recipes
        rows = Rows(total, count, index_R, per_row if temperature is None else temperature)
        todo = Pass(make_source(source_tensors), make_op(op_tensors), rows, chunking)
        grads_R = tuple(None if g is None else rows.take(g).to(state_RS.dtype) for g in grads_T)
        with torch.autocast(todo.source.device.type, enabled=False):
            return (None, *todo.backward(state_RS, grads_R, ctx.needs_input_grad[1:]))


class SavedTensors:
    """A flat list of tensors for autograd that can be cut into the tuples it was made of."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.cuts: list[int] = []

    def add(self, *tensors: Tensor | None) -> SavedTensors:
        self.tensors.extend(tensors)
        self.cuts.append(len(tensors))
        return self

    @staticmethod
    def cut(tensors: tuple[Tensor | None, ...], cuts: list[int]) -> list[tuple[Any, ...]]:
        pieces, start = [], 0
        for length in cuts:
            pieces.append(tensors[start : start + length])
            start += length
        return pieces
