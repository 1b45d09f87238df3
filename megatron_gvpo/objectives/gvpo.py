"""GVPO, arXiv 2504.19599: the gradient of a group is the covariance of its log-probs with reward minus implicit reward."""

from __future__ import annotations

from torch import Tensor

from megatron_gvpo.config.objectives import GvpoConfig
from megatron_gvpo.objectives.advantages import centred_N, reward_metrics
from megatron_gvpo.objectives.base import Comm, Objective, Prepared
from megatron_gvpo.objectives.batch import Batch, SequenceTable

REFERENCE_SIGNAL = {"old": "old_logprobs", "rollout": "rollout_logprobs", "frozen": "ref_logprobs"}


class Gvpo(Objective[GvpoConfig]):
    """The squared form of GVPO and its exact gradient (arXiv 2504.19599, the loss with unbiased 1/(k-1)):

        w_i = (R_i - mean R) - beta ((lp_i - lp'_i) - mean(lp - lp'))
        L = mean over groups of 1/(2(k-1)) sum_i w_i^2           dL/dlp_i = -beta w_i / ((k-1) G)

    lp is the sum over the response's tokens. The weights of a group sum to zero, so its means may be taken from detached
    log-probs without changing the gradient: the group can be spread over micro-batches and ranks in any way.
    """

    name = "gvpo"
    Config = GvpoConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences = batch.sequences
        lp_N = sequences.sum_of("logprobs")
        ref_N = sequences.sum_of(REFERENCE_SIGNAL[self.config.reference])
        return gvpo_step(batch, self.config.beta, lp_N, ref_N, sequences.reward_N)


def gvpo_step(batch: Batch, beta: float, lp_N: Tensor, ref_N: Tensor, reward_N: Tensor) -> Prepared:
    """What GVPO does with these rewards; `gvpo_opd` calls it with the teacher's log-ratio added to them."""
    sequences = batch.sequences
    k_N = sequences.group_size_N()
    ratio_N = lp_N - ref_N
    w_N = centred_N(sequences, reward_N) - beta * centred_N(sequences, ratio_N)
    coefficient_N = -beta * w_N / (k_N - 1)
    metrics = {
        **reward_metrics(sequences, reward_N),
        **_expansion(sequences, beta, lp_N, ref_N, reward_N),
        # The variance and covariance terms act only where the policy has left theta'.
        "log_ratio_abs": _mean(ratio_N.abs()),
        "log_ratio_std": _group_mean(sequences, centred_N(sequences, ratio_N).square() / (k_N - 1)) ** 0.5,
        "weight_abs": _mean(w_N.abs()),
        "pushed_up": _mean((w_N > 0).to(w_N.dtype)),
    }
    return Prepared(
        denominator=float(sequences.groups),
        coefficients_T=coefficient_N[batch.tokens.sequence_T],
        loss_sum=float((w_N.square() / (2 * (k_N - 1))).sum()),
        metrics=metrics,
    )


def _expansion(sequences: SequenceTable, beta: float, lp_N: Tensor, ref_N: Tensor, reward_N: Tensor) -> dict[str, float]:
    """The loss's three theta-dependent terms, group by group with 1/(k-1), averaged over groups (units of the loss).

    L = beta^2/2 Var(lp) - beta^2 Cov(lp, lp') - beta Cov(lp, R) + a constant in theta.
    """
    k_N = sequences.group_size_N()
    lp_c_N, ref_c_N, reward_c_N = (centred_N(sequences, v) for v in (lp_N, ref_N, reward_N))

    def covariance(a_N: Tensor, b_N: Tensor) -> float:
        return _group_mean(sequences, a_N * b_N / (k_N - 1))

    return {
        "term_variance": 0.5 * beta**2 * covariance(lp_c_N, lp_c_N),
        "term_reference": -(beta**2) * covariance(lp_c_N, ref_c_N),
        "term_reward": -beta * covariance(lp_c_N, reward_c_N),
    }


def _group_mean(sequences: SequenceTable, values_N: Tensor) -> float:
    """Sum within each group, mean over groups; 0 for no group."""
    return float(values_N.sum()) / max(sequences.groups, 1)


def _mean(values_N: Tensor) -> float:
    return float(values_N.mean()) if len(values_N) else 0.0
