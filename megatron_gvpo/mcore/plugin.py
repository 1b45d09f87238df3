"""The objectives in a Megatron-Core training loop that is not this project's.

    objective = create_objective("gvpo", {"beta": 0.1})
    forward_step = make_forward_step(objective, batch_of, calculate_per_token_loss=False, vocab_size=151936)
    for samples in my_rollouts:  # this data-parallel rank's own samples
        inputs = prepare_step(objective, samples, model, forward_step, micro_batch_size=2)
        get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iter(inputs), model=model, ...)

Nothing else of this project is needed: not its config, start-up, optimizer or loop. The gradients that Megatron's DDP (or
torch's) and `finalize_model_grads` leave are those of the global loss, in both of Megatron's normalisation modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.logprobs import VocabShard
from megatron_gvpo.mcore.batches import Layout, rank_batch
from megatron_gvpo.mcore.forward import HeadSettings, LossFunc, ModelOutputs, StepInput, objective_forward_step
from megatron_gvpo.mcore.passes import Passes
from megatron_gvpo.mcore.startup import Ranks, current_ranks
from megatron_gvpo.objectives.base import Objective
from megatron_gvpo.objectives.batch import kept_samples


class ObjectiveForwardStep:
    """A `forward_step` for `get_forward_backward_func()`; made by `make_forward_step`."""

    def __init__(
        self,
        objective: Objective[Any],
        batch_of: Callable[[Any], StepInput],
        model_outputs: ModelOutputs,
        calculate_per_token_loss: bool,
        vocab_size: int,
        padded_vocab_size: int,
        temperature: float,
    ) -> None:
        self.objective = objective
        self.calculate_per_token_loss = calculate_per_token_loss
        self._batch_of = batch_of
        self._model_outputs: ModelOutputs = model_outputs
        self._vocab_size = vocab_size
        self._padded_vocab_size = padded_vocab_size
        self._temperature = temperature

    def __call__(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, LossFunc]:
        config = get_model_config(model)
        if config.calculate_per_token_loss != self.calculate_per_token_loss:
            raise ValueError(
                f"the model's config has calculate_per_token_loss={config.calculate_per_token_loss}, and make_forward_step was "
                f"given {self.calculate_per_token_loss}: the gradients would be scaled wrongly"
            )
        step = objective_forward_step(self.objective, self.head(model), self._batch_of)
        return step(data_iterator, model)

    def head(self, model: Any) -> HeadSettings:
        """What turns this model's outputs into log-probs."""
        config = get_model_config(model)
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        width = -(-self._padded_vocab_size // size)
        found = parallel_state.get_tensor_model_parallel_group()
        group = found if size > 1 and isinstance(found, dist.ProcessGroup) else None
        shard = VocabShard(rank * width, (rank + 1) * width, self._vocab_size, group)
        # Logits are whole along the sequence: the model's own output layer has gathered them.
        sequence_parallel = bool(config.sequence_parallel) and self._model_outputs == "hidden"
        return HeadSettings(shard, self._temperature, sequence_parallel, self._model_outputs)


def make_forward_step(
    objective: Objective[Any],
    batch_of: Callable[[Any], StepInput] | None = None,
    *,
    vocab_size: int,
    padded_vocab_size: int | None = None,
    model_outputs: ModelOutputs = "logits",
    calculate_per_token_loss: bool = False,
    temperature: float = 1.0,
) -> ObjectiveForwardStep:
    """What to pass to `get_forward_backward_func()` as `forward_step_func`.

    batch_of: makes a `StepInput` (see `prepare_step`) of what the data iterator gives; None where it gives those.
    vocab_size: the model's own; padded_vocab_size: the rows of its output layer over all ranks, where that is more.
    model_outputs: `logits`, what a GPTModel returns without labels; `hidden` after `use_hidden_state_head(model)`, which keeps
    no logits. calculate_per_token_loss: as in the model's TransformerConfig.
    """
    return ObjectiveForwardStep(
        objective,
        batch_of or (lambda item: item),
        model_outputs,
        calculate_per_token_loss,
        vocab_size,
        padded_vocab_size or vocab_size,
        temperature,
    )


def prepare_step(
    objective: Objective[Any],
    samples: Sequence[Sample],
    model: Any,
    forward_step: ObjectiveForwardStep,
    *,
    micro_batch_size: int,
) -> list[StepInput]:
    """This rank's micro-batches for one optimizer step, with what the objective makes of the whole global batch.

    samples: those of this data-parallel rank (groups may be spread over ranks), the same on its tensor, pipeline and context
    ranks. model: the chunk or list of chunks that is trained. Runs one forward-only pass where the objective needs the policy's
    log-probs; `old_logprobs` that a sample lacks are taken from it too. Collective. Every rank gets the same number of inputs.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    config = get_model_config(chunks[0])
    ranks = _ranks(len(chunks))
    passes = Passes(ranks, forward_step.head(chunks[-1]), _layout(config, ranks))
    everything, mine = _gather(samples, ranks)
    kept, _ = kept_samples(everything, objective.needs.min_group_size)
    rows = [row for row, index in enumerate(kept) if index in mine]
    plan = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    fillers = _micro_batches_everywhere(len(plan), ranks) - len(plan)
    share = rank_batch(everything, kept, [*plan, *([[]] * fillers)], passes.layout)
    signals: dict[str, Tensor] = {}
    wants_old = objective.needs.old and any(everything[i].old_logprobs is None for i in kept)
    if objective.needs.current or wants_old:
        found = passes.logprobs_of(chunks, share)
        signals |= {"logprobs": found} if objective.needs.current else {}
        signals |= {"old_logprobs": found} if wants_old else {}
    batch, share = passes.batch_of(everything, kept, share, signals)
    items = passes.items(share, objective.prepare(batch, passes.comm))
    for item in items:
        item.scale = _divisor(config, len(items), ranks)
    return items


def _divisor(config: Any, micro_batches: int, ranks: Ranks) -> float:
    """What the schedule, DDP and the finalizer will divide the gradient by.

    Without per-token loss the schedule divides by the number of micro-batches, and DDP averages over the data- and
    context-parallel ranks. With it nobody does, but Megatron's finalizer divides by the sum of the token counts that the loss
    function returns: ours returns 1 per micro-batch, so that this is the same number.
    """
    if config.calculate_per_token_loss and config.finalize_model_grads_func is None:
        return 1.0
    return float(micro_batches * ranks.data_context.size)


def _ranks(chunks: int) -> Ranks:
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return current_ranks(device, 0, chunks if chunks > 1 else None)


def _layout(config: Any, ranks: Ranks) -> Layout:
    multiple = ranks.tensor.size if config.sequence_parallel else 1
    multiple *= 2 * ranks.context.size if ranks.context.size > 1 else 1
    # A schedule that was not told of variable lengths needs one shape for all.
    return Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.pipeline.size > 1)


def _gather(samples: Sequence[Sample], ranks: Ranks) -> tuple[list[Sample], set[int]]:
    """The samples of all data-parallel ranks, in rank order, and which of them are this rank's."""
    parts: list[Any] = [None] * ranks.data.size
    dist.all_gather_object(parts, list(samples), group=ranks.data.group)
    start = sum(len(part) for part in parts[: ranks.data.rank])
    return [sample for part in parts for sample in part], set(range(start, start + len(samples)))


def _micro_batches_everywhere(mine: int, ranks: Ranks) -> int:
    """The largest number of micro-batches of any data-parallel rank: all run that many."""
    counts: list[Any] = [None] * ranks.data.size
    dist.all_gather_object(counts, mine, group=ranks.data.group)
    most = max(1, *counts)
    return -(-most // ranks.pipeline.size) * ranks.pipeline.size if ranks.virtual_pipeline else most
