"""`plan`'s memory against what small CPU runs really allocate: weights, gradients, optimizer state and log-prob engine within
5 %, the plain-torch layers' activations within 15 %.

Why: whoever sizes a cluster run trusts these sums. Does not cover Transformer Engine's layers (a model of their own, which no
GPU has confirmed), nor several micro-batches in flight.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.launch.activations import activation_bytes
from megatron_gvpo.launch.head_memory import head_memory
from megatron_gvpo.launch.memory import rank_memory
from megatron_gvpo.launch.plan import read_subject
from tests.launch.measured import Case, measure_rank
from tests.ranks import run_ranks

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "intermediate_size": 704,
    "vocab_size": 6000,
    "max_position_embeddings": 1024,
}
CASES = [
    Case("fp32", LLAMA, {"precision": {"params": "fp32"}}),
    Case(
        "bf16_tied_recompute",
        {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
        {"model": {"recompute": "full"}, "parallel": {}},
        world=2,
    ),
    Case(
        "bf16_qk_norm_tensor_sequence",
        {**LLAMA, "model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 4},
        {"parallel": {"tensor": 2, "sequence": True}, "optimizer": {"distributed": False}},
        world=2,
        sequences=1,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_plan_is_what_is_allocated(case: Case, tmp_path: Path) -> None:
    """The most that layers hold is after the forward pass, or, with what the backward pass makes itself, within it."""
    config = case.config(tmp_path)
    subject = read_subject(config)
    planned = rank_memory(config, subject.shape, subject.needs, 0).parts
    tokens = case.sequences * case.positions
    head = head_memory(config, read_shape(tmp_path), tokens, case.sequences * case.trained)
    for found in run_ranks(measure_rank, case.world, case, str(tmp_path), init=False, timeout=100.0):
        for part in ("weights", "gradients", "optimizer"):
            assert found[part] == pytest.approx(planned[part], rel=0.05), part
        assert found["logprobs"] == pytest.approx(head, rel=0.05)
        held = max(found["activations"], found["backward"])
        assert held == pytest.approx(activation_bytes(config, subject.shape, 0, tokens), rel=0.15)
