"""A teacher beside the student: a frozen model in the same layout, whose hidden states stand for its distributions.

Its logits are formed chunk by chunk where the student's are, so nothing of the vocabulary's size is kept or sent. The teacher has
its own sizes; its head is cut at the student's vocabulary boundaries, since the padded sizes of two models of one family may
differ, so that each tensor-parallel rank holds the same ids of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.schema import ParallelSection
from megatron_gvpo.logprobs import HiddenTeacher, Teacher, TopKTeacher, linear_token_logprobs, linear_top_k
from megatron_gvpo.mcore.batches import Layout, RankBatch
from megatron_gvpo.mcore.forward import ForwardStep, HeadSettings, LossFunc, StepInput
from megatron_gvpo.mcore.head import head_of
from megatron_gvpo.mcore.hf_folder import HfFolder
from megatron_gvpo.mcore.model import facts_of, output_shard, unwrapped
from megatron_gvpo.mcore.passes import Passes
from megatron_gvpo.mcore.startup import Ranks
from megatron_gvpo.mcore.teacher_rows import RowTeacher


@dataclass(frozen=True)
class TeacherPass:
    """What one forward pass of the teacher found for a share.

    logprobs_T: [T] float64 (CPU) of the trained tokens, on every stage; NaN for an id that the teacher does not have.
    teachers: for each micro-batch, on the last stage only, what was asked for.
    """

    logprobs_T: Tensor
    teachers: list[RowTeacher] | None = None


class ColocatedTeacher:
    """A frozen model of the student's layout. All methods are collective, with the student's own shares.

    chunks: the teacher's, filled, with hidden-state heads. student: the student's head; its temperature divides the teacher's
    logits too, so any temperature is exact. folder: the teacher's Hugging Face folder. offload: its weights live in CPU memory
    between passes (its head, on the last stage, does not: it is needed until the student's backward pass is done).
    """

    def __init__(
        self, chunks: Sequence[Any], ranks: Ranks, layout: Layout, student: HeadSettings, folder: str | Path, *, offload: bool
    ) -> None:
        self._chunks = list(chunks)
        for chunk in self._chunks:
            chunk.requires_grad_(False)
        self.ids = min(student.shard.size, facts_of(chunks[-1]).shape.vocab)
        self._settings = replace(student, shard=replace(student.shard, size=self.ids), model_outputs="hidden")
        self._passes = Passes(ranks, self._settings, layout)
        self._offload = offload
        self._head_VH = self._recut_head(chunks[-1], folder) if ranks.is_last_stage else None
        self._park()

    def logprobs(self, share: RankBatch) -> Tensor:
        """[T] float64 (CPU): the sampled tokens' log-probs alone."""
        return self._pass(share, None).logprobs_T

    def full(self, share: RankBatch, active: Sequence[Tensor]) -> TeacherPass:
        """Whole distributions, as hidden states. active: for each micro-batch, the rows ([R] bool) this teacher speaks for."""
        return self._pass(share, active, lambda hidden_RH: HiddenTeacher(hidden_RH, self._head()))

    def top_k(self, share: RankBatch, active: Sequence[Tensor], k: int) -> TeacherPass:
        """The k likeliest ids of each row, at the run's temperature; the rest of the vocabulary is one bucket."""

        def of(hidden_RH: Tensor) -> TopKTeacher:
            s = self._settings
            found = linear_top_k(
                hidden_RH,
                self._head(),
                k,
                s.shard,
                temperature=s.temperature,
                chunk_tokens=s.chunk_tokens,
                sequence_parallel=s.sequence_parallel,
            )
            return TopKTeacher(found.ids, found.logprobs)

        return self._pass(share, active, of)

    def _pass(
        self, share: RankBatch, active: Sequence[Tensor] | None, teacher_of: Callable[[Tensor], Teacher] | None = None
    ) -> TeacherPass:
        items = self._passes.items(share)
        found: list[Teacher] = []

        def keep(hidden_RH: Tensor) -> None:
            if teacher_of is not None:
                found.append(teacher_of(hidden_RH))

        with torch.no_grad(), self._present():
            self._passes.run(self._forward_step(keep), items, self._chunks, forward_only=True)
        logprobs_T = self._passes.from_last_stage(items, share)
        if active is None or not self._passes.ranks.is_last_stage:
            return TeacherPass(logprobs_T)
        device = self._passes.ranks.device
        rows = [RowTeacher(teacher, active_R.to(device), self.ids) for teacher, active_R in zip(found, active, strict=True)]
        return TeacherPass(logprobs_T, rows)

    def _forward_step(self, keep: Callable[[Tensor], None]) -> ForwardStep:
        """Forward-only: sampled log-probs into each `StepInput`; the rows of hidden states are given to `keep`."""

        def forward_step(data_iterator: Iterator[StepInput], model: Any) -> tuple[Tensor, LossFunc]:
            item = next(data_iterator)
            output = model(item.micro.tokens_BS, item.micro.positions_BS, None)

            def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
                hidden_RH = output.transpose(0, 1).reshape(-1, output.size(-1))
                keep(hidden_RH)
                item.logprobs_T = self._sampled(hidden_RH, item)
                return item.logprobs_T

            return output, collect

        return forward_step

    def _sampled(self, hidden_RH: Tensor, item: StepInput) -> Tensor:
        s, targets_R = self._settings, item.micro.targets_R
        strange_R = targets_R >= self.ids
        found = linear_token_logprobs(
            hidden_RH,
            self._head(),
            targets_R.masked_fill(strange_R, -1),
            s.shard,
            temperature=s.temperature,
            chunk_tokens=s.chunk_tokens,
            sequence_parallel=s.sequence_parallel,
        )
        return found.logprobs.masked_fill(strange_R, math.nan)[item.micro.rows_T]

    def _head(self) -> Tensor:
        assert self._head_VH is not None, "only the last pipeline stage has a head"
        return self._head_VH

    def _recut_head(self, chunk: Any, folder: str | Path) -> Tensor:
        """[shard.width, H']: the teacher's output layer for the ids that this rank holds of the student's, in the chunk's dtype.

        The chunk's own where both have the same boundaries, else read from the folder again. Rows of ids that the teacher does
        not have are zeros, which no one looks at: distributions are compared over the common ids.
        """
        shard, ranks = self._settings.shard, self._passes.ranks
        model, shape, own = unwrapped(chunk), facts_of(chunk).shape, output_shard(chunk, ranks)
        layer: Any = head_of(model)
        own_VH: Any = model.shared_embedding_or_output_weight() if shape.tied else layer.weight
        if (own.start, own.stop) == (shard.start, shard.stop):
            return own_VH.detach().clone() if self._offload else own_VH.detach()
        whole_VH = HfFolder(folder, shape).tensor("model.embed_tokens.weight" if shape.tied else "lm_head.weight")
        head_VH = torch.zeros(shard.width, whole_VH.size(1), dtype=own_VH.dtype, device=ranks.device)
        stop = min(shard.stop, shape.vocab)
        if stop > shard.start:
            head_VH[: stop - shard.start] = whole_VH[shard.start : stop].to(head_VH)
        if not shape.tied:
            layer.weight.data = head_VH.new_empty(0)  # nothing multiplies by it: the rows above stand in its place
        return head_VH

    @contextmanager
    def _present(self) -> Iterator[None]:
        """The weights on the rank's device, for a pass."""
        if self._offload:
            self._move(self._passes.ranks.device)
        try:
            yield
        finally:
            self._park()

    def _park(self) -> None:
        if self._offload:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.data.to(device)


def teacher_parallel(parallel: ParallelSection, layers: int) -> ParallelSection:
    """The student's layout for a teacher of `layers` layers: split evenly over the stages where that goes."""
    if layers % (parallel.pipeline * (parallel.virtual_pipeline or 1)) == 0:
        return parallel.model_copy(update={"first_stage_layers": None, "last_stage_layers": None})
    return parallel
