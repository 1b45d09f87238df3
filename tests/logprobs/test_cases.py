"""The acceptance cases of sharded-vocabulary numerics and of distillation, each a failure that was reported of some system.

One spawn a world size computes every case of it (`_answers`); the tests look at the numbers. Values were worked out by
hand or in float64. Layout-wide agreement with a dense reference is tests/logprobs/test_layouts.py's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.logprobs import (
    FullTeacher,
    HiddenTeacher,
    TopKTeacher,
    VocabShard,
    argmax,
    divergence,
    linear_divergence,
    linear_score_loss,
    linear_token_logprobs,
    target_rank,
    token_logprobs,
    top_k,
)
from tests.ranks import run_ranks

F64 = torch.float64
Answers = dict[str, Any]


@functools.cache
def answers(world: int) -> list[Answers]:
    """What every rank of a tensor-parallel group of this size computed."""
    return run_ranks(_answers, world, timeout=120)


def _answers(rank: int, world: int) -> Answers:
    shard_of = functools.partial(VocabShard.of, rank, world, group=dist.group.WORLD if world > 1 else None)
    found: Answers = {}
    for part in (_case_01, _case_02, _case_05, _case_06, _case_09, _case_12):
        found |= part(shard_of)
    return found


def _shard(x: Tensor, shard: VocabShard) -> Tensor:
    return x[:, shard.start : shard.stop].clone().requires_grad_()


def _case_01(shard_of: Any) -> Answers:
    shard = shard_of(4)
    whole = torch.arange(4, dtype=F64)[None]
    logits = _shard(whole, shard)
    token_logprobs(logits, torch.tensor([3]), shard).logprobs.sum().backward()
    found: Answers = {"1 logprob": logits.grad}
    for name, fn in _functions(whole, shard).items():
        logits = _shard(whole, shard)
        fn(logits).sum().backward()
        found[f"1 {name}"] = logits.grad
    return found


def _functions(whole: Tensor, shard: VocabShard) -> dict[str, Any]:
    """The others that case 1 names, as functions of this rank's logits."""
    teacher = whole.flip(1) * 0.7
    full = FullTeacher(teacher[:, shard.start : shard.stop])
    best = teacher.log_softmax(1).topk(2, 1)
    topk = TopKTeacher(best.indices, best.values)
    functions: dict[str, Any] = {
        "entropy": lambda z: token_logprobs(z, torch.tensor([3]), shard, entropy=True).entropy,
    }
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        functions[f"{kind} full"] = lambda z, kind=kind: divergence(kind, z, full, shard)
        functions[f"{kind} topk"] = lambda z, kind=kind: divergence(kind, z, topk, shard)
    return functions


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_01_gradients_are_this_ranks_shard_of_the_true_one(world: int) -> None:
    """A plain all-reduce inside autograd gives right values and wrong gradients. Worked value for TP 2, then all functions
    against one process."""
    for rank, found in enumerate(answers(world)):
        expected = torch.tensor([-0.03206, -0.08714, -0.23688, 0.35609], dtype=F64).chunk(world)[rank]
        torch.testing.assert_close(found["1 logprob"][0], expected, atol=5e-6, rtol=0)
    one = answers(1)[0]
    for name in (name for name in one if name.startswith("1 ")):
        joined = torch.cat([found[name] for found in answers(world)], 1)
        torch.testing.assert_close(joined, one[name], atol=1e-14, rtol=0)


def _case_02(shard_of: Any) -> Answers:
    shard = shard_of(10, 16)
    logits = torch.zeros(1, shard.width, dtype=F64, requires_grad=True)
    found = token_logprobs(logits, torch.tensor([4]), shard, entropy=True)
    assert found.entropy is not None
    (found.logprobs + found.entropy).sum().backward()
    answers: Answers = {"2 value": (found.logprobs.item(), found.entropy.item()), "2 grad": logits.grad}
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        # Whatever stands in the padding of either model must not matter.
        student = torch.zeros(1, shard.width, dtype=F64)
        teacher = torch.arange(shard.start, shard.stop, dtype=F64)[None].clone()
        student[:, shard.valid :] = 50.0
        teacher[:, shard.valid :] = torch.nan
        student.requires_grad_()
        value = divergence(kind, student, FullTeacher(teacher), shard)
        value.sum().backward()
        assert student.grad is not None
        answers[f"2 {kind}"] = (value.item(), student.grad[:, shard.valid :])
    return answers


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_02_padded_columns_are_outside_every_softmax(world: int) -> None:
    """log 10, not log 16; the padding's gradient is exactly 0; divergences ignore both models' padding."""
    uniform = torch.zeros(10, dtype=F64).log_softmax(0)
    ramp = torch.arange(10, dtype=F64).log_softmax(0)
    for found in answers(world):
        assert found["2 value"] == pytest.approx((-2.302585, 2.302585), abs=1e-6)
        value, padding_grad = found["2 forward_kl"]
        assert value == pytest.approx(float((ramp.exp() * (ramp - uniform)).sum()), abs=1e-12)
        assert found["2 reverse_kl"][0] == pytest.approx(float((uniform.exp() * (uniform - ramp)).sum()), abs=1e-12)
        assert found["2 tv"][0] == pytest.approx(float((ramp.exp() - uniform.exp()).abs().sum() / 2), abs=1e-12)
        for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
            _, padding_grad = found[f"2 {kind}"]
            assert bool((padding_grad == 0).all())
    joined = torch.cat([found["2 grad"] for found in answers(world)], 1)[0]
    expected = torch.full((10,), -0.1, dtype=F64)
    expected[4] += 1
    torch.testing.assert_close(joined[:10], expected, atol=1e-15, rtol=0)
    assert bool((joined[10:] == 0).all())


def test_case_03_the_whole_vocabulary_where_a_shard_is_meant_is_refused() -> None:
    """Silently off by log(TP) otherwise. The message names both widths; so for the head's weight, teachers and targets."""
    half = VocabShard(0, 8, 16)
    with pytest.raises(ValueError, match=r"width 16.*width 8"):
        token_logprobs(torch.zeros(2, 16), torch.zeros(2, dtype=torch.int64), half)
    with pytest.raises(ValueError, match=r"width 16.*width 8"):
        linear_token_logprobs(torch.zeros(2, 4), torch.zeros(16, 4), torch.zeros(2, dtype=torch.int64), half)
    whole = VocabShard(0, 16, 16)
    with pytest.raises(ValueError, match=r"width 8.*width 16"):
        divergence("tv", torch.zeros(2, 16), FullTeacher(torch.zeros(2, 8)), whole)
    with pytest.raises(ValueError, match="target 16 is outside"):
        token_logprobs(torch.zeros(2, 16), torch.tensor([0, 16]), whole)
    with pytest.raises(ValueError, match="target -2 is outside"):
        token_logprobs(torch.zeros(2, 16), torch.tensor([0, -2]), whole)
    with pytest.raises(ValueError, match="has no group"):
        token_logprobs(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), half)
    with pytest.raises(ValueError, match="positions"):
        divergence("tv", torch.zeros(2, 16), FullTeacher(torch.zeros(3, 16)), whole)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        divergence("tv", torch.zeros(1, 16), TopKTeacher(torch.tensor([[1, 16]]), torch.zeros(1, 2)), whole)
    with pytest.raises(ValueError, match="twice"):
        divergence("tv", torch.zeros(1, 16), TopKTeacher(torch.tensor([[1, 1]]), torch.zeros(1, 2)), whole)
    with pytest.raises(ValueError, match="strictly between"):
        divergence("jsd", torch.zeros(1, 16), FullTeacher(torch.zeros(1, 16)), whole, beta=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_04_inputs_are_bitwise_unchanged(dtype: torch.dtype) -> None:
    """In-place exponentials once overwrote the caller's logits, and the reference log-probs computed next were wrong."""
    torch.manual_seed(0)
    shard = VocabShard(0, 16, 11)
    logits = torch.randn(9, 16).to(dtype).requires_grad_()
    hidden, weight = torch.randn(9, 4).to(dtype).requires_grad_(), torch.randn(16, 4).to(dtype).requires_grad_()
    teacher = torch.randn(9, 16).to(dtype)
    targets = torch.randint(0, 11, (9,))
    targets[2] = -1
    inputs = (logits, hidden, weight, teacher, targets)
    before = [x.detach().clone() for x in inputs]
    temperature = torch.full((9,), 0.7)
    options: dict[str, Any] = {"temperature": temperature, "chunk_tokens": 4}
    loss = token_logprobs(logits, targets, shard, entropy=True, **options).logprobs.sum()
    loss = loss + linear_token_logprobs(hidden, weight, targets, shard, entropy=True, **options).logprobs.sum()
    loss = loss + linear_score_loss(hidden, weight, targets, torch.ones(9), shard, **options).loss
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        loss = loss + divergence(kind, logits, FullTeacher(teacher), shard, **options).sum()
        loss = loss + linear_divergence(kind, hidden, weight, HiddenTeacher(hidden, weight), shard, **options).sum()
        loss = loss + divergence(kind, logits, TopKTeacher(targets[:, None], -torch.ones(9, 1)), shard, **options).sum()
    top_k(logits, 3, shard)
    argmax(logits, shard)
    target_rank(logits, targets, shard)
    loss.backward()
    for x, old in zip(inputs, before, strict=True):
        assert torch.equal(x.detach(), old)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype


def _case_05(shard_of: Any) -> Answers:
    shard = shard_of(8)
    logits = torch.zeros(1, shard.width, dtype=F64, requires_grad=True)
    teacher = TopKTeacher(torch.tensor([[0, 5]]), torch.tensor([[0.6, 0.4]], dtype=F64).log())
    divergence("forward_kl", logits, teacher, shard).sum().backward()
    return {"5": logits.grad}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_05_scatter_accumulates(world: int) -> None:
    """Another rank's id is looked up at a dummy column 0; a scatter that overwrites loses the gradient of the true id 0."""
    expected = torch.full((8,), 0.125, dtype=F64)
    expected[0] -= 0.6
    expected[5] -= 0.4
    joined = torch.cat([found["5"] for found in answers(world)], 1)[0]
    torch.testing.assert_close(joined, expected, atol=1e-15, rtol=0)


def _case_06(shard_of: Any) -> Answers:
    shard = shard_of(8)
    logits = torch.arange(shard.start, shard.stop, dtype=F64).expand(3, -1).clone()
    found = top_k(logits, 4, shard, chunk_tokens=2)
    # Three positions of equal logits for argmax, and ranks of the targets 7, 3 and none.
    ranks = target_rank(logits, torch.tensor([7, 3, -1]), shard)
    return {"6": found, "6 argmax": argmax(torch.zeros_like(logits), shard), "6 rank": ranks}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_06_top_k_larger_than_a_shard(world: int) -> None:
    """k = 4 of 8 ids over 4 ranks of 2, with their log-probs; argmax of equal logits is the lowest id; target ranks."""
    expected = torch.arange(8, dtype=F64).log_softmax(0)[[7, 6, 5, 4]]
    for found in answers(world):
        assert found["6"].ids.tolist() == [[7, 6, 5, 4]] * 3
        torch.testing.assert_close(found["6"].logprobs, expected.expand(3, -1), atol=1e-14, rtol=0)
        assert found["6 argmax"].tolist() == [0, 0, 0]
        assert found["6 rank"].tolist() == [0, 4, 0]


@pytest.mark.parametrize("positions", [0, 1, 5, 8])
def test_case_07_chunks_change_nothing(positions: int) -> None:
    """Chunk sizes that do not divide, exceed, or meet an empty batch: the same numbers, bit for bit in the forward pass."""
    torch.manual_seed(1)
    shard = VocabShard(0, 12, 11)
    hidden, weight = torch.randn(positions, 4, dtype=F64), torch.randn(12, 4, dtype=F64)
    targets = torch.randint(0, 11, (positions,))

    def run(chunk: int | None, budget: int | None = None) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = linear_token_logprobs(h, w, targets, shard, entropy=True, chunk_tokens=chunk, memory_budget=budget)
        assert found.entropy is not None
        (found.logprobs + found.entropy).sum().backward()
        assert h.grad is not None
        assert w.grad is not None
        return [found.logprobs, found.entropy, h.grad, w.grad]

    whole = run(None)
    for other in (run(1), run(3), run(100), run(None, 1)):
        for got, want in zip(other, whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-13)


def test_case_08_two_losses_from_the_same_logits_in_either_order() -> None:
    """A function that reuses its input as scratch, or its saved tensors twice, breaks the second backward pass."""
    torch.manual_seed(2)
    shard = VocabShard(0, 9, 9)
    base, targets = torch.randn(5, 9, dtype=F64), torch.randint(0, 9, (5,))
    teacher = FullTeacher(torch.randn(5, 9, dtype=F64))

    def grads(order: tuple[int, ...]) -> Tensor:
        logits = base.clone().requires_grad_()
        losses = [
            token_logprobs(logits, targets, shard).logprobs.sum(),
            divergence("jsd", logits, teacher, shard).sum(),
        ]
        for i in order:
            losses[i].backward(retain_graph=True)
        assert logits.grad is not None
        return logits.grad

    both = grads((0, 1))
    torch.testing.assert_close(grads((1, 0)), both, atol=1e-15, rtol=0)
    torch.testing.assert_close(grads((0,)) + grads((1,)), both, atol=1e-15, rtol=0)
    torch.testing.assert_close(grads((0, 0)), 2 * grads((0,)), atol=1e-15, rtol=0)


def _case_09(shard_of: Any) -> Answers:
    shard = shard_of(7)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(5, 7, dtype=F64, generator=generator)
    logits = _shard(whole, shard)
    found = token_logprobs(logits, torch.tensor([0, 3, 4, 6, -1]), shard, entropy=True)
    assert found.entropy is not None
    (found.logprobs + 2 * found.entropy).sum().backward()
    return {"9 values": torch.stack([found.logprobs, found.entropy]).detach(), "9 grad": logits.grad}


@pytest.mark.parametrize("world", [2, 4])
def test_case_09_a_vocabulary_that_does_not_divide(world: int) -> None:
    """V = 7 over 2 and 4 ranks equals one process."""
    one = answers(1)[0]
    for found in answers(world):
        torch.testing.assert_close(found["9 values"], one["9 values"], atol=1e-14, rtol=0)
    joined = torch.cat([found["9 grad"] for found in answers(world)], 1)
    torch.testing.assert_close(joined, one["9 grad"], atol=1e-14, rtol=0)


def test_case_10_extreme_log_probs_stay_finite() -> None:
    """The engine's part of case 10: a log-prob of -200 and of -2e4 has a finite value and the gradient (1, -1), and a banned
    token (-inf) makes no NaN in entropy or divergences. The k3 estimator itself is the objectives'."""
    shard = VocabShard(0, 3, 3)
    logits = torch.tensor([[0.0, -200.0, -200.0], [1e4, -1e4, -torch.inf]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([1, 1]), shard, entropy=True)
    assert found.entropy is not None
    (found.logprobs + found.entropy).sum().backward()
    assert found.logprobs.tolist() == [-200.0, -2e4]
    assert found.entropy.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-1.0, 1.0, 0.0]] * 2
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        for teacher in (FullTeacher(logits.detach()), TopKTeacher(torch.tensor([[0], [0]]), torch.zeros(2, 1))):
            student = logits.detach().clone().requires_grad_()
            value = divergence(kind, student, teacher, shard)
            value.sum().backward()
            assert student.grad is not None
            assert bool(student.grad.isfinite().all())
            assert float(value.detach().abs().max()) < 1e-6


def test_case_11_nan_where_there_is_no_target_goes_nowhere() -> None:
    """A padded position's hidden state or logit may be anything, NaN too: 0 there, gradient exactly 0, nothing elsewhere."""
    shard = VocabShard(0, 4, 4)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [torch.nan] * 4], dtype=F64, requires_grad=True)
    targets = torch.tensor([3, -1])
    found = token_logprobs(logits, targets, shard, entropy=True, temperature=torch.tensor([1.0, torch.nan]))
    assert found.entropy is not None
    (found.logprobs + found.entropy).sum().backward()
    assert logits.grad is not None
    assert found.logprobs[1] == found.entropy[1] == 0
    assert bool((logits.grad[1] == 0).all())
    assert bool(logits.grad[0].isfinite().all())

    hidden = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]], requires_grad=True)
    weight = torch.ones(4, 2, requires_grad=True)
    coefficients = torch.tensor([1.0, torch.nan])
    score = linear_score_loss(hidden, weight, targets, coefficients, shard)
    fused = linear_token_logprobs(hidden, weight, targets, shard).logprobs.sum()
    teacher = FullTeacher(torch.tensor([[0.0, 1.0, 2.0, 3.0], [torch.nan] * 4]))
    apart = linear_divergence("reverse_kl", hidden, weight, teacher, shard, active=targets >= 0)
    (score.loss + fused + apart.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bool((hidden.grad[1] == 0).all())
    assert bool(hidden.grad.isfinite().all())
    assert bool(weight.grad.isfinite().all())
    assert apart[1] == 0


def _case_12(shard_of: Any) -> Answers:
    found: Answers = {}
    generator = torch.Generator().manual_seed(4)
    whole_hidden = torch.randn(8, 3, dtype=F64, generator=generator)
    whole_weight = torch.randn(12, 3, dtype=F64, generator=generator)
    targets = torch.tensor([0, 9, -1, 5, 3, -1, 8, 1])
    shard = shard_of(10, 12)
    rank = shard.start // shard.width
    for sequence_parallel in (False, True):
        hidden = whole_hidden.clone()
        if sequence_parallel:
            hidden = hidden.chunk(shard.world)[rank].clone()
        for name in ("token", "score", "divergence"):
            h = hidden.clone().requires_grad_()
            w = whole_weight[shard.start : shard.stop].clone().requires_grad_()
            if name == "token":
                loss = linear_token_logprobs(h, w, targets, shard, sequence_parallel=sequence_parallel).logprobs.sum()
            elif name == "score":
                ones = torch.ones(8, dtype=F64)
                loss = linear_score_loss(h, w, targets, ones, shard, sequence_parallel=sequence_parallel).loss
            else:
                teacher = HiddenTeacher(hidden * 0.5, w.detach())
                loss = linear_divergence("tv", h, w, teacher, shard, sequence_parallel=sequence_parallel).sum()
            loss.backward()
            found[f"12 {name} {sequence_parallel}"] = (h.grad, w.grad)
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["token", "score", "divergence"])
def test_case_12_the_hidden_states_gradient_is_reduced(world: int, name: str) -> None:
    """Equal to TP 1, with the gradient whole on every rank, and with sequence parallelism this rank's rows of it."""
    hidden, weight = answers(1)[0][f"12 {name} False"]
    found = answers(world)
    for one in found:
        torch.testing.assert_close(one[f"12 {name} False"][0], hidden, atol=1e-14, rtol=0)
    joined = torch.cat([one[f"12 {name} True"][0] for one in found])
    torch.testing.assert_close(joined, hidden, atol=1e-14, rtol=0)
    for sequence_parallel in (False, True):
        joined = torch.cat([one[f"12 {name} {sequence_parallel}"][1] for one in found])
        torch.testing.assert_close(joined, weight, atol=1e-14, rtol=0)


def test_case_16_worked_divergences() -> None:
    """p = (.7, .2, .1), q = (.5, .3, .2): the numbers, TV's gradient, and p = q: 0 with gradient 0."""
    shard = VocabShard(0, 3, 3)
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=F64).log()
    q = torch.tensor([[0.5, 0.3, 0.2]], dtype=F64).log()
    worked = {"tv": 0.2, "forward_kl": 0.085123, "reverse_kl": 0.092033, "jsd": 0.021901}
    for kind, expected in worked.items():
        student = q.clone().requires_grad_()
        value = divergence(kind, student, FullTeacher(p), shard)
        value.sum().backward()
        assert value.item() == pytest.approx(expected, abs=1e-6)
        assert student.grad is not None
        if kind == "tv":
            assert student.grad[0].tolist() == pytest.approx([-0.25, 0.15, 0.10], abs=1e-12)
        same = p.clone().requires_grad_()
        value = divergence(kind, same, FullTeacher(p), shard)
        value.sum().backward()
        assert same.grad is not None
        assert value.item() == pytest.approx(0.0, abs=1e-15)
        assert float(same.grad.abs().max()) < 1e-15


def test_cases_14_and_15_the_tail_is_one_bucket() -> None:
    """Truncated, the first would be -.16987; renormalised, the second would be 0: neither is this loss."""
    shard = VocabShard(0, 4, 4)
    teacher = TopKTeacher(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.3]], dtype=F64).log())
    student = torch.tensor([[0.6, 0.39, 0.005, 0.005]], dtype=F64).log().requires_grad_()
    value = divergence("forward_kl", student, teacher, shard)
    value.sum().backward()
    assert value.item() == pytest.approx(0.42928, abs=1e-5)
    assert student.grad is not None
    assert float(student.grad.abs().max()) > 0.05
    away = torch.tensor([[0.0625, 0.0375, 0.45, 0.45]], dtype=F64).log()
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        assert divergence(kind, away, teacher, shard).item() > 0.1


def test_case_17_temperature_divides_the_logits() -> None:
    """T = .5, logits [0, ln 4]: -.060625, for the student and, in a divergence, for the teacher: equal models differ by 0."""
    shard = VocabShard(0, 2, 2)
    logits = torch.tensor([[0.0, math.log(4)]], dtype=F64)
    value = token_logprobs(logits, torch.tensor([1]), shard, temperature=0.5).logprobs
    assert value.item() == pytest.approx(-0.060625, abs=1e-6)
    assert divergence("forward_kl", logits, FullTeacher(logits), shard, temperature=0.5).item() == 0.0
    served = TopKTeacher(torch.tensor([[1]]), torch.tensor([[-0.060625]], dtype=F64))
    assert divergence("forward_kl", logits, served, shard, temperature=0.5).item() == pytest.approx(0.0, abs=1e-9)
    assert divergence("forward_kl", logits, served, shard).item() > 0.05
