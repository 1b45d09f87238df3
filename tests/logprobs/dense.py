"""The reference: one process, float64, the whole vocabulary, plain autograd. As short as the definitions allow."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """(log-prob of the target, entropy), 0 where the target is -1."""
    logp_TV = log_softmax(logits_TV, temperature)
    active_T = targets_T >= 0
    logprob_T = logp_TV.gather(1, targets_T.clamp(min=0)[:, None]).squeeze(1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(1)
    return torch.where(active_T, logprob_T, 0.0), torch.where(active_T, entropy_T, 0.0)


def log_softmax(logits_TV: Tensor, temperature: float | Tensor) -> Tensor:
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    return (logits_TV / tau).log_softmax(1)


def divergence(kind: str, logp_TV: Tensor, logq_TV: Tensor, beta: float) -> Tensor:
    p, q = logp_TV.exp(), logq_TV.exp()
    if kind == "forward_kl":
        return (torch.xlogy(p, p) - p * logq_TV).sum(1)
    if kind == "reverse_kl":
        return (q * (logq_TV - logp_TV)).sum(1)
    if kind == "tv":
        return 0.5 * (p - q).abs().sum(1)
    logm = torch.logaddexp(logp_TV + math.log(beta), logq_TV + math.log(1 - beta))
    return (beta * (torch.xlogy(p, p) - p * logm) + (1 - beta) * q * (logq_TV - logm)).sum(1)


def buckets(logq_TV: Tensor, ids_TK: Tensor) -> Tensor:
    """Log-probs of the given ids and, last, of all the others together."""
    kept_TK = logq_TV.gather(1, ids_TK)
    rest_TV = logq_TV.scatter(1, ids_TK, -torch.inf)
    return torch.cat([kept_TK, rest_TV.logsumexp(1, keepdim=True)], 1)


def support_logprobs(logits_TV: Tensor, targets_T: Tensor, kept_TV: Tensor, temperature: float | Tensor) -> Tensor:
    """Normalised over the ids where `kept` is true."""
    tau = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    z_TV = (logits_TV / tau).masked_fill(~kept_TV, -torch.inf)
    logprob_T = z_TV.log_softmax(1).gather(1, targets_T.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets_T >= 0, logprob_T, 0.0)
