"""What is kept for backward, and what is taken meanwhile.

Why: a memory "saving" that only cut temporaries keeps rows of the vocabulary's size until backward. Bytes are counted by
saved-tensor hooks; nothing may hide in an attribute of the autograd context either, so dropping the graph's inputs must free
them. Peak scratch is counted by intercepting every allocation an operation makes. Does not cover the CUDA allocator.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gvpo import logprobs as lp

T, H = 32, 16


def _problem(vocab: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, lp.VocabShard]:
    torch.manual_seed(0)
    hidden = torch.randn(T, H).to(dtype).requires_grad_()
    weight = torch.randn(vocab, H).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (T,)), lp.VocabShard(0, vocab, vocab)


def _kept_bytes(fn: Any, weights: tuple[Tensor, ...]) -> int:
    """Bytes of distinct saved tensors other than the weights."""
    seen: dict[tuple[int, int], int] = {}
    pointers = {w.data_ptr() for w in weights}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in pointers:
            seen[x.data_ptr(), x.numel()] = x.numel() * x.itemsize
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fn()
    return sum(seen.values())


@pytest.mark.parametrize("masked", [False, True])
def test_case_13_bytes_kept_do_not_grow_with_the_vocabulary(masked: bool) -> None:
    """At most 2 H T + 64 T in bfloat16, the same at V = 1k and V = 152k; twice that with a hidden-state teacher."""
    kept: dict[str, set[int]] = {"token": set(), "divergence": set()}
    temperature = torch.full((T,), 0.7)
    for vocab in (1024, 151_936):
        hidden, weight, targets, shard = _problem(vocab)
        if masked:
            targets[::3] = -1
        teacher = lp.HiddenTeacher(hidden.detach() * 0.5, weight.detach().clone())
        head = lp.Head(hidden, weight, shard, temperature=temperature)
        token = _kept_bytes(functools.partial(head.token_logprobs, targets, entropy=True), (weight,))
        apart = _kept_bytes(functools.partial(head.divergence, "tv", teacher, active=targets >= 0), (weight, teacher.weight))
        assert token <= 2 * H * T + 64 * T
        assert apart <= 2 * (2 * H * T + 64 * T)
        kept["token"].add(token)
        kept["divergence"].add(apart)
    assert all(len(sizes) == 1 for sizes in kept.values()), kept


def test_nothing_is_kept_without_grad() -> None:
    """A pass for old or reference log-probs leaves nothing behind."""
    hidden, weight, targets, shard = _problem(1024)
    with torch.no_grad():
        assert _kept_bytes(lambda: lp.linear_token_logprobs(hidden, weight, targets, shard), (weight,)) == 0


def test_nothing_hides_outside_the_saved_tensors() -> None:
    """With hooks that keep copies elsewhere, the graph holds no tensor itself: inputs die, and backward still works."""
    hidden, weight, targets, shard = _problem(1024, torch.float32)
    parked: list[Tensor] = []

    def pack(x: Tensor) -> int:
        parked.append(x.detach().clone())
        return len(parked) - 1

    inner = hidden * 1.0
    teacher = lp.HiddenTeacher(torch.randn(T, H), torch.randn(1024, H))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: parked[i]):
        loss = lp.linear_token_logprobs(inner, weight, targets, shard).logprobs.sum()
        loss = loss + lp.linear_divergence("jsd", inner, weight, teacher, shard).sum()
    watched = [weakref.ref(x) for x in (inner, teacher.hidden, teacher.weight, targets)]
    del inner, teacher, targets
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    loss.backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


class _PeakBytes(TorchDispatchMode):
    """Tracks live storages that operations created; `peak` is the most bytes alive at once."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: set[int] = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self._track(x.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_stays_within_the_budget(dtype: torch.dtype) -> None:
    """Peak bytes that the calls allocate beyond results and gradients: at most the budget + 10 %."""
    budget = 32 << 20
    torch.manual_seed(0)
    positions, width, vocab = 600, 64, 32_768
    shard = lp.VocabShard(0, vocab, vocab)
    hidden = torch.randn(positions, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (positions,))
    ones = torch.ones(positions)
    teacher = lp.HiddenTeacher(hidden.detach(), weight.detach())
    # float32 accumulation of the weight's gradient, its narrow copy, and the hidden states'.
    gradients = vocab * width * (4 + (0 if dtype == torch.float32 else 2)) + 8 * hidden.numel() * 4
    options: dict[str, Any] = {"memory_budget": budget}

    def token() -> Tensor:
        found = lp.linear_token_logprobs(hidden, weight, targets, shard, entropy=True, **options)
        assert found.entropy is not None
        return found.logprobs.sum() + found.entropy.sum()

    for name, fn in {
        "token": token,
        "score": lambda: lp.linear_score_loss(hidden, weight, targets, ones, shard, **options).loss,
        "jsd": lambda: lp.linear_divergence("jsd", hidden, weight, teacher, shard, **options).sum(),
    }.items():
        hidden.grad = weight.grad = None
        with _PeakBytes(hidden, weight, targets) as bytes_:
            fn().backward()
        assert bytes_.peak - gradients <= 1.1 * budget, f"{name}: {(bytes_.peak - gradients) / 2**20:.1f} MiB"
        assert bytes_.peak > gradients / 2  # the tracker does see allocations
