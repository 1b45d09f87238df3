"""Model shapes from config.json files, in the spellings of transformers 4 and 5, and the refusal of what cannot be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.hf_shape import ExpertShape, RopeShape, ShapeError, read_shape
from tests.config.conftest import LLAMA, MOE


def _read(folder: Path, values: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return read_shape(folder)


def test_both_spellings_of_rope(tmp_path: Path) -> None:
    """Why: transformers 5 moved rope_theta into rope_parameters; a reader of the old key takes 10000, silently."""
    facts = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **facts}}
    del old["rope_parameters"]
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **facts}}
    expected = RopeShape(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    assert _read(tmp_path, old).rope == _read(tmp_path, new).rope == expected
    assert _read(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}).rope.factor == 2
    plain = {**old, "rope_scaling": None}
    assert _read(tmp_path, plain).rope == RopeShape(5e5)


def test_families_differ_in_bias_and_norms(tmp_path: Path) -> None:
    llama = _read(tmp_path, {**LLAMA, "attention_bias": True})
    assert (llama.qkv_bias, llama.out_bias, llama.qk_norm, llama.head_dim) == (True, True, False, 32)
    qwen2 = _read(tmp_path, {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = _read(tmp_path, {**LLAMA, "model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


def test_experts_in_both_spellings(tmp_path: Path) -> None:
    expected = ExpertShape(count=8, per_token=2, ffn=64, norm_topk=True, aux_loss=0.001)
    assert _read(tmp_path, {**MOE, "norm_topk_prob": True}).experts == expected
    renamed = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert _read(tmp_path, {**renamed, "num_local_experts": 8, "norm_topk_prob": True}).experts == expected
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    shape = _read(tmp_path, mixtral)
    assert (shape.experts.ffn, shape.experts.norm_topk, shape.norm_eps) == (384, True, 1e-5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights cannot be trained"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window attention"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "303"}, "vocab_size must be a whole number above 0, got '303'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({**MOE, "mlp_only_layers": [0]}, "layers without experts"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is above the number of experts 8"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ShapeError) as caught:
        _read(tmp_path, {**LLAMA, **change})
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="No such file"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShapeError, match="not JSON"):
        read_shape(tmp_path)


def test_against_transformers_own_configs(tmp_path: Path) -> None:
    """Why: what transformers writes today is what this reader meets. Does not cover older versions' files (above)."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    for kind in (LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig):
        kind(num_hidden_layers=2, vocab_size=99).save_pretrained(tmp_path)
        shape = read_shape(tmp_path)
        own = kind.from_pretrained(tmp_path)
        assert (shape.layers, shape.vocab, shape.family) == (2, 99, own.model_type)
        assert (shape.hidden, shape.heads, shape.kv_heads) == (own.hidden_size, own.num_attention_heads, own.num_key_value_heads)
        assert shape.rope.theta == own.rope_parameters["rope_theta"]
        assert shape.head_dim == (getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads)
        assert shape.tied == own.tie_word_embeddings
