"""Reductions of small numbers over the trainer's ranks, for objectives and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.objectives.batch import TokenTable


@dataclass(frozen=True)
class RankComm:
    """The objectives' `Comm` over the ranks that hold different tokens (data- times context-parallel).

    group: that process group. device: where its backend wants tensors (cuda for nccl). Results come
    back on the device of the argument.
    """

    group: dist.ProcessGroup
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def max(self, values: Tensor) -> float:
        """The largest entry over those ranks; 0 where none has one."""
        largest = values.max() if values.numel() else torch.zeros((), dtype=values.dtype)
        found = largest.detach().to(self.device, copy=True)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return float(found)

    def gather_tokens(self, values_T: Tensor, tokens: TokenTable) -> tuple[Tensor, Tensor, Tensor]:
        values = self._gather(values_T)
        sequence = self._gather(tokens.sequence_T)
        position = self._gather(tokens.position_T)
        stride = int(position.max()) + 1 if position.numel() else 1
        order = torch.argsort(sequence * stride + position)
        return values[order], sequence[order], position[order]

    def _gather(self, values_T: Tensor) -> Tensor:
        """Concatenation over the ranks of tensors of different lengths."""
        world = dist.get_world_size(self.group)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([values_T.numel()], dtype=torch.int64, device=self.device), group=self.group)
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), dtype=values_T.dtype, device=self.device)
        padded[: values_T.numel()] = values_T
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]).to(values_T.device)
