"""Estimators of KL(policy || reference) on a sampled token, from d = ref - lp."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

K3_LINEAR_FROM = 10.0


def kl_T(estimator: KlEstimator, d_T: Tensor) -> Tensor:
    """[T], differentiable, in d = ref - lp: k1 = -d, k2 = d^2/2, k3 = e^d - 1 - d.

    k3 continues linearly beyond d = 10, with the value and slope it has there: e^d overflows where the policy has all but lost
    a token that the reference likes, and that is where the pull back is needed most.
    """
    if estimator == "k1":
        return -d_T
    if estimator == "k2":
        return d_T.square() / 2
    near_T = d_T.clamp(max=K3_LINEAR_FROM)
    return torch.expm1(near_T) - near_T + math.expm1(K3_LINEAR_FROM) * (d_T - near_T)


def kl_slope_T(estimator: KlEstimator, d_T: Tensor) -> Tensor:
    """[T]: d kl / d lp = -d kl / d d, where the gradient is wanted before the forward pass."""
    if estimator == "k1":
        return torch.ones_like(d_T)
    if estimator == "k2":
        return -d_T
    return -torch.expm1(d_T.clamp(max=K3_LINEAR_FROM))
