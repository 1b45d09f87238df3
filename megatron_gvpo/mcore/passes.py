"""Passes over one rank's share of a batch, for every layout: micro-batches in, log-probs out.

All methods are collective: every rank of the trainer calls them, in the same order, with the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore.batches import Layout, RankBatch, common_signals, rank_batch
from megatron_gvpo.mcore.comm import RankComm
from megatron_gvpo.mcore.forward import ForwardStep, HeadSettings, StepInput, logprob_forward_step
from megatron_gvpo.mcore.startup import Ranks
from megatron_gvpo.objectives.base import Prepared
from megatron_gvpo.objectives.batch import Batch, sequence_table


class Passes:
    """How this rank cuts samples, runs Megatron-Core's schedules over them, and shares what the last stage finds."""

    def __init__(self, ranks: Ranks, head: HeadSettings, layout: Layout) -> None:
        self.ranks = ranks
        self.head = head
        self.layout = layout
        self.comm = RankComm(ranks.data_context.group, ranks.device)

    def cut(self, samples: Sequence[Sample], kept: Sequence[int], plan: Sequence[Sequence[Sequence[int]]]) -> RankBatch:
        """This rank's share. plan: micro-batches (lists of indices into `kept`) of every data-parallel rank."""
        return rank_batch(samples, kept, plan[self.ranks.data.rank], self.layout)

    def logprobs_of(self, chunks: Sequence[Any], share: RankBatch) -> Tensor:
        """[T] float64 (CPU): the log-probs of this rank's trained tokens, without grad, on every pipeline stage.

        chunks: this rank's chunks of the model.
        """
        items = self.items(share)
        with torch.no_grad():
            self.run(logprob_forward_step(self.head, entropy=False), items, chunks, forward_only=True)
        return self.from_last_stage(items, share)

    def batch_of(
        self, samples: Sequence[Sample], kept: Sequence[int], share: RankBatch, signals: Mapping[str, Tensor]
    ) -> tuple[Batch, RankBatch]:
        """The objective's view: `signals` ([T] float64, this rank's) added to the samples' own, with every sequence's sums."""
        tokens = share.tokens.with_signals(**signals)
        names = sorted({*common_signals(samples, kept), *signals})
        sums = torch.zeros(len(names), len(kept), dtype=torch.float64)
        for row, name in enumerate(names):
            sums[row].index_add_(0, tokens.sequence_T, tokens.signal(name).to(torch.float64))
        total = self.comm.sum(sums) if names else sums
        by_name = {name: total[row] for row, name in enumerate(names)}
        if kept and all(samples[i].teacher_logprob is not None for i in kept):
            by_name["teacher_logprob"] = torch.tensor([samples[i].teacher_logprob for i in kept], dtype=torch.float64)
        elif "teacher_logprobs" in by_name:
            by_name["teacher_logprob"] = by_name["teacher_logprobs"]
        return Batch(sequence_table(samples, kept, by_name), tokens), replace(share, tokens=tokens)

    def items(self, share: RankBatch, prepared: Prepared | None = None, weights_N: Tensor | None = None) -> list[StepInput]:
        """The inputs of one pass over this rank's micro-batches. weights_N: GUPO's multiplier of each sequence."""
        items = []
        for number, micro in enumerate(share.micro_batches):
            tokens = share.tokens.select(micro.span)
            weight_T = None if weights_N is None else weights_N[tokens.sequence_T]
            teachers = share.teachers[number] if share.teachers else []
            items.append(StepInput(micro.to(self.ranks.device), tokens, prepared, weight_T, teachers))
        return items

    def run(self, forward_step: ForwardStep, items: list[StepInput], chunks: Sequence[Any], forward_only: bool = False) -> None:
        """Megatron-Core's schedule for this layout, once over `items`; results are put into them."""
        iterators = [iter(items) for _ in chunks]
        several = len(chunks) > 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=list(chunks) if several else chunks[0],
            num_microbatches=len(items),
            # With pipeline stages the model is built for variable lengths: these two only have to be positive.
            seq_length=max(item.micro.tokens_BS.size(1) for item in items) * self.layout.context_size,
            micro_batch_size=max(item.micro.tokens_BS.size(0) for item in items),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def from_last_stage(self, items: list[StepInput], share: RankBatch) -> Tensor:
        """[T] float64 on CPU: the log-probs that the last stage found, on every stage."""
        if self.ranks.is_last_stage:
            values = torch.cat([_found(item).to(torch.float64) for item in items]).to(self.ranks.device)
        else:
            values = torch.zeros(len(share.tokens), dtype=torch.float64, device=self.ranks.device)
        self.broadcast_from_last_stage(values)
        return values.cpu()

    def global_numbers(self, items: list[StepInput], batch: Batch, prepared: Prepared) -> tuple[float, dict[str, float]]:
        """The loss and the metrics of the whole batch: sums over tokens from the last stages, reduced and shared with all."""
        names = sorted(items[0].metric_sums) if self.ranks.is_last_stage else []
        shared: list[Any] = [names]
        if self.ranks.pipeline.size > 1:
            last = dist.get_process_group_ranks(self.ranks.pipeline.group)[-1]
            dist.broadcast_object_list(shared, src=last, group=self.ranks.pipeline.group, device=self.ranks.device)
        names = shared[0]
        local = [sum(i.loss_sum for i in items), *(sum(i.metric_sums.get(n, 0.0) for i in items) for n in names)]
        total = self.comm.sum(torch.tensor(local, dtype=torch.float64)).to(self.ranks.device)
        self.broadcast_from_last_stage(total)
        loss_sum, *sums = total.tolist()
        if prepared.loss_sum is not None:
            loss_sum = prepared.loss_sum
        tokens = max(batch.total_tokens, 1)
        metrics = {**prepared.metrics, **{n: s / tokens for n, s in zip(names, sums, strict=True)}}
        return loss_sum / prepared.denominator, metrics

    def broadcast_from_last_stage(self, values: Tensor) -> None:
        """Overwrite `values` on every stage by the last stage's."""
        if self.ranks.pipeline.size > 1:
            dist.broadcast(
                values, src=dist.get_process_group_ranks(self.ranks.pipeline.group)[-1], group=self.ranks.pipeline.group
            )


def _found(item: StepInput) -> Tensor:
    if item.logprobs_T is None:
        raise RuntimeError("the last pipeline stage's loss function did not run for a micro-batch")
    return item.logprobs_T
