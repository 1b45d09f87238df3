"""GSPO, arXiv 2507.18071: the clipped ratio of whole responses."""

from __future__ import annotations

from megatron_gvpo.config.objectives import GspoConfig
from megatron_gvpo.objectives.advantages import reward_metrics, standardised_N
from megatron_gvpo.objectives.base import Comm, Objective, Prepared, denominator
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.clipped import clip_gain_T, shaped_rewards_N
from megatron_gvpo.objectives.importance import importance_weights_T
from megatron_gvpo.objectives.kl import kl_slope_T, kl_T


class Gspo(Objective[GspoConfig]):
    """L = -(1/N) sum_i min(s_i A_i, clip(s_i) A_i), s_i = exp((1/T_i) sum_t (lp_t - old_t)) (arXiv 2507.18071, equation 5).

    s_i couples all tokens of a response, which context parallelism spreads over ranks. So the gradient,
    -s_i A_i / T_i for each token of a response that is not clipped, is taken from the log-probs of the pass before the loss.
    Importance weights of kind `token` are averaged over the response's tokens.
    """

    name = "gspo"
    Config = GspoConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences, tokens, config = batch.sequences, batch.tokens, self.config
        length_N = sequences.tokens_N.to(sequences.reward_N.dtype)
        rewards_N = shaped_rewards_N(config, batch, comm)
        advantage_N = standardised_N(sequences, rewards_N)
        log_ratio_N = (sequences.sum_of("logprobs") - sequences.sum_of("old_logprobs")) / length_N
        gain_N, clipped_N = clip_gain_T(log_ratio_N, advantage_N, config.clip_low, config.clip_high)
        slope_N = gain_N.masked_fill(clipped_N, 0.0)  # d gain / d log s is the gain itself where the clip does not act
        weights_T = importance_weights_T(config, batch, towards="old_logprobs")
        if weights_T is not None:
            weight_N = comm.sum(length_N.new_zeros(len(sequences)).index_add(0, tokens.sequence_T, weights_T)) / length_N
            gain_N, slope_N = gain_N * weight_N, slope_N * weight_N
        loss_sum = -float(gain_N.sum())
        coefficients_T = -(slope_N / length_N)[tokens.sequence_T]
        n = max(len(sequences), 1)
        metrics = {
            **reward_metrics(sequences, rewards_N),
            "clipped": float(clipped_N.sum()) / n,
            "ratio_log_abs": float(log_ratio_N.abs().sum()) / n,
        }
        if config.kl_coef:
            d_T = tokens.signal("ref_logprobs") - tokens.signal("logprobs")
            share_T = 1.0 / length_N[tokens.sequence_T]
            kl_sum = float(comm.sum((share_T * kl_T(config.kl_estimator, d_T)).sum()))
            metrics["reference_kl"] = kl_sum / n
            if config.kl_in == "loss":
                loss_sum += config.kl_coef * kl_sum
                coefficients_T = coefficients_T + config.kl_coef * share_T * kl_slope_T(config.kl_estimator, d_T)
        return Prepared(denominator(self.needs, sequences), coefficients_T, loss_sum=loss_sum, metrics=metrics)
