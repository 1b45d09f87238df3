"""The whole measurement of one global batch, from hidden states to each group's evidence.

    F --delta--> samples of the layer --log-probs--> coefficients --gradients--> variance --evidence--> weights (elsewhere)

Legend: G groups of the global batch, M posterior samples, T this rank's tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo.coefficients import coefficients_of, coefficients_under, prepared_under, why_not
from megatron_gvpo.gupo.cost import MemoryPlan, evidence_rows, memory_plan, one_pass
from megatron_gvpo.gupo.diagnostics import GradientGeometry, GradientSketches, geometry
from megatron_gvpo.gupo.evidence import EvidenceSum, MedianSample, evidence_sum, mean_evidence, median_over_ranks
from megatron_gvpo.gupo.fisher import diagonal_fisher
from megatron_gvpo.gupo.gradients import GroupGradients, Moments, sample_logprobs
from megatron_gvpo.gupo.head import Head, HeadTokens
from megatron_gvpo.gupo.posterior import PosteriorHeads, expected_kl, mix, solve_delta
from megatron_gvpo.gupo.rows import RowSet, one_of_each_stratum, rows_of_shard
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives.base import Comm, Objective
from megatron_gvpo.objectives.batch import Batch

_log = logging.getLogger(__name__)

# Above this expected KL, nats a token, a posterior sample is another model: its gradients say nothing of this one's.
WIDEST_POSTERIOR = 1.0


@dataclass(frozen=True)
class Measurement:
    """What the posterior says of each group; the same on every rank.

    mean_evidence_G: float64. active_G: groups with a gradient. delta, kl: the posterior's prior precision and its expected KL in
    nats a token. sigma: median over the dimensions of all active groups, of G times a group's share of the loss gradient.
    """

    mean_evidence_G: Tensor
    active_G: Tensor
    delta: float
    kl: float
    sigma: float
    geometry: GradientGeometry

    @staticmethod
    def numbers(groups: int) -> int:
        """How many numbers `packed` holds."""
        return 2 * groups + groups**2 + 6

    def packed(self) -> Tensor:
        """[2 G + G^2 + 6] float64: everything, to be sent to ranks that did not measure."""
        geometry = self.geometry
        scalars = [self.delta, self.kl, self.sigma, geometry.conflict_rate, geometry.mean_cosine, geometry.noise_scale]
        parts = [self.mean_evidence_G, self.active_G, geometry.cosine_GG.flatten(), torch.tensor(scalars, dtype=torch.float64)]
        return torch.cat([part.to("cpu", torch.float64) for part in parts])

    @classmethod
    def unpacked(cls, numbers: Tensor, groups: int) -> Measurement:
        evidence_G, active_G, cosine, scalars = numbers.split([groups, groups, groups**2, 6])
        delta, kl, sigma, conflict_rate, mean_cosine, noise_scale = scalars.tolist()
        found = GradientGeometry(cosine.view(groups, groups), conflict_rate, mean_cosine, noise_scale)
        return cls(evidence_G, active_G > 0, delta, kl, sigma, found)


def measure(
    head: Head,
    tokens: HeadTokens,
    batch: Batch,
    objective: Objective[Any],
    comm: Comm,
    gupo: GupoSection,
    seed: int,
    chunk_bytes: int | None = None,
) -> Measurement:
    """Evidence of every group. Every rank that holds a part of the output layer calls it, with its own whole groups.

    batch: the global sequences, and the table of this rank's tokens in the order of `tokens` (see `deal_groups`). comm: over the
    ranks with different tokens. seed: of this step's noise and draws. chunk_bytes: scratch for logits. ValueError where the
    objective's groups cannot be weighed.
    """
    refusal = why_not(objective.name, objective.needs)
    if refusal:
        raise ValueError(refusal)
    plan = _plan(head, gupo)
    if one_pass(gupo) and not plan.in_one_pass:
        say_once("gupo: memory_gib does not hold the sums of the whole head; held coefficients then cost one pass more a sample")
    fisher_VH, theta_T = diagonal_fisher(head, tokens, batch.total_tokens, comm, chunk_bytes)
    delta, kl = width_of_posterior(fisher_VH, head.shard, gupo)
    posterior = PosteriorHeads(head, fisher_VH, delta, gupo.samples, seed, plan.keep_samples)
    del fisher_VH

    held_T = held_coefficients(objective, batch, theta_T, comm)
    normalisers_MT, coefficients_MT = None, held_T.unsqueeze(0)
    if not plan.in_one_pass:
        found = sample_logprobs(head, tokens, posterior, chunk_bytes)
        normalisers_MT = found.normalisers_MT
        if gupo.coefficients == "recomputed":
            coefficients_MT = torch.stack([coefficients_under(objective, batch, lp_T, comm) for lp_T in found.logprobs_MT])
    unit = unit_of(coefficients_MT, batch, comm)
    gradients = GroupGradients(head, tokens, posterior, coefficients_MT / unit, normalisers_MT, chunk_bytes)
    active_G = active_groups(held_T, batch, comm)
    return _Evidence(head, tokens, batch, comm, gupo, plan, active_G, unit, seed).collect(gradients, delta, kl)


def held_coefficients(objective: Objective[Any], batch: Batch, theta_T: Tensor, comm: Comm) -> Tensor:
    """[T] float64: the coefficients at theta; theta_T are its log-probs as the measurement found them."""
    # The trainer's own log-probs where it has them: an all-equal group's coefficients are then exactly zero.
    theta_T = batch.tokens.signals.get("logprobs", theta_T)
    return coefficients_of(objective, *prepared_under(objective, batch, theta_T, comm), theta_T)


def width_of_posterior(fisher_VH: Tensor, shard: VocabShard, gupo: GupoSection) -> tuple[float, float]:
    """(delta, expected KL in nats a token) of the posterior with this Fisher."""
    delta = solve_delta(fisher_VH, gupo.kl_target, shard) if gupo.delta == "auto" else gupo.delta
    kl = expected_kl(fisher_VH, delta, shard)
    if kl > WIDEST_POSTERIOR:
        say_once(f"gupo: at delta {delta:g} a posterior sample is {kl:.3g} nats a token from the model: raise gupo.delta")
    return delta, kl


def _plan(head: Head, gupo: GupoSection) -> MemoryPlan:
    # By the largest shard: tensor-parallel ranks have to take the same way, or they would wait for each other.
    rows = int(head.shard.gather(torch.tensor([head.valid], device=head.device)).max())
    return memory_plan(
        gupo,
        head.shard.size,
        rows,
        head.hidden_size,
        weight_bytes=head.weight_VH.itemsize,
        compute_bytes=head.dtype.itemsize,
        cuda=head.device.type == "cuda",
    )


def unit_of(coefficients_MT: Tensor, batch: Batch, comm: Comm) -> float:
    """A power of two near the mean coefficient: dividing by it is exact, and keeps squares of gradients inside float32."""
    rows = coefficients_MT.shape[0] * max(batch.total_tokens, 1)
    mean = float(comm.sum(coefficients_MT.abs().sum().reshape(1))[0]) / rows
    return 2.0 ** round(math.log2(mean)) if 0 < mean < math.inf else 1.0


def active_groups(coefficients_T: Tensor, batch: Batch, comm: Comm) -> Tensor:
    """[G] bool: groups with any coefficient that is not zero."""
    group_T = batch.sequences.group_N[batch.tokens.sequence_T]
    count_G = torch.zeros(batch.sequences.groups, dtype=torch.float64)
    return comm.sum(count_G.index_add(0, group_T, (coefficients_T != 0).to(torch.float64))) > 0


class _Evidence:
    """Collects the evidence of this rank's groups, and then of all ranks'."""

    def __init__(
        self,
        head: Head,
        tokens: HeadTokens,
        batch: Batch,
        comm: Comm,
        gupo: GupoSection,
        plan: MemoryPlan,
        active_G: Tensor,
        unit: float,
        seed: int,
    ) -> None:
        self.head, self.tokens, self.comm, self.gupo, self.plan = head, tokens, comm, gupo, plan
        self.active_G, self.unit = active_G, unit
        self.groups = batch.sequences.groups
        self.medians_at = MedianSample.draw(head.shard, head.hidden_size, mix(seed, 1), head.device)
        self.count = evidence_rows(gupo, head.shard.size)
        rows = one_of_each_stratum(head.shard.size, self.count, mix(seed, 2))
        self.rows = rows_of_shard(rows, head.shard, head.device)
        self.sketches = GradientSketches(self.groups, head.shard, head.hidden_size, mix(seed, 3), head.dtype, head.device)
        self.sums: dict[int, EvidenceSum] = {}
        self.median: dict[int, float] = {}  # of sigma, in the moments' units
        self.sigmas: list[Tensor] = []  # of the active groups, for the batch's median

    def collect(self, gradients: GroupGradients, delta: float, kl: float) -> Measurement:
        if not self.plan.one_block:
            for moments in gradients.moments(self.medians_at.rows):
                self._take_median(moments.span.group, moments.variance_RH)
        for rows in self._blocks():
            for moments in gradients.moments(rows):
                if self.plan.one_block:
                    self._take_median(moments.span.group, self.medians_at.rows.take(moments.variance_RH))
                self._add(moments, rows)
        return self._result(delta, kl)

    def _blocks(self) -> Iterator[RowSet]:
        # One block brings collectives of the tensor-parallel group, so a rank has to come along with no row of its own too.
        if self.plan.one_block:
            yield self.rows
        else:
            yield from self.rows.blocks(self.plan.block_rows)

    def _take_median(self, group: int, variance_RH: Tensor) -> None:
        sigma = self.medians_at.sigma(variance_RH, self.head.shard)
        self.median[group] = float(sigma.median()) if sigma.numel() else 0.0
        if bool(self.active_G[group]):
            self.sigmas.append(sigma[sigma.isfinite()])

    def _add(self, moments: Moments, rows: RowSet) -> None:
        group, gupo = moments.span.group, self.gupo
        found = evidence_sum(moments, self.median[group], gupo.sigma_floor, gupo.s, gupo.evidence_scale)
        self.sums[group] = self.sums.get(group, EvidenceSum()) + found
        self.sketches.add(group, moments.mean_RH, rows)

    def _result(self, delta: float, kl: float) -> Measurement:
        none = torch.zeros(0, dtype=torch.float64)
        sigmas = torch.cat(self.sigmas).to(torch.float64).mul_(self.unit) if self.sigmas else none
        sigma = median_over_ranks(sigmas, self.comm)
        evidence_G = self.comm.sum(self._evidence_of_own_groups(sigma))
        gram_GG = self.sketches.gram(self.comm, self.count / self.head.shard.size) * self.unit**2
        return Measurement(evidence_G, self.active_G, delta, kl, sigma, geometry(gram_GG, self.active_G))

    def _evidence_of_own_groups(self, sigma: float) -> Tensor:
        """[G] float64: zero at other ranks' groups and at inactive ones."""
        gupo, spans = self.gupo, self.tokens.groups
        local = [self.sums.get(span.group, EvidenceSum()) for span in spans]
        values = torch.tensor([[one.total, float(one.live)] for one in local], dtype=torch.float64, device=self.head.device)
        over_shards = self.head.shard.sum(values.reshape(-1, 2)).tolist()
        evidence_G = torch.zeros(self.groups, dtype=torch.float64)
        for span, (total, live) in zip(spans, over_shards, strict=True):
            if bool(self.active_G[span.group]):
                sums, median = EvidenceSum(total, int(live)), self.median[span.group] * self.unit
                evidence_G[span.group] = mean_evidence(sums, median, sigma, gupo.s, gupo.evidence_scale)
        return evidence_G


_said: set[str] = set()


def say_once(text: str) -> None:
    key = text[:40]
    if key not in _said:
        _said.add(key)
        _log.warning("%s", text)
