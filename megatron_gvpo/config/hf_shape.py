"""A model's shape, from the `config.json` of its Hugging Face folder. Needs neither torch nor transformers.

Read by the config check, by `plan` and by the model builder, so that the three cannot disagree about a model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
RopeKind = Literal["default", "linear", "llama3"]

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")


class ShapeError(ValueError):
    """The folder holds no model that this project can build; the message is one line and names the file."""


@dataclass(frozen=True)
class RopeShape:
    """Rotary position embedding. The last four are set for `llama3` (and `factor` for `linear`), else neutral."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts in every layer."""

    count: int
    per_token: int
    ffn: int  # inner width of one expert
    norm_topk: bool  # whether the chosen experts' weights are made to sum to 1
    aux_loss: float  # coefficient of the load-balancing loss


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of a decoder-only transformer with RMSNorm, SwiGLU, grouped queries and RoPE."""

    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool  # output layer and embedding are one matrix
    qkv_bias: bool
    out_bias: bool  # bias of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    rope: RopeShape
    experts: ExpertShape | None = None


def read_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in `folder` (or of the `config.json` that is named itself). Raises ShapeError."""
    path = Path(folder)
    if path.suffix != ".json":
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ShapeError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ShapeError(f"{path}: a Hugging Face config is a JSON object")
    return _Reader(path, values).shape()


class _Reader:
    """Reads typed values and turns what is missing or unsupported into one line."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def fail(self, why: str) -> ShapeError:
        return ShapeError(f"{self.path}: {why}")

    def shape(self) -> ModelShape:
        family = self.values.get("model_type")
        if family not in FAMILIES:
            raise self.fail(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        self.refuse_variants()
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        # Only Llama lets this be absent: the other classes have a default of their own that fits one size of model.
        kv_heads = self.size("num_key_value_heads", heads if family == "llama" else None)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        head_dim = self.size("head_dim", 128 if family == "qwen3" else hidden // heads)
        attention_bias = self.flag("attention_bias")
        return ModelShape(
            family=family,
            layers=self.size("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=self.size("intermediate_size"),
            vocab=self.size("vocab_size"),
            tied=self.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or attention_bias,
            # Qwen2's code has a bias on q, k, v whatever the config says, and none on the output projection.
            out_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and self.flag("mlp_bias"),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            norm_eps=self.number(self.values, "rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
            max_positions=self.size("max_position_embeddings"),
            rope=self.rope(1e6 if family == "mixtral" else 1e4),
            experts=self.experts(family),
        )

    def refuse_variants(self) -> None:
        """What some checkpoint of a supported family switches on and this project does not compute."""
        values = self.values
        if (act := values.get("hidden_act", "silu")) != "silu":
            raise self.fail(f"hidden_act {act!r} is not supported; only silu (SwiGLU) is")
        if values.get("quantization_config"):
            raise self.fail("quantised weights cannot be trained; take the unquantised model")
        sliding = values.get("sliding_window") if values.get("model_type") == "mixtral" else values.get("use_sliding_window")
        if sliding or "sliding_attention" in (values.get("layer_types") or ()):
            raise self.fail("sliding-window attention is not supported")
        if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
            raise self.fail("layers without experts among layers with experts are not supported")

    def experts(self, family: Family) -> ExpertShape | None:
        if family not in ("qwen3_moe", "mixtral"):
            return None
        # transformers 5 writes num_local_experts for both families, older versions num_experts for Qwen3.
        count = self.size("num_local_experts" if "num_local_experts" in self.values else "num_experts")
        per_token = self.size("num_experts_per_tok")
        if per_token > count:
            raise self.fail(f"num_experts_per_tok {per_token} is above the number of experts {count}")
        return ExpertShape(
            count=count,
            per_token=per_token,
            ffn=self.size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
            norm_topk=family == "mixtral" or self.flag("norm_topk_prob"),
            aux_loss=self.number(self.values, "router_aux_loss_coef", 0.001),
        )

    def rope(self, default_theta: float) -> RopeShape:
        # transformers 5 writes `rope_parameters` (theta inside); before it was `rope_theta` beside `rope_scaling`.
        facts = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(facts, dict):
            raise self.fail("rope_parameters (or rope_scaling) must be an object")
        theta = self.number(facts if "rope_theta" in facts else self.values, "rope_theta", default_theta)
        if any(self.number(values, "partial_rotary_factor", 1.0) != 1.0 for values in (self.values, facts)):
            raise self.fail("partial_rotary_factor other than 1 is not supported")
        kind = facts.get("rope_type", facts.get("type", "default"))
        if kind == "default":
            return RopeShape(theta)
        if kind == "linear":
            return RopeShape(theta, "linear", self.number(facts, "factor"))
        if kind == "llama3":
            return RopeShape(
                theta,
                "llama3",
                self.number(facts, "factor"),
                self.number(facts, "low_freq_factor"),
                self.number(facts, "high_freq_factor"),
                int(self.number(facts, "original_max_position_embeddings")),
            )
        raise self.fail(f"rope type {kind!r} is not supported; supported: default, linear, llama3")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{key} must be a whole number above 0, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fail(f"{key} must be true or false, got {value!r}")
        return value

    def number(self, values: dict[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise self.fail(f"{key} must be a number of 0 or more, got {value!r}")
        return float(value)
