"""What a person reads when a GPU is full. The error is made here: there is no GPU to fill."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_gvpo.config.load import load_config
from megatron_gvpo.train.memory_limit import memory_limit
from tests.train.runs import config_of


def test_it_names_the_largest_parts_and_their_knobs(tmp_path: Path) -> None:
    """Why: `CUDA out of memory` alone sends people to lower the batch size, also where the weights are what does not fit."""
    config = load_config(config_of(tmp_path))
    torchs = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB.\n If reserved but unallocated memory is large, ..."
    )
    text = str(memory_limit(torch.OutOfMemoryError(torchs), config, 3))
    assert text.startswith("rank 3: GPU memory ran out. The plan needs ")
    assert "train.micro_batch_tokens" in text
    assert "Tried to allocate 2.00 GiB" in text
    assert ("\n" in text, "If reserved" in text) == (False, False)
