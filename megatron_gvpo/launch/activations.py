"""What the layers keep of a micro-batch until its backward pass, in bytes.

Two kinds of layer, two lists. `plain`: the plain-torch layers that the CPU device mode runs; the list was made by looking at
what autograd saves, and a test compares it with what is really allocated. `engine`: Transformer Engine's layers, after
arXiv 2205.05198 (section 4) and its documentation, with flash attention, fused SwiGLU and grouped queries; no GPU has
confirmed it yet.

Legend: t tensor-parallel ranks; s = t under sequence parallelism, else 1; c context-parallel ranks; q and k the widths of all
query and of all key heads.
"""

from __future__ import annotations

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.parameters import stage_layers


def element_bytes(config: Config) -> int:
    """Bytes of a weight or an activation outside FP8."""
    return 4 if config.precision.params == "fp32" else 2


def micro_batch_tokens(config: Config) -> int:
    """Tokens of a micro-batch on one context-parallel rank, at most."""
    by_samples = config.train.micro_batch_size * config.model.max_length
    # A sample longer than the budget is a micro-batch of its own.
    tokens = by_samples or max(config.train.micro_batch_tokens, config.model.max_length)
    samples = -(-config.rollout.prompts_per_step * config.rollout.group_size // config.parallel.data)
    return -(-min(tokens, samples * config.model.max_length) // config.parallel.context)


def micro_batches(config: Config) -> int:
    """Micro-batches of an optimizer step on each data-parallel rank, every sample at its full length."""
    parallel = config.parallel
    samples = -(-config.rollout.prompts_per_step * config.rollout.group_size // parallel.data)
    fit = config.train.micro_batch_size or max(config.train.micro_batch_tokens // config.model.max_length, 1)
    count = -(-samples // fit)
    # Interleaved schedules want a multiple of the number of stages.
    return -(-count // parallel.pipeline) * parallel.pipeline if (parallel.virtual_pipeline or 1) > 1 else count


def activation_bytes(config: Config, shape: ModelShape, stage: int, tokens: int | None = None) -> int:
    """What stage `stage` holds at its fullest, of all micro-batches that are under way; the last stage's final norm included.

    tokens: of one micro-batch on this rank, `micro_batch_tokens` by default.
    """
    tokens = micro_batch_tokens(config) if tokens is None else tokens
    layers = stage_layers(shape, config.parallel)[stage]
    last = stage == config.parallel.pipeline - 1
    final = _norm_bytes(config, shape, tokens) + _wide(config, shape, tokens) if last else 0
    under_way = in_flight(config, stage)
    one_layer = layer_bytes(config, shape, tokens)
    if config.model.recompute == "full":
        # Each layer keeps its input; one layer at a time is computed again.
        return int(under_way * (layers * _wide(config, shape, tokens) + final)) + one_layer
    return int(under_way * (layers * one_layer + final))


def in_flight(config: Config, stage: int) -> float:
    """Micro-batches whose activations stage i of p holds at once. 1F1B: p - i; with v interleaved chunks it runs
    2(p - i - 1) + (v - 1)p + 1 of its chunks ahead (arXiv 2104.04473, section 2.2)."""
    pipeline, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    ahead = pipeline - stage if chunks == 1 else (2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1) / chunks
    return max(1.0, min(float(micro_batches(config)), ahead))


def layer_bytes(config: Config, shape: ModelShape, tokens: int) -> int:
    """One layer's share of one micro-batch of `tokens` tokens on this rank."""
    if config.train.device == "cpu":
        return _plain(config, shape, tokens)
    return _engine(config, shape, tokens)


def _wide(config: Config, shape: ModelShape, tokens: int) -> int:
    """One tensor as wide as the model."""
    shards = config.parallel.tensor if config.parallel.sequence else 1
    return tokens * shape.hidden * element_bytes(config) // shards


def _norm_bytes(config: Config, shape: ModelShape, tokens: int) -> int:
    """What one norm keeps of its input: the input and, in plain torch, the normalised one, both in fp32."""
    if config.train.device == "cpu":
        return 2 * 4 * tokens * shape.hidden // (config.parallel.tensor if config.parallel.sequence else 1)
    return _wide(config, shape, tokens)


def _plain(config: Config, shape: ModelShape, tokens: int) -> int:
    parallel, size = config.parallel, element_bytes(config)
    tensor, context = parallel.tensor, parallel.context
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms, and the input of the linear layer after each.
    total = 2 * (_norm_bytes(config, shape, tokens) + _wide(config, shape, tokens))
    # Rotated queries, the output, and the log of each row's sum; values stay a view of the mixed projection.
    attention = 2 * queries * size + 4 * shape.heads
    attention += (queries + 3 * keys) * size if context == 1 else 2 * context * keys * size
    if shape.qk_norm:
        attention += (2 * queries + keys) * 4 if size == 4 else 2 * (queries + keys) * 4
    total += tokens * attention // tensor
    if shape.experts is None:
        # gate and up, silu(gate), up once more (an offset is added to it), and their product.
        total += tokens * 5 * shape.ffn * size // tensor
    else:
        total += _experts(config, shape, tokens, 5 * size, size)
    if context > 1:
        total += tokens * tokens * context  # the mask
    # Cosines and sines of queries and keys, once for all sequences of the micro-batch.
    return total + 4 * min(tokens, config.model.max_length) * shape.head_dim * size


def _engine(config: Config, shape: ModelShape, tokens: int) -> int:
    parallel = config.parallel
    size = element_bytes(config)
    # Linear layers keep their inputs in the precision of their products.
    kept = size if config.precision.fp8 == "none" else 1
    shards = parallel.tensor if parallel.sequence else 1
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    total = tokens * shape.hidden * (2 * size + 2 * kept) // shards
    # The mixed projection (values are a view of it), rotated queries and keys, the output, the log of each row's sum.
    attention = (3 * queries + 3 * keys) * size + 4 * shape.heads + (queries * kept if kept != size else 0)
    if shape.qk_norm:
        attention += (queries + keys) * size
    total += tokens * attention // parallel.tensor
    if shape.experts is None:
        return total + tokens * shape.ffn * (2 * size + kept) // parallel.tensor
    return total + _experts(config, shape, tokens, 2 * size + kept, kept)


def _experts(config: Config, shape: ModelShape, tokens: int, per_ffn: int, kept: int) -> int:
    """Tokens spread evenly over the experts; a rank's own load may be above it. per_ffn: bytes for one unit of their width."""
    experts, parallel = shape.experts, config.parallel
    assert experts is not None
    expert_tensor = parallel.expert_tensor or parallel.tensor
    own = tokens // (parallel.tensor if parallel.sequence else 1)
    # Each of a rank's own tokens goes to `per_token` experts; expert-tensor ranks gather one another's.
    dispatched = own * experts.per_token * expert_tensor
    return dispatched * (shape.hidden * (kept + element_bytes(config)) + experts.ffn * per_ffn // expert_tensor)
