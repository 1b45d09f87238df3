"""What an objective would do with a batch of samples: the module behind `megatron-gvpo explain`.

It runs the objective's own `prepare` and `loss`, as training does, in float64 on one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.objectives.base import LocalComm, Objective
from megatron_gvpo.objectives.batch import SampleLike, whole_batch
from megatron_gvpo.objectives.gradients import token_gradients
from megatron_gvpo.objectives.registry import create_objective


class ExplainError(ValueError):
    """The samples are not such as this objective can be asked about; the text is one line."""


def explain(
    samples: Sequence[SampleLike], name: str, options: Mapping[str, Any], lines: Sequence[int] | None = None
) -> dict[str, Any]:
    """Loss, gradient of every response token, metrics and drops, as JSON values.

    lines: each sample's line in its file, counted from 1; 1, 2, 3, ... when None. Dropped samples keep their place with
    gradients of 0. `coefficient` is the mean gradient of a sample's unmasked tokens: dLoss/dlp of the whole response where the
    objective treats its tokens alike. Raises ObjectiveConfigError for a wrong name or option, ExplainError for samples that
    lack a signal, and for objectives that need whole distributions.
    """
    objective = create_objective(name, options)
    lines = list(range(1, len(samples) + 1)) if lines is None else lines
    _check_answerable(objective, samples, lines)
    batch, dropped = whole_batch(samples, objective.needs.min_group_size)
    prepared = objective.prepare(batch, LocalComm())
    gradient_T, terms = token_gradients(objective, batch, prepared, batch.tokens.signal("logprobs"))
    scale = 1.0 / prepared.denominator if prepared.denominator else 0.0
    loss_sum = float(terms.loss_T.detach().sum()) if prepared.loss_sum is None else prepared.loss_sum

    token_grads = [[0.0] * len(s.response_ids) for s in samples]
    sample_T = batch.sequences.sample_N[batch.tokens.sequence_T]
    for index, at, value in zip(sample_T.tolist(), batch.tokens.position_T.tolist(), gradient_T.tolist(), strict=True):
        token_grads[index][at] = value * scale
    counts = [sum(1 for m in s.mask if m) for s in samples]
    metrics = {**prepared.metrics, **{k: float(v.mean()) if len(v) else 0.0 for k, v in terms.metrics.items()}}
    return {
        "objective": name,
        "loss": loss_sum * scale,
        "samples": [
            {"group": s.group, "token_grads": grads, "coefficient": sum(grads) / count if count else 0.0}
            for s, grads, count in zip(samples, token_grads, counts, strict=True)
        ],
        "metrics": metrics,
        "dropped": [{"line": lines[d.index], "why": d.why} for d in dropped],
    }


def needed_signals(needs: Needs) -> list[str]:
    """The per-token signals of a samples file that an objective reads."""
    wanted = {
        "old_logprobs": needs.old,
        "rollout_logprobs": needs.rollout,
        "ref_logprobs": needs.reference,
        "teacher_logprobs": needs.teacher in ("sampled", "topk", "full"),
    }
    return ["logprobs", *(signal for signal, is_wanted in wanted.items() if is_wanted)]


def _check_answerable(objective: Objective[Any], samples: Sequence[SampleLike], lines: Sequence[int]) -> None:
    name, needs = objective.name, objective.needs
    if needs.teacher in ("topk", "full"):
        raise ExplainError(
            f"{name} compares whole next-token distributions, and a samples file holds the log-probs of single tokens: "
            "it cannot be explained from one"
        )
    for sample, line in zip(samples, lines, strict=True):
        if not any(sample.mask):
            continue  # dropped, whatever it carries
        for signal in needed_signals(needs):
            if getattr(sample, signal) is None:
                raise ExplainError(f"line {line}: no {signal!r}, which {name} needs")
        if needs.rewards and sample.reward is None:
            raise ExplainError(f"line {line}: no 'reward', which {name} needs")
        if needs.teacher == "sequence" and sample.teacher_logprob is None and sample.teacher_logprobs is None:
            raise ExplainError(f"line {line}: neither 'teacher_logprob' nor 'teacher_logprobs', and {name} needs one")
