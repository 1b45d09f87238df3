"""The objectives with a ratio to the policy of the first optimizer step: GRPO, Dr.GRPO, DAPO, CISPO (GSPO has its own file).

They differ in the advantage, in how tokens are weighed, and in what the clip does; all share the KL to a reference and the
truncated importance weights from the server's policy to `old`. Their ratios are per token, so the loss needs no earlier pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from megatron_gvpo.config.objectives import CispoConfig, ClippedConfig, DapoConfig, DrGrpoConfig, GrpoConfig, RatioConfig
from megatron_gvpo.objectives.advantages import centred_N, reward_metrics, standardised_N
from megatron_gvpo.objectives.base import Comm, Objective, Outputs, Prepared, TokenLoss, denominator
from megatron_gvpo.objectives.batch import Batch, SequenceTable
from megatron_gvpo.objectives.importance import importance_weights_T
from megatron_gvpo.objectives.kl import kl_T

RatioConfigT = TypeVar("RatioConfigT", bound=RatioConfig)
ClippedConfigT = TypeVar("ClippedConfigT", bound=ClippedConfig)


def shaped_rewards_N(config: RatioConfig, batch: Batch, comm: Comm) -> Tensor:
    """[N] float64: the rewards, less kl_coef times the response's KL of `old` to the reference where `kl_in` is `reward`."""
    sequences = batch.sequences
    if not config.kl_coef or config.kl_in == "loss":
        return sequences.reward_N
    kl_of_T = kl_T(config.kl_estimator, batch.tokens.signal("ref_logprobs") - batch.tokens.signal("old_logprobs"))
    local_N = torch.zeros_like(sequences.reward_N).index_add(0, batch.tokens.sequence_T, kl_of_T)
    return sequences.reward_N - config.kl_coef * comm.sum(local_N)


def clip_gain_T(log_ratio_T: Tensor, advantage_T: Tensor, low: float | None, high: float) -> tuple[Tensor, Tensor]:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) and whether the clip acts, [T]; at a tie the unclipped gradient.

    exp() is taken only where its value is used: an overflow on the other branch would turn the gradient into NaN, and a ratio
    without an advantage into inf * 0.
    """
    ratio_T = log_ratio_T.detach().exp()
    over_T = (advantage_T > 0) & (ratio_T > 1 + high)
    under_T = (advantage_T < 0) & (ratio_T < 1 - low) if low is not None else torch.zeros_like(over_T)
    idle_T = over_T | under_T | (advantage_T == 0)
    live_T = torch.where(idle_T, 0.0, log_ratio_T).exp()
    # Two full tensors, since where() of two plain numbers would be float32.
    bound_T = torch.where(over_T, torch.full_like(live_T, 1 + high), torch.full_like(live_T, 1 - (low or 0.0)))
    gain_T = torch.where(over_T | under_T, bound_T, live_T) * advantage_T
    return gain_T, over_T | under_T


class RatioObjective(Objective[RatioConfigT]):
    """What GRPO, Dr.GRPO, DAPO and CISPO share: prepared advantages and weights, then a loss per token."""

    def advantages_N(self, sequences: SequenceTable, rewards_N: Tensor) -> Tensor:
        """A_i = (R_i - mean) / (std + 1e-6), std with k-1; exactly 0 in a group of equal rewards."""
        return standardised_N(sequences, rewards_N)

    def weights_N(self, sequences: SequenceTable) -> Tensor:
        """The weight of each of a sequence's tokens, before the division by the denominator."""
        return torch.ones_like(sequences.reward_N)

    @abstractmethod
    def gain_T(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        """What is maximised, [T] with grad, and whether the clip acts, [T] bool."""

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences, at_T = batch.sequences, batch.tokens.sequence_T
        rewards_N = shaped_rewards_N(self.config, batch, comm)
        weight_T = self.weights_N(sequences)[at_T]
        importance_T = importance_weights_T(self.config, batch, towards="old_logprobs")
        data = {
            "advantage": self.advantages_N(sequences, rewards_N)[at_T],
            "weight": weight_T,
            "gain_weight": weight_T if importance_T is None else weight_T * importance_T,
        }
        metrics = reward_metrics(sequences, rewards_N)
        return Prepared(denominator(self.needs, sequences), token_data=data, metrics=metrics)

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        lp_T = outputs.logprobs_T
        advantage_T, weight_T, gain_weight_T = (token_data[k].to(lp_T) for k in ("advantage", "weight", "gain_weight"))
        log_ratio_T = lp_T - outputs.tokens.signal("old_logprobs").to(lp_T)
        gain_T, clipped_T = self.gain_T(log_ratio_T, lp_T, advantage_T)
        loss_T = -gain_weight_T * gain_T
        metrics = {"clipped": clipped_T.to(lp_T.dtype), "ratio_log_abs": log_ratio_T.detach().abs()}
        if self.config.kl_coef:
            estimate_T = kl_T(self.config.kl_estimator, outputs.tokens.signal("ref_logprobs").to(lp_T) - lp_T)
            metrics["reference_kl"] = estimate_T.detach()
            if self.config.kl_in == "loss":
                loss_T = loss_T + self.config.kl_coef * weight_T * estimate_T
        return TokenLoss(loss_T, metrics)


class _TwoSided(RatioObjective[ClippedConfigT]):
    def gain_T(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        return clip_gain_T(log_ratio_T, advantage_T, self.config.clip_low, self.config.clip_high)


class Grpo(_TwoSided[GrpoConfig]):
    """L = -(1/N) sum_i (1/T_i) sum_t min(rho A, clip(rho) A), rho = exp(lp_t - old_t) (arXiv 2402.03300)."""

    name = "grpo"
    Config = GrpoConfig

    def weights_N(self, sequences: SequenceTable) -> Tensor:
        return 1.0 / sequences.tokens_N.to(sequences.reward_N.dtype)


class DrGrpo(_TwoSided[DrGrpoConfig]):
    """L = -(1/(N max_response_tokens)) sum_i sum_t min(rho A, clip(rho) A), A = R - mean (arXiv 2503.20783)."""

    name = "dr_grpo"
    Config = DrGrpoConfig

    def advantages_N(self, sequences: SequenceTable, rewards_N: Tensor) -> Tensor:
        return centred_N(sequences, rewards_N)

    def weights_N(self, sequences: SequenceTable) -> Tensor:
        return torch.full_like(sequences.reward_N, 1.0 / self.config.max_response_tokens)


class Dapo(_TwoSided[DapoConfig]):
    """L = -(1/sum T_i) sum_i sum_t min(rho A, clip(rho) A), clip_high > clip_low (arXiv 2503.14476).

    Overlong shaping and dynamic sampling act on the batch before it comes here: `objectives.shaping`.
    """

    name = "dapo"
    Config = DapoConfig


class Cispo(RatioObjective[CispoConfig]):
    """L = -(1/sum T_i) sum_i sum_t sg[min(rho, 1 + clip_high)] A lp_t (arXiv 2506.13585)."""

    name = "cispo"
    Config = CispoConfig

    @property
    def surrogate(self) -> bool:
        return True

    def gain_T(self, log_ratio_T: Tensor, logprobs_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.config.clip_low, self.config.clip_high
        ratio_T = log_ratio_T.detach().exp()
        kept_T = ratio_T.clamp(min=None if low is None else 1 - low, max=1 + high)
        return kept_T * advantage_T * logprobs_T, kept_T != ratio_T
