"""What the weights do: how they answer to the scale of a gradient, to the order of things, to shortcuts, and when they say so."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import ObjectiveConfig
from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo import group_multipliers, measurement
from megatron_gvpo.gupo.evidence import evidence_sum
from megatron_gvpo.gupo.gradients import Moments
from megatron_gvpo.gupo.head import GroupSpan
from megatron_gvpo.gupo.weights import summarise, uncertainty
from megatron_gvpo.objectives import Batch, Comm, Objective, Prepared
from tests.gupo import cases
from tests.gupo.cases import OBJECTIVES, Case, gvpo, make_case, measured
from tests.gupo.reference import gvpo_loss, reference


class Fixed(Objective[ObjectiveConfig]):
    """Coefficients that no log-prob changes: the centred rewards, times a number for each group."""

    name: ClassVar[str] = "fixed"

    def __init__(self, scale_G: list[float]) -> None:
        super().__init__(ObjectiveConfig())
        self.scale_G = torch.tensor(scale_G, dtype=torch.float64)

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        table = batch.sequences
        advantage_N = (table.reward_N - table.group_mean_N(table.reward_N)) * self.scale_G[table.group_N]
        return Prepared(float(len(table)), coefficients_T=-advantage_N[batch.tokens.sequence_T])


def _weights(case: Case, objective: Objective[Any], **options: Any) -> Tensor:
    gupo = GupoSection(enabled=True, **options)
    found = measured(case, objective, gupo)
    return group_multipliers(found.mean_evidence_G, found.active_G, gupo.eta)


@pytest.mark.parametrize(("scale", "lower"), [("paper", True), ("batch", True), ("snr", False)])
def test_a_group_with_larger_gradients_weighs_less_unless_noise_is_relative(scale: str, lower: bool) -> None:
    """Group 1's coefficients tripled: its variance grows ninefold, its signal-to-noise ratio does not change."""
    case = make_case()
    unit = 1e4  # gradients large enough for the paper's own scale to tell them apart
    plain = _weights(case, Fixed([unit] * 5), evidence_scale=scale)
    tripled = _weights(case, Fixed([unit, 3 * unit, unit, unit, unit]), evidence_scale=scale)
    if lower:
        assert float(tripled[1]) < float(plain[1]) - 1e-3
    else:
        torch.testing.assert_close(tripled, plain, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", ["batch", "snr"])
def test_the_scale_of_the_loss_does_not_matter(scale: str) -> None:
    """A loss in other units, over twelve orders of magnitude. The paper's own scale is the one it matters for (below)."""
    case = make_case()
    plain = _weights(case, Fixed([1.0] * 5), evidence_scale=scale)
    for factor in (1e-6, 1e6):
        torch.testing.assert_close(_weights(case, Fixed([factor] * 5), evidence_scale=scale), plain, rtol=1e-9, atol=0)


def test_at_the_gradients_of_a_large_model_the_raw_scale_is_the_plain_mean() -> None:
    """sigma around 1e-6, as in a large model: spread below 1e-4 with the paper's scale, far above with the batch's."""
    case, active = make_case(), torch.tensor([True, True, True, False, True])
    raw = _weights(case, Fixed([1e-6] * 5), evidence_scale="paper")
    scaled = _weights(case, Fixed([1e-6] * 5), evidence_scale="batch")
    assert summarise(raw, active, 0.1).uniform
    assert summarise(scaled, active, 0.1).spread > 1e-3


def test_renumbering_the_groups_renumbers_the_weights() -> None:
    """The order in which groups came says nothing about them. Rounding differs, because sums run in another order."""
    case = make_case()
    order = torch.tensor([3, 0, 4, 2, 1])  # new number of each group
    table = case.batch.sequences
    renumbered = replace(table, group_N=order[table.group_N])
    for name, make in OBJECTIVES.items():
        plain = _weights(case, make())
        moved = _weights(replace(case, batch=Batch(renumbered, case.batch.tokens)), make())
        torch.testing.assert_close(moved[order], plain, rtol=1e-9, atol=0, msg=name)


def test_renumbering_the_dimensions_changes_nothing() -> None:
    """Evidence is a mean over dimensions, so it knows neither rows nor columns; dead ones count nowhere."""
    generator = torch.Generator().manual_seed(4)
    variance = torch.rand(20, 30, generator=generator, dtype=torch.float64)
    variance[variance < 0.1] = 0.0
    mean = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    order = torch.randperm(600, generator=generator)
    for scale in ("paper", "batch", "snr"):
        one = evidence_sum(Moments(GroupSpan(0, 0, 1), mean, variance), 0.7, 1e-3, 0.5, scale)
        shuffled = [x.flatten()[order].view(30, 20) for x in (mean, variance)]
        other = evidence_sum(Moments(GroupSpan(0, 0, 1), *shuffled), 0.7, 1e-3, 0.5, scale)
        assert one.live == other.live == int((variance > 0).sum())
        assert one.total == pytest.approx(other.total, rel=1e-12)


def test_a_sixteenth_of_the_rows_tells_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 rows, many of them of rare tokens, float32: uncertainties within 2 % of those of all rows.

    float32 against float64 is checked on the way. The error grows with the spread of evidence over rows: with logits that
    differ by five and more within a token it is 5 to 10 % here (all groups alike), which this does not show.
    """
    monkeypatch.setattr(cases, "VOCAB", 16384)
    monkeypatch.setattr(cases, "HIDDEN", 16)
    case = make_case(seed=1, sizes=(4, 4, 4, 4), flat=-1)
    rarity = torch.arange(1, 16385, dtype=torch.float64).pow(-0.5)[:, None]
    case = replace(case, weight_VH=case.weight_VH * 0.2 + 0.2 * rarity * case.hidden_TH.mean(0))
    narrow = replace(case, weight_VH=case.weight_VH.float(), hidden_TH=case.hidden_TH.float())
    found = []
    for which, rows in ((case, 1.0), (narrow, 1.0), (narrow, 1 / 16)):
        result = measured(which, gvpo(), GupoSection(rows=rows), padded=16384)
        found.append(uncertainty(result.mean_evidence_G, result.active_G))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(found[2], found[1], rtol=0.02, atol=0)


def test_a_posterior_that_is_too_wide_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A delta given by hand at which a sample is another model altogether; the numbers are computed all the same."""
    measurement._said.clear()
    with caplog.at_level(logging.WARNING):
        found = measured(make_case(), gvpo(), GupoSection(delta=1e-3))
        measured(make_case(), gvpo(), GupoSection(delta=1e-3))
    assert found.kl > 1.0
    assert [r.getMessage() for r in caplog.records if "nats a token from the model" in r.getMessage()] != []
    assert len(caplog.records) == 1, "said once, not at every step"


def test_objectives_whose_gradient_is_not_the_log_probs_are_refused() -> None:
    """Divergences over the vocabulary and entropy terms have gradients that no coefficient of a log-prob describes."""

    class Entropy(Fixed):
        name: ClassVar[str] = "entropic"

        @property
        def needs(self) -> Needs:
            return Needs(entropy=True)

    class Whole(Fixed):
        name: ClassVar[str] = "whole"

        @property
        def needs(self) -> Needs:
            return Needs(teacher="full")

    for kind, why in ((Entropy, "entropic has an entropy term"), (Whole, "whole compares whole distributions")):
        with pytest.raises(ValueError, match=f"gupo: {why}.*set gupo.enabled: false"):
            measured(make_case(), kind([1.0] * 5), GupoSection())


def test_cosines_and_noise_scale_are_those_of_the_gradients() -> None:
    """Sketched inner products against the exact ones of the gradients at theta, at a posterior so narrow that both agree."""
    case = make_case(sizes=(3, 2, 4, 2, 3, 4, 4, 3), flat=3)
    gupo = GupoSection(delta=1e9)
    exact = reference(
        case.weight_VH, case.hidden_TH, case.targets_T, case.batch, gvpo_loss(0.3), gupo, 5, case.temperature
    ).gradients_G.flatten(1)
    found = measured(case, gvpo(), gupo).geometry
    gram = exact @ exact.t()
    norms = gram.diagonal().sqrt()
    active = norms > 0
    cosine = gram[active][:, active] / norms[active, None] / norms[None, active]
    # The layer has fewer rows than the sketch has buckets, so that only some rows collide.
    torch.testing.assert_close(found.cosine_GG[active][:, active], cosine, rtol=0, atol=0.1)
    pairs = cosine[torch.ones_like(cosine).triu(1).bool()]
    assert found.conflict_rate == pytest.approx(float((pairs < 0).double().mean()), abs=0.15)
    assert found.mean_cosine == pytest.approx(float(pairs.mean()), abs=0.05)
    count = len(exact)
    covariance = float((exact - exact.mean(0)).square().sum()) / (count - 1)
    signal = float(exact.mean(0).square().sum()) - covariance / count
    assert found.noise_scale == pytest.approx(covariance / signal, rel=0.5)
