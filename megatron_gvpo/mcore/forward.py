"""The objective, hooked into Megatron-Core's schedules through `forward_step`.

What the schedule differentiates is the sum over a micro-batch's tokens of (group weight * loss term) / global denominator, so
that gradients summed over micro-batches and over data- and context-parallel ranks are the gradient of the global loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.logprobs import (
    TokenLogprobs,
    VocabShard,
    divergence,
    linear_divergence,
    linear_score_loss,
    linear_token_logprobs,
    token_logprobs,
)
from megatron_gvpo.mcore.batches import MicroBatch
from megatron_gvpo.mcore.head import head_of
from megatron_gvpo.mcore.teacher_rows import RowDivergences, RowTeacher
from megatron_gvpo.objectives.base import Objective, Outputs, Prepared
from megatron_gvpo.objectives.batch import TokenTable

ModelOutputs = Literal["hidden", "logits"]
LossFunc = Callable[..., Any]
ForwardStep = Callable[[Iterator[Any], Any], tuple[Tensor, LossFunc]]
ModelCall = Callable[[Any, MicroBatch], Tensor]


@dataclass
class StepInput:
    """One micro-batch, what the objective prepared for it, and where its results are put.

    tokens: the micro-batch's own rows of the rank's table. group_weight_T: GUPO's multiplier of each token's group, if any.
    teachers: whose distributions the objective may compare with.
    scale: what the schedule, DDP and the finalizer will divide by, multiplied in beforehand; loss_divisor: the schedule's share
    of it, which divides the loss itself. Results (without grad) appear on the last stage.
    """

    micro: MicroBatch
    tokens: TokenTable
    prepared: Prepared | None = None
    group_weight_T: Tensor | None = None
    teachers: Sequence[RowTeacher] = ()
    scale: float = 1.0
    loss_divisor: float = 1.0
    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    loss_sum: float = 0.0
    metric_sums: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadSettings:
    """What turns a stage's output into log-probs."""

    shard: VocabShard
    temperature: float = 1.0
    sequence_parallel: bool = False
    model_outputs: ModelOutputs = "hidden"
    chunk_tokens: int | None = None


def trained_logprobs(output: Tensor, model: Any, micro: MicroBatch, head: HeadSettings, entropy: bool) -> TokenLogprobs:
    """Log-probs (and entropies) of the micro-batch's T trained tokens, with grad, in the order of the token table.

    output: what the last stage returned, [B, S, H] hidden states (S / TP under sequence parallelism) or [B, S, V / TP] logits.
    """
    rows = _rows(output)
    if head.model_outputs == "hidden":
        layer = head_of(model)
        found = linear_token_logprobs(
            rows,
            _called_weight(layer),
            micro.targets_R,
            head.shard,
            bias=layer.bias,
            temperature=head.temperature,
            entropy=entropy,
            chunk_tokens=head.chunk_tokens,
            sequence_parallel=head.sequence_parallel,
        )
    else:
        found = token_logprobs(
            rows, micro.targets_R, head.shard, temperature=head.temperature, entropy=entropy, chunk_tokens=head.chunk_tokens
        )
    return TokenLogprobs(
        found.logprobs[micro.rows_T],
        None if found.entropy is None else found.entropy[micro.rows_T],
    )


def call_model(model: Any, micro: MicroBatch) -> Tensor:
    """What a `GPTModel` is called with: no labels, so that it returns logits, and no mask, since attention is causal."""
    return model(micro.tokens_BS, micro.positions_BS, None)


def objective_forward_step(
    objective: Objective[Any], head: HeadSettings, batch_of: Callable[[Any], StepInput], call: ModelCall = call_model
) -> ForwardStep:
    """A `forward_step` for `get_forward_backward_func()` whose iterator items become a `StepInput` through `batch_of`."""

    def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, LossFunc]:
        item = batch_of(next(data_iterator))
        output = call(model, item.micro)
        return output, partial(_loss, objective=objective, head=head, item=item, model=model)

    return forward_step


def logprob_forward_step(head: HeadSettings, entropy: bool, call: ModelCall = call_model) -> ForwardStep:
    """A forward-only `forward_step`: log-probs of the trained tokens, kept in each `StepInput`."""

    def forward_step(data_iterator: Iterator[StepInput], model: Any) -> tuple[Tensor, LossFunc]:
        item = next(data_iterator)
        output = call(model, item.micro)

        def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
            found = trained_logprobs(output, model, item.micro, head, entropy)
            item.logprobs_T, item.entropy_T = found.logprobs, found.entropy
            return found.logprobs

        return output, collect

    return forward_step


def _loss(
    output: Tensor, objective: Objective[Any], head: HeadSettings, item: StepInput, model: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's three-tuple: the scaled local loss, a token count of 1 (we divide ourselves), and what it keeps."""
    prepared = item.prepared
    if prepared is None:
        raise ValueError("this micro-batch was not prepared by the objective")
    scale = item.scale / prepared.denominator
    if prepared.coefficients_T is not None:
        loss = _score_loss(output, model, item, head, prepared.coefficients_T[item.micro.span], scale)
    else:
        loss = _differentiated_loss(output, model, item, head, objective, prepared, scale)
    return loss, torch.ones((), dtype=torch.int, device=loss.device), {"loss": loss.detach().clone()}


def _score_loss(output: Tensor, model: Any, item: StepInput, head: HeadSettings, coefficients_T: Tensor, scale: float) -> Tensor:
    """Known coefficients: the head's gradients are formed while its logits are at hand."""
    weighted_T = coefficients_T if item.group_weight_T is None else coefficients_T * item.group_weight_T
    if head.model_outputs == "logits":
        logprobs_T = trained_logprobs(output, model, item.micro, head, entropy=False).logprobs
        loss = (weighted_T.to(logprobs_T) * logprobs_T).sum() * scale
    else:
        layer = head_of(model)
        weight = _called_weight(layer)
        exact = torch.float64 if output.dtype == torch.float64 else torch.float32
        coefficients_R = torch.zeros(item.micro.targets_R.numel(), dtype=exact, device=output.device)
        coefficients_R[item.micro.rows_T] = weighted_T.to(coefficients_R)
        found = linear_score_loss(
            _rows(output),
            weight,
            item.micro.targets_R,
            coefficients_R,
            head.shard,
            # What arrives at `found.loss` in the backward pass; Megatron multiplies the loss scale in (1 but for fp16).
            scale=scale * _loss_scale(model) / item.loss_divisor,
            bias=layer.bias,
            temperature=head.temperature,
            chunk_tokens=head.chunk_tokens,
            sequence_parallel=head.sequence_parallel,
        )
        loss, logprobs_T = found.loss * scale, found.logprobs[item.micro.rows_T]
    item.logprobs_T = logprobs_T.detach()
    item.loss_sum = float((coefficients_T.to(item.logprobs_T) * item.logprobs_T).sum(dtype=torch.float64))
    return loss


def _differentiated_loss(
    output: Tensor,
    model: Any,
    item: StepInput,
    head: HeadSettings,
    objective: Objective[Any],
    prepared: Prepared,
    scale: float,
) -> Tensor:
    """The objective's own terms, differentiated through the log-probs."""
    found = trained_logprobs(output, model, item.micro, head, objective.needs.entropy)
    tokens = item.tokens.to(found.logprobs.device, found.logprobs.dtype)
    token_data = {k: v[item.micro.span].to(found.logprobs.device) for k, v in prepared.token_data.items()}
    asked = _divergences(output, model, item, head) if item.teachers else None
    terms = objective.loss(Outputs(tokens, found.logprobs, found.entropy, asked), prepared, token_data)
    item.metric_sums = {k: float(v.sum(dtype=torch.float64)) for k, v in terms.metrics.items()}
    item.logprobs_T = found.logprobs.detach()
    item.entropy_T = None if found.entropy is None else found.entropy.detach()
    item.loss_sum = float(terms.loss_T.detach().sum(dtype=torch.float64))
    loss_T = terms.loss_T if item.group_weight_T is None else terms.loss_T * item.group_weight_T.to(terms.loss_T)
    # A filler's loss is an empty sum that hangs on the output: its backward pass keeps the ranks' collectives in step.
    return loss_T.sum() * scale


def _divergences(output: Tensor, model: Any, item: StepInput, head: HeadSettings) -> RowDivergences:
    """The handle on this micro-batch's head: its logits are made anew, by chunks, each time it is asked."""
    rows = _rows(output)

    def ask(kind: str, beta: float, row_teacher: RowTeacher) -> Tensor:
        shard = replace(head.shard, size=row_teacher.ids)
        teacher, active_R = row_teacher.teacher, row_teacher.active_R
        common: dict[str, Any] = {"temperature": head.temperature, "beta": beta, "chunk_tokens": head.chunk_tokens}
        if head.model_outputs == "logits":
            return divergence(kind, rows, teacher, shard, active=active_R, **common)
        layer = head_of(model)
        return linear_divergence(
            kind,
            rows,
            _called_weight(layer),
            teacher,
            shard,
            bias=layer.bias,
            sequence_parallel=head.sequence_parallel,
            active=active_R,
            **common,
        )

    return RowDivergences(item.teachers, item.micro.rows_T, ask)


def _rows(output: Tensor) -> Tensor:
    """[R, .] from [B, S, .]: position-major, the order in which sequence parallelism cuts."""
    return output.transpose(0, 1).reshape(-1, output.size(-1))


def _called_weight(layer: Any) -> Tensor:
    if layer.head_weight is None:
        raise RuntimeError("the output layer was not called in this forward pass")
    return layer.head_weight


def _loss_scale(model: Any) -> float:
    scale_func = get_model_config(model).grad_scale_func
    return 1.0 if scale_func is None else float(scale_func(torch.ones(())))
