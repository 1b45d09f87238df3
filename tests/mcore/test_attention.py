"""The plain PyTorch attention against the textbook: causal, grouped queries, packed sequences, and cut over context ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from tests.ranks import run_ranks

HEADS, GROUPS, WIDTH = 4, 2, 8
PACKED = [0, 8, 12, 24]  # ends of three sequences, each a multiple of 2 CP


def textbook(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """[T, N * D] of one row of packed sequences: every head and every query by itself."""
    out = torch.zeros(query.size(0), HEADS, WIDTH, dtype=query.dtype)
    for start, stop in itertools.pairwise(bounds):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for place in range(start, stop):
                scores = key[start : place + 1, group] @ query[place, head] / WIDTH**0.5
                out[place, head] = torch.softmax(scores, 0) @ value[start : place + 1, group]
    return out.flatten(1)


def _attention(group: Any) -> Any:
    from megatron_gvpo.mcore.spec import PlainAttention

    config: Any = SimpleNamespace(attention_dropout=0.0, kv_channels=WIDTH)
    return PlainAttention(config, 1, None, "self", pg_collection=SimpleNamespace(cp=group))


def _inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(length, HEADS, WIDTH), (length, GROUPS, WIDTH), (length, GROUPS, WIDTH)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


def _share(length: int, bounds: list[int], rank: int, world: int) -> torch.Tensor:
    """The positions that a context rank holds: chunks r and 2 CP - 1 - r of every sequence."""
    mine = []
    for start, stop in itertools.pairwise(bounds):
        chunks = torch.arange(start, stop).view(2 * world, -1)
        mine.append(torch.cat([chunks[rank], chunks[2 * world - 1 - rank]]))
    return torch.cat(mine)


def _cases(rank: int, world: int) -> dict[str, float]:
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_gvpo.mcore import cpu_device

    cpu_device.enable()
    found: dict[str, float] = {}
    for name, bounds in (("plain", [0, 24]), ("packed", PACKED)):
        length = bounds[-1]
        whole = _inputs(length)
        expected = textbook(*whole, bounds)
        expected.square().sum().backward()
        gradients = [x.grad for x in whole]
        mine = _share(length, bounds, rank, world)
        parts = [x.detach()[mine].requires_grad_() for x in whole]
        attention = _attention(dist.group.WORLD)
        if name == "packed":
            ends = torch.tensor(bounds, dtype=torch.int32)
            out = attention(*parts, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends))
        else:
            out = attention(*(x.unsqueeze(1) for x in parts)).squeeze(1)
        out.square().sum().backward()
        found[f"{name} value"] = float((out - expected[mine]).abs().max())
        found[f"{name} gradient"] = max(
            float((part.grad - gradient[mine]).abs().max())  # type: ignore[operator, index]
            for part, gradient in zip(parts, gradients, strict=True)
        )
    return found


def test_attention_is_the_textbooks_on_one_and_two_context_ranks() -> None:
    """Values and gradients in float64. Does not cover Transformer Engine's attention, which GPUs use."""
    for world in (1, 2):
        for found in run_ranks(_cases, world):
            assert all(difference < 1e-12 for difference in found.values()), (world, found)
