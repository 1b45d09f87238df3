"""What token-level distillation on sampled tokens shares: the log-ratio to the teacher, and pooled sums over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.config.objectives import ImportanceConfig
from megatron_gvpo.objectives.base import Comm
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.importance import importance_weights_T


@dataclass(frozen=True)
class LogRatio:
    """Delta = log p - log q of this rank's sampled tokens, and the pooled statistics of the global batch.

    delta_T: [T] float64, 0 where inactive. active_T: [T] bool, the tokens that have a teacher value (NaN is none; a Delta of 0
    is active). weights_T: importance weights or None. count: active tokens of the whole batch.
    metrics: `tv` is the unbiased total-variation estimate of arXiv 2609.08341, the mean over active tokens of
    (1 - e^Delta)_+ = -expm1(min(Delta, 0)), weighted on data of another policy.
    """

    delta_T: Tensor
    active_T: Tensor
    weights_T: Tensor | None
    count: int
    metrics: dict[str, float]


def log_ratio(config: ImportanceConfig, batch: Batch, comm: Comm) -> LogRatio:
    """Delta and its statistics: sums and counts are pooled over micro-batches and ranks before any division."""
    teacher_T = batch.tokens.signal("teacher_logprobs")
    current_T = batch.tokens.signal("logprobs")
    active_T = ~teacher_T.isnan()
    delta_T = torch.where(active_T, teacher_T - current_T, 0.0)
    weights_T = importance_weights_T(config, batch, towards="logprobs")
    tv_T = -torch.expm1(delta_T.clamp(max=0.0))
    if weights_T is not None:
        tv_T = tv_T * weights_T
    sums = torch.stack(
        [
            active_T.to(delta_T.dtype).sum(),
            torch.where(active_T, tv_T, 0.0).sum(),
            delta_T.sum(),
            delta_T.abs().sum(),
            (delta_T > 0).to(delta_T.dtype).sum(),
        ]
    )
    count, tv, delta, magnitude, raised = comm.sum(sums).tolist()
    n = max(count, 1.0)
    metrics = {
        "tv": tv / n,
        "teacher_log_ratio": delta / n,
        "teacher_log_ratio_abs": magnitude / n,
        "pushed_up": raised / n,
        "teacher_coverage": count / max(batch.total_tokens, 1),
    }
    return LogRatio(delta_T, active_T, weights_T, round(count), metrics)
