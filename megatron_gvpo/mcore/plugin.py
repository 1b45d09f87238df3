"""The objectives in a Megatron-Core training loop that is not this project's: what is passed to the schedule.

    from megatron_gvpo.mcore import make_forward_step, prepare_step

    forward_step = make_forward_step(create_objective("gvpo", {"beta": 0.1}), vocab_size=151936)
    for samples in my_rollouts:  # this data-parallel rank's, cut into micro-batches
        step = prepare_step(forward_step, samples, model)
        get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **step.schedule())
        optimizer.step()
        report = step.finish()

Nothing else of this project is needed: not its config, start-up, model, optimizer or loop. The gradients that Megatron's DDP (or
torch's) and `finalize_model_grads` leave are those of the global loss, in both of Megatron's normalisation modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.logprobs import VocabShard
from megatron_gvpo.mcore.batches import MicroBatch
from megatron_gvpo.mcore.forward import (
    HeadSettings,
    LossFunc,
    ModelCall,
    ModelOutputs,
    StepInput,
    call_model,
    objective_forward_step,
)
from megatron_gvpo.mcore.head import HiddenStateHead
from megatron_gvpo.objectives.base import Objective

Reduction = Literal["sum", "mean"]


class ObjectiveForwardStep:
    """A `forward_step` for `get_forward_backward_func()`; made by `make_forward_step`."""

    def __init__(
        self,
        objective: Objective[Any],
        batch_of: Callable[[Any], StepInput] | None,
        vocab_size: int,
        model_outputs: ModelOutputs,
        calculate_per_token_loss: bool | None,
        temperature: float,
        call: ModelCall,
        gradient_reduction: Reduction | None,
    ) -> None:
        self.objective = objective
        self.vocab_size = vocab_size
        self.calculate_per_token_loss = calculate_per_token_loss
        self.gradient_reduction: Reduction | None = gradient_reduction
        self._batch_of = batch_of
        self._model_outputs: ModelOutputs = model_outputs
        self._temperature = temperature
        self._call = call

    def __call__(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, LossFunc]:
        self.check_config(get_model_config(model))
        return objective_forward_step(self.objective, self.head(model), self._input, self.call)(data_iterator, model)

    def call(self, model: Any, micro: MicroBatch) -> Tensor:
        """The model's output for a micro-batch. TypeError, one line, where the last stage does not return what was announced."""
        output = self._call(model, micro)
        if not _inner(model).post_process or (isinstance(output, Tensor) and output.dim() == 3):
            return output
        found = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        wanted = "[B, S, V / TP] logits" if self._model_outputs == "logits" else "[B, S, H] hidden states"
        hint = "; that is a loss: call the model without labels" if isinstance(output, Tensor) else ""
        raise TypeError(f"the model returned {found}, and {wanted} are expected{hint}")

    def check_config(self, config: Any) -> None:
        """ValueError, one line, for a TransformerConfig that this forward step cannot work with."""
        told = self.calculate_per_token_loss
        if told is not None and config.calculate_per_token_loss != told:
            raise ValueError(
                f"the model's config has calculate_per_token_loss={config.calculate_per_token_loss}, and make_forward_step was "
                f"given {told}: the gradients would be scaled wrongly; leave it out to follow the config"
            )
        if getattr(config, "mtp_num_layers", None):
            raise ValueError(
                f"mtp_num_layers is {config.mtp_num_layers}: multi-token prediction needs labels, which a policy's samples "
                "are not; build the model without it"
            )

    def head(self, model: Any) -> HeadSettings:
        """What turns this model chunk's outputs into log-probs; on a stage without an output layer only the vocabulary's cut.

        ValueError or TypeError, one line, for an output layer that does not fit what `make_forward_step` was told.
        """
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        group: Any = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
        inner = _inner(model)
        rows = self._output_rows(inner.output_layer, size) if inner.post_process else self.vocab_size
        shard = VocabShard.of(rank, size, self.vocab_size, rows, group)
        # Logits are whole along the sequence: the model's own output layer has gathered them.
        sequence_parallel = bool(get_model_config(model).sequence_parallel) and self._model_outputs == "hidden"
        return HeadSettings(shard, self._temperature, sequence_parallel, self._model_outputs)

    def _output_rows(self, layer: Any, tensor_ranks: int) -> int:
        """The rows of the output layer over all tensor-parallel ranks, padding included."""
        rows = getattr(layer, "output_size", None)
        if not isinstance(rows, int):
            raise TypeError(f"the output layer is a {type(layer).__name__}; Megatron-Core's ColumnParallelLinear is expected")
        if rows < self.vocab_size:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, and the model's output layer has {rows} rows: give the number of ids that "
                "the tokenizer knows; rows above it are padding"
            )
        hidden = isinstance(layer, HiddenStateHead)
        if hidden and self._model_outputs == "logits":
            raise ValueError("the model hands out hidden states: make_forward_step needs model_outputs='hidden'")
        if not hidden and self._model_outputs == "hidden":
            raise ValueError(
                "model_outputs is 'hidden', and the model returns logits: call use_hidden_state_head(model) once, before training"
            )
        if not hidden and tensor_ranks > 1 and layer.gather_output:
            raise ValueError(
                "the model gathers its logits over the tensor-parallel ranks: build it with parallel_output=True, so that "
                "every rank keeps its own part of the vocabulary"
            )
        return rows

    def _input(self, item: Any) -> StepInput:
        found = item if self._batch_of is None else self._batch_of(item)
        if isinstance(found, StepInput):
            return found
        source = "the data iterator" if self._batch_of is None else "batch_of"
        raise TypeError(f"{source} gave a {type(found).__name__}; it has to give one of the inputs that prepare_step made")


def make_forward_step(
    objective: Objective[Any],
    batch_of: Callable[[Any], StepInput] | None = None,
    *,
    vocab_size: int,
    model_outputs: ModelOutputs = "logits",
    calculate_per_token_loss: bool | None = None,
    temperature: float = 1.0,
    call: ModelCall = call_model,
    gradient_reduction: Reduction | None = None,
) -> ObjectiveForwardStep:
    """What to pass to `get_forward_backward_func()` as `forward_step_func`.

    batch_of: finds, in what your data iterator gives, the `StepInput` that `prepare_step` made; None where it gives those.
    vocab_size: ids that the tokenizer knows. The model may have more rows: padding, which stays outside every softmax.
    model_outputs: `logits`, what a GPTModel returns without labels, or `hidden` after `use_hidden_state_head(model)`, with which
        no logits are kept for the backward pass.
    calculate_per_token_loss: as in the model's TransformerConfig, which is asked if this is None, and checked if it is not.
    temperature: of the policy; it divides the logits.
    call: how the model is called, for one that wants more than tokens and positions: (model, micro_batch) -> output.
    gradient_reduction: `sum` or `mean`, what the reduction over data- and context-parallel ranks does; None: found out from
        Megatron-Core's or torch's DistributedDataParallel around the model.

    ValueError, one line, for an objective that needs more than token log-probs, and for an unknown model_outputs.
    """
    if model_outputs not in get_args(ModelOutputs):
        raise ValueError(f"model_outputs is {model_outputs!r}; it must be one of {', '.join(get_args(ModelOutputs))}")
    if objective.needs.teacher in ("topk", "full"):
        raise ValueError(
            f"objective {objective.name!r} needs the teacher's distributions ({objective.needs.teacher}), and samples in a loop "
            "of your own carry token log-probs only: use `megatron-gvpo train` for it"
        )
    return ObjectiveForwardStep(
        objective, batch_of, vocab_size, model_outputs, calculate_per_token_loss, temperature, call, gradient_reduction
    )


def device_of(model: Any) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device


def _inner(model: Any) -> Any:
    """The model inside DDP and Float16Module that knows which stage it is."""
    while not hasattr(model, "post_process"):
        if not hasattr(model, "module"):
            raise TypeError(f"there is no Megatron-Core language model inside this {type(model).__name__}")
        model = model.module
    return model
