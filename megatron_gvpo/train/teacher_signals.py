"""What teachers say of a batch, on every rank: from models beside the student, or from what the servers sent with the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_gvpo.config.needs import TeacherSignal
from megatron_gvpo.config.schema import TeacherSection
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.logprobs import TopKTeacher
from megatron_gvpo.mcore.batches import MicroBatch, RankBatch
from megatron_gvpo.mcore.teacher import ColocatedTeacher, TeacherPass
from megatron_gvpo.mcore.teacher_rows import RowTeacher


class TeacherSignals:
    """Adds to a rank's share what the objective asks of a teacher.

    wanted: the objective's need. colocated: by domain, "" for all other prompts; empty where teachers are served. ids: how many
    ids a served teacher and the student share. last_stage: whether this rank compares distributions.
    """

    def __init__(
        self,
        section: TeacherSection,
        wanted: TeacherSignal,
        colocated: Mapping[str, ColocatedTeacher],
        *,
        ids: int,
        last_stage: bool,
    ) -> None:
        self._section = section
        self._distributions = wanted in ("topk", "full")
        self._colocated = colocated
        self._ids = ids
        self._last_stage = last_stage

    def add(self, samples: Sequence[Sample], kept: Sequence[int], share: RankBatch) -> tuple[RankBatch, dict[str, Tensor]]:
        """(the share with its teachers, signals [T] to be added to its tokens). Collective.

        ValueError, naming the sample, where a served top-k is missing.
        """
        if self._colocated:
            return self._from_models(samples, kept, share)
        if self._distributions and self._last_stage:
            rows = [[self._from_samples(samples, kept, share, micro)] for micro in share.micro_batches]
            return RankBatch(share.micro_batches, share.tokens, rows), {}
        return share, {}

    def _from_models(
        self, samples: Sequence[Sample], kept: Sequence[int], share: RankBatch
    ) -> tuple[RankBatch, dict[str, Tensor]]:
        domains = [self._domain(samples[i]) for i in kept]
        logprobs_T = torch.full((len(share.tokens),), torch.nan, dtype=torch.float64)
        teachers: list[list[RowTeacher]] = [[] for _ in share.micro_batches]
        for domain in sorted(set(domains)):  # the same on every rank, which all take part in the pass
            mine_N = torch.tensor([name == domain for name in domains])
            mine_T = mine_N[share.tokens.sequence_T]
            found = self._ask(self._colocated[domain], share, [_rows_of(micro, mine_T) for micro in share.micro_batches])
            logprobs_T = torch.where(mine_T, found.logprobs_T, logprobs_T)
            for rows, teacher in zip(teachers, found.teachers or [], strict=False):
                rows.append(teacher)
        compared = teachers if self._distributions and self._last_stage else None
        return RankBatch(share.micro_batches, share.tokens, compared), {"teacher_logprobs": logprobs_T}

    def _ask(self, teacher: ColocatedTeacher, share: RankBatch, active: list[Tensor]) -> TeacherPass:
        if not self._distributions:
            return TeacherPass(teacher.logprobs(share))
        if self._section.signal == "topk":
            return teacher.top_k(share, active, min(self._section.top_k, teacher.ids))
        return teacher.full(share, active)

    def _domain(self, sample: Sample) -> str:
        """The name of the teacher that speaks for a sample."""
        domain = str(sample.meta.get("domain", ""))
        if domain in self._colocated:
            return domain
        if "" not in self._colocated:
            raise ValueError(f"a sample of group {sample.group}: teacher.by_domain has no teacher for its domain {domain!r}")
        return ""

    def _from_samples(self, samples: Sequence[Sample], kept: Sequence[int], share: RankBatch, micro: MicroBatch) -> RowTeacher:
        """The served top-k of a micro-batch's rows. Rows without a trained token have none, and are not asked for."""
        sequence_T, position_T = share.tokens.sequence_T[micro.span], share.tokens.position_T[micro.span]
        count, width = micro.targets_R.numel(), self._section.top_k
        ids_RK = torch.full((count, width), -1, dtype=torch.int64)
        logprobs_RK = torch.zeros(count, width, dtype=torch.float32)
        for row in sequence_T.unique().tolist():
            sample = samples[kept[row]]
            if sample.teacher_top is None:
                raise ValueError(
                    f"a sample of group {sample.group} comes without the teacher's top-k, which samples files do not hold: "
                    "replay it with a colocated teacher"
                )
            mine_T = sequence_T == row
            position_t = position_T[mine_T].numpy()
            rows_t = micro.rows_T[mine_T]
            ids_RK[rows_t] = torch.from_numpy(sample.teacher_top.ids[position_t]).long()
            logprobs_RK[rows_t] = torch.from_numpy(sample.teacher_top.logprobs[position_t].copy())
        # Ids that the student does not have (an aligned vocabulary) go to the tail: an unused place.
        ids_RK.masked_fill_(ids_RK >= self._ids, -1)
        active_R = _rows_of(micro, torch.ones(len(share.tokens), dtype=torch.bool))
        return RowTeacher(TopKTeacher(ids_RK, logprobs_RK), active_R, self._ids)


def _rows_of(micro: MicroBatch, mine_T: Tensor) -> Tensor:
    """[R] bool: the head rows of those of the micro-batch's trained tokens that are marked in the share's `mine_T`."""
    active_R = torch.zeros(micro.targets_R.numel(), dtype=torch.bool)
    active_R[micro.rows_T] = mine_T[micro.span]
    return active_R
