"""The counts that `plan` prints: products of the head's size against those that are really made, and the memory plan."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo import cost, fisher, gradients, head
from megatron_gvpo.gupo.cost import head_products, memory_plan, step_ratio
from megatron_gvpo.gupo.deal import owners
from tests.gupo.cases import HIDDEN, VOCAB, gvpo, make_case, measured


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({}, 14.0),
        ({"coefficients": "held"}, 10.0),
        ({"samples": 2, "memory_gib": 1e-9}, 2 + 3 * 2 + 2 * 2 * 9 / 23),
        ({"coefficients": "held", "memory_gib": 1e-9}, 2 + 3 * 4 + 2 * 4 * 9 / 23),
        ({"rows": 0.1, "memory_gib": 1e-9}, 2 + 4 + 2 * 4 * 9 / 23 + 2 * 4 * 9 / 23),
    ],
)
def test_the_products_that_are_counted_are_those_that_are_made(
    options: dict[str, Any], products: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiply-adds of every product are recorded; 23 rows of which 9 are drawn. 3 M + 2 and 2 M + 2 for a layer in one block."""
    monkeypatch.setattr(cost, "SAMPLED_ROWS", 9)
    monkeypatch.setattr(cost, "_LEAST_BLOCK", 4)
    made = 0

    def counted(function: Any, size: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal made
            made += size(*arguments)
            return function(*arguments, **keywords)

        return wrapped

    def logits_size(out: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> int:
        return out.numel() * hidden.shape[1]

    def gradient_size(out: torch.Tensor, d: torch.Tensor, *_: Any, **__: Any) -> int:
        return out.numel() * d.shape[0]

    monkeypatch.setattr(head, "logits_into", counted(head.logits_into, logits_size))
    for module in (fisher, gradients):
        monkeypatch.setattr(module, "add_weight_gradient_", counted(module.add_weight_gradient_, gradient_size))
    case, gupo = make_case(), GupoSection(enabled=True, **options)
    measured(case, gvpo(), gupo)
    plan = memory_plan(gupo, VOCAB, VOCAB, HIDDEN, weight_bytes=8, compute_bytes=8)
    total = head_products(gupo, VOCAB, plan).total
    assert total == pytest.approx(products)
    assert made / (len(case.targets_T) * VOCAB * HIDDEN) == pytest.approx(total)


def test_a_70b_model_pays_eight_per_cent_at_most() -> None:
    """Where the old log-probs are recomputed anyway; a third more where GUPO brings the pass itself."""
    gupo, vocabulary, hidden = GupoSection(), 128256, 8192
    plan = memory_plan(gupo, vocabulary, vocabulary // 8, hidden, weight_bytes=2, cuda=True)
    products = head_products(gupo, vocabulary, plan)
    weights, layer = 70_553_706_496 - vocabulary * hidden, vocabulary * hidden
    assert 1.04 < step_ratio(products, layer, weights, own_pass=True) <= 1.08
    assert 1.33 < step_ratio(products, layer, weights, own_pass=False) <= 1.42


def test_memory_is_fitted_into_what_is_given() -> None:
    """Less memory: first the sums in blocks, then samples that are drawn anew; the Fisher stays, and a block of 64 rows."""
    shape = {"weight_bytes": 2, "cuda": True}
    size, gib = 16032 * 8192, 1 << 30
    for memory, keep, one_pass in ((8.0, True, True), (2.5, True, False), (0.9, False, False)):
        plan = memory_plan(GupoSection(memory_gib=memory, coefficients="held"), 128256, 16032, 8192, **shape)
        assert (plan.keep_samples, plan.in_one_pass) == (keep, one_pass), memory
        assert size * 4 <= plan.bytes <= memory * gib
    least = memory_plan(GupoSection(memory_gib=1e-6), 128256, 16032, 8192, **shape)
    assert least.block_rows == 64
    assert not least.keep_samples


def test_groups_are_dealt_evenly() -> None:
    """Largest first to whoever has least, so that no context rank waits long for another; empty groups belong to the first."""
    owner = owners([5, 1, 9, 4, 0, 5], 2)
    load = [sum(n for n, o in zip([5, 1, 9, 4, 0, 5], owner, strict=True) if o == rank) for rank in range(2)]
    assert load == [13, 11] or load == [12, 12]
    assert owner[4] == 0


def test_counting_costs_needs_no_torch() -> None:
    """`plan` is instant and runs on login nodes."""
    code = "import sys, megatron_gvpo.gupo.cost; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_gradients_that_are_not_numbers_do_not_pass_for_certain_ones() -> None:
    """A variance that is NaN is neither dead nor infinitely certain: it has to come out as NaN, for the step to see."""
    case = make_case()
    case.hidden_TH[0] = float("nan")
    found = measured(case, gvpo(), GupoSection())
    assert bool(found.mean_evidence_G[found.active_G].isnan().any())
