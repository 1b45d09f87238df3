"""What a Megatron-Core loop divides a gradient by between the loss function and the optimizer.

An objective's loss is already divided by its one global denominator, so what the loop divides by is multiplied in beforehand.
With M micro-batches on each of D data- and context-parallel ranks, and a loss function that counts one token a micro-batch:

| | schedule | reduction over the D ranks | finalize_model_grads |
|---|---|---|---|
| calculate_per_token_loss off | M | D (mean) | 1 |
| calculate_per_token_loss on | 1 | 1 (sum) by Megatron's DDP, D by torch's | M D, the number of tokens |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from torch.nn.parallel import DistributedDataParallel as TorchDDP


@dataclass(frozen=True)
class GradientScale:
    """loss: what the schedule divides the loss by. total: that times what reduction and finalizer divide the gradient by."""

    loss: float
    total: float


def gradient_scale(
    model: Any, config: Any, micro_batches: int, data_context: int, reduction: Literal["sum", "mean"] | None
) -> GradientScale:
    """The divisors of this loop, from the TransformerConfig and the DDP wrapper that hold them.

    A `finalize_model_grads_func` is taken to divide by the token count that it is given, as Megatron-Core's does. ValueError, one
    line, where `reduction` is None and the model's wrapper does not say what it does.
    """
    loss = 1 if config.calculate_per_token_loss else micro_batches
    mean = _takes_mean(model, data_context) if reduction is None else reduction == "mean"
    counts_tokens = config.calculate_per_token_loss and config.finalize_model_grads_func is not None
    total = loss * (data_context if mean else 1) * (micro_batches * data_context if counts_tokens else 1)
    return GradientScale(float(loss), float(total))


def _takes_mean(model: Any, data_context: int) -> bool:
    for layer in _wrappers(model):
        if isinstance(layer, MegatronDDP):
            # Asked of its buffers: the config may have been changed since they were made.
            buffers: Any = layer.buffers  # a list of Megatron's, under the name of torch's method
            factors = {buffer.gradient_scaling_factor for buffer in buffers}
            return layer.ddp_config.average_in_collective or factors != {1.0}
        if isinstance(layer, TorchDDP):
            size = dist.get_world_size(layer.process_group)
            if size != data_context:
                raise ValueError(
                    f"torch's DistributedDataParallel averages over {size} ranks, and {data_context} hold different samples: "
                    "give it process_group=parallel_state.get_data_parallel_group(with_context_parallel=True)"
                )
            return True
    if data_context == 1:
        return False
    raise ValueError(
        f"{type(model).__name__} is neither Megatron-Core's nor torch's DistributedDataParallel: tell make_forward_step whether "
        "your reduction over data-parallel ranks takes the sum or the mean, gradient_reduction='sum' or 'mean'"
    )


def _wrappers(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        model = getattr(model, "module", None)
