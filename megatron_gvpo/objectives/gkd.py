"""GKD, arXiv 2306.13649: a divergence between the student's and the teacher's whole next-token distributions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_gvpo.config.objectives import GkdConfig
from megatron_gvpo.objectives.base import Comm, Objective, Outputs, Prepared, TokenLoss, denominator
from megatron_gvpo.objectives.batch import Batch


class Gkd(Objective[GkdConfig]):
    """L = (1/sum T_i) sum_i sum_t D_t, D_t the divergence at token t (arXiv 2306.13649): the token mean over the global batch.

    The gradient does not go through the sampling, so any source of responses will do. A top-k teacher's tail is one bucket.
    """

    name = "gkd"
    Config = GkdConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(denominator=denominator(self.needs, batch.sequences))

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        if outputs.head is None:
            raise ValueError("gkd needs whole distributions, and this run offers no head to ask")
        loss_T = outputs.head.divergence(self.config.divergence, beta=self.config.jsd_beta)
        return TokenLoss(loss_T, {"divergence": loss_T.detach()})
