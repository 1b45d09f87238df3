"""The posterior's pieces: its width, its noise, the draws of rows, and the Fisher under bf16."""

from __future__ import annotations

import pytest
import torch

from megatron_gvpo.gupo import Head, deal_groups
from megatron_gvpo.gupo.fisher import diagonal_fisher
from megatron_gvpo.gupo.posterior import PosteriorHeads, expected_kl, noise_into, solve_delta
from megatron_gvpo.gupo.rows import RowSet, one_of_each_stratum
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.objectives import LocalComm
from tests.gupo.cases import make_case, padded_shard

ALONE = VocabShard(0, 8, 8)


@pytest.mark.parametrize("target", [1e-4, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_delta_gives_the_kl_that_was_asked_for(target: float, spread: float) -> None:
    """From posteriors far narrower than every F to targets near the most that 100 dimensions can give (50 nats)."""
    fisher = torch.randn(8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(spread).exp()
    delta = solve_delta(fisher, target, ALONE)
    assert expected_kl(fisher, delta, ALONE) == pytest.approx(target, rel=1e-9)


def test_delta_where_there_is_nothing_to_solve() -> None:
    """No gradient anywhere: any delta will do. A target beyond 1/2 a dimension: refused, not searched for ever."""
    assert solve_delta(torch.zeros(3, 2), 0.01, ALONE) == 1.0
    with pytest.raises(ValueError, match=r"kl_target of 10.0 nats cannot be reached"):
        solve_delta(torch.ones(3, 2), 10.0, ALONE)


def test_expected_kl_is_the_kl_of_samples() -> None:
    """The formula against the mean KL from the model to real posterior samples; it is a second-order expansion (5 %)."""
    case = make_case()
    weight, shard = padded_shard(case, 0, 1, None)
    head = Head(weight, shard, case.temperature)
    tokens, _ = deal_groups(case.hidden_TH, case.targets_T, case.batch.tokens, case.batch.sequences)
    # Targets drawn from the model itself, where the empirical Fisher estimates the true one: all of them, weighted.
    logits_TV = case.hidden_TH @ case.weight_VH.t() / case.temperature
    p_TV = logits_TV.softmax(1)
    fisher = torch.einsum("tv,th->vh", p_TV * (1 - p_TV), case.hidden_TH**2) / len(tokens) / case.temperature**2
    delta = solve_delta(fisher, 0.01, shard)
    posterior = PosteriorHeads(head, fisher, delta, 200, seed=3, keep=False)
    total = 0.0
    for m in range(200):
        other_TV = case.hidden_TH @ posterior.rows(m, RowSet(0, shard.valid)).t() / case.temperature
        total += float((p_TV * (logits_TV.log_softmax(1) - other_TV.log_softmax(1))).sum(1).mean()) / 200
    assert total == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_depends_on_the_global_row_alone(dtype: torch.dtype) -> None:
    """Any piece of the layer equals the same rows of the whole; seeds, samples and blocks differ; it is standard normal."""
    whole = noise_into(torch.empty(500, 8, dtype=dtype), 7, 2, 0)
    for first, stop in ((0, 64), (13, 200), (64, 65), (499, 500), (128, 384)):
        piece = noise_into(torch.empty(stop - first, 8, dtype=dtype), 7, 2, first)
        assert torch.equal(piece, whole[first:stop])
    others = [noise_into(torch.empty(500, 8, dtype=dtype), seed, m, 0) for seed, m in ((7, 1), (8, 2))]
    for other in [*others, whole.roll(64, 0)]:
        assert abs(float((other * whole).mean())) < 0.06
    assert abs(float(whole.mean())) < 0.06
    assert float(whole.var()) == pytest.approx(1.0, abs=0.1)


def _one_of_several_shards(weight: torch.Tensor, shard: VocabShard) -> Head:
    """What a rank of a tensor-parallel group holds, without the group (which `Head` would refuse to do without)."""
    head = object.__new__(Head)
    for key, value in {"weight_VH": weight, "shard": shard, "temperature": 1.0, "bias_V": None}.items():
        object.__setattr__(head, key, value)
    return head


def test_kept_samples_and_remade_rows_are_the_same() -> None:
    """A layer that fits in memory and one that does not; a shard that starts in the middle of a noise block; drawn rows."""
    generator = torch.Generator().manual_seed(2)
    shard, fisher = VocabShard(37, 337, 330), torch.rand(293, 6, generator=generator)
    weight = torch.randn(300, 6, generator=generator)
    head = _one_of_several_shards(weight, shard)
    kept = PosteriorHeads(head, fisher.clone(), 2.0, 3, 11, keep=True)
    remade = PosteriorHeads(head, fisher.clone(), 2.0, 3, 11, keep=False)
    cpu = torch.device("cpu")
    sets = [RowSet(0, 293), RowSet(20, 150), RowSet.of([0, 1, 30, 200, 292], cpu), RowSet.of([5, 6, 7], cpu)]
    for m in range(3):
        whole = weight[:293] + noise_into(torch.empty(293, 6), 11, m, 37) * (fisher + 2.0).rsqrt()
        for rows in sets:
            assert torch.equal(kept.rows(m, rows), remade.rows(m, rows))
            torch.testing.assert_close(kept.rows(m, rows), rows.take(whole), rtol=1e-6, atol=1e-6)


def test_draws_of_rows_cover_every_stretch() -> None:
    """One of each stratum, ascending, the same for the same seed, everything where everything is asked for."""
    rows = one_of_each_stratum(1000, 62, 5)
    assert rows == one_of_each_stratum(1000, 62, 5) != one_of_each_stratum(1000, 62, 6)
    assert all(1000 * i // 62 <= row < 1000 * (i + 1) // 62 for i, row in enumerate(rows))
    assert one_of_each_stratum(5, 9, 1) == list(range(5))


def test_fisher_of_bf16_states_is_that_of_their_values() -> None:
    """Narrow weights and hidden states, computed in float32: compared with float64 on the rounded values. CPU only."""
    case = make_case()
    weight, shard = padded_shard(case, 0, 1, None)
    narrow = deal_groups(case.hidden_TH.bfloat16(), case.targets_T, case.batch.tokens, case.batch.sequences)[0]
    wide = deal_groups(case.hidden_TH.bfloat16().double(), case.targets_T, case.batch.tokens, case.batch.sequences)[0]
    found, lp = diagonal_fisher(Head(weight.bfloat16(), shard, 0.8), narrow, len(narrow), LocalComm())
    expected, lp64 = diagonal_fisher(Head(weight.bfloat16().double(), shard, 0.8), wide, len(wide), LocalComm())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(lp.double(), lp64, rtol=1e-5, atol=1e-5)
