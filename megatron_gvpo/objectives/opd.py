"""On-policy distillation on sampled tokens: a policy gradient whose advantage is a shape of the log-ratio to the teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.objectives import OpdConfig
from megatron_gvpo.objectives.base import Comm, Objective, Outputs, Prepared, TokenLoss
from megatron_gvpo.objectives.batch import Batch, TokenTable
from megatron_gvpo.objectives.distillation import log_ratio

# Each token's advantage from its own Delta alone (the second argument is the config's `clip`).
POINTWISE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "raw": lambda delta_T, clip: delta_T,
    "sign": lambda delta_T, clip: delta_T.sign(),
    "tanh": lambda delta_T, clip: (delta_T / 2).tanh(),
    "clip": lambda delta_T, clip: delta_T.clamp(-clip, clip),
}


class Opd(Objective[OpdConfig]):
    """L = -(1/N) sum_t sg[A_t] lp_t over the N unmasked tokens that have a teacher value, Delta = log p - log q.

    - raw: A = Delta, the gradient of KL(q||p); sign: total-variation descent (arXiv 2609.08341); tanh(Delta/2):
      2 KL(p||(p+q)/2); clip: Delta within +-clip.
    - group_constant and permuted are that paper's controls: the sign of Delta with the mean magnitude of all tokens of that
      sign, or with their magnitudes permuted among them (a fresh permutation each step, the same on every layout).
    - baseline kl: A = Delta + KL(q||p) at the state, detached: the same expectation with less variance (vOPD).

    These hold for y sampled from q. With `tis`, samples of an older policy are weighted towards the current one.
    """

    name = "opd"
    Config = OpdConfig

    def __init__(self, config: OpdConfig) -> None:
        super().__init__(config)
        self.steps = 0  # keys the permutation of the next step

    @property
    def surrogate(self) -> bool:
        return True

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        ratio = log_ratio(self.config, batch, comm)
        delta_T, shape = ratio.delta_T, self.config.shape
        if shape in POINTWISE:
            advantage_T = POINTWISE[shape](delta_T, self.config.clip)
        elif shape == "group_constant":
            advantage_T = _group_constant(delta_T, comm)
        else:
            advantage_T = _permuted(delta_T, batch.tokens, comm, self.config.seed, self.steps)
        weights_T = ratio.active_T.to(delta_T.dtype)
        if ratio.weights_T is not None:
            weights_T = weights_T * ratio.weights_T
        if self.config.baseline == "kl":
            data = {"advantage": advantage_T, "weight": weights_T}
            return Prepared(denominator=float(ratio.count), token_data=data, metrics=ratio.metrics)
        return Prepared(denominator=float(ratio.count), coefficients_T=-advantage_T * weights_T, metrics=ratio.metrics)

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        """Only with `baseline: kl`, whose value at each state is known in the forward pass."""
        if outputs.head is None:
            raise ValueError("opd with baseline kl needs whole distributions, and this run offers no head to ask")
        lp_T = outputs.logprobs_T
        kl_T = outputs.head.divergence("reverse_kl").detach()
        advantage_T = token_data["advantage"].to(lp_T) + kl_T
        return TokenLoss(-advantage_T * token_data["weight"].to(lp_T) * lp_T, {"state_kl": kl_T})

    def commit(self, prepared: Prepared, accepted: bool) -> None:
        self.steps += accepted

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"steps"}:
            raise ValueError(f"opd keeps 'steps', and the checkpoint has: {', '.join(state) or 'nothing'}")
        self.steps = int(state["steps"])


def _group_constant(delta_T: Tensor, comm: Comm) -> Tensor:
    """sign(Delta) times the mean |Delta| of all tokens of that sign in the global batch."""
    up_T, down_T = delta_T > 0, delta_T < 0
    parts = [delta_T[up_T].sum(), up_T.sum(), -delta_T[down_T].sum(), down_T.sum()]
    up, n_up, down, n_down = comm.sum(torch.stack([p.to(torch.float64) for p in parts])).tolist()
    mean_up, mean_down = up / max(n_up, 1.0), down / max(n_down, 1.0)
    return up_T.to(delta_T.dtype) * mean_up - down_T.to(delta_T.dtype) * mean_down


def _permuted(delta_T: Tensor, tokens: TokenTable, comm: Comm, seed: int, step: int) -> Tensor:
    """sign(Delta) with the magnitudes of each sign permuted among its tokens.

    The permutation acts on the rank of a magnitude, not on its place, so that it does not depend on the order of the samples.
    """
    all_M, sequence_M, position_M = comm.gather_tokens(delta_T, tokens)
    stride = int(position_M.max()) + 1 if len(position_M) else 1
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    result_M = torch.zeros_like(all_M)
    for sign in (1.0, -1.0):
        at = (all_M.sign() == sign).nonzero().flatten()
        ranked = at[torch.argsort(all_M[at].abs(), stable=True)]
        result_M[ranked] = all_M[ranked[torch.randperm(len(ranked), generator=generator).to(ranked.device)]]
    place_T = torch.searchsorted(sequence_M * stride + position_M, tokens.sequence_T * stride + tokens.position_T)
    return result_M[place_T]
