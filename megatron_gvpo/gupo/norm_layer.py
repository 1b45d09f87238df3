"""The measurement with the final norm's scale as the layer Phi: H numbers, whose gradients come through the output layer.

    h = scale * x        d log pi(y) / d scale = x * (W^T (onehot(y) - softmax) / temperature)

The same equations as for the output layer (`measurement`), but all that is kept fits in a few vectors, so groups and samples are
held at once. What enters the norm is found again as x = h / scale; a unit whose scale is 0 is dead.

Legend: T tokens, C of a chunk, H hidden size, V rows of the output layer on this rank, M samples, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo.coefficients import coefficients_under, why_not
from megatron_gvpo.gupo.diagnostics import geometry
from megatron_gvpo.gupo.evidence import evidence_sum, mean_evidence, median_over_ranks
from megatron_gvpo.gupo.gradients import Moments
from megatron_gvpo.gupo.head import Head, HeadTokens, normalise
from megatron_gvpo.gupo.measurement import Measurement, active_groups, held_coefficients, unit_of, width_of_posterior
from megatron_gvpo.gupo.posterior import noise_into
from megatron_gvpo.logprobs.matmul import hidden_gradient_into, operand
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives.base import Comm, Objective
from megatron_gvpo.objectives.batch import Batch


def measure_norm(
    head: Head,
    scale_H: Tensor,
    tokens: HeadTokens,
    batch: Batch,
    objective: Objective[Any],
    comm: Comm,
    gupo: GupoSection,
    seed: int,
    chunk_bytes: int | None = None,
) -> Measurement:
    """As `measurement.measure`, for scale_H, what the final norm multiplies by (the same on every tensor-parallel rank)."""
    refusal = why_not(objective.name, objective.needs)
    if refusal:
        raise ValueError(refusal)
    norm = _Norm(head, scale_H.detach().to(head.dtype), tokens, chunk_bytes)
    theta_T, slopes_TH = norm.slopes(norm.scale_H)
    fisher_H = comm.sum(slopes_TH.square().sum(0)) / max(batch.total_tokens, 1)
    alone = VocabShard(0, 1, 1)
    delta, kl = width_of_posterior(fisher_H[None], alone, gupo)
    noise_MH = torch.cat([noise_into(torch.empty_like(fisher_H)[None], seed, m, 0) for m in range(gupo.samples)])
    scales_MH = norm.scale_H + noise_MH * (fisher_H + delta).rsqrt()

    held_T = held_coefficients(objective, batch, theta_T, comm)
    coefficients_MT = held_T.expand(gupo.samples, -1)
    if gupo.coefficients == "recomputed":
        found = [coefficients_under(objective, batch, norm.logprobs(scale), comm) for scale in scales_MH]
        coefficients_MT = torch.stack(found)
    unit = unit_of(coefficients_MT, batch, comm)
    gradients_MGH = torch.stack(
        [norm.group_gradients(scale, c_T / unit) for scale, c_T in zip(scales_MH, coefficients_MT, strict=True)]
    )
    active_G = active_groups(held_T, batch, comm)
    return _evidence(gradients_MGH, tokens, active_G, batch.sequences.groups, comm, gupo, unit, delta, kl)


class _Norm:
    """Log-probs and gradients of this rank's tokens as functions of the norm's scale."""

    def __init__(self, head: Head, scale_H: Tensor, tokens: HeadTokens, chunk_bytes: int | None) -> None:
        self.head, self.scale_H, self.tokens = head, scale_H, tokens
        self.inverse_H = torch.where(scale_H == 0, torch.zeros_like(scale_H), scale_H.reciprocal())
        size = head.tokens_per_chunk(chunk_bytes)
        self.chunk = min(size, max(len(tokens), 1))
        self.scratch_CV = torch.empty(self.chunk, head.valid, dtype=head.dtype, device=head.device)
        self.bias_V = None if head.bias_V is None else head.bias_V[: head.valid]

    def logprobs(self, scale_H: Tensor) -> Tensor:
        """[T]: of the targets; one product of the head's size."""
        found_T = torch.zeros(len(self.tokens), dtype=self.head.dtype, device=self.head.device)
        for at, hidden_CH, targets_C in self.tokens.chunks(self.chunk, self.head.device):
            _, found_T[at] = normalise(self._logits(hidden_CH, scale_H), targets_C, self.head.shard)
        return found_T

    def slopes(self, scale_H: Tensor, coefficients_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(log-probs [T], d log-prob / d scale [T, H], times a coefficient each); two products of the head's size."""
        head = self.head
        logprobs_T = torch.zeros(len(self.tokens), dtype=head.dtype, device=head.device)
        slopes_TH = torch.zeros(len(self.tokens), head.hidden_size, dtype=head.dtype, device=head.device)
        for at, hidden_CH, targets_C in self.tokens.chunks(self.chunk, head.device):
            z_CV = self._logits(hidden_CH, scale_H)
            normaliser_C, logprobs_T[at] = normalise(z_CV, targets_C, head.shard)
            score_CV = z_CV.sub_(normaliser_C[:, None]).exp_().neg_()
            if head.valid:
                column_C, here_C = head.shard.local(targets_C)
                score_CV.scatter_add_(1, column_C[:, None], here_C[:, None].to(score_CV.dtype))
            weight_VH = head.rows()
            hidden_gradient_into(slopes_TH[at], operand(score_CV, weight_VH), weight_VH)
            head.shard.reduce_(slopes_TH[at])
            slopes_TH[at] *= hidden_CH.to(head.dtype) * self.inverse_H / head.temperature
        if coefficients_T is not None:
            slopes_TH *= coefficients_T.to(slopes_TH)[:, None]
        return logprobs_T, slopes_TH

    def group_gradients(self, scale_H: Tensor, coefficients_T: Tensor) -> Tensor:
        """[own groups, H]."""
        slopes_TH = self.slopes(scale_H, coefficients_T)[1]
        found = [slopes_TH[span.start : span.stop].sum(0) for span in self.tokens.groups]
        return torch.stack(found) if found else slopes_TH.new_zeros(0, self.head.hidden_size)

    def _logits(self, hidden_CH: Tensor, scale_H: Tensor) -> Tensor:
        moved_CH = (hidden_CH.to(self.head.dtype) * (scale_H * self.inverse_H)).to(self.head.weight_VH.dtype)
        return self.head.logits_into(self.scratch_CV[: hidden_CH.shape[0]], moved_CH, self.head.rows(), self.bias_V)


def _evidence(
    gradients_MGH: Tensor,
    tokens: HeadTokens,
    active_G: Tensor,
    groups: int,
    comm: Comm,
    gupo: GupoSection,
    unit: float,
    delta: float,
    kl: float,
) -> Measurement:
    variance_GH, mean_GH = gradients_MGH.var(0, unbiased=True), gradients_MGH.mean(0)
    sigmas = [v[v != 0].sqrt() for v in variance_GH]
    medians = [float(sigma.median()) if sigma.numel() else 0.0 for sigma in sigmas]
    active = [bool(active_G[span.group]) for span in tokens.groups]
    counted = [sigma[sigma.isfinite()] for sigma, on in zip(sigmas, active, strict=True) if on]
    pooled = torch.cat(counted).to(torch.float64).mul_(unit) if counted else torch.zeros(0, dtype=torch.float64)
    batch_median = median_over_ranks(pooled, comm)
    evidence_G = torch.zeros(groups, dtype=torch.float64)
    whole_GH = mean_GH.new_zeros(groups, mean_GH.shape[1])
    for at, span in enumerate(tokens.groups):
        whole_GH[span.group] = mean_GH[at]
        if active[at]:
            moments = Moments(span, mean_GH[at : at + 1], variance_GH[at : at + 1])
            sums = evidence_sum(moments, medians[at], gupo.sigma_floor, gupo.s, gupo.evidence_scale)
            evidence_G[span.group] = mean_evidence(sums, medians[at] * unit, batch_median, gupo.s, gupo.evidence_scale)
    whole_GH = comm.sum(whole_GH).to("cpu", torch.float64) * unit
    return Measurement(comm.sum(evidence_G), active_G, delta, kl, batch_median, geometry(whole_GH @ whole_GH.t(), active_G))
