"""Which positions are computed, at which temperature, and how many at a time.

Positions without a target never enter the head: they are dropped before the first matmul and their results are zeros
put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.logprobs.shard import VocabShard

# Scratch that a call may take when no chunk size is given, in bytes. A GPU wants taller chunks to fill its matmul units.
CPU_BUDGET_BYTES = 384 << 20
CUDA_BUDGET_BYTES = 512 << 20

# Elements that one elementwise pass handles at a time. On a CPU the block stays in cache over the passes; on a GPU each
# pass is a launch, so blocks are larger. Temporaries are a few blocks, whatever the chunk.
_CPU_BLOCK = 1 << 18
_CUDA_BLOCK = 1 << 23


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is computed in float32."""
    if not dtype.is_floating_point:
        raise ValueError(f"logits or hidden states must be floating point, not {dtype}")
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Rows:
    """R computed positions out of T. `index_R` None means all; `temperature` is a float or one number a computed row."""

    total: int
    count: int
    index_R: Tensor | None
    temperature: float | Tensor

    def take(self, x: Tensor) -> Tensor:
        """[T, ...] -> [R, ...]."""
        return x if self.index_R is None else x.index_select(0, self.index_R)

    def put(self, x: Tensor) -> Tensor:
        """[R, ...] -> [T, ...], zeros at positions that were not computed."""
        if self.index_R is None:
            return x
        return x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.index_R, x)

    def divide_(self, x_CV: Tensor, first: int) -> Tensor:
        """Divide rows [first, first + C) by their temperature, in place."""
        if isinstance(self.temperature, Tensor):
            return x_CV.div_(self.temperature[first : first + x_CV.shape[0]].to(x_CV.dtype).unsqueeze(1))
        return x_CV if self.temperature == 1.0 else x_CV.div_(self.temperature)

    def divided(self, x_R: Tensor) -> Tensor:
        """One number a row, divided by the row's temperature: what the chain rule does to a gradient of logits."""
        if isinstance(self.temperature, Tensor):
            return x_R / self.temperature.to(x_R.dtype)
        return x_R if self.temperature == 1.0 else x_R / self.temperature


def rows_with_targets(targets_T: Tensor, size: int, total: int, temperature: float | Tensor) -> Rows:
    """The rows whose target is an id; -1 marks a position without one. ValueError for any other value outside [0, size)."""
    if targets_T.dim() != 1 or targets_T.dtype != torch.int64 or targets_T.shape[0] != total:
        raise ValueError(
            f"targets must be int64 of shape [{total}], one a position, not {targets_T.dtype} {list(targets_T.shape)}"
        )
    if total == 0:
        return Rows(0, 0, None, _temperature(temperature, 0, None))
    active_T = targets_T >= 0
    # One transfer to the host for everything that must be known there.
    low, high, count = torch.stack([targets_T.amin(), targets_T.amax(), active_T.sum()]).tolist()
    if low < -1 or high >= size:
        raise ValueError(
            f"target {high if high >= size else low} is outside the vocabulary of {size} ids "
            "(-1 marks a position without a target)"
        )
    return _rows(active_T, count, total, temperature)


def rows_that_are_active(active_T: Tensor | None, total: int, temperature: float | Tensor) -> Rows:
    """The rows where the mask is nonzero; None means all."""
    if active_T is None:
        return Rows(total, total, None, _temperature(temperature, total, None))
    if active_T.shape != (total,):
        raise ValueError(f"active must have shape [{total}], one a position, not {list(active_T.shape)}")
    active_T = active_T.bool()
    return _rows(active_T, int(active_T.sum()), total, temperature)


def _rows(active_T: Tensor, count: int, total: int, temperature: float | Tensor) -> Rows:
    index_R = None if count == total else active_T.nonzero().squeeze(1)
    return Rows(total, count, index_R, _temperature(temperature, total, index_R))


def _temperature(temperature: float | Tensor, total: int, index_R: Tensor | None) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        return float(temperature)
    temperature = temperature.detach()
    if temperature.dim() == 0:
        temperature = temperature.expand(total)
    if temperature.shape != (total,):
        raise ValueError(f"temperature must be a number or have shape [{total}], not {list(temperature.shape)}")
    return temperature if index_R is None else temperature.index_select(0, index_R)


@dataclass(frozen=True)
class Chunking:
    """How much is handled at a time: at most `tokens` rows, or what fits in `budget_bytes` (None: the device's default)."""

    tokens: int | None = None
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("chunk_tokens", self.tokens), ("memory_budget", self.budget_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def rows_per_chunk(
        self, shard: VocabShard, device: torch.device, bytes_per_column: int, fixed: int, count: int | None = None
    ) -> int:
        """Rows whose logits, at `bytes_per_column` of scratch each, fit in the budget next to `fixed` other bytes.

        With `count`, the rows that there are, no more than makes their chunks about equally high: a small last chunk
        multiplies matrices slowly.
        """
        if self.tokens is not None:
            return self.tokens
        budget = self.budget_bytes or (CUDA_BUDGET_BYTES if device.type == "cuda" else CPU_BUDGET_BYTES)
        rows = max(1, max(0, budget - fixed) // max(1, bytes_per_column * shard.planned_width))
        if rows < 16:
            return rows
        rows -= rows % 16  # matmul tiles are multiples of 16 high
        if not count:
            return rows
        even = -(-count // -(-count // rows))
        return min(rows, -(-even // 16) * 16)


def spans(count: int, step: int) -> Iterator[tuple[int, int]]:
    """[0, count) cut into pieces of at most `step`."""
    for first in range(0, count, step):
        yield first, min(count, first + step)


def block_rows(width: int, device: torch.device) -> int:
    """Rows of `width` columns that one elementwise pass should handle."""
    return max(1, (_CUDA_BLOCK if device.type == "cuda" else _CPU_BLOCK) // max(1, width))


def block_bytes(width: int, device: torch.device, itemsize: int) -> int:
    """Bytes of one temporary of such a pass."""
    return block_rows(width, device) * width * itemsize
