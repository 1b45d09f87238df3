"""Where the weight's gradient goes: Megatron's `main_grad` with its flags and hook, `.grad`, or autograd.

Why: written to the wrong place, or to both, the head trains twice as fast or not at all, and no shape is wrong. The hook is
the one that Megatron-Core's DDP registers, rebuilt here from its documented behaviour; that the engine works under the real
DDP is tests/mcore's to show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gvpo import logprobs as lp

T, V, H = 9, 16, 5
SHARD = lp.VocabShard(0, V, 11)


class MegatronLike:
    """A parameter with `main_grad`, Megatron's flag, and the hook that moves `.grad` there (with overlap: `.grad` is due)."""

    def __init__(self, dtype: torch.dtype, tied: bool, main_dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.weight: Any = torch.nn.Parameter(torch.randn(V, H).to(dtype))
        self.weight.main_grad = torch.zeros(V, H, dtype=main_dtype)
        self.weight.grad_added_to_main_grad = False
        if tied:
            self.weight.zero_out_wgrad = True
        self.calls = 0
        self.dummies = 0
        node = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]
        node.register_hook(self._hook)
        self._node = node

    def _hook(self, *_: Any) -> None:
        weight = self.weight
        assert weight.grad is not None, "overlap_grad_reduce refuses a parameter without .grad"
        self.dummies += weight.grad.untyped_storage().nbytes() < weight.numel()
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
        self.calls += 1


def _train(param: MegatronLike, how: str, dtype: torch.dtype, tied: bool) -> list[Tensor]:
    """Two micro-batches; returns the hidden states' gradients."""
    torch.manual_seed(4)
    grads = []
    for _ in range(2):
        x = torch.randn(T, H).to(dtype).requires_grad_()
        targets = torch.randint(0, 11, (T,))
        targets[::4] = -1
        hidden = x + torch.nn.functional.embedding(targets.clamp(min=0), param.weight) if tied else x
        coefficients = torch.randn(T)
        if how == "score":
            loss = lp.linear_score_loss(hidden, param.weight, targets, coefficients, SHARD, scale=2.0).loss
        else:
            mode: Any = "return" if how == "return" else "auto"
            found = lp.linear_token_logprobs(hidden, param.weight, targets, SHARD, weight_grad=mode, chunk_tokens=4)
            loss = (found.logprobs * coefficients).sum()
        (2.0 * loss).backward()
        param.weight.grad_added_to_main_grad = False  # as zero_grad_buffer does before each step
        assert x.grad is not None
        grads.append(x.grad)
    return grads


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_the_gradient_once(dtype: torch.dtype, tied: bool) -> None:
    """Fused paths against autograd's, over two micro-batches, alone and tied to the embedding of the same stage."""
    # In bfloat16 the plain path rounds each micro-batch's gradient, the fused ones do not.
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    plain = MegatronLike(dtype, tied)
    want = _train(plain, "return", dtype, tied)
    for how in ("recompute", "score"):
        param = MegatronLike(dtype, tied)
        got = _train(param, how, dtype, tied)
        torch.testing.assert_close(param.weight.main_grad, plain.weight.main_grad, atol=tolerance, rtol=0)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
        assert param.calls == 2
        # Untied, the dummy takes no memory of the weight's size.
        assert param.dummies == (0 if tied else 2)
        assert param.weight.grad is None


def test_main_grad_may_be_bfloat16() -> None:
    """`grad_reduce_in_fp32` off: the buffer is narrow, the products are still accumulated in float32 before they are added."""
    plain = MegatronLike(torch.float32, tied=False)
    _train(plain, "return", torch.float32, tied=False)
    param = MegatronLike(torch.float32, tied=False, main_dtype=torch.bfloat16)
    _train(param, "recompute", torch.float32, tied=False)
    torch.testing.assert_close(param.weight.main_grad.float(), plain.weight.main_grad, atol=3e-2, rtol=1e-2)


def test_score_loss_refuses_another_scale_than_announced() -> None:
    """The weight's gradient is already in its buffer at `scale`; another gradient arriving would leave it wrong unnoticed."""
    param = MegatronLike(torch.float32, tied=False)
    targets, ones = torch.zeros(T, dtype=torch.int64), torch.ones(T)
    hidden = torch.randn(T, H, requires_grad=True)
    loss = lp.linear_score_loss(hidden, param.weight, targets, ones, SHARD, scale=2.0).loss
    with pytest.raises(RuntimeError, match=r"scale=2\.0 was announced"):
        loss.backward()


def test_score_loss_without_grad_touches_nothing() -> None:
    """A forward-only pass (evaluation) must not add to a gradient buffer."""
    param = MegatronLike(torch.float32, tied=False)
    targets, ones = torch.zeros(T, dtype=torch.int64), torch.ones(T)
    with torch.no_grad():
        found = lp.linear_score_loss(torch.randn(T, H), param.weight, targets, ones, SHARD)
    assert bool((param.weight.main_grad == 0).all())
    assert not found.loss.requires_grad


@pytest.mark.parametrize("mode", ["grad", "return"])
def test_score_loss_accumulates_into_grad(mode: Any) -> None:
    """`grad` adds to `weight.grad` during the forward pass; both leave the same sum after two backward passes."""
    torch.manual_seed(5)
    weight = torch.randn(V, H, requires_grad=True)
    total = torch.zeros(V, H)
    for _ in range(2):
        hidden, targets, coefficients = torch.randn(T, H), torch.randint(0, 11, (T,)), torch.randn(T)
        lp.linear_score_loss(hidden, weight, targets, coefficients, SHARD, weight_grad=mode).loss.backward()
        other = weight.detach().clone().requires_grad_()
        (lp.linear_token_logprobs(hidden, other, targets, SHARD).logprobs * coefficients).sum().backward()
        assert other.grad is not None
        total += other.grad
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, total, atol=2e-6, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    """LoRA freezes the head: the hidden states' gradient is the same, the weight's is not computed."""
    torch.manual_seed(6)
    weight, targets = torch.randn(V, H), torch.randint(0, 11, (T,))
    hidden = torch.randn(T, H, requires_grad=True)
    ones = torch.ones(T)
    lp.linear_score_loss(hidden, weight, targets, ones, SHARD).loss.backward()
    first = hidden.grad
    hidden.grad = None
    lp.linear_token_logprobs(hidden, weight, targets, SHARD).logprobs.sum().backward()
    assert first is not None
    assert hidden.grad is not None
    torch.testing.assert_close(first, hidden.grad, atol=1e-6, rtol=1e-5)
    assert weight.grad is None


def test_bfloat16_head_is_computed_in_float32() -> None:
    """Log-probs of a bfloat16 head are those of its exact values to float32 accuracy, not rounded logits'."""
    torch.manual_seed(7)
    hidden, weight = torch.randn(T, 64).bfloat16().requires_grad_(), torch.randn(1000, 64).bfloat16().requires_grad_()
    shard, targets = lp.VocabShard(0, 1000, 1000), torch.randint(0, 1000, (T,))
    found = lp.linear_token_logprobs(hidden, weight, targets, shard, entropy=True)
    found.logprobs.sum().backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = (h @ w.t()).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    want.sum().backward()
    torch.testing.assert_close(found.logprobs.double(), want, atol=2e-5, rtol=1e-5)
    for got, exact in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert got is not None
        assert exact is not None
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, atol=1e-3, rtol=2**-7)
