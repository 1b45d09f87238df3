"""Adam's state in distributed checkpoints: where PyTorch's own AdamW and Megatron-Core's saving code do not fit together.

Megatron-Core expects the fused Adam of Transformer Engine or apex. With PyTorch's AdamW (no such package, or the CPU device mode)
1. there is no state before the first step, but saving and loading ask for it;
2. the step count is a tensor for every parameter; loading hands all parameters one and the same tensor, which then counts every
   parameter's update, so the bias correction is silently wrong from the next step on;
3. the distributed optimizer's loader looks for the step among the stored tensors, where it never was;
4. the other optimizers leave a step count of zero out of the checkpoint, and cannot load one without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def materialise(optimizer: Any) -> None:
    """Give every parameter that has none yet the state it would start with; the next step is the same with it as without."""
    for wrapper in _wrappers(optimizer):
        inner = wrapper.optimizer
        if isinstance(inner, (torch.optim.AdamW, torch.optim.Adam)):
            for param in _params(inner):
                if not inner.state[param]:
                    inner.state[param].update(
                        step=torch.tensor(0.0), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
                    )
        elif wrapper.init_state_fn is not None:
            wrapper.init_state_fn(inner, wrapper.config)


def complete(loaded: Any) -> None:
    """Put the step count of zero that was left out back into a loaded optimizer state, before it is handed to the optimizer."""
    if not isinstance(loaded, dict):
        return
    state = loaded.get("state")
    if isinstance(state, dict) and "common_step" not in state and any("exp_avg" in entry for entry in state.values()):
        state["common_step"] = torch.tensor(0.0)
    for value in loaded.values():
        complete(value)


@contextmanager
def loading(optimizer: Any) -> Iterator[None]:
    """Around everything that loads a checkpoint into the optimizer."""
    adams = [w for w in _wrappers(optimizer) if isinstance(w.optimizer, (torch.optim.AdamW, torch.optim.Adam))]
    patched = [w for w in adams if hasattr(w, "_set_main_param_and_optimizer_states")]
    for wrapper in patched:
        wrapper._set_main_param_and_optimizer_states = _keeping_the_step(wrapper)
    try:
        yield
    finally:
        for wrapper in patched:
            del wrapper._set_main_param_and_optimizer_states  # the class's own shows again
    for wrapper in adams:
        for param in _params(wrapper.optimizer):
            state = wrapper.optimizer.state[param]
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()


def _keeping_the_step(wrapper: Any) -> Any:
    original = wrapper._set_main_param_and_optimizer_states

    def set_states(model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = wrapper.model_param_group_index_map[model_param]
        state = wrapper.optimizer.state[wrapper.optimizer.param_groups[group]["params"][order]]
        original(model_param, {"step": state["step"].clone(), **tensors})

    return set_states


def _wrappers(optimizer: Any) -> list[Any]:
    """Megatron's optimizers with an optimizer inside; a rank may hold a part of the model that trains nothing."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [wrapper for wrapper in chained if not getattr(wrapper, "is_stub_optimizer", False)]


def _params(inner: Any) -> list[Any]:
    return [param for group in inner.param_groups for param in group["params"]]
