"""One batch of rollouts turned into optimizer steps: what the objective asks for is computed, and the objective decides.

Runs on every rank, with the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.microbatch import plan_micro_batches
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore.batches import RankBatch
from megatron_gvpo.mcore.gupo_step import GroupWeigher, GroupWeights
from megatron_gvpo.mcore.step import Engine, StepResult
from megatron_gvpo.objectives.base import Objective
from megatron_gvpo.objectives.batch import Batch, kept_samples
from megatron_gvpo.train.clock import StepClock
from megatron_gvpo.train.teacher_signals import TeacherSignals


@dataclass
class Learned:
    """What the optimizer steps on one batch did. first_logprobs_T: the trainer's log-probs before the first of them."""

    results: list[StepResult]
    batch: Batch | None
    first_logprobs_T: Tensor
    dropped: dict[str, int]
    metrics: dict[str, float]


class Learner:
    """Applies an objective to batches of samples through an engine."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        objective: Objective[Any],
        reference: Sequence[Any] | None,
        teacher: TeacherSignals | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.objective = objective
        self.reference = reference
        self.teacher = teacher
        self.weigher = GroupWeigher(engine, config.gupo, config.train.seed) if config.gupo.enabled else None

    def learn(self, samples: Sequence[Sample], step: int, clock: StepClock) -> Learned:
        """`train.optimizer_steps` optimizer steps on the whole batch of the run's `step`."""
        samples, dropped = self._admit(samples)
        kept, rejected = kept_samples(samples, self.objective.needs.min_group_size)
        for drop in rejected:
            dropped[drop.reason] = dropped.get(drop.reason, 0) + 1
        if not kept:
            return Learned([], None, torch.zeros(0, dtype=torch.float64), dropped, {})
        share = self.cut(samples, kept)
        taught: dict[str, Tensor] = {}
        if self.teacher is not None:
            with clock.part("teacher"):
                share, taught = self.teacher.add(samples, kept, share)
        weigher = self.weigher if self.weigher is not None and self.weigher.due(step) else None
        results: list[StepResult] = []
        fixed: dict[str, Tensor] = {}
        batch: Batch | None = None
        first = torch.zeros(0, dtype=torch.float64)
        weights: GroupWeights | None = None
        for number in range(self.config.train.optimizer_steps):
            with clock.part("logprobs"):
                hidden = weigher.collect(share) if weigher else None
                current_T = hidden.logprobs_T if hidden else None
                if number == 0:
                    fixed = taught | self._fixed_signals(samples, kept, share, current_T)
                signals = self._signals(share, fixed, number == 0, current_T)
                batch, whole = self.engine.batch_of(samples, kept, share, signals)
            if weigher and hidden:
                with clock.part("gupo"):
                    weights = weigher.weigh(hidden, batch, step, number)
            with clock.part("forward_backward"):
                prepared = self.objective.prepare(batch, self.engine.comm)
                result = self.engine.step(whole, batch, prepared, weights.multipliers_G if weights else None)
            clock.move("forward_backward", "optimizer", result.optimizer_seconds)
            if number == 0:
                first = result.logprobs_T
            results.append(result)
        metrics = {
            "tokens/trained": float(batch.total_tokens if batch else 0),
            "batch/groups": float(batch.sequences.groups if batch else 0),
            "batch/sequences": float(len(kept)),
            "batch/micro_batches": float(len(share.micro_batches)),
            **(weights.metrics if weights else {}),
        }
        return Learned(results, batch, first, dropped, metrics)

    def cut(self, samples: Sequence[Sample], kept: Sequence[int]) -> RankBatch:
        """This rank's share of the kept samples."""
        train, ranks = self.config.train, self.engine.ranks
        plan = plan_micro_batches(
            [len(samples[i]) for i in kept],
            ranks.data.size,
            max_tokens=None if train.micro_batch_size else train.micro_batch_tokens,
            max_samples=train.micro_batch_size or None,
            pad_multiple=self.engine.layout.pad_multiple,
            # Interleaved schedules want a multiple of the number of stages.
            count_multiple=ranks.pipeline.size if ranks.virtual_pipeline else 1,
            groups=[samples[i].group for i in kept] if self.config.gupo.enabled else None,
        )
        return self.engine.cut(samples, kept, plan)

    def _admit(self, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, int]]:
        """Samples that may be trained on; the others are counted by reason."""
        dropped: dict[str, int] = {}
        admitted = []
        for sample in samples:
            if sample.finish_reason == "abort":
                reason = "aborted"
            elif sample.finish_reason == "length" and self.config.rollout.truncated == "drop":
                reason = "truncated"
            else:
                admitted.append(sample)
                continue
            dropped[reason] = dropped.get(reason, 0) + 1
        return admitted, dropped

    @property
    def _first_pass_cancels(self) -> bool:
        """Whether current minus old log-probs, which is zero at the first step, is all that the objective uses of them.

        With one optimizer step per rollout batch the pass that computes them then changes nothing but the logged variances, for
        which the server's log-probs stand in.
        """
        return self.config.train.optimizer_steps == 1 and self.objective.needs.old_cancels

    def _fixed_signals(
        self, samples: Sequence[Sample], kept: Sequence[int], share: RankBatch, current_T: Tensor | None
    ) -> dict[str, Tensor]:
        """What stays the same over the batch's optimizer steps: log-probs of the old policy and of the reference.

        current_T: the policy's, where a pass has found them already.
        """
        needs = self.objective.needs
        fixed: dict[str, Tensor] = {}
        if needs.old or needs.current:
            have_rollout = all(samples[i].rollout_logprobs is not None for i in kept)
            if current_T is not None:
                fixed["old_logprobs"] = current_T
            elif self._first_pass_cancels and have_rollout:
                fixed["old_logprobs"] = share.tokens.signal("rollout_logprobs")
            else:
                fixed["old_logprobs"] = self.engine.logprobs(share)
        if needs.reference:
            if self.reference is None:
                raise RuntimeError(f"objective {self.objective.name!r} needs a reference model, and none was loaded")
            fixed["ref_logprobs"] = self.engine.logprobs(share, self.reference)
        return fixed

    def _signals(
        self, share: RankBatch, fixed: dict[str, Tensor], first_step: bool, current_T: Tensor | None
    ) -> dict[str, Tensor]:
        if not self.objective.needs.current:
            return fixed
        if first_step:
            return {**fixed, "logprobs": fixed["old_logprobs"]}
        return {**fixed, "logprobs": self.engine.logprobs(share) if current_T is None else current_T}


def without_trainer_signals(sample: Sample) -> Sample:
    """A replayed sample as it came from the server: what a trainer computed then is computed anew."""
    return replace(sample, logprobs=None, old_logprobs=None, ref_logprobs=None)
