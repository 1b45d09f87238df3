"""An objective of your own: imitate the best responses of each group (rejection-sampling fine-tuning, arXiv 2304.06767)."""

from pydantic import Field

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.objectives import Batch, Comm, Objective, ObjectiveConfig, Prepared


class BestOfGroupConfig(ObjectiveConfig):
    """Its keys in the YAML, under `objective:`, and what it needs of a run."""

    margin: float = Field(default=0.0, ge=0, description="how far below its group's best reward a response is still imitated")

    def needs(self) -> Needs:
        return Needs(rewards=True, data="any", denominator="tokens", groups=True)


class BestOfGroup(Objective[BestOfGroupConfig]):
    """L = -(1/M) sum of lp_t over the M tokens of the responses within `margin` of their group's best reward.

    Groups of equal reward teach nothing about what is better, and are left out.
    """

    name = "best_of_group"
    Config = BestOfGroupConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        # `sequences`: the whole global batch, the same on every rank. `tokens`: the ones that this rank holds.
        sequences, tokens = batch.sequences, batch.tokens
        reward_N = sequences.reward_N
        near_best_N = reward_N >= sequences.group_max_N(reward_N) - self.config.margin
        chosen_N = (near_best_N & ~sequences.group_is_flat_N(reward_N)).to(reward_N.dtype)
        return Prepared(
            denominator=float((chosen_N * sequences.tokens_N).sum()),  # global: the engine divides by it, once
            coefficients_T=-chosen_N[tokens.sequence_T],  # d(denominator * L)/d lp of each token
            metrics={"chosen": float(chosen_N.sum()) / max(len(sequences), 1)},
        )
