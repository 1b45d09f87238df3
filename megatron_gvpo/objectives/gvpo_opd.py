"""GVPO++, arXiv 2609.21432: distillation by the group variance of the log-ratio to a teacher."""

from __future__ import annotations

from megatron_gvpo.config.objectives import GvpoOpdConfig
from megatron_gvpo.objectives.advantages import centred_N
from megatron_gvpo.objectives.base import Comm, Objective, Prepared
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.gvpo import REFERENCE_SIGNAL, gvpo_step


class GvpoOpd(Objective[GvpoOpdConfig]):
    """Without `teacher_coef` (arXiv 2609.21432), lp and lpT whole responses' log-probs, f_i = (tokens_i)^-length_alpha:

        d_i = f_i (lp_i - lpT_i)
        L = mean over groups of 1/(2(k-1)) sum_i (d_i - mean d)^2          dL/dlp_i = f_i (d_i - mean d) / ((k-1) G)

    Its only optimum is the teacher, for any full-support source of responses and any positive f. No importance weights.
    With `teacher_coef` = beta_T it is GVPO (arXiv 2504.19599) on R + beta_T (lpT - lp'), lp' GVPO's reference: its optimum is
    proportional to pi_ref^(1 - beta_T/beta) pi_T^(beta_T/beta) exp(R/beta).
    """

    name = "gvpo_opd"
    Config = GvpoOpdConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences, config = batch.sequences, self.config
        lp_N, teacher_N = sequences.sum_of("logprobs"), sequences.sum_of("teacher_logprob")
        if config.teacher_coef is not None:
            ref_N = sequences.sum_of(REFERENCE_SIGNAL[config.reference])
            reward_N = sequences.reward_N + config.teacher_coef * (teacher_N - ref_N)
            return gvpo_step(batch, config.beta, lp_N, ref_N, reward_N)
        k_N = sequences.group_size_N()
        f_N = sequences.tokens_N.to(lp_N.dtype) ** -config.length_alpha
        distance_N = f_N * (lp_N - teacher_N)
        centre_N = centred_N(sequences, distance_N)
        groups = float(sequences.groups)
        loss_sum = float((centre_N.square() / (2 * (k_N - 1))).sum())
        kl = float((lp_N - teacher_N).mean()) if len(sequences) else 0.0
        return Prepared(
            denominator=groups,
            coefficients_T=(f_N * centre_N / (k_N - 1))[batch.tokens.sequence_T],
            loss_sum=loss_sum,
            metrics={"groups": groups, "teacher_log_ratio": kl, "distance_std": (2 * loss_sum / max(groups, 1.0)) ** 0.5},
        )
