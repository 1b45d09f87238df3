"""Names and layouts: what a Megatron parameter is called in Hugging Face's folder, and how its matrix is cut.

mbridge knows both for many families; here it is used for that and corrected where it is wrong. Its model building, its file
reading and its export loop are not used: they guess the RoPE scaling, change dtypes in silence, share one dictionary of names
between tied and untied models, and let missing tensors pass.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import mbridge  # noqa: F401 - importing it registers the families
import torch.nn.functional as F
from mbridge.core.bridge import _MODEL_REGISTRY
from torch import Tensor

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.mcore.model import ModelFacts

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"


class Names:
    """Conversion between one model's Megatron parameters (global layer numbers) and its Hugging Face tensors."""

    def __init__(self, facts: ModelFacts, config: Any) -> None:
        self.shape = facts.shape
        self.padded_vocab = facts.padded_vocab
        self._bridge = _corrected(_MODEL_REGISTRY[facts.shape.family], facts.shape, config)

    def hf_names(self, name: str) -> list[str]:
        """The Hugging Face tensors that this Megatron parameter is made of, in the order of their rows."""
        return self._bridge._weight_name_mapping_mcore_to_hf(name)

    def to_shard(self, name: str, tensors: list[Tensor], param: Tensor, rank: int, size: int) -> Tensor:
        """The part of the parameter that tensor-parallel rank `rank` of `size` holds; padding rows of the vocabulary are 0."""
        whole = self._bridge._weight_to_mcore_format(name, tensors)
        if name in (_EMBEDDING, _OUTPUT):
            whole = F.pad(whole, (0, 0, 0, self.padded_vocab - self.shape.vocab))
        return self._bridge._weight_split_across_tp(name, whole, param, size)[rank]

    def from_shards(self, name: str, shards: list[Tensor], partition_dim: int | None) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors of a parameter whose shards are given in rank order; padding rows are cut off."""
        if partition_dim is None:
            whole = shards[0]
        else:
            mark = SimpleNamespace(tensor_model_parallel=True, partition_dim=partition_dim)
            self._bridge.mpu = SimpleNamespace(tp_size=len(shards))
            whole = self._bridge._weight_merge_across_tp(name, shards, mark)
        if name in (_EMBEDDING, _OUTPUT):
            whole = whole[: self.shape.vocab]
        names, tensors = self._bridge._weight_to_hf_format(name, whole)
        return list(zip(names, tensors, strict=True))


def _corrected(base: type, shape: ModelShape, config: Any) -> Any:
    """An instance of mbridge's class for this family, with our model config and names of its own."""

    class Corrected(base):
        # The plain-torch layers keep their norms apart, Transformer Engine fuses them into the linear layer that follows.
        _OTHER_MAPPING: ClassVar[dict[str, Any]] = {
            **base._OTHER_MAPPING,
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        }
        _MLP_MAPPING: ClassVar[dict[str, Any]] = {
            **base._MLP_MAPPING,
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
        }
        _DIRECT_MAPPING: ClassVar[dict[str, Any]] = {
            **base._DIRECT_MAPPING,
            _OUTPUT: "model.embed_tokens.weight" if shape.tied else "lm_head.weight",
        }

        def _build_config(self) -> Any:
            return config

        def _adjust_mapping_for_shared_weights(self) -> None:
            """mbridge would change the dictionary of its class, and with it every untied model of the process."""

    hf_config = SimpleNamespace(
        model_type=shape.family,
        num_key_value_heads=shape.kv_heads,
        num_attention_heads=shape.heads,
        hidden_size=shape.hidden,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    # dtype None: no conversion on the way. mpu is only asked for sizes, which the methods above give.
    return Corrected(hf_config, dtype=None, parallel_states=SimpleNamespace(tp_size=1))
