"""Support replay: the trainer's log-prob over the ids that top-p or top-k kept. Layouts: tests/logprobs/test_layouts.py."""

from __future__ import annotations

import pytest
import torch

from megatron_gvpo.logprobs import Support, VocabShard, token_logprobs

SHARD = VocabShard(0, 3, 3)


def test_worked_value() -> None:
    """(.5, .3, .2) with top-p .8 keeps ids 0 and 1: log(.5/.8) = -.470004, what the server sampled with; ratio 1."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    found = token_logprobs(logits, torch.tensor([0]), SHARD, support=Support.of([[0, 1]]), entropy=True)
    assert found.logprobs.item() == pytest.approx(-0.470004, abs=1e-6)
    server = torch.tensor([0.5, 0.3], dtype=torch.float64)
    server /= server.sum()
    assert float((found.logprobs - server[0].log()).exp()) == pytest.approx(1.0, abs=1e-12)
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(-float((server * server.log()).sum()), abs=1e-12)


def test_ragged_lists_and_positions_without_a_target() -> None:
    """Lists of any length, empty where nothing was sampled; a single kept id has log-prob 0 and no gradient."""
    logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    support = Support.of([[2], [], [0, 1, 2]])
    found = token_logprobs(logits, torch.tensor([2, -1, 1]), SHARD, support=support)
    found.logprobs.sum().backward()
    assert found.logprobs[:2].tolist() == [0.0, 0.0]
    assert found.logprobs[2].item() == pytest.approx(logits[2].log_softmax(0)[1].item())
    assert logits.grad is not None
    assert bool((logits.grad[:2] == 0).all())


def test_a_target_outside_its_support_is_refused() -> None:
    """It cannot have been drawn from there: the sample and its kept ids do not belong together."""
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"target 2 \(position 1 .* is not among the 2 ids"):
        token_logprobs(logits, torch.tensor([0, 2]), SHARD, support=Support.of([[0], [0, 1]]))
    with pytest.raises(ValueError, match="id 3 is outside"):
        token_logprobs(logits, torch.tensor([0, 2]), SHARD, support=Support.of([[0], [2, 3]]))
    with pytest.raises(ValueError, match="no kept id"):
        token_logprobs(logits, torch.tensor([0, 2]), SHARD, support=Support.of([[], []]))
    assert token_logprobs(logits, torch.tensor([-1, -1]), SHARD, support=Support.of([[], []])).logprobs.tolist() == [0, 0]
