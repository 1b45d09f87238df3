"""From samples to what one rank feeds its model: padded micro-batches, and the table of the tokens that are trained.

Legend: B sequences of a micro-batch, S padded positions (this context-parallel rank's share), R = S * B head rows in the order
of Megatron's hidden states (position-major), T trained tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore.teacher_rows import RowTeacher
from megatron_gvpo.objectives.batch import SIGNALS, TokenTable, token_table


@dataclass(frozen=True)
class Layout:
    """How one rank's share of a batch is cut."""

    context_size: int = 1
    context_rank: int = 0
    pad_multiple: int = 1  # every padded length is a multiple: TP under sequence parallelism, times 2 CP
    uniform: bool = False  # all micro-batches of a rank have one shape: interleaved pipelines exchange no shapes reliably

    def share(self, length: int) -> Tensor:
        """[length / CP] int64: the positions this rank holds; chunks r and 2 CP - 1 - r of 2 CP equal ones (zigzag)."""
        if self.context_size == 1:
            return torch.arange(length)
        chunks = torch.arange(length).view(2 * self.context_size, -1)
        return torch.cat([chunks[self.context_rank], chunks[2 * self.context_size - 1 - self.context_rank]])


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass. A filler micro-batch has no trained token, and keeps the ranks' collectives in step."""

    tokens_BS: Tensor  # int64
    positions_BS: Tensor  # int64, place in the sequence
    targets_R: Tensor  # int64, the token to predict at each head row; -1 where nothing is trained
    rows_T: Tensor  # int64, the head row of each trained token, in the order of the token table
    span: slice  # these tokens' rows in the rank's token table

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.tokens_BS.to(device),
            self.positions_BS.to(device),
            self.targets_R.to(device),
            self.rows_T.to(device),
            self.span,
        )


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a global batch: its micro-batches, and its trained tokens with the samples' own signals.

    teachers: of each micro-batch, where the objective compares distributions; on the last pipeline stage only.
    """

    micro_batches: list[MicroBatch]
    tokens: TokenTable
    teachers: list[list[RowTeacher]] | None = None


def common_signals(samples: Sequence[Sample], kept: Sequence[int]) -> list[str]:
    """The per-token signals that every kept sample carries: what a token table of this batch has, on every rank."""
    return [name for name in SIGNALS if kept and all(getattr(samples[i], name) is not None for i in kept)]


def rank_batch(samples: Sequence[Sample], kept: Sequence[int], plan: Sequence[Sequence[int]], layout: Layout) -> RankBatch:
    """Cut this rank's samples into micro-batches.

    kept: indices of the samples that take part, in the order of the `SequenceTable`. plan: this data-parallel rank's
    micro-batches, as lists of indices into `kept`; an empty list is a filler. ValueError for a response without a prompt: its
    first token has no position that predicts it.
    """
    micro_batches: list[MicroBatch] = []
    tables: list[TokenTable] = []
    start = 0
    least = _largest_shape(samples, kept, plan) if layout.uniform else (1, 1)
    for members in plan:
        chosen = {kept[row]: row for row in members}
        table = token_table(samples, chosen)
        micro, local = _micro_batch(samples, chosen, table, layout, start, least)
        micro_batches.append(micro)
        tables.append(local)
        start = micro.span.stop
    return RankBatch(micro_batches, _concatenate(tables, common_signals(samples, kept)))


def _micro_batch(
    samples: Sequence[Sample],
    chosen: dict[int, int],
    table: TokenTable,
    layout: Layout,
    start: int,
    least: tuple[int, int],
) -> tuple[MicroBatch, TokenTable]:
    members = [samples[i] for i in chosen]
    count = max(len(members), least[0])
    longest = max([least[1], *(_inputs(s) for s in members)])
    width = -(-longest // layout.pad_multiple) * layout.pad_multiple
    tokens_BL = torch.zeros(count, width, dtype=torch.int64)
    targets_BL = torch.full((count, width), -1, dtype=torch.int64)
    at: dict[int, int] = {}  # row of the SequenceTable -> place in this micro-batch
    first = torch.zeros(count, dtype=torch.int64)  # the position that predicts the first response token
    for b, (index, sample) in enumerate(zip(chosen, members, strict=True)):
        if not sample.prompt_ids:
            raise ValueError(f"sample {index} of group {sample.group!r} has an empty prompt: nothing predicts its first token")
        ids = sample.prompt_ids + sample.response_ids
        tokens_BL[b, : len(ids) - 1] = torch.tensor(ids[:-1])
        first[b] = len(sample.prompt_ids) - 1
        at[chosen[index]] = b
        trained = torch.tensor([t for t, m in enumerate(sample.mask) if m], dtype=torch.int64)
        targets_BL[b, first[b] + trained] = torch.tensor(sample.response_ids)[trained]
    share_S = layout.share(width)
    place = torch.full((width,), -1, dtype=torch.int64)
    place[share_S] = torch.arange(share_S.numel())

    b_T = torch.tensor([at[int(r)] for r in table.sequence_T], dtype=torch.int64)
    s_T = place[first[b_T] + table.position_T]
    mine = s_T >= 0
    rows_T = (s_T * count + b_T)[mine]
    local = table.select(mine)
    micro = MicroBatch(
        tokens_BS=tokens_BL[:, share_S].contiguous(),
        positions_BS=share_S.expand(count, -1).contiguous(),
        targets_R=targets_BL[:, share_S].t().reshape(-1).contiguous(),
        rows_T=rows_T,
        span=slice(start, start + len(local)),
    )
    return micro, local


def _inputs(sample: Sample) -> int:
    """Positions that a sample needs: its last token predicts nothing, so it is not an input."""
    return max(len(sample) - 1, 1)


def _largest_shape(samples: Sequence[Sample], kept: Sequence[int], plan: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(sequences, positions) that hold every micro-batch of the plan."""
    rows = [row for members in plan for row in members]
    return max([1, *(len(members) for members in plan)]), max([1, *(_inputs(samples[kept[row]]) for row in rows)])


def _concatenate(tables: Sequence[TokenTable], names: Sequence[str]) -> TokenTable:
    full = [t for t in tables if len(t)]
    if not full:
        empty = torch.zeros(0, dtype=torch.int64)
        return TokenTable(empty, empty.clone(), {n: torch.zeros(0, dtype=torch.float64) for n in names})
    return TokenTable(
        torch.cat([t.sequence_T for t in full]),
        torch.cat([t.position_T for t in full]),
        {n: torch.cat([t.signal(n) for t in full]) for n in names},
    )
