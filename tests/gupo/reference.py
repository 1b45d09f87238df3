"""GUPO written out: float64, one process, each group's gradient under each posterior sample built by autograd.

Shares nothing with the product but the noise of the samples and the objects that describe a batch. Losses are written out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo.posterior import noise_into
from megatron_gvpo.objectives.batch import Batch

# (group, token log-probs of the whole batch [T]) -> the group's contribution to the global loss
GroupLoss = Callable[[Batch, int, Tensor], Tensor]


@dataclass(frozen=True)
class Reference:
    uncertainty_G: Tensor
    weights_G: Tensor
    gradients_G: Tensor  # [G, V, H] at theta
    fisher_VH: Tensor
    delta: float


def gvpo_loss(beta: float) -> GroupLoss:
    def loss(batch: Batch, group: int, logprobs_T: Tensor) -> Tensor:
        members = (batch.sequences.group_N == group).nonzero().flatten().tolist()
        pairs = []
        for n in members:
            mine = batch.tokens.sequence_T == n
            pairs.append((logprobs_T[mine].sum(), batch.tokens.signal("old_logprobs")[mine].sum()))
        ratio = torch.stack([lp - old for lp, old in pairs])
        reward = batch.sequences.reward_N[members]
        w = (reward - reward.mean()) - beta * (ratio - ratio.mean())
        return (w**2).sum() / (2 * (len(members) - 1)) / batch.sequences.groups

    return loss


def clipped_loss(low: float, high: float) -> GroupLoss:
    """Token mean of the clipped ratio times the centred reward."""

    def loss(batch: Batch, group: int, logprobs_T: Tensor) -> Tensor:
        members = (batch.sequences.group_N == group).nonzero().flatten().tolist()
        mean = batch.sequences.reward_N[members].mean()
        total = logprobs_T.new_zeros(())
        for n in members:
            mine = batch.tokens.sequence_T == n
            ratio_T = (logprobs_T[mine] - batch.tokens.signal("old_logprobs")[mine]).exp()
            advantage = batch.sequences.reward_N[n] - mean
            total = total - torch.minimum(ratio_T * advantage, ratio_T.clamp(1 - low, 1 + high) * advantage).sum()
        return total / batch.total_tokens

    return loss


def reference(
    weight_VH: Tensor,
    hidden_TH: Tensor,
    targets_T: Tensor,
    batch: Batch,
    loss: GroupLoss,
    gupo: GupoSection,
    seed: int,
    temperature: float,
    scale_H: Tensor | None = None,
) -> Reference:
    """weight_VH: the rows that are real ids, the whole layer. scale_H: of the final norm, which then is the layer ([1, H])."""
    groups = batch.sequences.groups
    theta = weight_VH if scale_H is None else scale_H[None]

    def logprobs(layer: Tensor) -> Tensor:
        weight, hidden = (layer, hidden_TH) if scale_H is None else (weight_VH, hidden_TH / scale_H * layer[0])
        logits_TV = hidden @ weight.t() / temperature
        return logits_TV.log_softmax(1).gather(1, targets_T[:, None]).squeeze(1)

    def gradient(at: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = at.clone().requires_grad_(True)
        return torch.autograd.grad(value(leaf), leaf)[0]

    fisher = torch.zeros_like(theta)
    for t in range(len(targets_T)):
        fisher += gradient(theta, lambda w, t=t: logprobs(w)[t]) ** 2 / len(targets_T)
    delta = _bisect(fisher, gupo.kl_target) if gupo.delta == "auto" else gupo.delta

    def group_gradient(at: Tensor, b: int) -> Tensor:
        return groups * gradient(at, lambda w: loss(batch, b, logprobs(w)))

    at_theta = torch.stack([group_gradient(theta, b) for b in range(groups)])
    samples = []
    for m in range(gupo.samples):
        noise = noise_into(torch.empty_like(theta), seed, m, 0)
        perturbed = theta + noise / (fisher + delta).sqrt()
        if gupo.coefficients == "recomputed":
            samples.append(torch.stack([group_gradient(perturbed, b) for b in range(groups)]))
        else:
            leaf = logprobs(theta).detach().requires_grad_(True)
            per_group = []
            for b in range(groups):
                coefficient_T = torch.autograd.grad(loss(batch, b, leaf), leaf)[0]
                per_group.append(groups * gradient(perturbed, lambda w, c=coefficient_T: (c * logprobs(w)).sum()))
            samples.append(torch.stack(per_group))
    gradients_MG = torch.stack(samples)
    variance_G = gradients_MG.var(0, unbiased=True).flatten(1)
    mean_G = gradients_MG.mean(0).flatten(1)
    return _weights(at_theta, variance_G, mean_G, gupo, fisher, delta)


def _weights(at_theta: Tensor, variance_G: Tensor, mean_G: Tensor, gupo: GupoSection, fisher: Tensor, delta: float) -> Reference:
    groups = len(variance_G)
    active = at_theta.flatten(1).abs().amax(1) > 0
    sigma_G = variance_G.sqrt()
    live_sigmas = [sigma_G[b][sigma_G[b] > 0] for b in range(groups) if active[b]]
    scale = torch.cat(live_sigmas).median() if gupo.evidence_scale == "batch" else torch.tensor(1.0, dtype=torch.float64)
    u = torch.zeros(groups, dtype=torch.float64)
    for b in range(groups):
        if not active[b]:
            continue
        live = sigma_G[b] > 0
        sigma = sigma_G[b][live].clamp(min=gupo.sigma_floor * float(sigma_G[b][live].median()))
        if gupo.evidence_scale == "snr":
            evidence = (mean_G[b][live] ** 2 / sigma**2) ** gupo.s
        else:
            evidence = (1.0 / (sigma / scale) ** 2) ** gupo.s
        alpha = evidence + 1
        u[b] = len(alpha) / alpha.sum()
    weights = torch.full((groups,), 1.0 / groups, dtype=torch.float64)
    n = int(active.sum())
    omega = (1 - u[active]) / (1 - u[active]).sum()
    weights[active] = (1 - gupo.eta) / groups + gupo.eta * omega * n / groups
    return Reference(u, weights, at_theta, fisher, delta)


def _bisect(fisher: Tensor, target: float) -> float:
    low, high = 1e-12, 1e12
    for _ in range(300):
        middle = (low * high) ** 0.5
        if float(0.5 * (fisher / (fisher + middle)).sum()) > target:
            low = middle
        else:
            high = middle
    return low
