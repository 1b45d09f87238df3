"""TV-OPD's scale: a lagged average of an estimate that is pooled over all ranks, kept through bad steps and resumes.

Not covered: whether a regulated run ends nearer to its teacher (that takes a model).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.base import LocalComm, Prepared
from megatron_gvpo.objectives.batch import Batch, whole_batch
from megatron_gvpo.objectives.contract_world import World, run
from megatron_gvpo.objectives.registry import create_objective
from megatron_gvpo.objectives.tv_opd import TvOpd
from tests.objectives.helpers import random_samples


def _make(**options: Any) -> TvOpd:
    objective = create_objective("tv_opd", options)
    assert isinstance(objective, TvOpd)
    return objective


def _towards_teacher(seed: int, left: float) -> list[Sample]:
    """Samples whose policy has `left` of the first log-ratio still to go."""
    samples = random_samples(seed)
    for s in samples:
        assert s.logprobs is not None
        assert s.teacher_logprobs is not None
        s.logprobs = [t - left * (t - v) for v, t in zip(s.logprobs, s.teacher_logprobs, strict=True)]
    return samples


def _batch(seed: int, left: float = 1.0) -> Batch:
    return whole_batch(_towards_teacher(seed, left))[0]


def _tv(samples: list[Sample]) -> float:
    """The pooled estimate written out: mean over tokens of (1 - p/q)_+."""
    terms = [
        max(0.0, 1 - math.exp(t - v))
        for s in samples
        for v, t, m in zip(s.logprobs or [], s.teacher_logprobs or [], s.mask, strict=True)
        if m
    ]
    return sum(terms) / len(terms)


def _step(objective: TvOpd, batch: Batch, accepted: bool = True) -> Prepared:
    prepared = objective.prepare(batch, LocalComm())
    objective.commit(prepared, accepted)
    return prepared


def _scale(prepared: Prepared) -> float:
    """c_k as it stands in the coefficients."""
    assert prepared.coefficients_T is not None
    sizes = prepared.coefficients_T[prepared.coefficients_T != 0].abs()
    assert sizes.min() == sizes.max()
    return float(sizes[0])


def test_the_scale_follows_the_lagged_average() -> None:
    """c_k is made from steps before k, from k0 on; c_0 and c_1 are 1."""
    alpha, ema, c_min, eps = 0.7, 0.6, 0.05, 1e-6
    objective = _make(alpha=alpha, ema=ema, c_min=c_min, eps=eps)
    lefts = [1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.0]
    average = start = 0.0
    for k, left in enumerate(lefts):
        samples = _towards_teacher(k, left)
        wanted = 1.0 if k == 0 else min(max(((average + eps) / (start + eps)) ** alpha, c_min), 1.0)
        prepared = _step(objective, whole_batch(samples)[0])
        assert objective.steps == k + 1
        if left:
            assert _scale(prepared) == pytest.approx(wanted, rel=1e-12)
        tv = _tv(samples)
        assert prepared.metrics["tv"] == pytest.approx(tv, rel=1e-12, abs=1e-15)
        average, start = (tv, tv) if k == 0 else (ema * average + (1 - ema) * tv, start)
    assert objective.average == pytest.approx(average, rel=1e-12)
    assert objective.first == 0


def test_the_scale_has_a_floor_and_a_ceiling() -> None:
    """c_k stays within [c_min, 1], and at 1 with `regulate: false`."""
    low, off, rising = _make(ema=0.0, c_min=0.3), _make(ema=0.0, regulate=False), _make(ema=0.0)
    for objective in (low, off):
        _step(objective, _batch(0))
        _step(objective, _batch(1, left=1e-4))
    _step(rising, _batch(0, left=0.1))
    _step(rising, _batch(1))
    assert _scale(low.prepare(_batch(2), LocalComm())) == 0.3
    assert _scale(off.prepare(_batch(2), LocalComm())) == 1.0
    assert _scale(rising.prepare(_batch(2), LocalComm())) == 1.0


def test_uneven_lengths_are_pooled_over_ranks_exactly() -> None:
    """Ranks with 1 and with many tokens: sums and counts are pooled before dividing, so no rank's mean gets a vote."""
    world = World.random(3, sizes=(2, 4, 3))
    single = run(_make(), world)
    for ranks in (2, 3, 7):
        for scatter in (False, True):
            split = run(_make(), world, ranks=ranks, scatter=scatter)
            for rank in split.ranks:
                assert rank.prepared.metrics["tv"] == pytest.approx(single.prepared.metrics["tv"], rel=1e-13)
                assert rank.prepared.denominator == single.prepared.denominator


def test_a_step_that_is_not_accepted_leaves_both_averages() -> None:
    """A non-finite gradient at the very start, and later: neither sets nor moves the averages; only the count goes on."""
    objective = _make()
    _step(objective, _batch(0), accepted=False)
    assert (objective.first, objective.average, objective.start, objective.steps) == (None, 0.0, 0.0, 1)
    first = _step(objective, _batch(1))
    assert objective.first == 1
    assert objective.average == objective.start == first.metrics["tv"]
    kept = objective.average
    _step(objective, _batch(2, left=0.1), accepted=False)
    assert (objective.average, objective.start, objective.steps) == (kept, kept, 3)


def test_a_batch_without_teacher_values_moves_nothing() -> None:
    """No active token: denominator 0, and an average that would otherwise be pulled to 0 stays."""
    objective = _make()
    _step(objective, _batch(0))
    kept = objective.average
    batch = _batch(1)
    blank = batch.tokens.with_signals(teacher_logprobs=torch.full((len(batch.tokens),), torch.nan, dtype=torch.float64))
    prepared = _step(objective, Batch(batch.sequences, blank))
    assert prepared.denominator == 0.0
    assert objective.average == kept


def test_a_resume_continues_the_run() -> None:
    """State through JSON after three steps: the fourth and fifth are those of the run that was never stopped."""
    straight, stopped = _make(alpha=1.0), _make(alpha=1.0)
    for k, left in enumerate((1.0, 0.6, 0.3)):
        for objective in (straight, stopped):
            _step(objective, _batch(k, left), accepted=k != 1)
    resumed = _make(alpha=1.0)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for k, left in ((3, 0.2), (4, 0.1)):
        ours, theirs = (_step(o, _batch(k, left)) for o in (straight, resumed))
        assert _scale(ours) == _scale(theirs) < 1.0
        assert ours.metrics == theirs.metrics
    with pytest.raises(ValueError, match="tv_opd keeps steps"):
        resumed.load_state_dict({"average": 1.0})
