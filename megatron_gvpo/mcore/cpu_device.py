"""The CPU device mode: lets an unmodified Megatron-Core run its own code on a machine without GPUs.

Opt-in and in one place: nothing changes unless `enable()` is called, which start-up does for `train.device: cpu` only. What
Megatron-Core hard-codes falls in four classes, and each is met once:

1. `torch.cuda.*` calls (current device, streams, events, synchronisation, random state)  ->  replaced on `torch.cuda`
2. `device="cuda"` in factories, `Tensor.cuda()`, and questions about `Tensor.type()`     ->  one `TorchFunctionMode`
3. the CUDA random-state tracker                                                         ->  a subclass that keeps CPU states
4. assumptions about what is installed (Transformer Engine's names, fused optimizers)    ->  the plain-torch paths

A function mode holds for the thread that enabled it: models are built and run from that thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# Megatron's optimizers sort parameters by these names.
_CUDA_TYPE_NAME = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.meta.FloatTensor": "torch.cuda.FloatTensor",
    "torch.meta.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}

_mode: TorchFunctionMode | None = None
_device = CPU


def enable(device: torch.device = CPU) -> None:
    """Switch this process to the CPU device mode; a second call does nothing. There is no way back within a process.

    device: what stands for "the current GPU"; the meta device for a dry run, in which nothing is allocated.
    """
    global _mode, _device
    if _mode is not None:
        return
    _device = device
    # Megatron's fused element-wise kernels would be compiled by inductor: minutes, for nothing gained on a CPU.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _replace_cuda_calls()
    _replace_megatron_parts()
    _mode = _CpuFunctionMode()
    _mode.__enter__()


class _CpuFunctionMode(TorchFunctionMode):
    """Sends `device="cuda"` to the CPU, makes `Tensor.cuda()` return its tensor, and names tensor types as CUDA would."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _CUDA_TYPE_NAME.get(name, name)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _device}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _device, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


class _NoStream:
    """Stands where Megatron wants a CUDA stream or event: on a CPU everything has happened when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def record_event(self, *args: Any) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait = wait_stream = wait_event = record = synchronize = _nothing


def _replace_cuda_calls() -> None:
    stream = _NoStream()

    def nothing() -> Callable[..., None]:
        # A new function each time: torch's compiler keeps tables of torch.cuda's functions and refuses one found twice.
        return lambda *args, **kwargs: None

    def get_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    replacements: dict[str, object] = {
        # Also on a machine that has GPUs: in this mode nothing may reach for them.
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: _device,
        "set_device": nothing(),
        "synchronize": nothing(),
        "empty_cache": nothing(),
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    # Megatron reaches the random state through both names.
    setattr(torch.cuda.random, "get_rng_state", get_state)  # noqa: B010 - a module's function, replaced on purpose
    setattr(torch.cuda.random, "set_rng_state", set_state)  # noqa: B010


def _replace_megatron_parts() -> None:
    from megatron.core import jit, optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as rng
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    jit.disable_jit_fuser()

    class CpuRngStatesTracker(rng.CudaRNGStatesTracker):
        """Keeps named states of the CPU generator; the CUDA tracker would call moving that generator a fault."""

        @contextlib.contextmanager
        def fork(self, name: str = rng._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise ValueError(f"random state {name!r} was never added")
            outer, outer_name = torch.get_rng_state(), self._current_state_name
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)
                self._current_state_name = outer_name

    def get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replacements: list[tuple[object, str, object]] = [
        (rng, "_get_cuda_rng_state", get_state),
        (rng, "_set_cuda_rng_state", set_state),
        (rng, "CudaRNGStatesTracker", CpuRngStatesTracker),
        # Split sizes of the all-to-all must be lists; the GPU path makes them while it copies to the host.
        (token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        # Transformer Engine's and apex's fused Adam need a GPU, whether or not they are installed.
        (optimizer, "Adam", torch.optim.AdamW),
        (optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (distrib_optimizer, "Adam", torch.optim.AdamW),
        (distrib_optimizer, "HAVE_APEX_OR_TE", False),
        (distrib_optimizer, "USING_TE_OPTIMIZER", False),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", False),
    ]
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core 0.16 reads this name without ever binding it when Transformer Engine is missing.
        replacements.append((moe_utils, "te_general_gemm", None))
    for owner, name, value in replacements:
        setattr(owner, name, value)
