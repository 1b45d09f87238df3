"""RLOO, arXiv 2402.14740: REINFORCE on whole responses, with the mean reward of the others as the baseline."""

from __future__ import annotations

from megatron_gvpo.config.objectives import RlooConfig
from megatron_gvpo.objectives.advantages import leave_one_out_N, reward_metrics
from megatron_gvpo.objectives.base import Comm, Objective, Prepared, denominator
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.importance import importance_weights_T


class Rloo(Objective[RlooConfig]):
    """L = -(1/N) sum_i (R_i - mean of the others) sum_t lp_t: the sequence's sum, no ratio, no length normalisation."""

    name = "rloo"
    Config = RlooConfig

    @property
    def surrogate(self) -> bool:
        return self.config.tis != "none"  # the weights depend on the policy, and are detached

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences = batch.sequences
        advantage_N = leave_one_out_N(sequences, sequences.reward_N)
        coefficients_T = -advantage_N[batch.tokens.sequence_T]
        weights_T = importance_weights_T(self.config, batch, towards="logprobs")
        return Prepared(
            denominator=denominator(self.needs, sequences),
            coefficients_T=coefficients_T if weights_T is None else coefficients_T * weights_T,
            metrics=reward_metrics(sequences, sequences.reward_N),
        )
