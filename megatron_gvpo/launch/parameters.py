"""How many parameters a model has, and how many of them one rank holds. Pure arithmetic on a `ModelShape`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.schema import Config, ParallelSection

# The model builder pads the vocabulary to a multiple of this and of the tensor-parallel size.
VOCAB_MULTIPLE = 128


def count_parameters(shape: ModelShape) -> dict[str, int]:
    """Parameters by part, as in the Hugging Face checkpoint: a tied output layer counts once, padding does not count."""
    layer = layer_parameters(shape)
    counts = {"embedding": shape.vocab * shape.hidden}
    counts |= {part: shape.layers * (whole.sharded + whole.replicated) for part, whole in layer.items()}
    counts["norms"] += shape.hidden  # the final norm
    counts["output_layer"] = 0 if shape.tied else shape.vocab * shape.hidden
    return counts


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token passes through: of the experts only those that are chosen."""
    counts = count_parameters(shape)
    if shape.experts is not None:
        counts["experts"] = counts["experts"] * shape.experts.per_token // shape.experts.count
    return sum(counts.values())


@dataclass(frozen=True)
class Split:
    """Parameters of one part of one layer: those that tensor parallelism shards, and those that every rank holds whole."""

    sharded: int
    replicated: int = 0


def layer_parameters(shape: ModelShape) -> dict[str, Split]:
    """One transformer layer by part. `experts` are sharded by expert and expert-tensor parallelism, the rest by tensor."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = (queries + 2 * keys) * (shape.hidden + shape.qkv_bias)
    parts = {
        "attention": Split(qkv + queries * shape.hidden, shape.hidden if shape.out_bias else 0),
        "norms": Split(0, 2 * shape.hidden + (2 * shape.head_dim if shape.qk_norm else 0)),
    }
    if shape.experts is None:
        bias = shape.mlp_bias
        parts["mlp"] = Split(3 * shape.hidden * shape.ffn + 2 * shape.ffn * bias, shape.hidden * bias)
    else:
        parts["experts"] = Split(shape.experts.count * 3 * shape.hidden * shape.experts.ffn)
        parts["router"] = Split(0, shape.experts.count * shape.hidden)
    return parts


def padded_vocab(shape: ModelShape, parallel: ParallelSection) -> int:
    """Rows of the embedding and of the output layer, padding included."""
    multiple = math.lcm(VOCAB_MULTIPLE, parallel.tensor)
    return -(-shape.vocab // multiple) * multiple


def stage_layers(shape: ModelShape, parallel: ParallelSection) -> list[int]:
    """Layers of each pipeline stage (all its virtual chunks together)."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    middle = parallel.pipeline - (first is not None) - (last is not None)
    rest = shape.layers - (first or 0) - (last or 0)
    layers = [rest // middle] * middle if middle else []
    return ([first] if first is not None else []) + layers + ([last] if last is not None else [])


@dataclass(frozen=True)
class RankParameters:
    """What one rank of a pipeline stage holds. Expert parameters are apart: their optimizer is sharded over other ranks."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def rank_parameters(shape: ModelShape, parallel: ParallelSection, stage: int) -> RankParameters:
    """Parameters of one rank of pipeline stage `stage`, vocabulary padding and the tied copy on the last stage included."""
    layers, last = stage_layers(shape, parallel)[stage], parallel.pipeline - 1
    expert_tensor = parallel.expert_tensor or parallel.tensor
    dense = experts = 0
    for part, split in layer_parameters(shape).items():
        if part == "experts":
            experts += layers * split.sharded // (parallel.expert * expert_tensor)
        else:
            dense += layers * (split.sharded // parallel.tensor + split.replicated)
    table = padded_vocab(shape, parallel) // parallel.tensor * shape.hidden
    if stage == 0:
        dense += table
    if stage == last:
        dense += shape.hidden
        # A tied output layer is the embedding itself, except that a pipeline's last stage needs a copy of its own.
        if not shape.tied or parallel.pipeline > 1:
            dense += table
    return RankParameters(dense, experts)


def fp8_parameters(config: Config, shape: ModelShape, stage: int) -> int:
    """Weights of one rank whose products run in FP8: linear layers outside the first and last layers that stay in bf16."""
    layers, parallel, precision = stage_layers(shape, config.parallel), config.parallel, config.precision
    if precision.fp8 == "none":
        return 0
    start = sum(layers[:stage])
    in_bf16 = 0
    if precision.fp8 != "delayed":
        first, last = precision.bf16_first_layers, shape.layers - precision.bf16_last_layers
        in_bf16 = sum(not first <= layer < last for layer in range(start, start + layers[stage]))
    parts = layer_parameters(shape)
    expert_tensor = parallel.expert_tensor or parallel.tensor
    per_layer = parts["attention"].sharded // parallel.tensor
    if "experts" in parts:
        per_layer += parts["experts"].sharded // (parallel.expert * expert_tensor)
    else:
        per_layer += parts["mlp"].sharded // parallel.tensor
    return (layers[stage] - in_bf16) * per_layer
