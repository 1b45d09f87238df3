"""Context parallelism: which tokens a rank holds, and sums over sequences spread over ranks.

Why: counted once a context rank, a token's gradient is doubled (case 25's part that is this package's). Covers two and four
gloo ranks, one of which holds no token. Attention under context parallelism is Megatron's.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_gvpo.logprobs import packed_zigzag_indices, sequence_sums, zigzag_indices, zigzag_join, zigzag_slice
from tests.ranks import run_ranks


def test_zigzag_slices() -> None:
    """Rank r of C holds slices r and 2C - 1 - r; together every position once; joining undoes slicing, on any axis."""
    assert zigzag_indices(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_indices(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert zigzag_indices(5, 1, 0).tolist() == [0, 1, 2, 3, 4]
    x = torch.arange(48).view(2, 24)
    parts = [zigzag_slice(x, 3, rank, dim=1) for rank in range(3)]
    assert torch.equal(zigzag_join(parts, dim=1), x)
    with pytest.raises(ValueError, match="pad it to 12"):
        zigzag_indices(10, 2, 0)


def test_packed_zigzag() -> None:
    """Each packed sequence is cut by itself."""
    boundaries = torch.tensor([0, 4, 12])
    assert packed_zigzag_indices(boundaries, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert packed_zigzag_indices(boundaries, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert packed_zigzag_indices(torch.tensor([0]), 2, 1).tolist() == []


def _sums(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Three sequences of 8 tokens, the last rank without a response token; a loss that is not linear in the sums."""
    values = torch.arange(24, dtype=torch.float64) / 10
    sequence = torch.arange(3).repeat_interleave(8)
    held = packed_zigzag_indices(torch.tensor([0, 8, 16, 24]), world, rank)
    response = torch.zeros(24, dtype=torch.bool)
    response[zigzag_indices(24, 1, 0)] = True
    # The last rank's positions are all prompt.
    response[packed_zigzag_indices(torch.tensor([0, 8, 16, 24]), world, world - 1)] = False
    mine = held[response[held]]
    x = values[mine].clone().requires_grad_()
    sums = sequence_sums(x, sequence[mine], 3, dist.group.WORLD)
    (sums**2).sum().backward()
    whole = values.clone().requires_grad_()
    expected = sequence_sums(whole[response], sequence[response], 3)
    (expected**2).sum().backward()
    assert x.grad is not None
    assert whole.grad is not None
    return {"sums": sums - expected, "grad": x.grad - whole.grad[mine], "count": torch.tensor(len(mine))}


@pytest.mark.parametrize("world", [2, 4])
def test_sums_over_sequences_and_their_gradients(world: int) -> None:
    """Equal to one process on every rank, gradients neither doubled nor divided, with a rank that holds no response token."""
    found = run_ranks(_sums, world, timeout=60)
    assert int(found[-1]["count"]) == 0
    for one in found:
        assert float(one["sums"].abs().max()) < 1e-13
        assert one["grad"].numel() == 0 or float(one["grad"].abs().max()) < 1e-13
