"""The mathematics that the objectives promise, on a policy small enough to know every probability.

Why: agreement with a formula does not show that the formula does what its paper says. Not covered: networks, sampling noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_gvpo.objectives.base import LocalComm
from megatron_gvpo.objectives.batch import whole_batch
from megatron_gvpo.objectives.gradients import token_loss
from megatron_gvpo.objectives.registry import create_objective
from tests.objectives.helpers import sample
from tests.objectives.tabular import Problem, Tree, minimise, sampled_groups

TREE = Tree()
GENERATOR = torch.Generator().manual_seed(0)
REWARDS_S = torch.randn(7, generator=GENERATOR, dtype=torch.float64)
REFERENCE = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
TEACHER = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
SAMPLER = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
START = torch.randn(3, 3, generator=GENERATOR, dtype=torch.float64)
BETA = 0.5


def _tilted(log_weights_S: Tensor) -> Tensor:
    return log_weights_S.softmax(-1)


def _probabilities(logits: Tensor) -> Tensor:
    return TREE.logprobs_S(logits).exp()


def _groups(seed: int = 1) -> list[list[int]]:
    """96 groups of four, from a policy that is neither the trained one nor the reference."""
    return sampled_groups(_probabilities(SAMPLER), 96, 4, seed)


def test_gvpo_reaches_its_target_from_any_sampling_policy_and_grpo_does_not() -> None:
    """The optimum is pi_ref exp(R / beta) to 1e-6, whoever sampled; GRPO with the same data and KL settles elsewhere."""
    wanted_S = _tilted(TREE.logprobs_S(REFERENCE) + REWARDS_S / BETA)
    problem = Problem.build(_groups(), REWARDS_S, {"ref_logprobs": REFERENCE, "old_logprobs": REFERENCE})
    gvpo = create_objective("gvpo", {"beta": BETA, "reference": "frozen"})
    found = minimise(lambda logits: problem.gradient(gvpo, logits), START)
    assert (_probabilities(found) - wanted_S).abs().max() < 1e-6

    grpo = create_objective("grpo", {"kl_coef": BETA, "kl_estimator": "k3"})
    logits = START.clone()
    for _ in range(700):
        _, gradient = problem.gradient(grpo, logits, old_logprobs=logits)  # every step starts a new rollout batch
        logits -= 2.0 * gradient
    assert float(gradient.abs().max()) < 1e-3  # it has settled
    assert (_probabilities(logits) - wanted_S).abs().max() > 0.03


def test_gvpo_steps_against_the_last_policy_divide_beta() -> None:
    """Three exact steps from theta_0 reach pi_0 exp(3 R / beta): reference `old` means an effective beta of beta / 3."""
    gvpo = create_objective("gvpo", {"beta": BETA})
    old = REFERENCE
    for _ in range(3):
        problem = Problem.build(_groups(), REWARDS_S, {"old_logprobs": old})
        old = minimise(lambda logits, p=problem: p.gradient(gvpo, logits), old)
    wanted_S = _tilted(TREE.logprobs_S(REFERENCE) + 3 * REWARDS_S / BETA)
    assert (_probabilities(old) - wanted_S).abs().max() < 1e-6


def test_gvpo_starts_as_beta_times_rloo() -> None:
    """At theta = theta' every group's gradient is beta times its RLOO gradient."""
    problem = Problem.build(_groups(), REWARDS_S, {"old_logprobs": START})
    _, gvpo = problem.gradient(create_objective("gvpo", {"beta": BETA}), START)
    _, rloo = problem.gradient(create_objective("rloo", {}), START)
    assert torch.allclose(gvpo, BETA * rloo, rtol=1e-12, atol=1e-15)


def test_gvpo_with_k_minus_one_is_unbiased() -> None:
    """The mean over all groups of three from a sampling policy is half the population variance, exactly."""
    mu_S = _probabilities(SAMPLER)
    gvpo = create_objective("gvpo", {"beta": BETA, "reference": "frozen"})
    groups = [list(g) for g in itertools.product(range(7), repeat=3)]
    problem = Problem.build(groups, REWARDS_S, {"ref_logprobs": REFERENCE})
    batch = problem.under(START)
    gap_N = BETA * (batch.sequences.sum_of("logprobs") - batch.sequences.sum_of("ref_logprobs"))
    w_N = batch.sequences.reward_N - gap_N
    per_group = (w_N - batch.sequences.group_mean_N(w_N)).square().view(-1, 3).sum(1) / 4
    chance_G = torch.stack([mu_S[list(g)].prod() for g in groups])
    # The batch's loss is the plain mean of these per-group losses, so weighing them by chance gives its expectation.
    value, _ = problem.gradient(gvpo, START)
    assert value == pytest.approx(float(per_group.mean()), rel=1e-12)
    x_S = REWARDS_S - BETA * (TREE.logprobs_S(START) - TREE.logprobs_S(REFERENCE))
    variance = (mu_S * (x_S - (mu_S * x_S).sum()).square()).sum()
    assert float((chance_G * per_group).sum()) == pytest.approx(float(variance) / 2, rel=1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_gvpo_opd_reaches_the_teacher_for_any_alpha(alpha: float) -> None:
    """The weight by length changes the path and not the end, from responses of any policy."""
    problem = Problem.build(_groups(), REWARDS_S, {"teacher_logprobs": TEACHER})
    objective = create_objective("gvpo_opd", {"length_alpha": alpha})
    found = minimise(lambda logits: problem.gradient(objective, logits), START)
    assert (_probabilities(found) - _probabilities(TEACHER)).abs().max() < 1e-6


def test_gvpo_opd_across_tokenizers_needs_alpha_zero() -> None:
    """A teacher's scores that do not sum to 1 (here: shifted): with alpha 0 the optimum is the normalised score, else biased."""
    found = {}
    for alpha in (0.0, 1.0):
        problem = Problem.build(_groups(), REWARDS_S, {"teacher_logprobs": TEACHER}, teacher_shift=-3.0)
        objective = create_objective("gvpo_opd", {"length_alpha": alpha})
        found[alpha] = _probabilities(minimise(lambda logits, p=problem, o=objective: p.gradient(o, logits), START))
    assert (found[0.0] - _probabilities(TEACHER)).abs().max() < 1e-6
    assert (found[1.0] - _probabilities(TEACHER)).abs().max() > 1e-2


@pytest.mark.parametrize("teacher_coef", [0.2, 0.5, 0.8])
def test_reward_and_teacher_together_reach_their_optimum(teacher_coef: float) -> None:
    """pi_ref^(1 - bT/b) pi_T^(bT/b) exp(R/b); the last case extrapolates beyond the teacher."""
    share = teacher_coef / BETA
    log_weights_S = (1 - share) * TREE.logprobs_S(REFERENCE) + share * TREE.logprobs_S(TEACHER) + REWARDS_S / BETA
    problem = Problem.build(_groups(), REWARDS_S, {"teacher_logprobs": TEACHER, "ref_logprobs": REFERENCE})
    objective = create_objective("gvpo_opd", {"teacher_coef": teacher_coef, "beta": BETA, "reference": "frozen"})
    found = minimise(lambda logits: problem.gradient(objective, logits), START)
    assert (_probabilities(found) - _tilted(log_weights_S)).abs().max() < 1e-6


# --- token-level distillation: one state, every token once, importance weights give the exact expectation over q

P = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64)
Q_LOGITS = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=torch.float64)


def _expected(shape: str, logits: Tensor, **options: float) -> Tensor:
    """E_q of opd's gradient in the logits: each of the four tokens once, as if sampled uniformly, weighted back to q."""
    lp = logits.log_softmax(-1)
    samples = [
        sample("a", logprobs=[float(lp[v])], rollout_logprobs=[math.log(0.25)], teacher_logprobs=[float(P[v].log())])
        for v in range(4)
    ]
    objective = create_objective("opd", {"shape": shape, "tis": "token", "tis_cap": 4.0, **options})
    batch, _ = whole_batch(samples)
    prepared = objective.prepare(batch, LocalComm())
    leaf = logits.clone().requires_grad_()
    loss = token_loss(objective, batch, prepared, leaf.log_softmax(-1)).loss_T.sum() / prepared.denominator
    return torch.autograd.grad(loss, leaf)[0]


def _slope(divergence: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(divergence(leaf.softmax(-1)), leaf)[0]


def test_the_shapes_are_gradients_of_their_divergences() -> None:
    """sign: 2 TV; raw: KL(q||p); tanh: 2 KL(p||(p+q)/2): the expected surrogate's gradient, exactly."""
    cases = {
        "sign": lambda q: (P - q).abs().sum(),
        "raw": lambda q: (q * (q / P).log()).sum(),
        "tanh": lambda q: 2 * (P * (P / ((P + q) / 2)).log()).sum(),
    }
    for shape, divergence in cases.items():
        assert torch.allclose(_expected(shape, Q_LOGITS), _slope(divergence, Q_LOGITS), rtol=1e-10, atol=1e-12), shape


def test_sign_weighted_scores_average_to_minus_two_grad_tv() -> None:
    """E_q[sign(Delta) grad log q] = -2 grad TV(p, q), straight from the definition."""
    leaf = Q_LOGITS.clone().requires_grad_()
    log_q, q = leaf.log_softmax(-1), Q_LOGITS.softmax(-1)
    (scores,) = torch.autograd.grad((q * (P / q).log().sign() * log_q).sum(), leaf)
    tv = _slope(lambda q: (P - q).abs().sum() / 2, Q_LOGITS)
    assert torch.allclose(scores, -2 * tv, rtol=1e-12, atol=1e-15)
    assert torch.allclose(_expected("sign", Q_LOGITS), 2 * tv, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", ["raw", "tanh", "clip", "sign"])
def test_the_shapes_reach_the_teacher(shape: str) -> None:
    """raw, tanh and clip with a constant step; sign, whose gradient does not vanish, with a decreasing one."""
    logits = Q_LOGITS.clone()
    for k in range(400):
        step = 0.5 / (1 + 0.2 * k) if shape == "sign" else 2.0
        logits -= step * _expected(shape, logits)
    assert (logits.softmax(-1) - P).abs().max() < (1e-2 if shape == "sign" else 1e-6)
