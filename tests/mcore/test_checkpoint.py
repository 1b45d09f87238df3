"""Checkpoints: the run that goes on is the run that was never stopped, at the same layout bit for bit, at others to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mcore.checkpoint_cases import load_all, refuse_all, save_all
from tests.mcore.tiny import make_hf
from tests.ranks import run_ranks

# name: (layout, distributed optimizer); what is sharded over data-parallel ranks can only be loaded by its like.
SAVED: dict[str, tuple[dict[str, Any], bool]] = {
    "tp2dp2 sharded": ({"tensor": 2}, True),
    "tp2pp2": ({"tensor": 2, "pipeline": 2}, False),
    "pp2vpp2dp2 sharded": ({"pipeline": 2, "virtual_pipeline": 2}, True),
}
LOADED: dict[int, dict[str, tuple[dict[str, Any], bool]]] = {
    1: {"one": ({}, False), "one sharded": ({}, True)},
    2: {"tp2": ({"tensor": 2, "sequence": True}, False), "pp2 sharded": ({"pipeline": 2}, True), "dp2 sharded": ({}, True)},
}


@pytest.mark.heavy
def test_the_next_step_after_loading_is_the_next_step(tmp_path: Path) -> None:
    """Why: PyTorch's Adam and Megatron's loader do not fit together by themselves, and the bias correction of the step after a
    resume is silently wrong. Tied embeddings, a padded vocabulary, three layouts that save, five that load.

    Does not cover bfloat16 main parameters, GPUs, or kills while writing.
    """
    path = str(make_hf(tmp_path, "qwen3-tied"))
    root = tmp_path / "saved"
    saved = run_ranks(save_all, 4, path, str(root), SAVED, init=False, timeout=240)
    for rank, found in enumerate(saved):
        for name, case in found.items():
            where = f"rank {rank}, {name}"
            assert case["extra"] == {"position": [2, name]}, where
            assert case["same draws"], where
            assert case["same step"], where
            assert case["same weights"], where
    for world, cases in LOADED.items():
        loaded = run_ranks(load_all, world, path, str(root), cases, init=False, timeout=240)[0]
        assert len(loaded) == {1: 3, 2: 5}[world]
        for name, case in loaded.items():
            reference = saved[0][name.partition(" -> ")[0]]
            assert case["step"] == pytest.approx(reference["step"], rel=1e-5), name
            assert case["extra"]["position"][0] == 2
            worst = max(float((tensor - reference["weights"][n]).abs().max()) for n, tensor in case["weights"].items())
            # A step moves weights by about the learning rate, 1e-2; a wrong step count is off by a tenth of that.
            assert worst < 1e-4, name


@pytest.mark.heavy
def test_what_cannot_be_loaded_or_written_is_said_and_the_one_before_is_used(tmp_path: Path) -> None:
    """Case 40 (the newest one truncated: the one before it, here of step 0, before any optimizer state) and every refusal, on two
    ranks: each must hear the same words, or it would wait for the other. Does not cover damage that keeps a large file's size.
    """
    path, other = str(make_hf(tmp_path, "llama")), str(make_hf(tmp_path, "qwen2"))
    first, second = run_ranks(refuse_all, 2, path, other, str(tmp_path / "run"), init=False, timeout=240)
    assert first == second
    empty, model, optimizer, disk, damaged, untouched, weights, bare = first
    assert empty == "None"
    assert "holds another model: family llama, here qwen2" in model
    assert "was written by a FP32Optimizer, this run has a DistributedOptimizer" in optimizer
    assert disk == "OSError: the checkpoint of step 2 could not be written: rank 1: no space left on device"
    assert (damaged, untouched) == ("{'at': 0}", "True")
    assert (weights, bare) == ("0", "True")
