"""The last pipeline stage's output layer, made to hand out hidden states: the log-prob engine multiplies by its weight itself.

`GPTModel.forward` is not patched. Its output layer keeps its parameters, its names in checkpoints and its hooks; only what
calling it returns changes.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class HiddenStateHead(ColumnParallelLinear):
    """A `ColumnParallelLinear` that returns its input, and remembers the weight it was called with (the tied one, perhaps)."""

    head_weight: Tensor | None

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        # Past Module.__setattr__, which would register the parameter under a second name, in checkpoints too.
        self.__dict__["head_weight"] = self.weight if weight is None else weight
        return input_, None


def use_hidden_state_head(chunk: Any) -> None:
    """Let `chunk` (a `GPTModel`, wrapped or not) return hidden states where it would return logits.

    Nothing happens on stages without a head, and nothing at a second call. TypeError for a head of another kind.
    """
    while not hasattr(chunk, "post_process"):
        chunk = chunk.module
    if not chunk.post_process:
        return
    layer = chunk.output_layer
    if type(layer) is HiddenStateHead:
        return
    if type(layer) is not ColumnParallelLinear:
        raise TypeError(f"the output layer is a {type(layer).__name__}; only Megatron-Core's ColumnParallelLinear can be fused")
    # A change of class, not of object: the parameter, its main_grad, the optimizer's and the checkpoint's view of it all stay.
    layer.__class__ = HiddenStateHead


def head_of(chunk: Any) -> HiddenStateHead:
    """The hidden-state head of a last-stage chunk, however often the chunk is wrapped (DDP, Float16Module)."""
    while not hasattr(chunk, "output_layer"):
        chunk = chunk.module
    return chunk.output_layer
