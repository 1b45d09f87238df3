"""`torch.autograd.gradcheck` on every differentiable function: numerical derivatives know nothing of our formulas.

Covers padding, masked positions, per-token temperature, bias, chunks that do not divide. One process; that layouts agree is
tests/logprobs/test_layouts.py's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gvpo import logprobs as lp

KINDS = ("reverse_kl", "forward_kl", "jsd", "tv")
F64 = torch.float64
SHARD = lp.VocabShard(0, 12, 11)


def _inputs() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(5)
    hidden, weight, bias = (torch.randn(*s, dtype=F64, requires_grad=True) for s in ((5, 3), (12, 3), (12,)))
    logits = torch.randn(5, 12, dtype=F64, requires_grad=True)
    targets = torch.tensor([4, -1, 0, 10, 7])
    return (hidden, weight, bias), logits, targets, {"temperature": torch.rand(5, dtype=F64) + 0.5, "chunk_tokens": 3}


def _teachers() -> dict[str, lp.Teacher]:
    torch.manual_seed(6)
    logits = torch.randn(5, 12, dtype=F64)
    best = logits[:, :11].log_softmax(1).topk(3, 1)
    return {
        "full": lp.FullTeacher(logits),
        "topk": lp.TopKTeacher(best.indices, best.values),
        "hidden": lp.HiddenTeacher(torch.randn(5, 4, dtype=F64), torch.randn(12, 4, dtype=F64)),
    }


def test_token_logprobs() -> None:
    """Log-prob and entropy from logits and fused, and over a replayed support."""
    head, logits, targets, options = _inputs()
    support = lp.Support.of([[4, 1], [], [0], [10, 3, 2], [1, 7]])
    for kept in (None, support):
        assert torch.autograd.gradcheck(
            lambda z, s=kept: lp.token_logprobs(z, targets, SHARD, entropy=True, support=s, **options), (logits,)
        )
        assert torch.autograd.gradcheck(
            lambda h, w, b, s=kept: lp.linear_token_logprobs(h, w, targets, SHARD, bias=b, entropy=True, support=s, **options),
            head,
        )


def test_score_loss() -> None:
    """Gradients that were formed in the forward pass are those of the loss that was returned."""
    head, _, targets, options = _inputs()
    coefficients = torch.randn(5, dtype=F64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: lp.linear_score_loss(h, w, targets, coefficients, SHARD, scale=7.0, bias=b, **options).loss, head
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teacher", ["full", "topk", "hidden"])
def test_divergences(kind: str, teacher: str) -> None:
    """Each kind from each teacher, from logits and fused."""
    head, logits, targets, options = _inputs()
    one = _teachers()[teacher]
    options |= {"beta": 0.3, "active": targets >= 0}
    assert torch.autograd.gradcheck(lambda z: lp.divergence(kind, z, one, SHARD, **options), (logits,))
    assert torch.autograd.gradcheck(lambda h, w, b: lp.linear_divergence(kind, h, w, one, SHARD, bias=b, **options), head)
