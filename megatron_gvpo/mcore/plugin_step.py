"""One optimizer step in a loop that is not this project's: samples in, the schedule's inputs out, and what the step did.

`prepare_step` and `PreparedStep.finish` are collective over all ranks of the job.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore.batches import Layout, RankBatch, rank_batch
from megatron_gvpo.mcore.comm import RankComm
from megatron_gvpo.mcore.forward import logprob_forward_step
from megatron_gvpo.mcore.gradient_scale import GradientScale, gradient_scale
from megatron_gvpo.mcore.passes import Passes
from megatron_gvpo.mcore.plugin import ObjectiveForwardStep, device_of
from megatron_gvpo.mcore.plugin_checks import agree, check_samples, trouble_of
from megatron_gvpo.mcore.startup import Ranks, current_ranks
from megatron_gvpo.objectives.base import Prepared
from megatron_gvpo.objectives.batch import Batch, Dropped, SequenceTable, kept_samples

log = logging.getLogger(__name__)

Chunks = Sequence[Any]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step was taken on; the same on every rank.

    loss, metrics: of the whole global batch. sequences: every kept sample's scalars; `sequences.sum_of("logprobs")` is the
    log-prob of each response under the weights that the step started from.
    """

    loss: float
    metrics: dict[str, float]
    sequences: SequenceTable


class PreparedStep:
    """One optimizer step's inputs on this rank; made by `prepare_step`.

    inputs: one `StepInput` a micro-batch, as many on every data-parallel rank. dropped: samples that take no part, with the
    reason; `index` counts the samples of all data-parallel ranks, in rank order. empty: nothing is left to train on; the
    gradients will be exactly zero, and the optimizer step should be left out.
    """

    def __init__(
        self,
        forward_step: ObjectiveForwardStep,
        passes: Passes,
        chunks: Chunks,
        share: RankBatch,
        batch: Batch,
        prepared: Prepared,
        dropped: list[Dropped],
    ) -> None:
        self.dropped = dropped
        self.batch = batch
        self.prepared = prepared
        self.empty = prepared.denominator == 0
        # With nothing to train on, any denominator gives zero; 0 itself would give NaN.
        self.inputs = passes.items(share, replace(prepared, denominator=1.0) if self.empty else prepared)
        scale = _scale(forward_step, chunks, len(self.inputs), passes.ranks)
        for item in self.inputs:
            item.scale, item.loss_divisor = scale.total, scale.loss
        self._objective = forward_step.objective
        self._passes = passes
        self._chunks = len(chunks)
        self._share = share
        self._finished = False

    def schedule(self) -> dict[str, Any]:
        """The arguments of Megatron's schedule that depend on the data: data_iterator, num_microbatches, seq_length and
        micro_batch_size. With a data iterator of your own, replace the first.
        """
        iterators = [iter(self.inputs) for _ in range(self._chunks)]
        return {
            "data_iterator": iterators if self._chunks > 1 else iterators[0],
            "num_microbatches": len(self.inputs),
            "seq_length": max(i.micro.tokens_BS.size(1) for i in self.inputs) * self._passes.ranks.context.size,
            "micro_batch_size": max(i.micro.tokens_BS.size(0) for i in self.inputs),
        }

    def finish(self, accepted: bool = True) -> StepReport:
        """After the optimizer step: tells the objective of it, and returns the loss and the metrics of the global batch.

        accepted: whether the optimizer took the step (a non-finite gradient is usually skipped): objectives that remember
        something (`tv_opd`) do so for accepted steps only. RuntimeError when called twice, or before the schedule ran.
        """
        if self._finished:
            raise RuntimeError("finish() was called before for this step: the objective would remember it twice")
        self._finished = True
        self._objective.commit(self.prepared, accepted and not self.empty)
        if self.empty:
            return StepReport(0.0, dict(self.prepared.metrics), self.batch.sequences)
        loss, metrics = self._passes.global_numbers(self.inputs, self.batch, self.prepared)
        found_T = self._passes.from_last_stage(self.inputs, self._share)
        sums_N = torch.zeros(len(self.batch.sequences), dtype=torch.float64)
        sums_N.index_add_(0, self._share.tokens.sequence_T, found_T)
        sums = {**self.batch.sequences.sums, "logprobs": self._passes.comm.sum(sums_N)}
        return StepReport(loss, metrics, replace(self.batch.sequences, sums=sums))


def prepare_step(
    forward_step: ObjectiveForwardStep, micro_batches: Sequence[Sequence[Sample]], model: Any, *, single_step: bool = False
) -> PreparedStep:
    """This rank's micro-batches for one optimizer step, with what the objective makes of the whole global batch.

    micro_batches: the samples of this data-parallel rank, cut as its loop shall run them; groups may be spread over micro-batches
        and ranks in any way. The tensor-, pipeline- and context-parallel ranks that work on them must all give the same ones.
        Ranks with fewer micro-batches than others get empty ones, which add exactly nothing.
    model: the wrapped chunk, or the list of chunks, that is passed to the schedule.
    single_step: the samples serve one optimizer step only. What uses current and old log-probs through their difference alone
        (GVPO) then takes the recorded rollout log-probs for both, and one forward pass is saved.

    Where the objective asks for the policy's log-probs, one forward-only pass finds them (in eval mode, so without dropout). It
    also fills in the `old_logprobs` of samples that have none, in place: a later step on the same samples compares with this one.
    Collective over all ranks. ValueError, the same one line on every rank, for input that cannot be right.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError("Megatron-Core's process groups do not exist yet: call parallel_state.initialize_model_parallel() first")
    agree(trouble_of(forward_step, chunks, micro_batches), micro_batches)
    config = get_model_config(chunks[-1])
    ranks = current_ranks(device_of(chunks[-1]), 0, len(chunks) if len(chunks) > 1 else None)
    passes = Passes(ranks, forward_step.head(chunks[-1]), _layout(config, ranks))
    samples, plan = _gather(micro_batches, ranks)
    check_samples(samples, forward_step.objective.needs, forward_step.vocab_size, forward_step.objective.name)

    kept, dropped = kept_samples(samples, forward_step.objective.needs.min_group_size)
    row_of = {index: row for row, index in enumerate(kept)}
    share = rank_batch(samples, kept, [[row_of[i] for i in members if i in row_of] for members in plan], passes.layout)
    signals = _policy_signals(forward_step, passes, chunks, share, samples, kept, single_step)
    if "old_logprobs" in signals and not single_step:
        _remember_old([s for micro in micro_batches for s in micro], signals["old_logprobs"], share, ranks, plan, row_of)
    batch, share = passes.batch_of(samples, kept, share, signals)
    return PreparedStep(forward_step, passes, chunks, share, batch, forward_step.objective.prepare(batch, passes.comm), dropped)


def _gather(micro_batches: Sequence[Sequence[Sample]], ranks: Ranks) -> tuple[list[Sample], list[list[int]]]:
    """The samples of all data-parallel ranks, in rank order, and this rank's micro-batches as lists of indices into them.

    All ranks get as many micro-batches, the interleaved schedule a multiple of the number of stages: the rest are empty.
    """
    parts: list[Any] = [None] * ranks.data.size
    dist.all_gather_object(parts, [list(micro) for micro in micro_batches], group=ranks.data.group)
    samples = [sample for part in parts for micro in part for sample in micro]
    start = sum(len(micro) for part in parts[: ranks.data.rank] for micro in part)
    plan: list[list[int]] = []
    for micro in parts[ranks.data.rank]:
        plan.append(list(range(start, start + len(micro))))
        start += len(micro)
    most = max(1, *(len(part) for part in parts)) if len(parts) > 1 else max(1, len(plan))
    if ranks.virtual_pipeline:
        most = -(-most // ranks.pipeline.size) * ranks.pipeline.size
    return samples, plan + [[] for _ in range(most - len(plan))]


def _policy_signals(
    forward_step: ObjectiveForwardStep,
    passes: Passes,
    chunks: Chunks,
    share: RankBatch,
    samples: Sequence[Sample],
    kept: Sequence[int],
    single_step: bool,
) -> dict[str, Tensor]:
    """The current and old log-probs [T] that the objective asks for, of this rank's tokens."""
    needs = forward_step.objective.needs
    lacks_old = needs.old and any(samples[i].old_logprobs is None for i in kept)
    if not (needs.current or lacks_old):
        return {}
    if single_step and needs.old_cancels and lacks_old and all(samples[i].rollout_logprobs is not None for i in kept):
        rollout_T = share.tokens.signal("rollout_logprobs")
        return {"logprobs": rollout_T, "old_logprobs": rollout_T}
    found_T = _policy_logprobs(forward_step, passes, chunks, share)
    signals = {"logprobs": found_T} if needs.current else {}
    if lacks_old:
        tokens = zip(share.tokens.sequence_T.tolist(), share.tokens.position_T.tolist(), found_T.tolist(), strict=True)
        recorded = [(samples[kept[row]].old_logprobs, position, found) for row, position, found in tokens]
        old = [found if values is None else values[position] for values, position, found in recorded]
        signals["old_logprobs"] = torch.tensor(old, dtype=torch.float64)
    return signals


def _policy_logprobs(forward_step: ObjectiveForwardStep, passes: Passes, chunks: Chunks, share: RankBatch) -> Tensor:
    """[T] float64: the trained tokens' log-probs by one forward-only pass without dropout."""
    items = passes.items(share)
    with torch.no_grad(), _eval_mode(chunks):
        passes.run(logprob_forward_step(passes.head, False, forward_step.call), items, chunks, forward_only=True)
    return passes.from_last_stage(items, share)


@contextmanager
def _eval_mode(chunks: Chunks) -> Iterator[None]:
    """Every module in eval mode, and afterwards in the mode that it had."""
    trained = [module for chunk in chunks for module in chunk.modules() if module.training]
    config = get_model_config(chunks[0])
    if trained and (config.hidden_dropout or config.attention_dropout):
        _warn_of_dropout(config.hidden_dropout, config.attention_dropout)
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def _warn_of_dropout(hidden: float, attention: float) -> None:
    if "dropout" in _warned:
        return
    _warned.add("dropout")
    log.warning(
        "hidden_dropout is %g and attention_dropout %g: log-probs of the loss differ from those of the policy that samples, by "
        "noise; set both to 0 in the TransformerConfig",
        hidden,
        attention,
    )


_warned: set[str] = set()


def _remember_old(
    mine: Sequence[Sample], old_T: Tensor, share: RankBatch, ranks: Ranks, plan: Sequence[Sequence[int]], row_of: dict[int, int]
) -> None:
    """Write `old_T` into this rank's own samples that have none; NaN where a token is masked."""
    # Under context parallelism every rank holds some of a sample's tokens.
    everyone = RankComm(ranks.context.group, ranks.device).gather_tokens(old_T, share.tokens)
    lacking: dict[int, list[float]] = {}
    for sample, index in zip(mine, [i for members in plan for i in members], strict=True):
        if sample.old_logprobs is None and index in row_of:
            lacking[row_of[index]] = sample.old_logprobs = [math.nan] * len(sample.response_ids)
    for value, row, position in zip(*(values.tolist() for values in everyone), strict=True):
        if row in lacking:
            lacking[row][position] = value


def _layout(config: Any, ranks: Ranks) -> Layout:
    multiple = ranks.tensor.size if config.sequence_parallel else 1
    multiple *= 2 * ranks.context.size if ranks.context.size > 1 else 1
    # A schedule that was not told of variable lengths needs one shape for all.
    return Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.pipeline.size > 1)


def _scale(forward_step: ObjectiveForwardStep, chunks: Chunks, micro_batches: int, ranks: Ranks) -> GradientScale:
    chunk = chunks[-1]
    return gradient_scale(chunk, get_model_config(chunk), micro_batches, ranks.data_context.size, forward_step.gradient_reduction)
