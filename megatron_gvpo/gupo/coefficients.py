"""The objective's coefficients: what each token's log-prob gradient is multiplied by, under any log-probs.

GUPO can weigh every objective whose loss is a function of the sampled tokens' log-probs, a sum over groups once `prepare` has
seen the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.objectives.base import Comm, Objective, Outputs, Prepared
from megatron_gvpo.objectives.batch import Batch


def why_not(name: str, needs: Needs) -> str | None:
    """One line that says why this objective's groups cannot be weighed; None where they can."""
    obstacle = needs.unweighable()
    return None if obstacle is None else f"gupo: {name} {obstacle}"


def coefficients_of(objective: Objective[Any], batch: Batch, prepared: Prepared, logprobs_T: Tensor) -> Tensor:
    """[T] float64: G dLoss/dlogprob_t, so that (1/G) sum of the groups' gradients is the gradient of the global loss.

    logprobs_T: those at which an objective with a `loss` is differentiated; the others know their coefficients from `prepared`.
    """
    tokens = batch.tokens
    if prepared.denominator == 0 or len(tokens) == 0:
        return torch.zeros(len(tokens), dtype=torch.float64)
    scale = batch.sequences.groups / prepared.denominator
    if prepared.coefficients_T is not None:
        return prepared.coefficients_T.detach().to("cpu", torch.float64) * scale
    leaf_T = logprobs_T.detach().to("cpu", torch.float64).requires_grad_(True)
    with torch.enable_grad():
        terms = objective.loss(Outputs(tokens, leaf_T), prepared, prepared.token_data)
        (gradient_T,) = torch.autograd.grad(terms.loss_T.sum(), leaf_T)
    return gradient_T * scale


def coefficients_under(objective: Objective[Any], batch: Batch, logprobs_T: Tensor, comm: Comm) -> Tensor:
    """[T] float64: the coefficients the objective would use if the policy's log-probs were these; arXiv 2608.17411, eq. 11.

    `prepare` is pure, so it is simply asked again. Every data- and context-parallel rank must call it.
    """
    return coefficients_of(objective, *prepared_under(objective, batch, logprobs_T, comm), logprobs_T)


def prepared_under(objective: Objective[Any], batch: Batch, logprobs_T: Tensor, comm: Comm) -> tuple[Batch, Prepared]:
    """The batch with these as the current policy's log-probs, and what the objective makes of it."""
    logprobs_T = logprobs_T.detach().to("cpu", torch.float64)
    tokens, sequences = batch.tokens.with_signals(logprobs=logprobs_T), batch.sequences
    sums_N = torch.zeros(len(sequences), dtype=torch.float64).index_add(0, tokens.sequence_T, logprobs_T)
    sequences = replace(sequences, sums={**sequences.sums, "logprobs": comm.sum(sums_N)})
    batch = Batch(sequences, tokens)
    return batch, objective.prepare(batch, comm)
