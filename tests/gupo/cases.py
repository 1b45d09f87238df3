"""Small batches for the tests: ragged groups, one of them without any spread of rewards, hidden states and an output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import GvpoConfig, ObjectiveConfig
from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo import Head, Measurement, deal_groups, measure
from megatron_gvpo.gupo.norm_layer import measure_norm
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives import Batch, Comm, LocalComm, Objective, Outputs, Prepared, TokenLoss, TokenTable
from megatron_gvpo.objectives.batch import SequenceTable
from megatron_gvpo.objectives.gvpo import Gvpo

VOCAB, HIDDEN = 23, 12
# Of the final norm, where that is the layer.
SCALE = torch.linspace(0.5, 1.6, HIDDEN, dtype=torch.float64) * torch.tensor([1.0, -1.0] * (HIDDEN // 2))


@dataclass(frozen=True)
class Case:
    """A whole batch: hidden_TH, targets_T and batch.tokens have the same rows."""

    weight_VH: Tensor
    hidden_TH: Tensor
    targets_T: Tensor
    batch: Batch
    temperature: float


def make_case(seed: int = 0, sizes: Sequence[int] = (3, 2, 4, 2, 3), flat: int = 3, temperature: float = 0.8) -> Case:
    """sizes: responses of each group, 1 to 6 tokens each. flat: a group of equal rewards (-1: none)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    lengths = torch.randint(1, 7, (len(group),), generator=generator)
    sequence_T = torch.repeat_interleave(torch.arange(len(group)), lengths)
    position_T = torch.cat([torch.arange(int(n)) for n in lengths])
    total = len(sequence_T)
    weight, hidden = 0.5 * normal(VOCAB, HIDDEN), 1.5 * normal(total, HIDDEN)
    targets = torch.randint(0, VOCAB, (total,), generator=generator)
    lp_T = (hidden @ weight.t() / temperature).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    reward = normal(len(group)).round(decimals=2)
    old_T = lp_T + 0.1 * normal(total)
    if flat >= 0:
        members = torch.tensor([g == flat for g in group])
        reward[members] = 0.5
        # No distance from the reference either: this group has no gradient at theta.
        old_T = torch.where(members[sequence_T], lp_T, old_T)
    signals = {"logprobs": lp_T, "old_logprobs": old_T}
    sums = {k: torch.zeros(len(group), dtype=torch.float64).index_add(0, sequence_T, v) for k, v in signals.items()}
    table = SequenceTable(torch.arange(len(group)), torch.tensor(group), lengths, reward, sums, len(sizes))
    return Case(weight, hidden, targets, Batch(table, TokenTable(sequence_T, position_T, signals)), temperature)


class Clipped(Objective[ObjectiveConfig]):
    """Token mean of a clipped ratio: an objective that has a `loss` and no coefficients."""

    name: ClassVar[str] = "clipped"
    low, high = 0.05, 0.05

    @property
    def needs(self) -> Needs:
        return Needs(rewards=True, old=True, denominator="tokens")

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        reward_N = batch.sequences.reward_N
        advantage_N = reward_N - batch.sequences.group_mean_N(reward_N)
        return Prepared(float(batch.total_tokens), token_data={"advantage": advantage_N[batch.tokens.sequence_T]})

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        ratio_T = (outputs.logprobs_T - outputs.tokens.signal("old_logprobs")).exp()
        advantage_T = token_data["advantage"]
        clipped_T = ratio_T.clamp(1 - self.low, 1 + self.high) * advantage_T
        return TokenLoss(-torch.minimum(ratio_T * advantage_T, clipped_T))


def gvpo(beta: float = 0.3) -> Gvpo:
    return Gvpo(GvpoConfig(beta=beta))


OBJECTIVES = {"gvpo": gvpo, "clipped": lambda: Clipped(ObjectiveConfig())}


class GroupComm:
    """The objectives' `Comm` over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather_tokens(self, values_T: Tensor, tokens: TokenTable) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("no objective of these tests gathers tokens")


def padded_shard(
    case: Case, rank: int, world: int, group: dist.ProcessGroup | None, padded: int = 28
) -> tuple[Tensor, VocabShard]:
    """This rank's rows of the layer, padded with rows of nonsense, and the shard."""
    shard = VocabShard.of(rank, world, VOCAB, padded, group)
    weight = torch.full((padded, HIDDEN), 7.0, dtype=case.weight_VH.dtype)
    weight[:VOCAB] = case.weight_VH
    return weight[shard.start : shard.stop].clone(), shard


def measured(
    case: Case,
    objective: Objective,
    gupo: GupoSection,
    seed: int = 5,
    *,
    rows_T: Tensor | None = None,
    comm: Comm | None = None,
    weight: Tensor | None = None,
    shard: VocabShard | None = None,
    context: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
    padded: int = 28,
) -> Measurement:
    """rows_T: the tokens that this rank holds (all of them by default)."""
    rows_T = torch.arange(len(case.targets_T)) if rows_T is None else rows_T
    if shard is None:
        weight, shard = padded_shard(case, 0, 1, None, padded)
    assert weight is not None
    local = case.batch.tokens.select(rows_T)
    tokens, table = deal_groups(case.hidden_TH[rows_T], case.targets_T[rows_T], local, case.batch.sequences, context)
    head = Head(weight, shard, case.temperature)
    batch = Batch(case.batch.sequences, table)
    if gupo.layer == "final_norm":
        return measure_norm(head, SCALE, tokens, batch, objective, comm or LocalComm(), gupo, seed, chunk_bytes)
    return measure(head, tokens, batch, objective, comm or LocalComm(), gupo, seed, chunk_bytes)
