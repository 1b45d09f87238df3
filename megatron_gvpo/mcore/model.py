"""A Megatron-Core model of the shape that a Hugging Face `config.json` describes, cut as the layout says."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gvpo.config.hf_shape import ModelShape, read_shape
from megatron_gvpo.config.schema import ModelSection, ParallelSection, PrecisionSection
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.mcore.errors import SetupError
from megatron_gvpo.mcore.fp8 import fp8_fields
from megatron_gvpo.mcore.spec import layer_spec, transformer_engine_works
from megatron_gvpo.mcore.startup import Ranks

# The same padded size at every power-of-two tensor-parallel size, so that checkpoints move between layouts without reshaping.
VOCAB_MULTIPLE = 128

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Fields that a section of the config already sets; a second place could only contradict it.
_OWNED = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "params_dtype": "precision.params",
    "pipeline_dtype": "precision.params",
    "bf16": "precision.params",
    "fp8": "precision.fp8",
    "fp8_recipe": "precision.fp8",
    "fp8_param": "precision.fp8_params",
}


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a chunk was built from; kept on the chunk for everything that converts or saves weights."""

    shape: ModelShape
    padded_vocab: int


def build_model(
    model: ModelSection,
    parallel: ParallelSection,
    precision: PrecisionSection,
    ranks: Ranks,
    params_dtype: torch.dtype | None = None,
) -> list[GPTModel]:
    """This rank's model chunks (one, or `virtual_pipeline` of them), unwrapped, on the rank's device, in training mode.

    The weights are NOT initialised: fill them by `load_hf` or `init_random`. params_dtype: in place of
    precision.params, for the float64 models of tests. ValueError (ShapeError for the folder), one line, for what cannot be built.
    """
    shape = read_shape(model.path)
    config = transformer_config(shape, model, parallel, precision, ranks, params_dtype)
    vocab = padded_vocab(shape.vocab, parallel.tensor)
    facts = ModelFacts(shape, vocab)
    return [_chunk(config, facts, ranks, stage) for stage in _virtual_stages(ranks)]


def transformer_config(
    shape: ModelShape,
    model: ModelSection,
    parallel: ParallelSection,
    precision: PrecisionSection,
    ranks: Ranks,
    params_dtype: torch.dtype | None = None,
) -> TransformerConfig:
    """Megatron's config. `model.megatron` overrides what no section owns. ValueError for what does not fit, in one line."""
    check_shape(shape, parallel)
    dtype = params_dtype or _DTYPES[precision.params]
    engine = uses_transformer_engine(ranks)
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        # The policy that is trained has to be the policy that sampled.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": ranks.virtual_pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor or parallel.tensor,
        "sequence_parallel": parallel.sequence and parallel.tensor > 1,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        # Micro-batches differ in length and in number of sequences.
        "variable_seq_lengths": parallel.pipeline > 1,
        # Variable lengths are refused with the other dispatchers, even by models without experts.
        "moe_token_dispatcher_type": "alltoall",
        # Batched sends cannot be combined with variable lengths on every backend; interleaving wants them apart anyway.
        "batch_p2p_comm": False,
        "overlap_p2p_comm": ranks.virtual_pipeline is not None and not ranks.cpu,
        "deallocate_pipeline_outputs": parallel.pipeline > 1,
        # Every weight is filled afterwards, from a folder or at random, in the same way for every layout.
        "perform_initialization": False,
        "use_cpu_initialization": ranks.cpu,
        # Fused kernels of Transformer Engine and of torch.compile; none of them runs on a CPU.
        "bias_activation_fusion": not ranks.cpu,
        "bias_dropout_fusion": not ranks.cpu,
        "apply_rope_fusion": engine,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    fields |= _recompute(model) | fp8_fields(precision, engine) | _overrides(model)
    try:
        return TransformerConfig(**fields)
    except (AssertionError, ValueError, TypeError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise SetupError(f"Megatron-Core refuses this model: {text}") from error


def check_shape(shape: ModelShape, parallel: ParallelSection) -> None:
    """ValueError for a model that is not built here, or that the layout cannot cut."""
    if shape.experts is not None:
        raise SetupError(f"{shape.family} models (mixtures of experts) cannot be built; supported: llama, qwen2, qwen3")
    if shape.out_bias or shape.mlp_bias:
        raise SetupError("a bias on the attention's output projection or in the MLP is not supported (attention_bias, mlp_bias)")
    for name, count in (("heads", shape.heads), ("key-value heads", shape.kv_heads), ("ffn", shape.ffn)):
        if count % parallel.tensor:
            raise SetupError(f"parallel.tensor {parallel.tensor} does not divide the model's {count} {name}")
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    middle = parallel.pipeline - (first is not None) - (last is not None)
    left = shape.layers - (first or 0) - (last or 0)
    chunks = middle * (parallel.virtual_pipeline or 1)
    if left < chunks or (middle == 0 and left) or (middle and left % chunks):
        raise SetupError(
            f"{shape.layers} layers do not divide over {parallel.pipeline} pipeline stages x {parallel.virtual_pipeline or 1} "
            f"chunks (first_stage_layers {first}, last_stage_layers {last}): set one of these two so that the rest divides"
        )


def padded_vocab(vocab: int, tensor: int) -> int:
    """Rows of the embedding and the output layer over all tensor-parallel ranks, padding included."""
    multiple = math.lcm(VOCAB_MULTIPLE, tensor)
    return -(-vocab // multiple) * multiple


def output_shard(chunk: Any, ranks: Ranks) -> VocabShard:
    """The part of the vocabulary whose logits this rank computes; ids from the model's own vocabulary size on are padding."""
    facts = facts_of(chunk)
    group = ranks.tensor.group if ranks.tensor.size > 1 else None
    return VocabShard.of(ranks.tensor.rank, ranks.tensor.size, facts.shape.vocab, facts.padded_vocab, group)


def facts_of(chunk: Any) -> ModelFacts:
    """What a chunk, wrapped or not, was built from. TypeError for a model that `build_model` did not build."""
    facts = getattr(unwrapped(chunk), "facts", None)
    if not isinstance(facts, ModelFacts):
        raise TypeError(f"this {type(chunk).__name__} was not built by build_model")
    return facts


def unwrapped(chunk: Any) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while not isinstance(chunk, GPTModel):
        if not hasattr(chunk, "module"):
            raise TypeError(f"there is no GPTModel inside this {type(chunk).__name__}")
        chunk = chunk.module
    return chunk


def uses_transformer_engine(ranks: Ranks) -> bool:
    return not ranks.cpu and transformer_engine_works()


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """[head_dim / 2] float32 radians per position, as the model was trained with; the arithmetic is float32, as in transformers.

    `linear` divides all frequencies by `factor` (Chen et al. 2023, arXiv 2306.15595, eq. 3). `llama3` divides those whose
    wavelength is above original_positions / low_freq_factor, keeps those below original_positions / high_freq_factor, and
    blends linearly in between (Llama 3.1's published rule).
    """
    rope = shape.rope
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        blend = (rope.original_positions / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
        long = wavelengths > rope.original_positions / rope.low_freq_factor
        short = wavelengths < rope.original_positions / rope.high_freq_factor
        return torch.where(long, frequencies / rope.factor, torch.where(short, frequencies, blended))
    return frequencies


def _virtual_stages(ranks: Ranks) -> list[int | None]:
    return [None] if ranks.virtual_pipeline is None else list(range(ranks.virtual_pipeline))


def _chunk(config: TransformerConfig, facts: ModelFacts, ranks: Ranks, stage: int | None) -> GPTModel:
    virtual = stage is not None
    shape = facts.shape
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, uses_transformer_engine(ranks), stage),
        vocab_size=facts.padded_vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=int(shape.rope.theta),
        vp_stage=stage,
    )
    # Megatron knows Llama 3's scaling with one fixed set of its four numbers; here they are the model's own.
    chunk.rotary_pos_emb.inv_freq = rotary_frequencies(shape).to(ranks.device)
    chunk.facts = facts  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    _mark_partitions(chunk)
    return chunk.to(ranks.device)


def _mark_partitions(chunk: GPTModel) -> None:
    """Megatron marks a weight as partitioned only where it also initialises it, and takes one without the mark for a copy of
    rank 0's: it would be left out of the gradient norm on all other tensor-parallel ranks, and clipping would be wrong.
    """
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (VocabParallelEmbedding, ColumnParallelLinear)):
            dim = 0
        elif isinstance(module, RowParallelLinear):
            dim = 1
        else:
            continue
        if weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _recompute(model: ModelSection) -> dict[str, Any]:
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _overrides(model: ModelSection) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields: dict[str, Any] = {}
    for name, value in model.megatron.items():
        if name in _OWNED:
            raise SetupError(f"model.megatron.{name}: this is set by {_OWNED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SetupError(f"model.megatron.{name}: Megatron-Core's TransformerConfig has no such field{hint}")
        if name == "attention_backend" and isinstance(value, str):
            if value not in AttnBackend.__members__:
                raise SetupError(f"model.megatron.attention_backend: {value!r} is none of {', '.join(AttnBackend.__members__)}")
            value = AttnBackend[value]
        fields[name] = value
    return fields
