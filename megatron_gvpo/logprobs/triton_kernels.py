"""Triton kernels of `token_op`: an online log-sum-exp over a chunk's logits, and the gradient in place.

Each reads a chunk once where the torch path makes four passes. The formulas are those of `token_op`; the torch path there is
the reference. Import this file only where Triton is installed (`kernels` decides). Under TRITON_INTERPRET=1, set before
Triton is imported, the kernels run on a CPU for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _stats_kernel(
    z_ptr,
    column_ptr,
    here_ptr,
    out_ptr,
    width,
    row_stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: running maximum m, sum s of exp(x - m), and (4 columns) sum e of exp(x - m) (x - m)."""
    row = tl.program_id(0).to(tl.int64)
    m = -3.4028234663852886e38
    s = 0.0
    e = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(z_ptr + row * row_stride + columns, mask=columns < width, other=-float("inf"))
        # m starts at the lowest finite number: a block of banned ids must not make (-inf) - (-inf).
        new = tl.maximum(m, tl.max(x, axis=0))
        # The clamp keeps -inf out of products with 0; exp is 0 long before.
        shift = tl.maximum(m - new, -1.0e4)
        y = tl.maximum(x - new, -1.0e4)
        p = tl.exp(y)
        scale = tl.exp(shift)
        e = scale * (e + shift * s) + tl.sum(p * y, axis=0)
        s = scale * s + tl.sum(p, axis=0)
        m = new
    here = tl.load(here_ptr + row) != 0
    target = tl.load(z_ptr + row * row_stride + tl.load(column_ptr + row), mask=here, other=0.0)
    tl.store(out_ptr + row * COLUMNS, m)
    tl.store(out_ptr + row * COLUMNS + 1, s)
    tl.store(out_ptr + row * COLUMNS + 2, target)
    if COLUMNS == 4:
        tl.store(out_ptr + row * COLUMNS + 3, e)


@triton.jit
def _gradient_kernel(
    z_ptr,
    column_ptr,
    here_ptr,
    state_ptr,
    grad_ptr,
    width,
    row_stride,
    state_stride,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and block: z := g ([v = y] - p) - h p (log p + H). grad: [C, 2], g and h."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(z_ptr + row * row_stride + columns, mask=inside, other=-float("inf"))
    top = tl.load(state_ptr + row * state_stride)
    log_total = tl.load(state_ptr + row * state_stride + 1)
    g = tl.load(grad_ptr + row * 2)
    logp = tl.maximum(x - top, -1.0e4) - log_total
    p = tl.exp(logp)
    d = -g * p
    if ENTROPY:
        h = tl.load(grad_ptr + row * 2 + 1)
        d -= h * p * (logp + tl.load(state_ptr + row * state_stride + 2))
    target = tl.where(tl.load(here_ptr + row) != 0, tl.load(column_ptr + row), -1)
    d += tl.where(columns == target, g, 0.0)
    tl.store(z_ptr + row * row_stride + columns, d, mask=inside)


def row_stats(z_CV: Tensor, column_C: Tensor, here_C: Tensor, entropy: bool) -> Tensor:
    """As `token_op.row_stats`, float32; leaves `z` as it is."""
    rows, width = z_CV.shape
    out_CN = torch.empty(rows, 4 if entropy else 3, device=z_CV.device, dtype=torch.float32)
    _stats_kernel[(rows,)](
        z_CV,
        column_C.contiguous(),
        here_C.to(torch.int8),
        out_CN,
        width,
        z_CV.stride(0),
        COLUMNS=tl.constexpr(out_CN.shape[1]),
        BLOCK=tl.constexpr(min(_BLOCK, triton.next_power_of_2(width))),
    )
    return out_CN


def row_gradient_(
    z_CV: Tensor,
    column_C: Tensor,
    here_C: Tensor,
    state_CS: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> None:
    """As `token_op.row_gradient_`, float32, in place."""
    rows, width = z_CV.shape
    zero_C = torch.zeros(rows, device=z_CV.device, dtype=torch.float32)
    grads_C2 = torch.stack([zero_C if g is None else g for g in (grad_logprob_C, grad_entropy_C)], 1)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gradient_kernel[(rows, triton.cdiv(width, block))](
        z_CV,
        column_C.contiguous(),
        here_C.to(torch.int8),
        state_CS.contiguous(),
        grads_C2,
        width,
        z_CV.stride(0),
        state_CS.shape[1],
        ENTROPY=tl.constexpr(grad_entropy_C is not None),
        BLOCK=tl.constexpr(block),
    )
