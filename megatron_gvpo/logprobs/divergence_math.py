"""Divergences of teacher p and student q as sums over ids (or buckets of ids), and their gradients.

For D = sum_v f(p_v, q_v) and q = softmax(z):      dD/dz_v = q_v a_v - q_v sum_u q_u a_u,      a_v = dD/dq_v

so a rank needs of the others only two sums a row: that of f, which is D, and that of q a. A constant in `a` drops out.

    forward_kl  KL(p||q)                          f = p log(p/q)                               q a = -p
    reverse_kl  KL(q||p)                          f = q log(q/p)                               q a = q log(q/p)
    jsd         b KL(p||m) + (1-b) KL(q||m)       m = b p + (1-b) q                            q a = (1-b) q log(q/m)
    tv          1/2 sum |p - q|                   f = |p - q| / 2                              q a = q sign(q - p) / 2
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["reverse_kl", "forward_kl", "jsd", "tv"]

# Stands for log 0: its exp is 0, and 0 times it is 0, where 0 times -inf would be NaN.
LOG_ZERO = -1.0e30


def check_kind(kind: str, beta: float) -> Kind:
    for known in get_args(Kind):
        if kind == known:
            if kind == "jsd" and not 0.0 < beta < 1.0:
                raise ValueError(f"beta must lie strictly between 0 and 1, not {beta}: at 0 and 1 the JSD is identically 0")
            return known
    raise ValueError(f"unknown divergence {kind!r}: use one of {', '.join(get_args(Kind))}")


def terms(kind: Kind, logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """(f, q a) elementwise, of log-probs that are at least LOG_ZERO. May overwrite nothing; the shapes are those given."""
    if kind == "forward_kl":
        p = logp.exp()
        return (logp - logq).mul_(p), p.neg_()
    q = logq.exp()
    if kind == "reverse_kl":
        f = (logq - logp).mul_(q)
        return f, f
    if kind == "tv":
        return (logp.exp() - q).abs_().mul_(0.5), (logq - logp).sign_().mul_(0.5).mul_(q)
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    student = (logq - logm).mul_(q).mul_(1.0 - beta)
    return (logp - logm).mul_(logp.exp()).mul_(beta).add_(student), student


def student_terms(kind: Kind, logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """Only `q a`: what backward needs. Total variation asks the teacher for a sign, not for probabilities."""
    if kind == "forward_kl":
        return logp.exp().neg_()
    q = logq.exp()
    if kind == "reverse_kl":
        return (logq - logp).mul_(q)
    if kind == "tv":
        return (logq - logp).sign_().mul_(0.5).mul_(q)
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
    return (logq - logm).mul_(q).mul_(1.0 - beta)
