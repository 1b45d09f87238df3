"""Which modules a transformer layer is made of: Transformer Engine's on GPUs that have it, plain PyTorch's everywhere else.

The plain layer keeps Megatron-Core's parallel linear layers and replaces what needs a GPU: the norms and the core attention.
Parameter names in distributed checkpoints are the same for both, so a checkpoint of one loads into the other.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gvpo.mcore.errors import SetupError

log = logging.getLogger(__name__)


@functools.cache
def transformer_engine_works() -> bool:
    """Whether Transformer Engine can be imported here; why not is logged once."""
    try:
        import transformer_engine.pytorch  # noqa: F401  # pyright: ignore[reportMissingImports]
    # A build for another CUDA or torch raises RuntimeError or OSError rather than ImportError.
    except (ImportError, RuntimeError, OSError) as error:
        log.warning(
            "Transformer Engine cannot be used (%s): layers are plain PyTorch, slower and without FP8",
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return False
    return True


def layer_spec(config: TransformerConfig, transformer_engine: bool, vp_stage: int | None = None) -> Any:
    """The spec of the layers that this rank's chunk `vp_stage` holds (None without virtual pipeline stages)."""
    if transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    layers: Any = block.layer_specs
    for layer in layers:
        modules: Any = layer.submodules
        modules.input_layernorm = PlainRMSNorm
        modules.pre_mlp_layernorm = PlainRMSNorm
        attention = modules.self_attention.submodules
        attention.core_attention = PlainAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = PlainRMSNorm
    block.layer_norm = PlainRMSNorm  # pyright: ignore[reportAttributeAccessIssue]
    return block


class PlainRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight Megatron knows to reduce over the tensor group where a rank sees a part of the sequence only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - a mark that Tensor does not declare


class PlainAttention(MegatronModule):
    """Causal attention by `scaled_dot_product_attention`, with grouped queries, packed sequences and context parallelism.

    Keys and values are gathered over the context-parallel group; every rank holds chunks r and 2 CP - 1 - r of 2 CP equal
    chunks of each sequence (the "zigzag" that gives all ranks the same work).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise SetupError(f"attention dropout is {dropout}; training against sampled responses wants it to be 0")
        channels = config.kv_channels
        if softmax_scale is None and channels is None:
            raise SetupError("the attention needs kv_channels or a softmax scale")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(channels or 1)
        group: Any = getattr(pg_collection, "cp", None)
        self.cp_group: Any = group if group is not None else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D] -> [S, B, N * D]; packed: [T, N, D] -> [T, N * D].

        S and T count this rank's positions. ValueError for an explicit mask: attention is causal, which is right for padding at
        the end of a sequence.
        """
        if attention_mask is not None or attention_bias is not None:
            raise SetupError("the plain PyTorch attention is causal: attention_mask and attention_bias must be None")
        packed = query.dim() == 3
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask = self._mask(query.size(0), packed_seq_params if packed else None, query.device)
        if self.cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        out = out.permute(2, 0, 1, 3).flatten(2)
        return out.squeeze(1) if packed else out

    def _mask(self, length: int, packed: PackedSeqParams | None, device: torch.device) -> Tensor | None:
        """[queries, keys], True where a query sees a key; None where plain causality says it all."""
        ranks = self.cp_group.size()
        if packed is None and ranks == 1:
            return None
        if packed is None:
            bounds = [0, length * ranks]
        else:
            bounds = [int(b) for b in packed.cu_seqlens_q]  # pyright: ignore[reportOptionalIterable]
        places = [_places(bounds, rank, ranks, device) for rank in range(ranks)]
        sequence_q, position_q = places[self.cp_group.rank()]
        sequence_k, position_k = (torch.cat(parts) for parts in zip(*places, strict=True))
        return (sequence_q[:, None] == sequence_k) & (position_q[:, None] >= position_k)


def _places(bounds: list[int], rank: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which sequence each of a rank's tokens belongs to, and its position there; `bounds` are the sequences' global ends."""
    sequences: list[Tensor] = []
    positions: list[Tensor] = []
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        position = torch.arange(stop - start, device=device)
        if ranks > 1:
            chunks = position.view(2 * ranks, -1)
            position = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
        sequences.append(torch.full_like(position, number))
        positions.append(position)
    return torch.cat(sequences), torch.cat(positions)
