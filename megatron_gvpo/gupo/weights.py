"""From evidence to the weight of each group: arXiv 2608.17411, the last two equations.

Legend: B groups of the global batch, n of them active (with a gradient).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Below this spread, B (max - min), the weights are the plain mean and the method does nothing.
UNIFORM_SPREAD = 1e-4


def group_weights(mean_evidence: Any, active: Any, eta: float = 0.1) -> Tensor:
    """The weights omega~ with which the groups' gradients are summed; they sum to 1.

        u_b = 1 / (1 + mean evidence)          omega_b = (1 - u_b) / sum over active (1 - u)
        active: omega~_b = (1 - eta)/B + eta omega_b n/B          inactive: omega~_b = 1/B

    mean_evidence: [B] float, the mean over gradient dimensions of (1/sigma^2)^s, 0 to infinity; whatever stands at inactive
    places is ignored. active: [B] bool. Returns [B] in the dtype of mean_evidence (float64 for anything not floating). No
    active group: all 1/B; all active ones at zero evidence: equal. ValueError for other shapes, for eta outside [0, 1], and
    for evidence of an active group that is negative or not a number.
    """
    multipliers_B = group_multipliers(mean_evidence, active, eta)
    return multipliers_B / max(multipliers_B.numel(), 1)


def group_multipliers(mean_evidence: Any, active: Any, eta: float = 0.1) -> Tensor:
    """B omega~: what each group's loss is multiplied by. 1 + eta (n omega_b - 1) for an active group, 1 for an inactive one.

    At eta = 0 every entry is exactly 1, so that the gradient is the plain one bit for bit. Arguments as in `group_weights`.
    """
    evidence_B = torch.as_tensor(mean_evidence)
    dtype = evidence_B.dtype if evidence_B.is_floating_point() else torch.float64
    active_B = torch.as_tensor(active, device=evidence_B.device).to(torch.bool)
    if evidence_B.dim() != 1 or active_B.shape != evidence_B.shape:
        raise ValueError(
            f"mean_evidence and active must have one entry per group, not {list(evidence_B.shape)} and {list(active_B.shape)}"
        )
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must lie in [0, 1], not {eta}")
    omega_B = _omega(evidence_B.to(torch.float64), active_B)
    count = int(active_B.sum())
    multipliers_B = torch.where(active_B, 1.0 + eta * (count * omega_B - 1.0), torch.ones_like(omega_B))
    return multipliers_B.to(dtype)


def uncertainty(mean_evidence_B: Tensor, active_B: Tensor) -> Tensor:
    """[B] float64: u_b = K / sum_d (e_d + 1) = 1 / (1 + mean evidence); 0 for a group without gradient (it is certain)."""
    evidence_B = mean_evidence_B.to(torch.float64)
    return torch.where(active_B, 1.0 / (1.0 + evidence_B), torch.zeros_like(evidence_B))


def _omega(evidence_B: Tensor, active_B: Tensor) -> Tensor:
    """[B] float64: the Dirichlet weights of the active groups, 0 elsewhere."""
    bad_B = active_B & ~(evidence_B >= 0)  # also true for NaN
    if bool(bad_B.any()):
        first = int(bad_B.nonzero()[0])
        raise ValueError(f"evidence of active group {first} is {float(evidence_B[first])}; it must be 0 or more")
    evidence_B = torch.where(active_B, evidence_B, torch.zeros_like(evidence_B))
    # 1 - u = e / (1 + e), without the cancellation of 1 - 1/(1 + e), and 1 at infinity instead of inf / inf.
    certain_B = torch.where(torch.isinf(evidence_B), torch.ones_like(evidence_B), evidence_B / (1.0 + evidence_B))
    largest = certain_B.max() if certain_B.numel() else certain_B.new_zeros(())
    if float(largest) == 0.0:
        return active_B.to(torch.float64) / max(int(active_B.sum()), 1)
    certain_B = certain_B / largest  # so that evidence near the smallest float does not vanish in the sum
    return certain_B / certain_B.sum()


@dataclass(frozen=True)
class WeightSummary:
    """spread: B (max - min) of the weights that would be applied. uniform: the spread is below 1e-4 with eta above 0."""

    spread: float
    smallest: float
    largest: float
    uniform: bool


def summarise(multipliers_B: Tensor, active_B: Tensor, eta: float) -> WeightSummary:
    """Spread of the multipliers over the active groups; less than two of them have none, and are not called uniform."""
    values_n = multipliers_B[active_B].to(torch.float64)
    if values_n.numel() == 0:
        return WeightSummary(0.0, 1.0, 1.0, False)
    low, high = float(values_n.min()), float(values_n.max())
    uniform = values_n.numel() > 1 and eta > 0 and (high - low) < UNIFORM_SPREAD
    return WeightSummary(high - low, low, high, uniform)
