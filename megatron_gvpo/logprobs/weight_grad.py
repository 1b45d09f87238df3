"""Where the head's weight gradient goes.

Megatron-Core keeps a gradient buffer beside each parameter (`weight.main_grad`, usually float32) and adds `weight.grad`
to it in a hook, unless the layer says that it has already done so (`weight.grad_added_to_main_grad`). Writing there
saves a buffer of the weight's size and accumulates in float32 over micro-batches. Facts of that protocol (read from
Megatron-Core 0.16's `tensor_parallel/layers.py` and `distributed/distributed_data_parallel.py`):

- with `overlap_grad_reduce` the hook refuses a parameter whose `.grad` is None, so a dummy gradient is due;
- `zero_out_wgrad` marks a weight tied to the embedding of the same stage: the hook then adds `.grad` (the embedding's
  share) although the flag is set.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_gvpo.logprobs.matmul import add_weight_gradient_
from megatron_gvpo.logprobs.rows import compute_dtype

WeightGrad = Literal["auto", "main_grad", "grad", "return"]


def resolve(mode: WeightGrad, weight: Tensor) -> WeightGrad:
    """`auto` becomes `main_grad` where Megatron's buffers and flag are there, else `return`; others are checked."""
    # Megatron-FSDP hands out its buffer by a call and reshards it afterwards; it gets an ordinary gradient.
    megatron = (
        hasattr(weight, "main_grad") and hasattr(weight, "grad_added_to_main_grad") and not hasattr(weight, "__fsdp_param__")
    )
    if mode == "auto":
        return "main_grad" if megatron else "return"
    if mode == "main_grad" and getattr(weight, "main_grad", None) is None:
        raise ValueError("weight_grad='main_grad', but the weight has no main_grad buffer")
    if mode == "grad" and not (weight.is_leaf and weight.requires_grad):
        raise ValueError("weight_grad='grad' needs a leaf weight that requires a gradient")
    return mode


class WeightGradient:
    """Accumulates the gradient of a head's weight over chunks, in place, into the buffer that `mode` names.

    `return` (a buffer handed to autograd), `main_grad` (Megatron's) or `grad` (`weight.grad`).
    """

    def __init__(self, weight_VH: Tensor, valid: int, mode: WeightGrad) -> None:
        self._weight = weight_VH
        self._valid = valid
        self._mode = mode
        self._fresh = False
        if mode == "main_grad":
            self._buffer: Tensor = weight_VH.main_grad  # pyright: ignore[reportAttributeAccessIssue] Megatron's attribute
        elif mode == "grad":
            if weight_VH.grad is None:
                weight_VH.grad = torch.zeros_like(weight_VH)
            self._buffer = weight_VH.grad
        else:
            # Uninitialised but for the padding: the first chunk overwrites instead of adding.
            self._buffer = torch.empty_like(weight_VH, dtype=compute_dtype(weight_VH.dtype))
            self._buffer[valid:].zero_()
            self._fresh = True

    def add(self, d_CV: Tensor, hidden_CH: Tensor) -> None:
        """Add d^T hidden; `d` is the gradient of the chunk's logits as `matmul.operand` returns it."""
        add_weight_gradient_(self._buffer[: self._valid], d_CV, hidden_CH, self._fresh)
        self._fresh = False

    def finish(self) -> Tensor | None:
        """The gradient for autograd, in the weight's dtype, or None where it already lies in its buffer."""
        if self._mode != "return":
            return None
        if self._fresh:  # no chunk came: no position had a target
            self._buffer.zero_()
            self._fresh = False
        return self._buffer.to(self._weight.dtype)


def announce(weight: Tensor, mode: WeightGrad) -> None:
    """Tell Megatron's hook, during backward, that `main_grad` already holds this gradient."""
    if mode != "main_grad" or not hasattr(weight, "grad_added_to_main_grad"):
        return
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue] Megatron's attribute
    if weight.grad is None and not getattr(weight, "zero_out_wgrad", False):
        # A dummy of one element seen as the weight's shape. It must not go through autograd, which would copy it to full
        # size; and a tied weight gets none, because autograd is about to store the embedding's gradient there.
        weight.grad = weight.new_zeros(()).expand(weight.shape)
