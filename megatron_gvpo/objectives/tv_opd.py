"""TV-OPD, arXiv 2609.08341: descent on total variation, its step scaled by how far total variation has fallen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gvpo.config.objectives import TvOpdConfig
from megatron_gvpo.objectives.base import Comm, Objective, Prepared
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.distillation import log_ratio


class TvOpd(Objective[TvOpdConfig]):
    """L = -(1/N) sum_t c_k sg[sign(Delta_t)] lp_t, with (arXiv 2609.08341)

        c_k = clip(((Dbar_{k-1} + eps) / (D_ref + eps))^alpha, c_min, 1)
        Dbar_k = ema Dbar_{k-1} + (1 - ema) Dhat_k,    Dhat_k the pooled total-variation estimate of step k

    The first accepted step sets Dbar = D_ref = Dhat. c_k is lagged: fixed before step k, one number for all tokens. A step
    that is not accepted leaves both averages as they are.
    """

    name = "tv_opd"
    Config = TvOpdConfig

    def __init__(self, config: TvOpdConfig) -> None:
        super().__init__(config)
        self.steps = 0  # optimizer steps seen, accepted or not
        self.first: int | None = None  # k0, the first accepted step
        self.average = 0.0  # Dbar
        self.start = 0.0  # D_ref

    @property
    def surrogate(self) -> bool:
        return True

    def scale(self) -> float:
        """c_k of the next step."""
        config = self.config
        if not config.regulate or self.first is None:
            return 1.0
        fallen = ((self.average + config.eps) / (self.start + config.eps)) ** config.alpha
        return min(max(fallen, config.c_min), 1.0)

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        ratio = log_ratio(self.config, batch, comm)
        scale = self.scale()
        coefficients_T = -scale * ratio.delta_T.sign()  # 0 where there is no teacher value
        if ratio.weights_T is not None:
            coefficients_T = coefficients_T * ratio.weights_T
        pending = {"tv": ratio.metrics["tv"]} if ratio.count else {}
        metrics = {**ratio.metrics, "tv_average": self.average, "tv_start": self.start, "scale": scale}
        return Prepared(float(ratio.count), coefficients_T, metrics=metrics, pending=pending)

    def commit(self, prepared: Prepared, accepted: bool) -> None:
        if accepted and "tv" in prepared.pending:
            tv = float(prepared.pending["tv"])
            if self.first is None:
                self.first, self.average, self.start = self.steps, tv, tv
            else:
                self.average = self.config.ema * self.average + (1 - self.config.ema) * tv
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "first": self.first, "average": self.average, "start": self.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"steps", "first", "average", "start"}:
            raise ValueError(f"tv_opd keeps steps, first, average and start; the checkpoint has: {', '.join(state) or 'nothing'}")
        self.steps, self.first = int(state["steps"]), None if state["first"] is None else int(state["first"])
        self.average, self.start = float(state["average"]), float(state["start"])
