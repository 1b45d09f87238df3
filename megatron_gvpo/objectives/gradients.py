"""The gradient of an objective with respect to the log-probs, outside of any model: for `explain`, tests and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.objectives.base import Divergences, Objective, Outputs, Prepared, TokenLoss
from megatron_gvpo.objectives.batch import Batch


def token_loss(
    objective: Objective[Any], batch: Batch, prepared: Prepared, logprobs_T: Tensor, head: Divergences | None = None
) -> TokenLoss:
    """The loss terms of this rank's tokens (sums, not yet divided), whether the objective gives coefficients or a loss."""
    if prepared.coefficients_T is not None:
        return TokenLoss(prepared.coefficients_T.to(logprobs_T) * logprobs_T)
    tokens = batch.tokens.to(logprobs_T.device, logprobs_T.dtype)
    return objective.loss(Outputs(tokens, logprobs_T, head=head), prepared, prepared.token_data)


def token_gradients(objective: Objective[Any], batch: Batch, prepared: Prepared, logprobs_T: Tensor) -> tuple[Tensor, TokenLoss]:
    """d(denominator * Loss)/dlogprob at `logprobs_T`, [T] in its dtype, and the loss terms they come from.

    TypeError where the objective needs whole distributions: it has no gradient in the log-probs alone.
    """
    with torch.enable_grad():
        leaf_T = logprobs_T.detach().requires_grad_()
        terms = token_loss(objective, batch, prepared, leaf_T)
        (gradient_T,) = torch.autograd.grad(terms.loss_T.sum(), leaf_T)
    return gradient_T, terms
