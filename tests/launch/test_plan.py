"""`plan`: parameter counts against published ones and against transformers' models, memory against sums done by hand.

Does not cover memory against a real run (test_memory_measured), nor times against a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.hf_shape import ModelShape, read_shape
from megatron_gvpo.config.schema import ParallelSection
from megatron_gvpo.launch.memory import GIB
from megatron_gvpo.launch.parameters import count_parameters, padded_vocab, rank_parameters, stage_layers
from megatron_gvpo.launch.plan import make_plan
from megatron_gvpo.launch.plan_text import plan_text
from tests.config.conftest import LLAMA, MOE, Run

_COMMON = {"max_position_embeddings": 32768, "rope_theta": 1e6}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.1-70B": (
        70_553_706_496,
        {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256},
    ),
    "Qwen2.5-72B": (
        72_706_203_648,
        {"model_type": "qwen2", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064},
    ),
    "Qwen2.5-1.5B": (
        1_543_714_304,
        {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12}
        | {"num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "Qwen3-8B": (
        8_190_735_360,
        {"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    "Qwen3-235B-A22B": (
        235_093_634_560,
        {"model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64}
        | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        {"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}


def shape_of(folder: Path, values: dict[str, Any]) -> ModelShape:
    (folder / "config.json").write_text(json.dumps({**_COMMON, **values}))
    return read_shape(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(tmp_path: Path, name: str) -> None:
    """Why: whoever plans a cluster run trusts these; a wrong part shows as a wrong sum."""
    count, values = PUBLISHED[name]
    assert sum(count_parameters(shape_of(tmp_path, values)).values()) == count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_counts_equal_transformers_models(tmp_path: Path, family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**(MOE if family == "qwen3_moe" else LLAMA), "model_type": family, "tie_word_embeddings": tied}
    if family == "llama":
        values |= {"attention_bias": True, "mlp_bias": True}
    shape = shape_of(tmp_path, values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(count_parameters(shape).values()) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor": 2, "gpus_per_node": 2},
        {"pipeline": 2, "gpus_per_node": 2},
        {"tensor": 2, "pipeline": 4, "gpus_per_node": 8},
        {"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1, "gpus_per_node": 3},
        {"expert": 4, "expert_tensor": 1, "tensor": 2, "gpus_per_node": 8},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_ranks_together_hold_the_model(tmp_path: Path, parallel: dict[str, Any], tied: bool) -> None:
    """Why: a part that is sharded twice, or not at all, only shows in the sum over ranks."""
    shape = shape_of(tmp_path, {**MOE, "num_experts": 8, "tie_word_embeddings": tied})
    section = ParallelSection(**parallel)
    tensor, pipeline = section.tensor, section.pipeline
    assert sum(stage_layers(shape, section)) == shape.layers
    held = [rank_parameters(shape, section, stage) for stage in range(pipeline)]
    counts = count_parameters(shape)
    padding = (padded_vocab(shape, section) - shape.vocab) * shape.hidden
    tables = 1 if tied and pipeline == 1 else 2
    replicated = counts["norms"] + counts["router"]
    dense = sum(count for part, count in counts.items() if part not in ("experts", "embedding", "output_layer"))
    whole = dense + tables * (shape.vocab * shape.hidden + padding) + (tensor - 1) * replicated
    assert sum(rank.dense for rank in held) * tensor == whole
    assert sum(rank.experts for rank in held) * section.expert * (section.expert_tensor or tensor) == counts["experts"]


def test_memory_of_a_small_run_by_hand(run: Run) -> None:
    """fp32 weights and gradients, Adam's two moments, sharded over two data-parallel ranks."""
    config = run.load(precision={"params": "fp32"}, parallel={"gpus_per_node": 2})
    plan = make_plan(config)
    held = rank_parameters(read_shape(run.model), config.parallel, 0).total
    memory = plan["memory_gib"]
    assert memory["weights"] == memory["gradients"] == pytest.approx(4 * held / GIB)
    assert memory["optimizer"] == pytest.approx(8 * (held // 2) / GIB)
    # Training is the fullest phase; the copies that a weight sync makes come after it.
    assert plan["stages"][0]["fullest_phase"] == "training"
    assert plan["memory_gib_total"] == pytest.approx(sum(memory.values()) - memory["weight_sync"])
    assert plan["parameters"] == sum(plan["parameters_by_part"].values())


def test_what_changes_the_memory_and_what_does_not(run: Run) -> None:
    def memory(**changes: Any) -> dict[str, float]:
        return make_plan(run.load(**changes))["memory_gib"]

    base = memory()
    assert memory(optimizer={"distributed": False})["optimizer"] == base["optimizer"]  # one data-parallel rank
    assert memory(model={"recompute": "full"})["activations"] < base["activations"]
    assert memory(train={"micro_batch_tokens": 512})["activations"] < base["activations"]
    assert memory(precision={"grad_reduce_fp32": False})["gradients"] == base["gradients"] / 2
    assert "reference" not in base
    assert memory(objective={"reference": "frozen"})["reference"] == base["weights"]
    teacher = {"path": str(run.model), "signal": "full", "where": "colocated"}
    assert memory(objective={"name": "gkd"}, teacher=teacher)["teacher"] == base["weights"]


def test_the_largest_stage_is_named_and_the_text_shows_all(run: Run) -> None:
    plan = make_plan(run.load(parallel={"pipeline": 4, "gpus_per_node": 4}))
    totals = [stage["memory_gib_total"] for stage in plan["stages"]]
    assert plan["memory_gib_total"] == max(totals) == totals[plan["largest_stage"]]
    text = plan_text(plan)
    assert text.count("<- largest") == 1
    assert "4 ranks: tensor 1, pipeline 4" in text
