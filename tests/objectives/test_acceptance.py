"""Cases that have broken other systems, by number: those that an objective can get wrong. Values were computed in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, GvpoConfig, objective_config
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.logprobs import FullTeacher, Teacher, TopKTeacher, VocabShard, divergence
from megatron_gvpo.objectives.advantages import standardised_N
from megatron_gvpo.objectives.base import LocalComm, Outputs
from megatron_gvpo.objectives.batch import kept_samples, whole_batch
from megatron_gvpo.objectives.clipped import clip_gain_T
from megatron_gvpo.objectives.contract_world import Response, World, run
from megatron_gvpo.objectives.explain import explain
from megatron_gvpo.objectives.kl import kl_slope_T, kl_T
from megatron_gvpo.objectives.registry import create_objective
from tests.objectives.helpers import prepared_of, random_samples, sample


def test_case_10_k3_stays_finite_and_pulls_back() -> None:
    """Current log-prob -200, reference -1: e^199 overflows float32 and its gradient with it."""
    for dtype in (torch.float32, torch.float64):
        lp_T = torch.tensor([-200.0, -1.0, -11.0], dtype=dtype, requires_grad=True)
        d_T = torch.tensor([-1.0, -200.0, -1.0], dtype=dtype) - lp_T
        value_T = kl_T("k3", d_T)
        (slope_T,) = torch.autograd.grad(value_T.sum(), lp_T)
        assert value_T.isfinite().all()
        assert slope_T.isfinite().all()
        assert slope_T[0] < 0  # descent raises the log-prob that has fallen
        assert torch.allclose(slope_T, kl_slope_T("k3", d_T.detach()))
        # Value and slope go on from d = 10 without a step.
        assert float(value_T[2].detach()) == pytest.approx(math.exp(10) - 11, rel=1e-6)


def test_case_10_a_huge_ratio_without_an_advantage_costs_nothing() -> None:
    """exp(1000) times 0 is NaN; both the loss and its gradient are to be 0. And a clipped overflow has gradient 0, not NaN."""
    log_ratio_T = torch.tensor([1000.0, 1000.0], dtype=torch.float64, requires_grad=True)
    gain_T, clipped_T = clip_gain_T(log_ratio_T, torch.tensor([0.0, 2.0], dtype=torch.float64), 0.2, 0.2)
    (slope_T,) = torch.autograd.grad(gain_T.sum(), log_ratio_T)
    assert gain_T.tolist() == [0.0, 2.4]
    assert slope_T.tolist() == [0.0, 0.0]
    assert clipped_T.tolist() == [False, True]
    flat = [sample("a", 1.0, logprobs=[0.0], old_logprobs=[-1000.0]), sample("a", 1.0, logprobs=[-1.0], old_logprobs=[-1.0])]
    for name in ("grpo", "dr_grpo", "dapo", "gspo"):
        found = explain(flat, name, {})
        assert found["loss"] == 0.0, name
        assert [s["token_grads"] for s in found["samples"]] == [[0.0], [0.0]], name


def test_case_11_nan_at_a_masked_position() -> None:
    """Token losses [1, nan], mask [1, 0]: loss 1, gradient (-1 in the log-prob, 0)."""
    found = explain([sample("a", mask=[1, 0], logprobs=[-1.0, math.nan])], "sft", {})
    assert found["loss"] == 1.0
    assert found["samples"][0]["token_grads"] == [-1.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(BUILTIN_CONFIGS) - {"gkd"}))
def test_case_11_nan_at_masked_positions_of_every_objective(name: str) -> None:
    """Random batches whose masked places are all NaN: nothing that comes out is NaN."""
    found = explain(random_samples(1), name, {})
    assert math.isfinite(found["loss"])
    assert all(math.isfinite(g) for s in found["samples"] for g in s["token_grads"])
    assert all(math.isfinite(m) for m in found["metrics"].values())


class _LogitsHead:
    """The divergences of the log-prob engine, at the tokens of one micro-batch and for one teacher."""

    def __init__(self, logits_TV: torch.Tensor, teacher: Teacher) -> None:
        self.logits_TV, self.teacher = logits_TV, teacher

    def divergence(self, kind: str, *, beta: float = 0.5) -> torch.Tensor:
        width = self.logits_TV.size(1)
        return divergence(kind, self.logits_TV, self.teacher, VocabShard(0, width, width), beta=beta)  # pyright: ignore[reportArgumentType]


def _gkd(kind: str, student: list[float], teacher: Teacher) -> tuple[float, list[float]]:
    """Loss and gradient in the student's logits of one token."""
    objective = create_objective("gkd", {"divergence": kind})
    batch, _ = whole_batch([sample("a", logprobs=[-1.0])])
    logits_TV = torch.tensor([student], dtype=torch.float64).log().requires_grad_()
    prepared = objective.prepare(batch, LocalComm())
    outputs = Outputs(batch.tokens, torch.zeros(1, dtype=torch.float64), head=_LogitsHead(logits_TV, teacher))
    loss = objective.loss(outputs, prepared, {}).loss_T.sum() / prepared.denominator
    loss.backward()
    assert logits_TV.grad is not None
    return float(loss.detach()), logits_TV.grad[0].tolist()


def _top_two(p: float, q: float) -> TopKTeacher:
    return TopKTeacher(torch.tensor([[0, 1]]), torch.tensor([[p, q]], dtype=torch.float64).log())


def test_case_14_gkd_gives_the_tail_one_bucket() -> None:
    """p = (.5, .3 | tail .2), q = (.6, .39 | .01): +.42928 where truncation gives -.16987, and a gradient that is not 0."""
    loss, gradient = _gkd("forward_kl", [0.6, 0.39, 0.01], _top_two(0.5, 0.3))
    assert loss == pytest.approx(0.42928, abs=1e-5)
    assert max(map(abs, gradient)) > 0.1


def test_case_15_gkd_charges_for_leaving_the_teachers_support() -> None:
    """The student has the teacher's ratio within the top 2, and only a mass of .1 there: renormalised, that would be free."""
    loss, _ = _gkd("forward_kl", [0.0625, 0.0375, 0.9], _top_two(0.5, 0.3))
    assert loss > 1.0


def test_case_16_gkd_by_hand() -> None:
    """p = (.7, .2, .1), q = (.5, .3, .2), every kind under its own name; p = q gives 0 with gradient 0."""
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    teacher = FullTeacher(torch.tensor([p], dtype=torch.float64).log())
    wanted = {"tv": 0.2, "forward_kl": 0.085123, "reverse_kl": 0.092033, "jsd": 0.021901}
    for kind, value in wanted.items():
        assert _gkd(kind, q, teacher)[0] == pytest.approx(value, abs=1e-6), kind
        loss, gradient = _gkd(kind, p, teacher)
        assert abs(loss) < 1e-12
        assert max(map(abs, gradient)) < 1e-12, kind
    assert _gkd("tv", q, teacher)[1] == pytest.approx([-0.25, 0.15, 0.10], abs=1e-12)


def test_cases_21_and_22_one_denominator_for_all_ranks_and_micro_batches() -> None:
    """One token of loss 1 and three of 3: 2.5 and a gradient of 1/4 a token, never a mean of means (2.0)."""
    samples = [sample("a", logprobs=[-1.0]), sample("b", logprobs=[-3.0, -3.0, -3.0])]
    found = explain(samples, "sft", {})
    assert found["loss"] == 2.5
    assert [g for s in found["samples"] for g in s["token_grads"]] == [-0.25] * 4
    logits = torch.zeros(4, 5, dtype=torch.float64)
    world = World(
        [
            Response("a", 0.0, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), _all(logits[:1])),
            Response("b", 0.0, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), _all(logits[1:])),
        ]
    )
    objective = create_objective("sft", {})
    for ranks, micro_batches, scatter in ((2, 1, False), (1, 2, False), (2, 2, True), (4, 1, True)):
        split = run(objective, world, ranks, micro_batches, scatter)
        assert split.grad_PV[:, 0].tolist() == pytest.approx([-0.25 * 0.8] * 4)


def _all(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    return dict.fromkeys(names, logits)


def test_case_23_a_fully_masked_sample_counts_nowhere() -> None:
    """One sample of four tokens of loss 1 and a fully masked one: 1.0, not .8; and it is reported as dropped."""
    samples = [sample("a", logprobs=[-1.0] * 4), sample("a", 100.0, mask=[0], logprobs=[-1.0])]
    found = explain(samples, "sft", {})
    assert found["loss"] == 1.0
    assert found["dropped"] == [{"line": 2, "why": "no unmasked response token"}]
    assert found["samples"][1] == {"group": "a", "token_grads": [0.0], "coefficient": 0.0}


@pytest.mark.parametrize("name", sorted(set(BUILTIN_CONFIGS) - {"gkd"}))
def test_case_23_everything_masked(name: str) -> None:
    """No token at all: loss 0, gradients 0, and a denominator of 0 by which the engine knows that it skips the step."""
    samples = [replace(s, mask=[0] * len(s.mask)) for s in random_samples(2)]
    found = explain(samples, name, {})
    assert found["loss"] == 0.0
    assert not any(g for s in found["samples"] for g in s["token_grads"])
    assert len(found["dropped"]) == len(samples)
    prepared, _ = prepared_of(name, {}, samples)
    assert prepared.denominator == 0.0
    assert all(math.isfinite(m) for m in prepared.metrics.values())


def test_case_24_the_numerator_sees_the_mask() -> None:
    """Losses [[1, 100], [1, -50]], masks [[1, 0], [1, 0]]: 1.0."""
    samples = [sample("a", mask=[1, 0], logprobs=[-1.0, -100.0]), sample("a", mask=[1, 0], logprobs=[-1.0, 50.0])]
    assert explain(samples, "sft", {})["loss"] == 1.0


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_case_25_the_same_samples_under_other_layouts(name: str) -> None:
    """Four samples under (dp, cp, micro-batches) = (1,1,1), (1,1,4), (2,1,2), (4,1,1), (2,2,1): one gradient norm."""
    world = World.random(9, sizes=(2, 2), flat=())
    norms = [
        float(run(create_objective(name, {}), world, ranks=dp * cp, micro_batches=micro, scatter=cp > 1).grad_PV.norm())
        for dp, cp, micro in ((1, 1, 1), (1, 1, 4), (2, 1, 2), (4, 1, 1), (2, 2, 1))
    ]
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-12)
    assert norms[0] > 0


def test_case_26_rounding_residue_is_not_a_spread() -> None:
    """Equal rewards in float32: advantages exactly 0 and the group counted; a real spread keeps its value."""
    for value, k in ((0.35, 8), (0.7, 12)):
        reward = float(torch.tensor(value, dtype=torch.float32))
        samples = [sample("a", reward, logprobs=[-1.0 - i / 7], old_logprobs=[-1.0 - i / 7]) for i in range(k)]
        for name in ("gvpo", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"):
            found = explain(samples, name, {})
            assert all(g == 0.0 for s in found["samples"] for g in s["token_grads"]), name
            assert found["metrics"]["flat_groups"] == 1.0, name
    batch, _ = whole_batch([sample("a", r, logprobs=[-1.0]) for r in [0.35] * 7 + [-0.25]])
    advantage_N = standardised_N(batch.sequences, batch.sequences.reward_N)
    assert advantage_N.tolist() == pytest.approx([0.35355] * 7 + [-2.47487], abs=1e-5)


def test_case_27_a_group_of_one_is_dropped_and_named() -> None:
    """Objectives that divide by k-1 drop it; the others keep it and stay finite."""
    samples = random_samples(5)
    alone = replace(samples[0], group="alone")
    for name in sorted(set(BUILTIN_CONFIGS) - {"gkd"}):
        needs = objective_config(name, {}).needs()
        found = explain([*samples, alone], name, {})
        assert math.isfinite(found["loss"])
        if needs.min_group_size == 2:
            assert [d["line"] for d in found["dropped"]] == [len(samples) + 1], name
            assert "'alone' is left with 1" in found["dropped"][0]["why"]
            assert found["loss"] == pytest.approx(explain(samples, name, {})["loss"], rel=1e-12), name
        else:
            assert found["dropped"] == [], name
    assert {n for n in BUILTIN_CONFIGS if objective_config(n, {}).needs().min_group_size == 2} == {
        "gvpo",
        "gvpo_opd",
        "grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
    }


def test_case_27_a_group_reduced_to_one_by_an_empty_response() -> None:
    """Two samples, one of them empty: both are dropped, each with its own reason."""
    samples = [
        sample("a", 1.0, logprobs=[-1.0], old_logprobs=[-1.0]),
        Sample("a", [1], [], [], 0.0, logprobs=[], old_logprobs=[]),
    ]
    kept, dropped = kept_samples(samples, 2)
    assert kept == []
    assert [d.why for d in dropped] == [
        "its group 'a' is left with 1, and the objective needs 2",
        "no unmasked response token",
    ]
    found = explain(samples, "gvpo", {})
    assert found["loss"] == 0.0
    assert [s["token_grads"] for s in found["samples"]] == [[0.0], []]


def test_case_28_groups_go_by_their_id() -> None:
    """Shuffled samples, and a group that has lost a member: advantages by id, and by the group's own size."""
    rewards = {"a": [1.0, 0.0, 0.5], "b": [3.0, 1.0]}
    ordered = [(g, r) for g, values in rewards.items() for r in values]
    shuffled = [ordered[i] for i in (3, 0, 4, 2, 1)]
    found = explain([sample(g, r, logprobs=[-1.0]) for g, r in shuffled], "rloo", {})
    wanted = {("a", 1.0): 0.75, ("a", 0.0): -0.75, ("a", 0.5): 0.0, ("b", 3.0): 2.0, ("b", 1.0): -2.0}
    assert [s["coefficient"] for s in found["samples"]] == pytest.approx([-wanted[key] / 5 for key in shuffled])


def _case_29(rewards: tuple[float, float] = (1.0, 0.0), shift: float = 0.0) -> list[Sample]:
    lps = (-10.0 + shift, -12.0 + shift)
    return [sample("a", r, logprobs=[lp], old_logprobs=[-11.0]) for r, lp in zip(rewards, lps, strict=True)]


def test_case_29_gvpo_by_hand() -> None:
    """k = 2, beta .1, lp (-10, -12), old (-11, -11), R (1, 0): loss .16, dL/dlp (-.04, +.04); constants change nothing."""
    found = explain(_case_29(), "gvpo", {"beta": 0.1})
    assert found["loss"] == pytest.approx(0.16, abs=1e-14)
    assert [s["coefficient"] for s in found["samples"]] == pytest.approx([-0.04, 0.04], abs=1e-14)
    for changed in (_case_29(rewards=(8.0, 7.0)), _case_29(shift=-3.0)):
        again = explain(changed, "gvpo", {"beta": 0.1})
        assert again["loss"] == pytest.approx(found["loss"], abs=1e-12)
        assert [s["coefficient"] for s in again["samples"]] == pytest.approx([-0.04, 0.04], abs=1e-12)


def test_case_29_the_loss_is_a_mean_over_groups_and_an_empty_response_is_dropped() -> None:
    """A second, identical group halves each coefficient; an empty third member enters neither mean nor k."""
    twin = [replace(s, group="b") for s in _case_29()]
    empty = Sample("a", [1], [], [], 50.0, logprobs=[], old_logprobs=[])
    found = explain([*_case_29(), empty, *twin], "gvpo", {"beta": 0.1})
    assert found["loss"] == pytest.approx(0.16, abs=1e-14)
    assert [s["coefficient"] for s in found["samples"]] == pytest.approx([-0.02, 0.02, 0.0, -0.02, 0.02], abs=1e-14)
    assert found["dropped"] == [{"line": 3, "why": "no unmasked response token"}]


def test_gvpo_keeps_a_flat_group_that_has_left_its_reference() -> None:
    """Equal rewards and theta != theta': the group is not dropped, and pulls the policy back to theta'."""
    found = explain(_case_29(rewards=(1.0, 1.0)), "gvpo", {"beta": 0.1})
    assert found["dropped"] == []
    assert [s["coefficient"] for s in found["samples"]] == pytest.approx([0.01, -0.01], abs=1e-14)
    assert found["metrics"]["flat_groups"] == 1.0


def test_gvpo_logs_the_terms_of_its_expansion() -> None:
    """Variance, reference covariance and reward covariance add up to the loss, up to what does not depend on theta."""
    terms = ("term_variance", "term_reference", "term_reward")
    samples = random_samples(6)
    moved = [replace(s, logprobs=[0.9 * v for v in s.logprobs or []]) for s in samples]
    first, second = (explain(s, "gvpo", GvpoConfig(beta=0.4).model_dump()) for s in (samples, moved))
    change = sum(second["metrics"][t] - first["metrics"][t] for t in terms)
    assert second["loss"] - first["loss"] == pytest.approx(change, rel=1e-10)
