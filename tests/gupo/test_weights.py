"""`group_weights`: the surface that others call, at its corners."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gvpo.gupo import group_multipliers, group_weights
from megatron_gvpo.gupo.weights import summarise, uncertainty

INF, NAN = math.inf, math.nan


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weights_follow_the_equations() -> None:
    """Worked by hand: evidence 1 and 3 give 1 - u = 1/2 and 3/4, omega = 2/5 and 3/5; the inactive third keeps 1/3."""
    weights = group_weights(_tensor(1.0, 3.0, NAN), torch.tensor([True, True, False]), eta=0.5)
    expected = _tensor(0.5 / 3 + 0.5 * 0.4 * 2 / 3, 0.5 / 3 + 0.5 * 0.6 * 2 / 3, 1 / 3)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("evidence", "active", "expected"),
    [
        ([NAN, INF, -1.0], [False, False, False], [1 / 3] * 3),
        ([0.0, 0.0, 0.0], [True, True, True], [1 / 3] * 3),
        ([INF, INF], [True, True], [0.5] * 2),
        ([7.0], [True], [1.0]),
        ([5e-324, 5e-324], [True, True], [0.5] * 2),
        ([0.0, INF], [True, True], [0.45, 0.55]),
        ([1e308, 1e-308, 0.0], [True, False, False], [1 / 3] * 3),
    ],
)
def test_corners_are_finite(evidence: list[float], active: list[bool], expected: list[float]) -> None:
    """No active group, one, zero, infinite and denormal evidence, rubbish at inactive places. float32 as well."""
    for dtype in (torch.float64, torch.float32):
        weights = group_weights(torch.tensor(evidence, dtype=dtype), torch.tensor(active))
        assert weights.dtype == dtype
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=dtype), rtol=1e-6, atol=0)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-6)


def test_eta_zero_multiplies_by_exactly_one() -> None:
    """The plain gradient bit for bit: B times a weight of 1/B would be 1 only to rounding."""
    multipliers = group_multipliers(_tensor(0.3, 2.0, INF, 0.0, 9.0), torch.tensor([True, True, True, False, True]), eta=0.0)
    assert multipliers.tolist() == [1.0] * 5


def test_weights_move_with_their_groups_and_sum_to_one() -> None:
    """A permutation of the groups permutes the weights; many random cases."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        count = int(torch.randint(1, 40, (1,), generator=generator))
        evidence = torch.rand(count, generator=generator, dtype=torch.float64) * 10
        active = torch.rand(count, generator=generator) < 0.7
        order = torch.randperm(count, generator=generator)
        weights = group_weights(evidence, active, 0.4)
        torch.testing.assert_close(group_weights(evidence[order], active[order], 0.4), weights[order], rtol=1e-12, atol=0)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        assert bool((weights >= 0.6 / count - 1e-12).all())


def test_wrong_arguments_are_refused_in_one_line() -> None:
    """Shapes that differ, eta outside [0, 1], and evidence of an active group that no variance gives."""
    good = torch.tensor([True, True])
    with pytest.raises(ValueError, match=r"one entry per group, not \[2\] and \[1\]"):
        group_weights(_tensor(1.0, 2.0), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"eta must lie in \[0, 1\], not 1.5"):
        group_weights(_tensor(1.0, 2.0), good, eta=1.5)
    for bad in (NAN, -0.5):
        with pytest.raises(ValueError, match="evidence of active group 1"):
            group_weights(_tensor(1.0, bad), good)


def test_uniform_weights_are_recognised() -> None:
    """The raw scale at the gradients of a large model: sigma 1e-6 means evidence 1e6 at s = 0.5, and equal weights."""
    active = torch.ones(4, dtype=torch.bool)
    raw, scaled = _tensor(1e6, 2e6, 5e5, 3e6), _tensor(1.0, 2.0, 0.5, 3.0)
    assert summarise(group_multipliers(raw, active), active, 0.1).uniform
    summary = summarise(group_multipliers(scaled, active), active, 0.1)
    assert not summary.uniform
    assert summary.spread == pytest.approx(summary.largest - summary.smallest)
    assert not summarise(group_multipliers(raw, active, 0.0), active, 0.0).uniform
    assert float((1 - uncertainty(raw, active)).min()) > 1 - 1e-5
