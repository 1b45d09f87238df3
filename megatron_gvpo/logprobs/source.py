"""Where a chunk's logits come from, and where their gradient goes: a tensor of logits, or hidden states and a head.

A source names tensors; opened for some rows it becomes a reader, which makes the logits of one chunk at a time and
turns the gradient of those logits into gradients of the tensors.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.logprobs.matmul import (
    fixed_scratch_bytes,
    hidden_gradient_into,
    is_low_precision,
    logits_into,
    operand,
)
from megatron_gvpo.logprobs.rows import Rows, compute_dtype
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.weight_grad import WeightGrad, WeightGradient, announce


class Reader(ABC):
    """Makes logits of computed rows [first, last), divided by temperature, padding columns cut off."""

    @abstractmethod
    def chunk(self, first: int, last: int) -> Tensor:
        """[C, valid] in the compute dtype. Scratch: the caller may overwrite it; it lives until the next call."""

    @abstractmethod
    def backward(self, first: int, last: int, d_CV: Tensor) -> None:
        """Take the gradient of the chunk's UNDIVIDED logits, which lies in the scratch that `chunk` returned."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of the source's tensors, in their order; runs the collectives."""


class Source(ABC):
    """Tensors that logits are made of."""

    shard: VocabShard

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd saves and differentiates."""

    @abstractmethod
    def recipe(self) -> Callable[[tuple[Any, ...]], Source]:
        """Makes the same source of the tensors that autograd gives back; holds none of them itself."""

    @property
    @abstractmethod
    def total(self) -> int:
        """T, the positions over all sequence-parallel ranks."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The compute dtype."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abstractmethod
    def bytes_per_column(self) -> int:
        """Scratch bytes of one column of one chunk row."""

    @property
    @abstractmethod
    def fixed_bytes(self) -> int:
        """Scratch bytes that do not depend on the chunk."""

    @abstractmethod
    def open(self, rows: Rows, capacity: int, needs: tuple[bool, ...] = ()) -> Reader:
        """A reader for chunks of at most `capacity` rows; `needs` says which tensors want a gradient (none if empty)."""


@dataclass(frozen=True)
class LogitsSource(Source):
    """logits [T, width]: never modified."""

    shard: VocabShard
    logits_TV: Tensor

    def __post_init__(self) -> None:
        if self.logits_TV.dim() != 2:
            raise ValueError(f"logits must have shape [T, width], not {list(self.logits_TV.shape)}")
        compute_dtype(self.logits_TV.dtype)
        self.shard.check_width(self.logits_TV.shape[1], "logits")

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.logits_TV,)

    def recipe(self) -> Callable[[tuple[Any, ...]], Source]:
        return functools.partial(_logits_source, self.shard)

    @property
    def total(self) -> int:
        return self.logits_TV.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.logits_TV.dtype)

    @property
    def device(self) -> torch.device:
        return self.logits_TV.device

    @property
    def bytes_per_column(self) -> int:
        # The scratch, and rows picked out of the logits before they are widened.
        return self.dtype.itemsize + self.logits_TV.itemsize

    @property
    def fixed_bytes(self) -> int:
        return 0

    def open(self, rows: Rows, capacity: int, needs: tuple[bool, ...] = ()) -> LogitsReader:
        return LogitsReader(self, rows, capacity, any(needs))


class LogitsReader(Reader):
    def __init__(self, source: LogitsSource, rows: Rows, capacity: int, backward: bool) -> None:
        self._rows = rows
        self._valid = source.shard.valid
        self._logits = source.logits_TV[:, : self._valid]
        self._grad: Tensor | None = None
        # In backward, where the dtypes agree and no row is left out, the gradient itself is the scratch.
        self._direct = backward and rows.index_R is None and source.logits_TV.dtype == source.dtype
        if backward:
            self._grad = torch.empty_like(source.logits_TV, memory_format=torch.contiguous_format)
            self._grad[:, self._valid :].zero_()
            if rows.index_R is not None:
                self._grad.zero_()
        if not self._direct:
            height = min(capacity, rows.count)
            self._scratch = source.logits_TV.new_empty(height, self._valid, dtype=source.dtype)

    def chunk(self, first: int, last: int) -> Tensor:
        index_R = self._rows.index_R
        logits_CV = self._logits[first:last] if index_R is None else self._logits[index_R[first:last]]
        if self._direct:
            assert self._grad is not None
            z_CV = self._grad[first:last, : self._valid]
        else:
            z_CV = self._scratch[: last - first]
        return self._rows.divide_(z_CV.copy_(logits_CV), first)

    def backward(self, first: int, last: int, d_CV: Tensor) -> None:
        assert self._grad is not None
        if self._direct:
            return
        index_R = self._rows.index_R
        if index_R is None:
            self._grad[first:last, : self._valid].copy_(d_CV)
        else:
            self._grad[index_R[first:last], : self._valid] = d_CV.to(self._grad.dtype)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return (self._grad,)


@dataclass(frozen=True)
class HeadSource(Source):
    """logits = hidden weight^T + bias, made a chunk at a time and never kept.

    hidden [T, H], or [T/W, H] with `sequence_parallel`; weight [width, H]; bias [width] or None.
    `weight_grad` is resolved (not "auto"); `marked` is the parameter where it is another object than `weight_VH`.
    """

    shard: VocabShard
    hidden_TH: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None = None
    sequence_parallel: bool = False
    weight_grad: WeightGrad = "return"
    marked: Tensor | None = None

    def __post_init__(self) -> None:
        hidden, weight, bias = self.hidden_TH, self.weight_VH, self.bias_V
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            raise ValueError(f"hidden must be [T, H] and weight [width, H], not {list(hidden.shape)} and {list(weight.shape)}")
        if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
            raise ValueError(
                f"hidden, weight and bias must have one dtype, not {hidden.dtype}, {weight.dtype}"
                + ("" if bias is None else f", {bias.dtype}")
            )
        compute_dtype(hidden.dtype)
        self.shard.check_width(weight.shape[0], "weight")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {list(bias.shape)}, weight {list(weight.shape)}: their widths must agree")

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.hidden_TH, self.weight_VH, self.bias_V)

    def recipe(self) -> Callable[[tuple[Any, ...]], Source]:
        # Megatron's buffer and flags are attributes of the parameter object, which a hook on saved tensors may replace.
        parameter = None if self.weight_grad == "return" else self.parameter
        return functools.partial(_head_source, self.shard, self.sequence_parallel, self.weight_grad, parameter)

    @property
    def parameter(self) -> Tensor:
        """The object that carries `grad`, `main_grad` and Megatron's flags."""
        return self.weight_VH if self.marked is None else self.marked

    @property
    def total(self) -> int:
        return self.hidden_TH.shape[0] * (self.shard.world if self.sequence_parallel else 1)

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.hidden_TH.dtype)

    @property
    def device(self) -> torch.device:
        return self.hidden_TH.device

    @property
    def bytes_per_column(self) -> int:
        narrow = self.weight_VH.is_cuda and is_low_precision(self.weight_VH.dtype)
        return self.dtype.itemsize + (self.weight_VH.itemsize if narrow else 0)

    @property
    def fixed_bytes(self) -> int:
        return fixed_scratch_bytes(self.weight_VH)

    def open(self, rows: Rows, capacity: int, needs: tuple[bool, ...] = ()) -> HeadReader:
        return HeadReader(self, rows, capacity, needs)


def _logits_source(shard: VocabShard, tensors: tuple[Any, ...]) -> Source:
    (logits_TV,) = tensors
    return LogitsSource(shard, logits_TV)


def _head_source(
    shard: VocabShard, sequence_parallel: bool, weight_grad: WeightGrad, marked: Tensor | None, tensors: tuple[Any, ...]
) -> Source:
    hidden_TH, weight_VH, bias_V = tensors
    return HeadSource(shard, hidden_TH, weight_VH, bias_V, sequence_parallel, weight_grad, marked)


class HeadReader(Reader):
    def __init__(self, source: HeadSource, rows: Rows, capacity: int, needs: tuple[bool, ...]) -> None:
        self._source = source
        self._rows = rows
        shard, valid = source.shard, source.shard.valid
        hidden_TH = shard.gather_rows(source.hidden_TH) if source.sequence_parallel else source.hidden_TH
        self._hidden = rows.take(hidden_TH)
        self._weight = source.weight_VH[:valid]
        self._bias = None if source.bias_V is None else source.bias_V[:valid].to(source.dtype)
        self._scratch = hidden_TH.new_empty(min(capacity, rows.count), valid, dtype=source.dtype)
        needs_hidden, needs_weight, needs_bias = needs or (False, False, False)
        self._grad_hidden = None
        if needs_hidden:
            self._grad_hidden = torch.empty_like(self._hidden, memory_format=torch.contiguous_format)
        self._grad_weight = WeightGradient(source.parameter, valid, source.weight_grad) if needs_weight else None
        self._grad_bias = None
        if needs_bias and source.bias_V is not None:
            self._grad_bias = torch.zeros_like(source.bias_V, dtype=source.dtype)

    def chunk(self, first: int, last: int) -> Tensor:
        z_CV = self._scratch[: last - first]
        logits_into(z_CV, self._hidden[first:last], self._weight)
        if self._bias is not None:
            z_CV += self._bias
        return self._rows.divide_(z_CV, first)

    def backward(self, first: int, last: int, d_CV: Tensor) -> None:
        if self._grad_bias is not None:
            self._grad_bias[: d_CV.shape[1]] += d_CV.sum(0)
        d_CV = operand(d_CV, self._weight)
        if self._grad_hidden is not None:
            hidden_gradient_into(self._grad_hidden[first:last], d_CV, self._weight)
        if self._grad_weight is not None:
            self._grad_weight.add(d_CV, self._hidden[first:last])

    def gradients(self) -> tuple[Tensor | None, ...]:
        source = self._source
        grad_hidden = None
        if self._grad_hidden is not None:
            grad_TH = self._rows.put(self._grad_hidden)
            reduce = source.shard.reduce_scatter_rows if source.sequence_parallel else source.shard.reduce_
            grad_hidden = reduce(grad_TH)
        grad_weight = self._grad_weight.finish() if self._grad_weight is not None else None
        grad_bias = None if self._grad_bias is None else self._grad_bias.to(source.weight_VH.dtype)
        return grad_hidden, grad_weight, grad_bias

    def announce(self) -> None:
        """During backward: tell Megatron where the weight's gradient lies."""
        if self._grad_weight is not None:
            announce(self._source.parameter, self._source.weight_grad)
