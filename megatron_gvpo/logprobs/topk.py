"""Top-k, argmax and the target's rank over a sharded vocabulary: for serving a teacher, and for metrics. No gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_gvpo.logprobs.row_op import Finished, Reduction, reduce_rows
from megatron_gvpo.logprobs.rows import Chunking, rows_that_are_active, rows_with_targets
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.source import HeadSource, LogitsSource, Source
from megatron_gvpo.logprobs.token_op import row_stats


class TopK(NamedTuple):
    """ids [T, k] int64, most probable first; logprobs [T, k] over the whole vocabulary."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class _TopKReduction(Reduction):
    """outputs: ids and log-probs [R, k]. Ids travel as floats: exact below 2^24, and vocabularies are far smaller."""

    shard: VocabShard
    k: int

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        rows, width = z_CV.shape
        here = min(self.k, width)  # k may exceed a shard
        found_C2K = z_CV.new_full((rows, 2, self.k), -torch.inf)
        values_CK, columns_CK = z_CV.topk(here, 1)
        found_C2K[:, 0, :here] = values_CK
        found_C2K[:, 1, :here] = (columns_CK + self.shard.start).to(z_CV.dtype)
        nowhere_C = torch.zeros(rows, dtype=torch.int64, device=z_CV.device)
        stats_CN = row_stats(z_CV, nowhere_C, nowhere_C.bool(), entropy=False)
        return torch.cat([stats_CN[:, :2], found_C2K.view(rows, -1)], 1)

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        all_WRN = self.shard.gather(partial_RN)
        world, rows, _ = all_WRN.shape
        top_R = all_WRN[..., 0].amax(0)
        log_total_R = ((all_WRN[..., 0] - top_R).exp() * all_WRN[..., 1]).sum(0).log()
        found_R2M = all_WRN[..., 2:].view(world, rows, 2, self.k).permute(1, 2, 0, 3).reshape(rows, 2, -1)
        values_RK, order_RK = found_R2M[:, 0].topk(self.k, 1)
        ids_RK = found_R2M[:, 1].gather(1, order_RK)
        return Finished((ids_RK, (values_RK - top_R[:, None]) - log_total_R[:, None]), partial_RN)


@dataclass(frozen=True)
class _ArgmaxReduction(Reduction):
    """output: the id of the largest logit as a float, the lowest such id where several are equal."""

    shard: VocabShard

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        best_C2 = z_CV.new_full((z_CV.shape[0], 2), -torch.inf)
        if z_CV.shape[1]:
            best_C2[:, 0] = z_CV.amax(1)
            columns_V = torch.arange(self.shard.start, self.shard.start + z_CV.shape[1], device=z_CV.device)
            best_C2[:, 1] = torch.where(z_CV == best_C2[:, :1], columns_V, self.shard.size).amin(1).to(z_CV.dtype)
        return best_C2

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        all_WR2 = self.shard.gather(partial_RN)
        best_R = all_WR2[..., 0].amax(0)
        ids_R = torch.where(all_WR2[..., 0] == best_R, all_WR2[..., 1], float(self.shard.size)).amin(0)
        return Finished((ids_R,), partial_RN)


@dataclass(frozen=True)
class _RankReduction(Reduction):
    """output: how many ids have a larger logit than the target."""

    shard: VocabShard
    targets_R: Tensor

    def partial(self, z_CV: Tensor, first: int) -> Tensor:
        # The target's logit must be known on every rank before anything can be counted: a gather for every chunk.
        column_C, here_C = self.shard.local(self.targets_R[first : first + z_CV.shape[0]])
        if z_CV.shape[1] == 0:
            own_C = z_CV.new_zeros(z_CV.shape[0])
        else:
            own_C = z_CV.gather(1, column_C[:, None]).squeeze(1).masked_fill(~here_C, 0.0)
        target_C = self.shard.sum(own_C)
        return (z_CV > target_C[:, None]).sum(1, keepdim=True).to(z_CV.dtype)

    def finish(self, partial_RN: Tensor, first: int) -> Finished:
        return Finished((self.shard.sum(partial_RN).squeeze(1),), partial_RN)


@torch.no_grad()
def top_k(
    logits: Tensor,
    k: int,
    shard: VocabShard,
    *,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
) -> TopK:
    """The k most probable ids of softmax(logits / temperature) and their log-probs, the same on every rank.

    logits [T, shard.width]; k may be larger than a shard, not than the vocabulary (ValueError). Which of several equal
    ids is named is unspecified.
    """
    return _top_k(LogitsSource(shard, logits), k, temperature, Chunking(chunk_tokens, memory_budget))


@torch.no_grad()
def linear_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    shard: VocabShard,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
) -> TopK:
    """`top_k` of hidden weight^T + bias, whose logits are never held; arguments as in `linear_token_logprobs`."""
    source = HeadSource(shard, hidden, weight, bias, sequence_parallel)
    return _top_k(source, k, temperature, Chunking(chunk_tokens, memory_budget))


def _top_k(source: Source, k: int, temperature: float | Tensor, chunking: Chunking) -> TopK:
    if not 1 <= k <= source.shard.size:
        raise ValueError(f"k must lie between 1 and the vocabulary's {source.shard.size} ids, not {k}")
    rows = rows_that_are_active(None, source.total, temperature)
    ids, logprobs = reduce_rows(source, _TopKReduction(source.shard, k), rows, chunking).outputs
    return TopK(ids.long(), logprobs)


@torch.no_grad()
def argmax(logits: Tensor, shard: VocabShard, *, chunk_tokens: int | None = None) -> Tensor:
    """[T] int64: the id of the largest logit, the lowest one where several are equal; the same on every rank."""
    source = LogitsSource(shard, logits)
    rows = rows_that_are_active(None, source.total, 1.0)
    return reduce_rows(source, _ArgmaxReduction(shard), rows, Chunking(chunk_tokens)).outputs[0].long()


@torch.no_grad()
def target_rank(logits: Tensor, targets: Tensor, shard: VocabShard, *, chunk_tokens: int | None = None) -> Tensor:
    """[T] int64: how many ids have a larger logit than the target (0: it is the argmax); 0 where there is no target."""
    source = LogitsSource(shard, logits)
    rows = rows_with_targets(targets, shard.size, source.total, 1.0)
    reduction = _RankReduction(shard, rows.take(targets))
    return rows.put(reduce_rows(source, reduction, rows, Chunking(chunk_tokens)).outputs[0]).long()
