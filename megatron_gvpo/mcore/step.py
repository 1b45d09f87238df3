"""One trainer rank's optimizer step, from samples to updated weights, for every layout.

    samples, plan --cut--> RankBatch --logprobs--> signals --batch_of--> Batch
    Batch --objective.prepare--> Prepared --step--> StepResult

All methods are collective: every rank of the trainer calls them, in the same order, with the same samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.mcore.batches import Layout, RankBatch
from megatron_gvpo.mcore.forward import (
    HeadSettings,
    StepInput,
    objective_forward_step,
)
from megatron_gvpo.mcore.optimizer import Training, apply_gradients, gradient_norm, zero_gradients
from megatron_gvpo.mcore.passes import Passes
from megatron_gvpo.mcore.startup import Ranks
from megatron_gvpo.objectives.base import Objective, Prepared
from megatron_gvpo.objectives.batch import Batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; numbers are global and the same on every rank, logprobs_T is this rank's [T] float64.

    accepted is False where the gradient was not finite, or where no token was trained: then nothing was updated.
    """

    accepted: bool
    why_not: str
    loss: float
    grad_norm: float
    lr: float
    logprobs_T: Tensor
    metrics: dict[str, float]
    optimizer_seconds: float = 0.0


class Engine(Passes):
    """Runs forward and backward passes of this rank's model chunks through Megatron-Core's schedules."""

    def __init__(self, ranks: Ranks, training: Training, objective: Objective[Any], head: HeadSettings, layout: Layout) -> None:
        super().__init__(ranks, head, layout)
        self.training = training
        self.objective = objective

    def logprobs(self, share: RankBatch, chunks: Sequence[Any] | None = None) -> Tensor:
        """[T] float64 (CPU): log-probs without grad, of the trained model or of `chunks` (a reference of the same layout)."""
        return self.logprobs_of(chunks or self.training.chunks, share)

    def step(self, share: RankBatch, batch: Batch, prepared: Prepared, group_weights_G: Tensor | None = None) -> StepResult:
        """Forward, backward, and the optimizer step, unless the gradient is not finite or there is nothing to train on.

        group_weights_G: a multiplier for each group's loss (GUPO's).
        """
        lr = self.training.lr
        if prepared.denominator == 0:
            empty = torch.zeros(0, dtype=torch.float64)
            result = StepResult(False, "no trained token", 0.0, 0.0, lr, empty, dict(prepared.metrics))
            self.objective.commit(prepared, accepted=False)
            return result
        items = self._forward_backward(share, batch, prepared, group_weights_G)
        started = time.perf_counter()
        norm = gradient_norm(self.training)
        accepted = math.isfinite(norm)
        if accepted:
            apply_gradients(self.training)
        spent = time.perf_counter() - started
        self.objective.commit(prepared, accepted)
        loss, metrics = self.global_numbers(items, batch, prepared)
        why_not = "" if accepted else f"the gradient's norm is {norm}"
        return StepResult(accepted, why_not, loss, norm, lr, self.from_last_stage(items, share), metrics, spent)

    def gradients(
        self, share: RankBatch, batch: Batch, prepared: Prepared, group_weights_G: Tensor | None = None
    ) -> tuple[float, float]:
        """Only (loss, gradient norm): the gradients are finished over all ranks and left in the parameters' `main_grad`."""
        items = self._forward_backward(share, batch, prepared, group_weights_G)
        loss, _ = self.global_numbers(items, batch, prepared)
        return loss, gradient_norm(self.training)

    def _forward_backward(
        self, share: RankBatch, batch: Batch, prepared: Prepared, group_weights_G: Tensor | None
    ) -> list[StepInput]:
        weights_N = None if group_weights_G is None else group_weights_G[batch.sequences.group_N]
        items = self.items(share, prepared, weights_N)
        zero_gradients(self.training)
        self.run(objective_forward_step(self.objective, self.head, lambda item: item), items, self.training.chunks)
        return items
