"""Hand out tokens so that every group lies whole on one rank, sorted by group.

With context parallelism a response's tokens lie on several ranks. What is exchanged are hidden states, each token's once; a
gradient of the head for each group and sample would be far more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.gupo.head import GroupSpan, HeadTokens
from megatron_gvpo.objectives.batch import SequenceTable, TokenTable

# Columns of the hidden states that are exchanged at a time.
_COLUMNS = 1024


def deal_groups(
    hidden_TH: Tensor,
    targets_T: Tensor,
    tokens: TokenTable,
    sequences: SequenceTable,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> tuple[HeadTokens, TokenTable]:
    """(this rank's whole groups, their rows of the token table), sorted by group, sequence and position.

    hidden_TH, targets_T: of the tokens in `tokens`, row by row; they stay on the device they are on. group: the context-parallel
    ranks, who share a data-parallel rank's sequences; None where there is one. device: what that group's backend works with (that
    of hidden_TH if None). ValueError where a group's tokens are not all among these ranks: the batch plan has to keep groups
    whole on a data-parallel rank.
    """
    if group is not None and dist.get_world_size(group) > 1:
        device = hidden_TH.device if device is None else device
        hidden_TH, targets_T, tokens = _exchange(hidden_TH, targets_T, tokens, sequences, group, device)
    order_T = _order(tokens, sequences)
    tokens = tokens.select(order_T)
    _check_whole(tokens, sequences)
    spans = _spans(sequences.group_N[tokens.sequence_T])
    hidden_TH, targets_T = hidden_TH[order_T.to(hidden_TH.device)], targets_T[order_T.to(targets_T.device)]
    return HeadTokens(hidden_TH, targets_T, spans), tokens


def _order(tokens: TokenTable, sequences: SequenceTable) -> Tensor:
    stride = int(tokens.position_T.max()) + 1 if len(tokens) else 1
    within_T = tokens.sequence_T * stride + tokens.position_T
    by_sequence = torch.argsort(within_T)
    return by_sequence[torch.argsort(sequences.group_N[tokens.sequence_T[by_sequence]], stable=True)]


def _spans(group_T: Tensor) -> tuple[GroupSpan, ...]:
    groups, counts = torch.unique_consecutive(group_T, return_counts=True)
    spans, start = [], 0
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        spans.append(GroupSpan(group, start, start + count))
        start += count
    return tuple(spans)


def _check_whole(tokens: TokenTable, sequences: SequenceTable) -> None:
    found_N = torch.bincount(tokens.sequence_T, minlength=len(sequences))
    touched_G = torch.zeros(sequences.groups, dtype=torch.bool)
    touched_G[sequences.group_N[tokens.sequence_T]] = True
    expected_N = torch.where(touched_G[sequences.group_N], sequences.tokens_N, torch.zeros_like(sequences.tokens_N))
    if not torch.equal(found_N, expected_N):
        wrong = int((found_N != expected_N).nonzero()[0])
        raise ValueError(
            f"gupo: group {int(sequences.group_N[wrong])} is not whole on this rank (sequence {wrong}: {int(found_N[wrong])} of "
            f"{int(sequences.tokens_N[wrong])} tokens): plan the micro-batches with whole groups"
        )


def owners(counts_G: Sequence[int], ranks: int) -> list[int]:
    """The rank that gets each group, largest first to whoever has least; a pure function, so that all ranks agree."""
    load, owner = [0] * ranks, [0] * len(counts_G)
    for group in sorted(range(len(counts_G)), key=lambda g: (-counts_G[g], g)):
        if counts_G[group]:
            owner[group] = min(range(ranks), key=lambda r: (load[r], r))
            load[owner[group]] += counts_G[group]
    return owner


def _exchange(
    hidden_TH: Tensor,
    targets_T: Tensor,
    tokens: TokenTable,
    sequences: SequenceTable,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[Tensor, Tensor, TokenTable]:
    world = dist.get_world_size(group)
    group_T = sequences.group_N[tokens.sequence_T]
    counts_G = torch.bincount(group_T, minlength=sequences.groups).to(device)
    dist.all_reduce(counts_G, group=group)
    destination_T = torch.tensor(owners(counts_G.tolist(), world), dtype=torch.int64)[group_T]
    order_T = torch.argsort(destination_T, stable=True)
    sent = torch.bincount(destination_T, minlength=world)
    received = torch.empty_like(sent, device=device)
    dist.all_to_all_single(received, sent.to(device), group=group)
    send, receive = sent.tolist(), received.tolist()

    def swap(x: Tensor) -> Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        # A few columns at a time: states that are kept in CPU memory do not fit on the device.
        for piece, target in zip(x.split(_COLUMNS, 1), out.split(_COLUMNS, 1), strict=True):
            target.copy_(_all_to_all(piece[order_T.to(x.device)].to(device), send, receive, group))
        return out

    names = sorted(tokens.signals)
    whole = swap(torch.stack([tokens.sequence_T, tokens.position_T], 1))
    signals = {}
    if names:
        values = swap(torch.stack([tokens.signal(n).to(torch.float64) for n in names], 1))
        signals = {name: values[:, column].contiguous() for column, name in enumerate(names)}
    table = TokenTable(whole[:, 0].contiguous(), whole[:, 1].contiguous(), signals)
    return swap(hidden_TH), swap(targets_T[:, None])[:, 0].contiguous(), table


def _all_to_all(x_TH: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x to each rank; as bytes, because not every backend moves every dtype."""
    x_TH = x_TH.contiguous()
    out = x_TH.new_empty(sum(receive), x_TH.shape[1])
    dist.all_to_all_single(out.view(torch.uint8), x_TH.view(torch.uint8), receive, send, group=group)
    return out
