"""FP8: how tokens are padded, and what Transformer Engine is asked for, recorded by a stand-in.

Does not cover FP8 arithmetic, nor Transformer Engine itself: nobody here could run it (docs/gpu_status.md).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gvpo.config.alignment import FP8_MULTIPLE, padded_tokens, run_multiple, token_multiple
from megatron_gvpo.config.schema import ParallelSection, PrecisionSection

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("recipe", "padded"), [("tensorwise", 31936), ("delayed", 31936), ("mxfp8", 32000), ("blockwise", 32256)]
)
def test_case_45(recipe: str, padded: int) -> None:
    """Tensor 4 with sequence parallelism, 31,936 tokens."""
    assert padded_tokens(31936, recipe, tensor=4, sequence=True) == padded


@pytest.mark.parametrize(
    ("tokens", "recipe", "tensor", "sequence", "context", "padded"),
    [
        (0, "blockwise", 4, True, 2, 0),
        (1, "none", 1, False, 1, 1),
        (1, "none", 4, True, 1, 4),  # every rank holds a token
        (1, "none", 4, False, 1, 1),  # without sequence parallelism every rank holds all of them
        (5, "none", 1, False, 2, 8),  # the zigzag's 2 CP chunks
        (5, "none", 2, True, 2, 8),
        (1, "tensorwise", 1, False, 1, 16),
        (17, "tensorwise", 1, False, 1, 32),
        (1, "tensorwise", 8, False, 1, 16),
        (1, "tensorwise", 8, True, 1, 128),
        (129, "tensorwise", 8, True, 1, 256),
        (1, "mxfp8", 8, True, 1, 256),
        (1, "mxfp8", 2, True, 4, 256),
        (1, "blockwise", 8, True, 2, 2048),
        (2048, "blockwise", 8, True, 2, 2048),
        (2049, "blockwise", 8, True, 2, 4096),
        (100, "delayed", 1, False, 3, 144),
    ],
)
def test_a_table_of_cases(tokens: int, recipe: str, tensor: int, sequence: bool, context: int, padded: int) -> None:
    assert padded_tokens(tokens, recipe, tensor, sequence, context) == padded


def test_every_rank_holds_a_multiple_after_both_splits() -> None:
    """Why: the gathered sequence may be aligned while a rank's own part is not, and then the weight gradient's product fails."""
    layouts = itertools.product(FP8_MULTIPLE, (1, 2, 4, 8), (False, True), (1, 2, 3, 4, 8), (1, 31, 4096, 31936))
    for recipe, tensor, sequence, context, tokens in layouts:
        padded = padded_tokens(tokens, recipe, tensor, sequence, context)
        shards = (tensor if sequence else 1) * context
        multiple = token_multiple(recipe, tensor, sequence, context)
        assert padded % shards == 0
        assert (padded // shards) % FP8_MULTIPLE[recipe] == 0
        assert context == 1 or padded % (2 * context) == 0
        assert tokens <= padded < tokens + multiple


def test_wrong_input_and_a_runs_multiple() -> None:
    with pytest.raises(ValueError, match="none of"):
        padded_tokens(5, "fp7")
    with pytest.raises(ValueError, match="cannot be padded"):
        padded_tokens(-1, "none")
    parallel = ParallelSection(tensor=4, sequence=True, context=2, gpus_per_node=8)
    assert run_multiple(PrecisionSection(fp8="mxfp8"), parallel) == 32 * 4 * 2


RECORD = """
import json, sys
from tests.launch import te_stand_in as stand_in
stand_in.install()
import torch
from megatron.core import fp8_utils
from megatron.core.transformer import TransformerConfig
from megatron_gvpo.config.schema import PrecisionSection
from megatron_gvpo.mcore.fp8 import fp8_fields
found = {}
for recipe in ("delayed", "tensorwise", "mxfp8", "blockwise"):
    ends = 0 if recipe == "delayed" else 1
    precision = PrecisionSection(fp8=recipe, bf16_first_layers=ends, bf16_last_layers=ends, fp8_params=True)
    config = TransformerConfig(num_layers=8, hidden_size=128, num_attention_heads=4, bf16=True,
                               params_dtype=torch.bfloat16, **fp8_fields(precision, True))
    for layer in (0, 3, 7):
        for is_init in (False, True):
            stand_in.RECORDED.clear()
            with fp8_utils.get_fp8_context(config, layer, is_init):
                pass
            found[f"{recipe} {layer} {'init' if is_init else 'run'}"] = [
                [name, {key: str(value) for key, value in arguments.items() if "recipe" not in key}]
                for name, arguments in stand_in.RECORDED
            ]
print(json.dumps(found))
"""


def test_what_transformer_engine_is_asked_for() -> None:
    """Through Megatron-Core's own code: the recipe object, its format, and bf16 at the first and the last layer."""
    done = subprocess.run([sys.executable, "-c", RECORD], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    recipes = {
        "delayed": ("DelayedScaling", "Format.HYBRID"),
        "tensorwise": ("Float8CurrentScaling", "Format.HYBRID"),
        "mxfp8": ("MXFP8BlockScaling", "Format.E4M3"),
        "blockwise": ("Float8BlockScaling", "Format.E4M3"),
    }
    for recipe, (name, form) in recipes.items():
        made, entered = found[f"{recipe} 3 run"]
        assert made[0] == name
        assert made[1]["fp8_format"] == form
        assert entered[0] == "fp8_autocast"
        assert entered[1]["enabled"] == "True"
        # Weights are born in FP8 (precision.fp8_params) by the same recipe.
        assert [call[0] for call in found[f"{recipe} 3 init"]] == [name, "fp8_model_init"]
        for layer in (0, 7):
            asked = [call[0] for call in found[f"{recipe} {layer} run"]]
            assert asked == ([name, "fp8_autocast"] if recipe == "delayed" else [])
    assert found["delayed 3 run"][0][1]["amax_compute_algo"] == "most_recent"


def test_refusals() -> None:
    from megatron_gvpo.mcore.fp8 import fp8_fields

    assert fp8_fields(PrecisionSection(), engine=False) == {}
    with pytest.raises(ValueError, match="needs a GPU"):
        fp8_fields(PrecisionSection(fp8="tensorwise"), engine=False)
    with pytest.raises(ValueError, match="delayed cannot keep layers"):
        fp8_fields(PrecisionSection(fp8="delayed"), engine=True)
