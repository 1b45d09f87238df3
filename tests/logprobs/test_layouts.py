"""Values and gradients of every function on every layout equal those of one float64 process.

Why: a forward pass that is right with a gradient that is wrong trains a little worse and is never noticed. Covers TP 1,
2 and 4 over gloo, chunks of 1, 7 and all, padded vocabularies (down to ranks that hold no real id), scalar and per-token
temperature, sequence parallelism, masked positions, T = 0, logits of 1e4. Does not cover nccl or a GPU's matmuls.
"""

from __future__ import annotations

import pytest
import torch

from tests.logprobs import grid
from tests.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.heavy)])
def test_every_function_on_every_layout(world: int, dtype: torch.dtype) -> None:
    """Errors below 1e-12 in float64 and 1e-5 in float32, on every rank."""
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    for rank, worst in enumerate(run_ranks(grid.errors, world, dtype, timeout=280)):
        assert len(worst) == 31
        bad = {name: pair for name, pair in worst.items() if max(pair) > limit}
        assert not bad, f"rank {rank}: (value error, gradient error) above {limit}: {bad}"
