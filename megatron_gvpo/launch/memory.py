"""GPU memory of a trainer rank, by part, from the config alone.

Weights, gradients and optimizer state are counted; activations and the log-prob engine are estimated from what a layer keeps
for its backward pass. Not in it: the allocator's fragmentation, NCCL's buffers and the CUDA context (a few GiB together).
"""

from __future__ import annotations

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.parameters import padded_vocab, rank_parameters, stage_layers

GIB = 1 << 30
# The log-prob engine works on this many tokens at a time.
HEAD_CHUNK_TOKENS = 1024


def rank_memory(config: Config, shape: ModelShape, needs: Needs, stage: int, teacher: ModelShape | None = None) -> dict[str, int]:
    """Bytes by part on one rank of pipeline stage `stage`. `teacher`: a colocated teacher's shape."""
    parallel, precision, optimizer = config.parallel, config.precision, config.optimizer
    held = rank_parameters(shape, parallel, stage)
    size = _element_bytes(config)
    dense_copies, expert_copies = _optimizer_copies(config, shape)
    parts = {
        "weights": held.total * (1 if precision.fp8_params else size),
        "gradients": held.total * (4 if precision.grad_reduce_fp32 else size),
        # Adam's two moments in fp32, and fp32 master weights beside bf16 ones.
        "optimizer": 0
        if optimizer.cpu_offload
        else (held.dense // dense_copies + held.experts // expert_copies) * (8 if size == 4 else 12),
        "activations": _activations(config, shape, stage),
        "logprobs": _head(config, shape) if stage == parallel.pipeline - 1 else 0,
    }
    if needs.reference:
        parts["reference"] = held.total * size
    if teacher is not None:
        parts["teacher"] = rank_parameters(teacher, parallel, stage).total * size
    return parts


def micro_batch_tokens(config: Config) -> int:
    """Tokens of a micro-batch on one context-parallel rank, at most."""
    by_samples = config.train.micro_batch_size * config.model.max_length
    # A sample longer than the budget is a micro-batch of its own.
    tokens = by_samples or max(config.train.micro_batch_tokens, config.model.max_length)
    samples = -(-config.rollout.prompts_per_step * config.rollout.group_size // config.parallel.data)
    return -(-min(tokens, samples * config.model.max_length) // config.parallel.context)


def _element_bytes(config: Config) -> int:
    return 4 if config.precision.params == "fp32" else 2


def _optimizer_copies(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Over how many ranks the optimizer state of dense and of expert parameters is sharded."""
    parallel = config.parallel
    if not config.optimizer.distributed:
        return 1, 1
    dense = parallel.world_size // (parallel.tensor * parallel.pipeline)
    if shape.experts is None:
        return dense, 1
    return dense, parallel.world_size // ((parallel.expert_tensor or parallel.tensor) * parallel.expert * parallel.pipeline)


def _activations(config: Config, shape: ModelShape, stage: int) -> int:
    parallel, tokens = config.parallel, micro_batch_tokens(config)
    layers = stage_layers(shape, parallel)[stage]
    size = _element_bytes(config)
    layer_input = tokens * shape.hidden * size // (parallel.tensor if parallel.sequence else 1)
    in_flight = _micro_batches_in_flight(config, stage)
    if config.model.recompute == "full":
        # Each layer keeps its input; one layer at a time is computed again.
        return int(in_flight * layers * layer_input) + _layer_activations(config, shape, tokens)
    return int(in_flight * layers * _layer_activations(config, shape, tokens))


def _micro_batches_in_flight(config: Config, stage: int) -> float:
    """1F1B: stage i of p holds p - i; with v interleaved chunks it runs 2(p - i - 1) + (v - 1)p + 1 of its chunks ahead
    (arXiv 2104.04473, section 2.2)."""
    pipeline, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    ahead = pipeline - stage if chunks == 1 else (2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1) / chunks
    samples = config.rollout.prompts_per_step * config.rollout.group_size / config.parallel.data
    count = samples * config.model.max_length / config.parallel.context / micro_batch_tokens(config)
    return max(1.0, min(count, ahead))


def _layer_activations(config: Config, shape: ModelShape, tokens: int) -> int:
    """Bytes that one layer keeps of one micro-batch: inputs and outputs of the norms, q, k, v, the attention's output, and
    gate, up and their product (after arXiv 2205.05198, section 4, with flash attention, grouped queries and SwiGLU)."""
    parallel, size = config.parallel, _element_bytes(config)
    tensor = parallel.tensor
    along_hidden = 4 * shape.hidden // (tensor if parallel.sequence else 1)
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim // tensor
    if shape.experts is None:
        feed_forward = 3 * shape.ffn // tensor
    else:
        wide = 3 * shape.experts.ffn // (parallel.expert_tensor or tensor)
        feed_forward = shape.experts.per_token * (wide + shape.hidden)
    total = tokens * (along_hidden + attention + feed_forward) * size
    if config.train.device == "cpu" and config.model.recompute == "none":
        # Without flash attention the scores and their softmax are kept: length x length for each sequence and head.
        length = min(config.model.max_length, tokens)
        total += 2 * tokens * length * (shape.heads // tensor) * size
    return total


def _head(config: Config, shape: ModelShape) -> int:
    """The last hidden states, and two fp32 copies of one chunk of logits; nothing as wide as the vocabulary is kept."""
    tokens = micro_batch_tokens(config)
    chunk = min(tokens, HEAD_CHUNK_TOKENS) * padded_vocab(shape, config.parallel) // config.parallel.tensor
    return tokens * shape.hidden * _element_bytes(config) + 2 * 4 * chunk
