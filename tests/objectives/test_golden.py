"""`explain` against numbers that an independent implementation of the formulas computed (golden.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.explain import explain

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


def golden_samples() -> list[Sample]:
    return [Sample(**{k: v for k, v in s.items() if k != "weight_version"}) for s in GOLDEN["samples"]]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: f"{c['objective']}-{len(c['set'])}")
def test_loss_and_every_token_gradient(case: dict[str, Any]) -> None:
    """The numbers that the rest of the tests trust. Not here: KL terms, c_k < 1, gkd, sft, other shapes, masked samples."""
    found = explain(golden_samples(), case["objective"], case["set"])
    assert found["loss"] == pytest.approx(case["loss"], abs=1e-12)
    assert found["dropped"] == []
    for ours, theirs in zip(found["samples"], case["token_grads"], strict=True):
        assert ours["token_grads"] == pytest.approx(theirs, abs=1e-12)


def test_total_variation_estimate_is_pooled_over_tokens() -> None:
    """The estimate that TV-OPD's scale rests on: a mean over tokens, not over sequences."""
    found = explain(golden_samples(), "tv_opd", {})
    assert found["metrics"]["tv"] == pytest.approx(GOLDEN["tv_estimate"], abs=1e-12)
