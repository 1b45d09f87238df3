"""GUPO inside a training step: hidden states from a pass without grad, the measurement on the last stage, weights for all ranks.

    share --collect--> HiddenPass (with the log-probs that the objective wants anyway) --weigh--> GroupWeights --> Engine.step

Both methods are collective. What they add to a step is the measurement; the update itself stays one ordinary backward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo.coefficients import why_not
from megatron_gvpo.gupo.deal import deal_groups
from megatron_gvpo.gupo.head import Head
from megatron_gvpo.gupo.measurement import Measurement, measure
from megatron_gvpo.gupo.norm_layer import measure_norm
from megatron_gvpo.gupo.posterior import mix
from megatron_gvpo.gupo.weights import group_multipliers, summarise, uncertainty
from megatron_gvpo.mcore.batches import RankBatch
from megatron_gvpo.mcore.forward import ForwardStep, HeadSettings, LossFunc, StepInput, trained_logprobs
from megatron_gvpo.mcore.head import head_of
from megatron_gvpo.mcore.model import unwrapped
from megatron_gvpo.mcore.step import Engine
from megatron_gvpo.objectives.batch import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HiddenPass:
    """What one pass without grad found for this rank's trained tokens, in the order of the share's token table.

    logprobs_T: [T] float64 (CPU), on every pipeline stage. hidden_TH, targets_T: what enters the output layer and the ids it
    has to predict, on the last stage only; on its device, or in CPU memory where they are over `gupo.memory_gib`.
    """

    logprobs_T: Tensor
    hidden_TH: Tensor | None = None
    targets_T: Tensor | None = None


@dataclass(frozen=True)
class GroupWeights:
    """The same on every rank; [G] in the order of the batch's groups.

    multipliers_G: float64, for `Engine.step`; None where nothing is to be multiplied (`enabled: observe`). weights_G: what the
    groups' gradients are summed with (or would be), sum 1. metrics: named `gupo/...`.
    """

    multipliers_G: Tensor | None
    weights_G: Tensor
    uncertainty_G: Tensor
    active_G: Tensor
    cosine_GG: Tensor
    metrics: dict[str, float]


class GroupWeigher:
    """Weighs the groups of a batch for one engine. ValueError for an objective whose groups cannot be weighed."""

    def __init__(self, engine: Engine, gupo: GupoSection, seed: int) -> None:
        refusal = why_not(engine.objective.name, engine.objective.needs)
        if refusal:
            raise ValueError(refusal)
        if engine.head.model_outputs != "hidden":
            raise ValueError("gupo: the model returns logits; it has to return hidden states (use_hidden_state_head)")
        self._engine = engine
        self._gupo = gupo
        self._seed = seed

    def due(self, step: int) -> bool:
        """Whether the weights are computed at this step (steps count from 1; the first one is)."""
        return self._gupo.enabled is not False and (step - 1) % self._gupo.every == 0

    def collect(self, share: RankBatch) -> HiddenPass:
        """One forward pass; in place of `Engine.logprobs`, whose result it also gives."""
        engine, items = self._engine, self._engine.items(share)
        states: list[Tensor] = []
        over = self._bytes(len(share.tokens)) > self._gupo.memory_gib * (1 << 30)
        with torch.no_grad():
            step = _hidden_forward_step(engine.head, states, torch.device("cpu") if over else None)
            engine.run(step, items, engine.training.chunks, forward_only=True)
        logprobs_T = engine.from_last_stage(items, share)
        if not engine.ranks.is_last_stage:
            return HiddenPass(logprobs_T)
        targets_T = torch.cat([item.micro.targets_R[item.micro.rows_T] for item in items])
        return HiddenPass(logprobs_T, torch.cat(states).to(self._head().weight_VH.dtype), targets_T)

    def weigh(self, found: HiddenPass, batch: Batch, step: int, optimizer_step: int = 0) -> GroupWeights:
        """Weights of the batch's groups, from the pass at the same weights. batch: as `objective.prepare` sees it.

        step, optimizer_step: the noise is drawn anew for each of them. A batch whose gradients are not numbers gets plain weights
        and `gupo/failed` 1: the step itself will be refused for the same reason.
        """
        measured = self._shared(self._measure(found, batch, step, optimizer_step), batch.sequences.groups)
        eta, active_G = self._gupo.eta, measured.active_G
        failed = bool(measured.mean_evidence_G.isnan().any())
        if failed:
            _log.warning("gupo: step %d: the groups' evidence is not a number, plain weights are used", step)
            active_G = torch.zeros_like(active_G)
        multipliers_G = group_multipliers(measured.mean_evidence_G, active_G, eta)
        summary = summarise(multipliers_G, active_G, eta)
        if summary.uniform:
            _log.warning(
                "gupo: step %d: the weights are uniform to %.1e, so this step is the plain mean (gupo.evidence_scale: %s)",
                step,
                summary.spread,
                self._gupo.evidence_scale,
            )
        u_G = uncertainty(measured.mean_evidence_G, active_G)
        return GroupWeights(
            multipliers_G=None if self._gupo.enabled == "observe" else multipliers_G,
            weights_G=multipliers_G / max(multipliers_G.numel(), 1),
            uncertainty_G=u_G,
            active_G=active_G,
            cosine_GG=measured.geometry.cosine_GG,
            metrics={
                **_statistics(u_G[active_G]),
                "gupo/active": float(active_G.sum()),
                "gupo/weight_min": summary.smallest,
                "gupo/weight_max": summary.largest,
                "gupo/spread": summary.spread,
                "gupo/uniform": float(summary.uniform),
                "gupo/failed": float(failed),
                "gupo/delta": measured.delta,
                "gupo/kl": measured.kl,
                "gupo/sigma": measured.sigma,
                "gupo/conflict_rate": measured.geometry.conflict_rate,
                "gupo/cosine_mean": measured.geometry.mean_cosine,
                "gupo/noise_scale": measured.geometry.noise_scale,
            },
        )

    def _measure(self, found: HiddenPass, batch: Batch, step: int, optimizer_step: int) -> Measurement | None:
        """On the last stage; None on the others."""
        engine, ranks = self._engine, self._engine.ranks
        if found.hidden_TH is None or found.targets_T is None:
            return None
        context = ranks.context.group if ranks.context.size > 1 else None
        tokens, table = deal_groups(found.hidden_TH, found.targets_T, batch.tokens, batch.sequences, context, device=ranks.device)
        seed = mix(self._seed, step, optimizer_step)
        dealt, head = Batch(batch.sequences, table), self._head()
        if self._gupo.layer == "final_norm":
            return measure_norm(head, self._norm_scale(), tokens, dealt, engine.objective, engine.comm, self._gupo, seed)
        return measure(head, tokens, dealt, engine.objective, engine.comm, self._gupo, seed)

    def _norm_scale(self) -> Tensor:
        """[H]: what the final norm multiplies by."""
        chunk = self._engine.training.chunks[-1]
        norm: Any = unwrapped(chunk).decoder.final_layernorm
        weight_H: Tensor = norm.weight.detach()
        # Megatron can keep the scale as its distance from 1.
        return weight_H + 1 if get_model_config(chunk).layernorm_zero_centered_gamma else weight_H

    def _head(self) -> Head:
        layer = head_of(self._engine.training.chunks[-1])
        if layer.head_weight is None:
            raise RuntimeError("the output layer was not called in this forward pass")
        settings = self._engine.head
        return Head(layer.head_weight.detach(), settings.shard, settings.temperature, layer.bias)

    def _bytes(self, tokens: int) -> int:
        """Of this rank's hidden states."""
        parameter = next(self._engine.training.chunks[-1].parameters())
        return tokens * int(get_model_config(self._engine.training.chunks[-1]).hidden_size) * parameter.itemsize

    def _shared(self, measured: Measurement | None, groups: int) -> Measurement:
        """The last stage's measurement on every stage."""
        numbers = torch.zeros(Measurement.numbers(groups), dtype=torch.float64, device=self._engine.ranks.device)
        if measured is not None:
            numbers.copy_(measured.packed())
        self._engine.broadcast_from_last_stage(numbers)
        return Measurement.unpacked(numbers.cpu(), groups)


def _hidden_forward_step(head: HeadSettings, states: list[Tensor], keep_on: torch.device | None) -> ForwardStep:
    """Forward-only: log-probs into each `StepInput`, hidden states of its trained tokens appended to `states`."""

    def forward_step(data_iterator: Iterator[StepInput], model: Any) -> tuple[Tensor, LossFunc]:
        item = next(data_iterator)
        output = model(item.micro.tokens_BS, item.micro.positions_BS, None)

        def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
            item.logprobs_T = trained_logprobs(output, model, item.micro, head, entropy=False).logprobs
            rows_RH = output.transpose(0, 1).reshape(-1, output.size(-1))
            if head.sequence_parallel:
                rows_RH = head.shard.gather_rows(rows_RH)
            states.append(rows_RH[item.micro.rows_T].to(keep_on or rows_RH.device))
            return item.logprobs_T

        return output, collect

    return forward_step


def _statistics(values_n: Tensor) -> dict[str, float]:
    if values_n.numel() == 0:
        return {"gupo/u_mean": 0.0, "gupo/u_min": 0.0, "gupo/u_max": 0.0}
    return {
        "gupo/u_mean": float(values_n.mean()),
        "gupo/u_min": float(values_n.min()),
        "gupo/u_max": float(values_n.max()),
    }
