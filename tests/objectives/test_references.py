"""Loss and gradient of every objective against formulas written out sample by sample, differentiated by autograd.

Why: the product works on flat tables and prepared coefficients; these references loop over groups, sequences and tokens, as the
papers write it, and share no code with it. Not covered: layouts (see test_contract and test_gloo) and models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.explain import explain
from tests.objectives.helpers import random_samples

Lps = list[list[Tensor]]  # one scalar a token; masked tokens left out


def _tokens(sample: Sample, signal: str) -> list[float]:
    return [v for v, m in zip(getattr(sample, signal), sample.mask, strict=True) if m]


def _groups(samples: list[Sample]) -> list[list[int]]:
    return [[i for i, s in enumerate(samples) if s.group == g] for g in dict.fromkeys(s.group for s in samples)]


def _kl(kind: str, d: Tensor) -> Tensor:
    if kind == "k1":
        return -d
    if kind == "k2":
        return d * d / 2
    return d.exp() - 1 - d if d <= 10 else math.exp(10) - 11 + (math.exp(10) - 1) * (d - 10)


def gvpo(samples: list[Sample], lps: Lps, beta: float = 0.1, reference: str = "old") -> Tensor:
    signal = {"old": "old_logprobs", "rollout": "rollout_logprobs", "frozen": "ref_logprobs"}[reference]
    per_group = []
    for members in _groups(samples):
        k = len(members)
        gap = [sum(lps[i]) - sum(_tokens(samples[i], signal)) for i in members]
        rewards = [samples[i].reward for i in members]
        w = [r - sum(rewards) / k - beta * (g - sum(gap) / k) for r, g in zip(rewards, gap, strict=True)]
        per_group.append(sum(x * x for x in w) / (2 * (k - 1)))
    return sum(per_group) / len(per_group)


def gvpo_opd(
    samples: list[Sample], lps: Lps, length_alpha: float = 0.0, teacher_coef: float | None = None, beta: float = 0.1
) -> Tensor:
    per_group = []
    for members in _groups(samples):
        k = len(members)
        lp = [sum(lps[i]) for i in members]
        teacher = [sum(_tokens(samples[i], "teacher_logprobs")) for i in members]
        if teacher_coef is None:
            d = [(x - t) * len(lps[i]) ** -length_alpha for x, t, i in zip(lp, teacher, members, strict=True)]
        else:
            old = [sum(_tokens(samples[i], "old_logprobs")) for i in members]
            total = [samples[i].reward + teacher_coef * (t - o) for i, t, o in zip(members, teacher, old, strict=True)]
            d = [r - beta * (x - o) for r, x, o in zip(total, lp, old, strict=True)]
        per_group.append(sum((x - sum(d) / k) ** 2 for x in d) / (2 * (k - 1)))
    return sum(per_group) / len(per_group)


def _weight(samples: list[Sample], lps: Lps, i: int, t: int, tis: str, cap: float, towards: str) -> float:
    rollout = _tokens(samples[i], "rollout_logprobs")
    target = [float(x) for x in lps[i]] if towards == "logprobs" else _tokens(samples[i], towards)
    if tis == "none":
        return 1.0
    gap = target[t] - rollout[t] if tis == "token" else sum(target) - sum(rollout)
    return min(math.exp(gap), cap)


def opd(
    samples: list[Sample], lps: Lps, shape: str = "raw", clip: float = 5.0, tis: str = "none", tis_cap: float = 2.0
) -> Tensor:
    deltas = {
        (i, t): teacher - float(lps[i][t])
        for i, s in enumerate(samples)
        for t, teacher in enumerate(_tokens(s, "teacher_logprobs"))
    }
    mean = {z: [abs(d) for d in deltas.values() if (d > 0) == z] for z in (True, False)}
    shapes: dict[str, Callable[[float], float]] = {
        "raw": lambda d: d,
        "sign": lambda d: math.copysign(1.0, d),
        "tanh": lambda d: (math.exp(d) - 1) / (math.exp(d) + 1),
        "clip": lambda d: max(-clip, min(clip, d)),
        "group_constant": lambda d: math.copysign(sum(mean[d > 0]) / len(mean[d > 0]), d),
    }
    terms = [
        -_weight(samples, lps, i, t, tis, tis_cap, "logprobs") * shapes[shape](d) * lps[i][t] for (i, t), d in deltas.items()
    ]
    return sum(terms) / len(terms)


def _advantages(samples: list[Sample], rewards: list[float], standardise: bool) -> list[float]:
    found = [0.0] * len(samples)
    for members in _groups(samples):
        r = [rewards[i] for i in members]
        mean = sum(r) / len(r)
        std = math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - 1))
        for i, x in zip(members, r, strict=True):
            found[i] = 0.0 if max(r) == min(r) else (x - mean) / (std + 1e-6 if standardise else 1.0)
    return found


def ratio_family(
    samples: list[Sample],
    lps: Lps,
    kind: str,
    clip_low: float | None,
    clip_high: float,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_in: str = "loss",
    tis: str = "none",
    tis_cap: float = 2.0,
    max_response_tokens: int = 1,
) -> Tensor:
    rewards = []
    for s in samples:
        old, ref = _tokens(s, "old_logprobs"), _tokens(s, "ref_logprobs")
        kls = [float(_kl(kl_estimator, torch.tensor(r - o, dtype=torch.float64))) for o, r in zip(old, ref, strict=True)]
        rewards.append(s.reward - (kl_coef * sum(kls) if kl_in == "reward" else 0.0))
    adv = _advantages(samples, rewards, standardise=kind != "dr_grpo")
    total_tokens = sum(len(x) for x in lps)

    def clipped(rho: Tensor, a: float) -> Tensor:
        bounded = rho.clamp(1 - (clip_low or 0.0), 1 + clip_high)
        return rho * a if float(rho) * a <= float(bounded) * a else bounded.detach() * a

    losses = []
    for i, s in enumerate(samples):
        old, ref, n = _tokens(s, "old_logprobs"), _tokens(s, "ref_logprobs"), len(lps[i])
        each = {
            "grpo": 1 / (n * len(samples)),
            "gspo": 1 / (n * len(samples)),
            "dr_grpo": 1 / (max_response_tokens * len(samples)),
            "dapo": 1 / total_tokens,
            "cispo": 1 / total_tokens,
        }[kind]
        w = [_weight(samples, lps, i, t, tis, tis_cap, "old_logprobs") for t in range(n)]
        if kind == "gspo":
            ratio = ((sum(lps[i]) - sum(old)) / n).exp()
            losses.append(-clipped(ratio, adv[i]) * sum(w) / n / len(samples))
        for t, lp in enumerate(lps[i]):
            rho = (lp - old[t]).exp()
            if kind == "cispo":
                kept = rho.detach().clamp(max=1 + clip_high)
                kept = kept if clip_low is None else kept.clamp(min=1 - clip_low)
                losses.append(-each * w[t] * kept * adv[i] * lp)
            elif kind != "gspo":
                losses.append(-each * w[t] * clipped(rho, adv[i]))
            if kl_in == "loss":
                losses.append(each * kl_coef * _kl(kl_estimator, ref[t] - lp))
    return sum(losses)


def rloo(samples: list[Sample], lps: Lps, tis: str = "none", tis_cap: float = 2.0) -> Tensor:
    terms = []
    for members in _groups(samples):
        for i in members:
            others = [samples[j].reward for j in members if j != i]
            a = samples[i].reward - sum(others) / len(others)
            w = [_weight(samples, lps, i, t, tis, tis_cap, "logprobs") for t in range(len(lps[i]))]
            terms.append(-a * sum(x * lp for x, lp in zip(w, lps[i], strict=True)))
    return sum(terms) / len(samples)


def sft(samples: list[Sample], lps: Lps) -> Tensor:
    flat = [lp for row in lps for lp in row]
    return -sum(flat) / len(flat)


CLIPPED = {"clip_low": 0.2, "clip_high": 0.2}
CASES: list[tuple[str, dict[str, Any], Callable[..., Tensor], dict[str, Any]]] = [
    ("gvpo", {"beta": 0.3}, gvpo, {"beta": 0.3}),
    ("gvpo", {"reference": "rollout"}, gvpo, {"reference": "rollout"}),
    ("gvpo", {"reference": "frozen"}, gvpo, {"reference": "frozen"}),
    ("gvpo_opd", {"length_alpha": 1.0}, gvpo_opd, {"length_alpha": 1.0}),
    ("gvpo_opd", {"teacher_coef": 0.07, "beta": 0.2}, gvpo_opd, {"teacher_coef": 0.07, "beta": 0.2}),
    ("opd", {}, opd, {}),
    ("opd", {"shape": "sign"}, opd, {"shape": "sign"}),
    ("opd", {"shape": "tanh"}, opd, {"shape": "tanh"}),
    ("opd", {"shape": "clip", "clip": 0.3}, opd, {"shape": "clip", "clip": 0.3}),
    ("opd", {"shape": "group_constant"}, opd, {"shape": "group_constant"}),
    ("opd", {"tis": "token", "tis_cap": 1.1}, opd, {"tis": "token", "tis_cap": 1.1}),
    ("opd", {"tis": "sequence"}, opd, {"tis": "sequence"}),
    ("tv_opd", {}, opd, {"shape": "sign"}),
    ("rloo", {}, rloo, {}),
    ("rloo", {"tis": "token"}, rloo, {"tis": "token"}),
    ("rloo", {"tis": "sequence", "tis_cap": 1.0}, rloo, {"tis": "sequence", "tis_cap": 1.0}),
    ("sft", {}, sft, {}),
]
for _kind, _clip in (
    ("grpo", CLIPPED),
    ("dr_grpo", {**CLIPPED, "max_response_tokens": 7}),
    ("dapo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("gspo", {"clip_low": 0.03, "clip_high": 0.04}),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.28}),
    ("cispo", {"clip_low": None, "clip_high": 0.28}),
):
    for _more in (
        {},
        {"kl_coef": 0.2},
        {"kl_coef": 0.2, "kl_estimator": "k2"},
        {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
        {"kl_coef": 0.2, "kl_in": "reward"},
        {"tis": "token", "tis_cap": 1.2},
        {"tis": "sequence"},
    ):
        _options = {**_clip, **_more}
        CASES.append((_kind, _options, ratio_family, {"kind": _kind, **_options}))


@pytest.mark.parametrize(("name", "options", "reference", "arguments"), CASES, ids=lambda v: v if isinstance(v, str) else None)
def test_against_the_formula_written_out(
    name: str, options: dict[str, Any], reference: Callable[..., Tensor], arguments: dict[str, Any]
) -> None:
    """One case of options, on three random batches with ragged groups, masks and NaN at every masked place."""
    for seed in (0, 1, 2):
        samples = random_samples(seed)
        lps = [[torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in _tokens(s, "logprobs")] for s in samples]
        loss = reference(samples, lps, **arguments)
        flat = [lp for row in lps for lp in row]
        wanted = torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
        found = explain(samples, name, options)
        assert found["loss"] == pytest.approx(float(loss), rel=1e-11, abs=1e-13)
        grads = [
            g for s, r in zip(samples, found["samples"], strict=True) for g, m in zip(r["token_grads"], s.mask, strict=True) if m
        ]
        assert grads == pytest.approx([float(g) for g in wanted], rel=1e-9, abs=1e-13)


def test_permuted_magnitudes_keep_the_signs_and_the_magnitudes_of_each_sign() -> None:
    """The control of the shape `permuted`: what it keeps, that it permutes at all, and anew after each accepted step."""
    from megatron_gvpo.objectives.base import LocalComm
    from megatron_gvpo.objectives.batch import whole_batch
    from megatron_gvpo.objectives.registry import create_objective

    batch, _ = whole_batch(random_samples(3))
    objective = create_objective("opd", {"shape": "permuted", "seed": 5})
    first = objective.prepare(batch, LocalComm())
    assert first.coefficients_T is not None
    delta_T = batch.tokens.signal("teacher_logprobs") - batch.tokens.signal("logprobs")
    advantage_T = -first.coefficients_T
    assert torch.equal(advantage_T.sign(), delta_T.sign())
    for sign in (1, -1):
        at = delta_T.sign() == sign
        assert torch.equal(advantage_T[at].sort().values, delta_T[at].sort().values)
    assert not torch.equal(advantage_T, delta_T)
    objective.commit(first, accepted=True)
    second = objective.prepare(batch, LocalComm())
    assert second.coefficients_T is not None
    assert not torch.equal(first.coefficients_T, second.coefficients_T)


def test_tokens_without_a_teacher_value_count_in_no_denominator() -> None:
    """N_active of OPD: a NaN of the teacher is no value, a Delta of exactly 0 is one."""
    samples = random_samples(4)
    teacher = samples[0].teacher_logprobs
    current = samples[1].logprobs
    assert teacher is not None
    assert current is not None
    samples[0].teacher_logprobs = [math.nan] * len(teacher)
    samples[1].teacher_logprobs = list(current)
    found = explain(samples, "tv_opd", {})
    active = sum(sum(s.mask) for s in samples[1:])
    assert found["samples"][0]["token_grads"] == [0.0] * len(teacher)
    assert found["samples"][1]["token_grads"] == [0.0] * len(current)
    sizes = {round(abs(g) * active, 9) for s in found["samples"][2:] for g in s["token_grads"] if g}
    assert sizes == {1.0}
