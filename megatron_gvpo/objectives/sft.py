"""Supervised fine-tuning: every unmasked response token is an example."""

from __future__ import annotations

import torch

from megatron_gvpo.config.objectives import SftConfig
from megatron_gvpo.objectives.base import Comm, Objective, Prepared, denominator
from megatron_gvpo.objectives.batch import Batch


class Sft(Objective[SftConfig]):
    """L = -(1/sum T_i) sum_i sum_t lp_t: the token mean over the global batch."""

    name = "sft"
    Config = SftConfig

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        ones_T = torch.ones_like(batch.tokens.position_T, dtype=torch.float64)
        return Prepared(denominator=denominator(self.needs, batch.sequences), coefficients_T=-ones_T)
