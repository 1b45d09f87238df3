"""The head's three products, each with float32 (or float64) accumulation and results, whatever the weight's dtype.

    logits_CV = hidden_CH weight_VH^T        grad_hidden_CH = d_CV weight_VH        grad_weight_VH += d_CV^T hidden_CH

float32 and float64 go straight to the library. bfloat16 and float16 on CUDA use tensor cores with float32 results. On a
CPU, where no such product exists, the weight is widened a block of rows at a time.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from megatron_gvpo.logprobs.rows import spans

_log = logging.getLogger(__name__)

# Elements of a weight block that is widened, or of a product that is added, at a time.
_CPU_BLOCK = 1 << 20
_CUDA_BLOCK = 1 << 23


def is_low_precision(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def fixed_scratch_bytes(weight_VH: Tensor) -> int:
    """Bytes these products need beside their operands, however many rows there are.

    The same on every rank, whatever its share of the vocabulary: ranks must agree on the size of a chunk.
    """
    if not is_low_precision(weight_VH.dtype):
        return 0
    return 8 * (_CUDA_BLOCK if weight_VH.is_cuda else _CPU_BLOCK)


def _block(weight_VH: Tensor) -> int:
    elements = _CUDA_BLOCK if weight_VH.is_cuda else _CPU_BLOCK
    return max(1, elements // max(1, weight_VH.shape[1]))


def logits_into(out_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
    """out = hidden weight^T in out's dtype."""
    if weight_VH.dtype == out_CV.dtype:
        torch.mm(hidden_CH, weight_VH.t(), out=out_CV)
    elif weight_VH.is_cuda:
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=out_CV.dtype, out=out_CV)
    else:
        wide_CH = hidden_CH.to(out_CV.dtype)
        for a, b in spans(weight_VH.shape[0], _block(weight_VH)):
            torch.mm(wide_CH, weight_VH[a:b].to(out_CV.dtype).t(), out=out_CV[:, a:b])


def operand(d_CV: Tensor, weight_VH: Tensor) -> Tensor:
    """The gradient of the logits as the two products below want it: narrow on tensor cores, as it is elsewhere."""
    return d_CV.to(weight_VH.dtype) if weight_VH.is_cuda else d_CV


def hidden_gradient_into(out_CH: Tensor, d_CV: Tensor, weight_VH: Tensor) -> None:
    """out = d weight, rounded once to out's dtype; `d` as `operand` returns it."""
    if d_CV.dtype == weight_VH.dtype == out_CH.dtype:
        torch.mm(d_CV, weight_VH, out=out_CH)
        return
    wide_CH = d_CV.new_zeros(out_CH.shape)
    for a, b in spans(weight_VH.shape[0], _block(weight_VH)):
        wide_CH.addmm_(d_CV[:, a:b], weight_VH[a:b].to(d_CV.dtype))
    out_CH.copy_(wide_CH)


def add_weight_gradient_(out_VH: Tensor, d_CV: Tensor, hidden_CH: Tensor, fresh: bool) -> None:
    """out += d^T hidden, accumulated in float32; out = d^T hidden if `fresh`. `d` as `operand` returns it."""
    if d_CV.dtype != hidden_CH.dtype:
        hidden_CH = hidden_CH.to(d_CV.dtype)
    if d_CV.dtype == out_VH.dtype and not is_low_precision(out_VH.dtype):
        out_VH.addmm_(d_CV.t(), hidden_CH, beta=0.0 if fresh else 1.0)
        return
    if out_VH.dtype == torch.float32 and out_VH.is_cuda and _adds_in_place(out_VH.device, d_CV.dtype):
        torch.addmm(out_VH, d_CV.t(), hidden_CH, out_dtype=torch.float32, beta=0.0 if fresh else 1.0, out=out_VH)
        return
    for a, b in spans(out_VH.shape[0], _block(out_VH)):
        product_VH = _product(d_CV[:, a:b].t(), hidden_CH)
        if fresh:
            out_VH[a:b].copy_(product_VH)
        else:
            out_VH[a:b].add_(product_VH)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if is_low_precision(left.dtype):
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build's CUDA addmm adds a narrow product to a float32 matrix in place; found out on a 16 x 16 one."""
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        _log.warning(
            "the head's weight gradient is added in a second pass (about a third slower for that product): "
            "addmm of %s into float32 is not available here: %s",
            dtype,
            str(error).splitlines()[0],
        )
        return False
    return bool((total == 17.0).all())
