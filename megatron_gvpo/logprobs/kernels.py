"""Chooses at run time between the torch path and the Triton kernels; no other file knows of Triton.

The kernels serve float32 chunks on CUDA, and on a CPU under TRITON_INTERPRET=1 (tests). MEGATRON_GVPO_TRITON=0 turns them
off, to tell a fault of theirs from one of the model.
"""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def usable(z_CV: Tensor) -> bool:
    """Whether the kernels take this chunk."""
    if z_CV.dtype != torch.float32 or z_CV.stride(-1) != 1:
        return False
    if not z_CV.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return _module() is not None


def row_stats(z_CV: Tensor, column_C: Tensor, here_C: Tensor, entropy: bool) -> Tensor:
    """See `token_op.row_stats`; `z` stays as it is."""
    return _loaded().row_stats(z_CV, column_C, here_C, entropy)


def row_gradient_(
    z_CV: Tensor,
    column_C: Tensor,
    here_C: Tensor,
    state_CS: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> None:
    """See `token_op.row_gradient_`."""
    _loaded().row_gradient_(z_CV, column_C, here_C, state_CS, grad_logprob_C, grad_entropy_C)


@functools.cache
def _module() -> ModuleType | None:
    if os.environ.get("MEGATRON_GVPO_TRITON") == "0":
        return None
    try:
        from megatron_gvpo.logprobs import triton_kernels
    except ImportError as error:
        _log.warning("log-probs run without Triton, in four passes over each chunk's logits instead of one: %s", error)
        return None
    return triton_kernels


def _loaded() -> ModuleType:
    module = _module()
    assert module is not None, "asked for a kernel that `usable` does not offer"
    return module
