"""What a model section becomes: refusals in one line, RoPE frequencies, the padded vocabulary."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gvpo.config.hf_shape import ModelShape, RopeShape, read_shape
from megatron_gvpo.config.schema import ModelSection, ParallelSection, PrecisionSection

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _shape(tmp_path: Path, **values: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **values}))
    return read_shape(tmp_path)


def _config(shape: ModelShape, **sections: Any) -> Any:
    from megatron_gvpo.mcore.model import transformer_config

    parallel = sections.get("parallel", ParallelSection())
    ranks: Any = SimpleNamespace(cpu=True, virtual_pipeline=parallel.virtual_pipeline)
    precision = sections.get("precision", PrecisionSection(params="fp32"))
    return transformer_config(shape, sections.get("model", ModelSection()), parallel, precision, ranks)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": ParallelSection(tensor=4)}, "parallel.tensor 4 does not divide the model's 2 key-value heads"),
        ({"parallel": ParallelSection(pipeline=4)}, "6 layers do not divide over 4 pipeline stages x 1 chunks"),
        ({"parallel": ParallelSection(pipeline=2, first_stage_layers=6)}, "6 layers do not divide over 2 pipeline stages"),
        ({"precision": PrecisionSection(fp8="delayed")}, "precision.fp8 delayed needs a GPU and Transformer Engine"),
        ({"model": ModelSection(megatron={"qk_layer_norm": True})}, r"no such field; did you mean qk_layernorm\?"),
        ({"model": ModelSection(megatron={"sequence_parallel": True})}, "sequence_parallel: this is set by parallel.sequence"),
        ({"model": ModelSection(megatron={"attention_backend": "quick"})}, "'quick' is none of flash, fused"),
        ({"model": ModelSection(megatron={"recompute_granularity": "full"})}, "Megatron-Core refuses this model: .*recompute"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(sections: dict[str, Any], words: str, tmp_path: Path) -> None:
    """The key to change is named; Megatron's own assertions come through as one line too."""
    with pytest.raises(ValueError, match=words) as caught:
        _config(_shape(tmp_path), **sections)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"attention_bias": True}, "a bias on the attention's output projection"),
        ({"mlp_bias": True}, "or in the MLP is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
    ],
)
def test_models_that_are_not_computed_right_are_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A model with a switch that is ignored would train, and be another one than the server runs."""
    with pytest.raises(ValueError, match=words):
        _config(_shape(tmp_path, **values))


def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    """Known to the config's reader, since `plan` counts them, and not to the builder."""
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(ValueError, match="mixtures of experts"):
        _config(_shape(tmp_path, **experts))


def test_sections_and_overrides_reach_megatrons_config(tmp_path: Path) -> None:
    """The pass-through sets what no section owns; the rest is the layout's."""
    model = ModelSection(megatron={"attention_backend": "unfused", "layernorm_zero_centered_gamma": False}, recompute="full")
    parallel = ParallelSection(tensor=2, pipeline=2, first_stage_layers=2, sequence=True)
    config = _config(_shape(tmp_path, rms_norm_eps=1e-5), model=model, parallel=parallel)
    assert config.attention_backend.name == "unfused"
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert (config.num_layers_in_first_pipeline_stage, config.sequence_parallel) == (2, True)
    assert (config.variable_seq_lengths, config.layernorm_epsilon) == (True, 1e-5)


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (RopeShape(500000.0), {"rope_type": "default", "rope_theta": 500000.0}),
        (
            RopeShape(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),  # Llama 3.1
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            RopeShape(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),  # Llama 3.2
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (RopeShape(10000.0, "linear", 4.0), {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ],
    ids=["default", "llama3.1", "llama3.2", "linear"],
)
def test_rope_frequencies_are_transformers_to_the_bit(rope: RopeShape, parameters: dict[str, Any], tmp_path: Path) -> None:
    """Real models' numbers, which a tiny model's parity of logits does not reach."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from megatron_gvpo.mcore.model import rotary_frequencies

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters)
    shape = dataclasses.replace(_shape(tmp_path), head_dim=128, rope=rope)
    assert torch.equal(rotary_frequencies(shape), LlamaRotaryEmbedding(config).inv_freq)


def test_the_planned_and_the_built_vocabulary_are_padded_alike(tmp_path: Path) -> None:
    """`plan` counts the rows that the builder allocates; powers of two share one size, so checkpoints move between them."""
    from megatron_gvpo.launch.parameters import padded_vocab as planned
    from megatron_gvpo.mcore.model import padded_vocab

    shape = _shape(tmp_path)
    for tensor in (1, 2, 3, 4, 8, 64):
        built = padded_vocab(shape.vocab, tensor)
        assert built == planned(shape, ParallelSection(tensor=tensor))
        assert built % tensor == 0
        assert built >= shape.vocab
    assert {padded_vocab(151936, tensor) for tensor in (1, 2, 4, 8)} == {151936}
