"""GUPO in whole models: weights against the written-out equations, the update against the groups' own gradients, all layouts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.schema import GupoSection
from tests.gupo.step_runs import VOCAB, Run, gradients_with, prepare_engine, run
from tests.mcore.step_cases import OBJECTIVES, TEMPERATURE
from tests.mcore.tiny import make_hf, sections
from tests.ranks import run_ranks

MODELS = ("llama-four", "llama-four-tied")
# A large share, so that a wrong weight shows in the gradient.
GUPO = GupoSection(enabled=True, eta=0.8, delta=30.0)
NORM = GUPO.model_copy(update={"layer": "final_norm", "delta": "auto"})

# world size -> (layout, samples per micro-batch)
LAYOUTS: dict[int, list[tuple[dict[str, Any], int]]] = {
    2: [({}, 2), ({"tensor": 2, "sequence": True}, 4), ({"pipeline": 2, "virtual_pipeline": 2}, 2), ({"context": 2}, 1)],
    4: [({}, 4), ({"tensor": 4}, 2), ({"tensor": 2, "pipeline": 2}, 1), ({"context": 2, "tensor": 2, "sequence": True}, 4)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for name in MODELS:
        make_hf(root, name)
    return root


def _exact_medians() -> None:
    """The layer's 300 x 64 dimensions are more than a median is taken on; what is written out takes all."""
    from megatron_gvpo.gupo import evidence

    evidence.MEDIAN_DIMENSIONS = 300 * 64


def _one_process(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Runs of every objective and model, and one of them taken apart."""
    import torch

    from megatron_gvpo.mcore.gupo_step import GroupWeigher
    from megatron_gvpo.mcore.startup import shutdown, start
    from tests.gupo.reference import gvpo_loss, reference

    _exact_medians()
    parallel, train, precision = sections(world)
    ranks = start(parallel, train, precision)
    out: dict[str, Any] = {
        f"{name} {model}": run(f"{folder}/{model}", ranks, parallel, name, GUPO, 99)
        for name, model in itertools.product(("gvpo", "grpo"), MODELS)
    }
    engine, share, batch_samples, kept = prepare_engine(f"{folder}/{MODELS[0]}", ranks, parallel, "gvpo", 99)
    weigher = GroupWeigher(engine, GUPO, seed=3)
    found = weigher.collect(share)
    batch, whole = engine.batch_of(batch_samples, kept, share, {"logprobs": found.logprobs_T})
    assert found.hidden_TH is not None
    assert found.targets_T is not None
    from megatron_gvpo.gupo.posterior import mix

    # Written out, on the same hidden states and noise.
    layer = weigher._head().weight_VH[:VOCAB]
    written = reference(
        layer, found.hidden_TH, found.targets_T, batch, gvpo_loss(OBJECTIVES["gvpo"]["beta"]), GUPO, mix(3, 1, 0), TEMPERATURE
    )
    out["written out"] = (written.uncertainty_G, written.weights_G)
    out[f"norm {MODELS[0]}"] = run(f"{folder}/{MODELS[0]}", ranks, parallel, "gvpo", NORM, 99)
    loss, noise, scale = gvpo_loss(OBJECTIVES["gvpo"]["beta"]), mix(3, 1, 0), weigher._norm_scale()
    written_norm = reference(layer, found.hidden_TH, found.targets_T, batch, loss, NORM, noise, TEMPERATURE, scale)
    out["norm written out"] = (written_norm.uncertainty_G, written_norm.weights_G)
    groups = batch.sequences.groups
    one_group = [gradients_with(engine, whole, batch, groups * torch.eye(groups, dtype=torch.float64)[b]) for b in range(groups)]
    out["sum of the groups' own gradients"] = {
        name: sum(w * g[name] for w, g in zip(written.weights_G.tolist(), one_group, strict=True)) for name in one_group[0]
    }
    plain = gradients_with(engine, whole, batch, None)
    for eta, enabled in ((0.0, True), (0.8, "observe")):
        weights = GroupWeigher(engine, GUPO.model_copy(update={"eta": eta, "enabled": enabled}), seed=3).weigh(found, batch, 1)
        same = gradients_with(engine, whole, batch, weights.multipliers_G)
        out[f"plain at eta {eta} {enabled}"] = all(torch.equal(plain[name], same[name]) for name in plain)
        out[f"spread at eta {eta} {enabled}"] = weights.metrics["gupo/spread"]
    other = GroupWeigher(engine, GUPO, seed=3).weigh(found, batch, step=2)
    out["other noise"] = other.multipliers_G
    shutdown()
    return out


@pytest.fixture(scope="module")
def one_process(folder: Path) -> dict[str, Any]:
    (found,) = run_ranks(_one_process, 1, str(folder), init=False, timeout=200)
    return found


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    scale = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / scale


def test_weights_and_update_are_those_of_the_paper(one_process: dict[str, Any]) -> None:
    """Uncertainties and weights against autograd on every group and sample; the gradient of the whole model against
    sum_b w_b g_b, each g_b from a backward pass of its own. Float64; the layer is the untied output layer.
    """
    found: Run = one_process[f"gvpo {MODELS[0]}"]
    uncertainty_G, weights_G = one_process["written out"]
    assert found.uncertainty_G.tolist() == pytest.approx(uncertainty_G.tolist(), rel=1e-9)
    assert (found.multipliers_G / len(weights_G)).tolist() == pytest.approx(weights_G.tolist(), rel=1e-9)
    assert found.metrics["gupo/spread"] > 0.05, "weights that all are alike would prove nothing"
    assert _difference(found.gradients, one_process["sum of the groups' own gradients"]) < 1e-10


def test_the_final_norm_as_the_layer(one_process: dict[str, Any]) -> None:
    """The same for H numbers, whose gradients come through the head."""
    found: Run = one_process[f"norm {MODELS[0]}"]
    uncertainty_G, weights_G = one_process["norm written out"]
    assert found.uncertainty_G.tolist() == pytest.approx(uncertainty_G.tolist(), rel=1e-9)
    assert (found.multipliers_G / len(weights_G)).tolist() == pytest.approx(weights_G.tolist(), rel=1e-9)


def test_eta_zero_and_observing_leave_the_gradient_bit_for_bit(one_process: dict[str, Any]) -> None:
    """What is not applied must not be seen; `observe` still reports the weights it would have used."""
    assert one_process["plain at eta 0.0 True"]
    assert one_process["plain at eta 0.8 observe"]
    assert one_process["spread at eta 0.0 True"] == 0.0
    assert one_process["spread at eta 0.8 observe"] > 0.05


def test_noise_is_drawn_anew_each_step(one_process: dict[str, Any]) -> None:
    """The same batch at another step: other samples, so slightly other weights."""
    assert one_process["other noise"].tolist() != one_process[f"gvpo {MODELS[0]}"].multipliers_G.tolist()


def _cases(rank: int, world: int, folder: str) -> dict[str, Run]:
    from megatron_gvpo.mcore.startup import shutdown, start

    _exact_medians()
    found = {}
    for layout, micro in LAYOUTS[world]:
        parallel, train, precision = sections(world, **layout)
        ranks = start(parallel, train, precision)
        for name, model in (("gvpo", MODELS[0]), ("grpo", MODELS[1])):
            found[f"{name} {model} {layout}"] = run(f"{folder}/{model}", ranks, parallel, name, GUPO, micro)
        if "tensor" in layout:
            found[f"norm {MODELS[0]} {layout}"] = run(f"{folder}/{MODELS[0]}", ranks, parallel, "gvpo", NORM, micro)
    shutdown()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_the_layout_does_not_matter(world: int, folder: Path, one_process: dict[str, Any]) -> None:
    """Weights, diagnostics and the weighted gradient of the whole model equal those of one process: data, tensor, pipeline
    (virtual stages too) and context ranks, sequence parallelism, micro-batches of 1, 2 and 4, tied and untied heads.
    """
    results = run_ranks(_cases, world, str(folder), init=False, timeout=250)
    for rank, result in enumerate(results):
        for case, found in result.items():
            wanted: Run = one_process[" ".join(case.split()[:2])]
            where = f"rank {rank}: {case}"
            assert found.multipliers_G.tolist() == pytest.approx(wanted.multipliers_G.tolist(), rel=1e-9), where
            assert found.uncertainty_G.tolist() == pytest.approx(wanted.uncertainty_G.tolist(), rel=1e-8), where
            assert found.metrics == pytest.approx(wanted.metrics, rel=1e-7), where
            assert float((found.cosine_GG - wanted.cosine_GG).abs().max()) < 1e-9, where
            assert _difference(found.gradients, wanted.gradients) < 1e-10, where
