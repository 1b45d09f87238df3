"""The measurement against the paper's equations, written out with autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo import cost, group_weights
from megatron_gvpo.gupo.weights import uncertainty
from tests.gupo.cases import OBJECTIVES, SCALE, Clipped, make_case, measured
from tests.gupo.reference import Reference, clipped_loss, gvpo_loss, reference

LOSSES = {"gvpo": gvpo_loss(0.3), "clipped": clipped_loss(Clipped.low, Clipped.high)}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"evidence_scale": "paper", "s": 0.7},
    {"evidence_scale": "snr"},
    {"coefficients": "held"},
    {"coefficients": "held", "memory_gib": 1e-9, "evidence_scale": "snr", "s": 0.3},
    {"memory_gib": 1e-9, "samples": 3, "eta": 0.7},
    {"delta": 3.0, "sigma_floor": 0.3},
    {"delta": 50.0, "sigma_floor": 0.0, "samples": 2},
    {"layer": "final_norm"},
    {"layer": "final_norm", "coefficients": "held", "evidence_scale": "snr"},
    {"layer": "final_norm", "evidence_scale": "paper", "s": 0.3, "sigma_floor": 0.9},
]


def _reference(name: str, gupo: GupoSection, seed: int = 5) -> Reference:
    case = make_case()
    scale = SCALE if gupo.layer == "final_norm" else None
    return reference(
        case.weight_VH, case.hidden_TH, case.targets_T, case.batch, LOSSES[name], gupo, seed, case.temperature, scale
    )


@pytest.mark.parametrize("options", SETTINGS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "default")
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_uncertainties_and_weights_are_those_of_the_written_out_equations(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged groups, one without gradient, padded rows, a temperature, chunks of one token, blocks of a few rows.

    Covers one process in float64. Does not cover float32 or bf16 rounding, nor several ranks (test_layouts).
    """
    monkeypatch.setattr(cost, "_LEAST_BLOCK", 5)
    gupo = GupoSection(enabled=True, **options)
    case, expected = make_case(), _reference(name, gupo)
    for chunk_bytes in (None, 600):
        found = measured(case, OBJECTIVES[name](), gupo, chunk_bytes=chunk_bytes)
        assert found.active_G.tolist() == [True, True, True, False, True]
        torch.testing.assert_close(uncertainty(found.mean_evidence_G, found.active_G), expected.uncertainty_G, rtol=1e-9, atol=0)
        weights = group_weights(found.mean_evidence_G, found.active_G, gupo.eta)
        torch.testing.assert_close(weights, expected.weights_G, rtol=1e-9, atol=0)
        assert found.delta == pytest.approx(expected.delta, rel=1e-9)
