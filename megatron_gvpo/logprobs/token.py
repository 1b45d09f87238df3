"""Token log-probs and entropies over a sharded vocabulary, from logits or straight from hidden states and the head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_gvpo.logprobs.row_op import ScoreOp, run
from megatron_gvpo.logprobs.rows import Chunking, Rows, rows_with_targets
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.source import HeadSource, LogitsSource, Source
from megatron_gvpo.logprobs.support import Support, support_op
from megatron_gvpo.logprobs.token_op import TokenOp
from megatron_gvpo.logprobs.weight_grad import WeightGrad, resolve


class TokenLogprobs(NamedTuple):
    """logprobs [T], and entropy [T] in nats where it was asked for; 0 where there is no target."""

    logprobs: Tensor
    entropy: Tensor | None = None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    support: Support | None = None,
) -> TokenLogprobs:
    """log softmax(logits / temperature)[target] of every position, the same on every rank of `shard.group`.

    logits: [T, shard.width], any float dtype, never modified. targets: [T] int64 global ids; -1 marks a position without
    one, whose results are 0 and whose gradient is exactly 0. temperature: a number or [T], without gradient.
    Results: [T] float32, float64 for float64 logits; differentiable with respect to `logits`, each rank getting its
    shard of the gradient that one process would compute. At most `chunk_tokens` positions are handled at a time, or as
    many as fit into `memory_budget` bytes. With `support`, probabilities are normalised over the ids kept at each
    position (see `Support`). ValueError for a wrong width or a target outside the vocabulary.
    """
    source = LogitsSource(shard, logits)
    rows = rows_with_targets(targets, shard.size, source.total, temperature)
    return _results(source, targets, rows, entropy, support, Chunking(chunk_tokens, memory_budget))


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
    support: Support | None = None,
    weight_grad: WeightGrad = "auto",
) -> TokenLogprobs:
    """`token_logprobs` of hidden weight^T + bias, without ever holding those logits.

    hidden: [T, H], or [T/W, H] with `sequence_parallel` (gathered here). weight: [shard.width, H]; bias: [shard.width].
    targets: [T], all of them, on every rank. Backward recomputes the logits chunk by chunk; what is kept is `hidden` and
    a few numbers a position. The gradient of `hidden` is already reduced over the group (reduce-scattered under
    sequence parallelism). The weight's gradient is accumulated in float32 and goes, by `weight_grad`, into Megatron's
    `weight.main_grad` ("main_grad"), into `weight.grad` ("grad") or through autograd ("return"); "auto" takes
    `main_grad` where the parameter carries Megatron's buffer and flag. Positions without a target enter no matmul.
    """
    source = HeadSource(shard, hidden, weight, bias, sequence_parallel, resolve(weight_grad, weight))
    rows = rows_with_targets(targets, shard.size, source.total, temperature)
    return _results(source, targets, rows, entropy, support, Chunking(chunk_tokens, memory_budget))


def _results(
    source: Source, targets_T: Tensor, rows: Rows, entropy: bool, support: Support | None, chunking: Chunking
) -> TokenLogprobs:
    return TokenLogprobs(*run(source, target_op(source.shard, targets_T, rows, entropy, support), rows, chunking))


def target_op(shard: VocabShard, targets_T: Tensor, rows: Rows, entropy: bool, support: Support | None) -> ScoreOp:
    """The operation that gives the targets' log-probs, over the whole vocabulary or over the kept ids."""
    if support is not None:
        return support_op(shard, targets_T, support, rows, entropy)
    return TokenOp(shard, rows.take(targets_T), entropy)
