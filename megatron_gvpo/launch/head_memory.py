"""What the log-prob engine and GUPO take on the last pipeline stage, in bytes. The same sums as the code that allocates."""

from __future__ import annotations

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.schema import Config
from megatron_gvpo.gupo.cost import MemoryPlan, memory_plan
from megatron_gvpo.launch.activations import element_bytes, micro_batch_tokens
from megatron_gvpo.launch.parameters import padded_vocab

# The engine's scratch budget, its elementwise blocks and its blocks of widened weights (logprobs.rows, logprobs.matmul).
_BUDGET = {"cpu": 256 << 20, "cuda": 512 << 20}
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 23}
_WEIGHT_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 25}


def head_memory(config: Config, shape: ModelShape, tokens: int | None = None, trained: int | None = None) -> int:
    """The most that one micro-batch's log-probs and their gradients hold at once; nothing as wide as the vocabulary outlives a
    chunk.

    tokens, trained: of the micro-batch, over the ranks of sequence parallelism, all and those with a target; by default
    `micro_batch_tokens` and the share of a sequence that `rollout.max_new_tokens` may be.
    """
    parallel, size, device = config.parallel, element_bytes(config), config.train.device
    tokens = micro_batch_tokens(config) if tokens is None else tokens
    if trained is None:
        trained = -(-tokens * config.rollout.max_new_tokens // config.model.max_length)
    width = -(-shape.vocab // parallel.tensor)
    weight = padded_vocab(shape, parallel) // parallel.tensor * shape.hidden
    narrow = size == 2
    per_column = 4 + (2 if narrow and device == "cuda" else 0)
    chunk = min(_chunk_rows(width, weight, per_column, narrow, device), max(trained, 1))
    scratch = chunk * width * per_column
    # The weight is widened by blocks (a GPU's products need no widening, but a block of the weight's gradient).
    block = 4 * min(_WEIGHT_BLOCK[device], weight) if narrow else 0
    widened = 4 * chunk * shape.hidden if narrow and device == "cpu" else 0

    row = shape.hidden * size
    gathered = tokens * row if parallel.sequence else 0
    masked = trained < tokens
    taken = trained * row if masked else 0
    gradient = trained * row
    spread = tokens * row if masked else 0  # the gradient, put back among rows without a target
    own = tokens * row // parallel.tensor if parallel.sequence else 0
    held = taken if masked else gathered
    return max(
        gathered + taken + scratch + gradient,
        held + gradient + scratch + block + widened,
        held + gradient + scratch + spread + own,
    )


def _chunk_rows(width: int, weight: int, per_column: int, narrow: bool, device: str) -> int:
    """Rows whose logits fit the engine's budget, as `logprobs.rows.Chunking` counts them."""
    blocks = 2 * 4 * max(1, _BLOCK[device] // width) * width
    widened = 8 * min(_WEIGHT_BLOCK[device], weight) if narrow else 0
    rows = max(0, _BUDGET[device] - blocks - widened) // (per_column * width)
    return max(1, rows - rows % 16 if rows >= 16 else rows)


def gupo_plan(config: Config, shape: ModelShape) -> MemoryPlan:
    """How GUPO will lay out its buffers on this run's largest shard of the output layer."""
    rows = padded_vocab(shape, config.parallel) // config.parallel.tensor
    cuda = config.train.device == "cuda"
    return memory_plan(config.gupo, shape.vocab, rows, shape.hidden, weight_bytes=element_bytes(config), cuda=cuda)


def gupo_memory(config: Config, shape: ModelShape) -> int:
    """The last stage's buffers of the output layer's size, one chunk of logits, and the step's hidden states."""
    parallel = config.parallel
    samples = -(-config.rollout.prompts_per_step * config.rollout.group_size // parallel.data)
    states = samples * config.rollout.max_new_tokens // parallel.context * shape.hidden * element_bytes(config)
    # Above `gupo.memory_gib` they wait in CPU memory.
    kept = states if states <= config.gupo.memory_gib * (1 << 30) else 0
    return gupo_plan(config, shape).bytes + kept + _BUDGET[config.train.device]
