"""What the measurement works on: the output layer's shard, and this rank's tokens with their groups whole.

Legend: T trained tokens of this rank, C tokens of a chunk, V rows of the output layer that this rank holds and that are real ids,
H hidden size, M posterior samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.logprobs.matmul import fixed_scratch_bytes, logits_into
from megatron_gvpo.logprobs.rows import Chunking, block_rows, compute_dtype, spans
from megatron_gvpo.logprobs.shard import VocabShard


@dataclass(frozen=True)
class Head:
    """The output layer Phi on this rank: weight [width, H] (padding rows last), an optional bias [width] that is held fixed.

    Logits are (hidden weight^T + bias) / temperature.
    """

    weight_VH: Tensor
    shard: VocabShard
    temperature: float = 1.0
    bias_V: Tensor | None = None

    def __post_init__(self) -> None:
        self.shard.check_width(self.weight_VH.shape[0], "weight")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, not {self.temperature}")

    @property
    def valid(self) -> int:
        return self.shard.valid

    @property
    def hidden_size(self) -> int:
        return self.weight_VH.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """float64 for a float64 weight, float32 for every other."""
        return compute_dtype(self.weight_VH.dtype)

    @property
    def device(self) -> torch.device:
        return self.weight_VH.device

    def rows(self) -> Tensor:
        """[V, H]: the weight's rows that are real ids."""
        return self.weight_VH[: self.valid].detach()

    def logits_into(self, out_CR: Tensor, hidden_CH: Tensor, weight_RH: Tensor, bias_R: Tensor | None) -> Tensor:
        """out = (hidden weight^T + bias) / temperature, for any rows of the layer or of a sample of it."""
        logits_into(out_CR, hidden_CH, weight_RH)
        if bias_R is not None:
            out_CR += bias_R.to(out_CR.dtype)
        return out_CR if self.temperature == 1.0 else out_CR.div_(self.temperature)

    def tokens_per_chunk(self, budget_bytes: int | None) -> int:
        """Rows of logits over this rank's whole shard that fit in the budget; the same on all tensor-parallel ranks."""
        chunking = Chunking(budget_bytes=budget_bytes)
        # Logits and, on tensor cores, their narrow copy.
        per_column = self.dtype.itemsize + self.weight_VH.itemsize
        return chunking.rows_per_chunk(self.shard, self.device, per_column, fixed_scratch_bytes(self.weight_VH))


@dataclass(frozen=True)
class GroupSpan:
    """Rows [start, stop) of the tokens belong to group `group` (a row of the global group tables)."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class HeadTokens:
    """The trained tokens of this rank, sorted by group, every group whole.

    hidden_TH: what enters the output layer, in the layer's dtype; on the layer's device or in CPU memory. targets_T: int64 ids.
    """

    hidden_TH: Tensor
    targets_T: Tensor
    groups: tuple[GroupSpan, ...]

    def __len__(self) -> int:
        return self.targets_T.numel()

    def chunk(self, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(hidden [C, H], targets [C]) of tokens [start, stop) on the layer's device."""
        return self.hidden_TH[start:stop].to(device), self.targets_T[start:stop].to(device)

    def chunks(self, size: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for start, stop in spans(len(self), size):
            yield slice(start, stop), *self.chunk(start, stop, device)


def normalise(logits_CV: Tensor, targets_C: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """(log-normaliser [C], log-prob of the target [C]) of logits whose columns are this rank's V real ids.

    One gather over the tensor-parallel group; the same bits on all its ranks.
    """
    rows, width = logits_CV.shape
    top_C = logits_CV.new_full((rows,), -torch.inf)
    total_C = logits_CV.new_zeros(rows)
    if width:
        for a, b in spans(rows, block_rows(width, logits_CV.device)):
            top_C[a:b] = logits_CV[a:b].amax(1)
            total_C[a:b] = (logits_CV[a:b] - top_C[a:b, None]).exp_().sum(1)
    column_C, here_C = shard.local(targets_C)
    target_C = logits_CV.new_zeros(rows)
    if width:
        target_C = torch.where(here_C, logits_CV.gather(1, column_C[:, None]).squeeze(1), target_C)
    top_WC, total_WC, target_WC = shard.gather(torch.stack([top_C, total_C, target_C])).unbind(1)
    highest_C = top_WC.amax(0)
    normaliser_C = highest_C + (total_WC * (top_WC - highest_C).exp()).sum(0).log()
    return normaliser_C, target_WC.sum(0) - normaliser_C
