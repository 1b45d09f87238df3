"""The split into micro-batches: what must hold for every batch, checked on random ones, and the cases that broke others.

Not covered: that the loss does not depend on the plan (layout tests of the objectives and of mcore).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.data.microbatch import Plan, padded_tokens, plan_micro_batches


def _loads(plan: Plan, lengths: Sequence[int], pad: int = 1) -> list[int]:
    return [sum(padded_tokens(part, lengths, pad) for part in rank) for rank in plan]


@settings(max_examples=400, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), max_size=60),
    dp=st.integers(1, 6),
    max_tokens=st.none() | st.integers(1, 400),
    max_samples=st.none() | st.integers(1, 9),
    pad_multiple=st.sampled_from([1, 2, 8, 16]),
    count_multiple=st.sampled_from([1, 2, 4]),
    group_size=st.none() | st.integers(1, 7),
)
def test_what_holds_for_every_batch(
    lengths: list[int],
    dp: int,
    max_tokens: int | None,
    max_samples: int | None,
    pad_multiple: int,
    count_multiple: int,
    group_size: int | None,
) -> None:
    """No sample lost or doubled, equal counts, no limit passed but by a sample alone, groups whole, the same plan again."""
    groups = None if group_size is None else [i * 7919 % len(lengths) // group_size for i in range(len(lengths))]

    def plan_again() -> Plan:
        return plan_micro_batches(
            lengths,
            dp,
            max_tokens=max_tokens,
            max_samples=max_samples,
            pad_multiple=pad_multiple,
            count_multiple=count_multiple,
            groups=groups,
        )

    plan = plan_again()
    assert plan == plan_again()
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert len(plan) == dp
    [count] = {len(rank) for rank in plan}
    assert count >= 1
    assert count % count_multiple == 0
    for part in (part for rank in plan for part in rank):
        assert max_samples is None or len(part) <= max_samples
        assert max_tokens is None or len(part) <= 1 or padded_tokens(part, lengths, pad_multiple) <= max_tokens
    if groups is None and any(not part for rank in plan for part in rank):
        assert max(len(part) for rank in plan for part in rank) <= 1  # fillers only where samples run out
    if groups is not None:
        homes = [{groups[i] for part in rank for i in part} for rank in plan]
        assert sum(map(len, homes)) == len(set(groups))


def test_unequal_lengths_make_equal_counts() -> None:
    """Acceptance 30: five samples of 95 tokens and five of 20, budget 100. The five long ones fill a micro-batch each, so
    one rank that held all long ones would run 5 and the other 1, and hang; here both run 3. With the long ones in one group
    and the short ones in another, both run 5."""
    lengths = [95] * 5 + [20] * 5
    plan = plan_micro_batches(lengths, 2, max_tokens=100)
    assert [len(rank) for rank in plan] == [3, 3]
    plan = plan_micro_batches(lengths, 2, max_tokens=100, groups=["a"] * 5 + ["b"] * 5)
    assert [len(rank) for rank in plan] == [5, 5]
    assert all(part for rank in plan for part in rank)


def test_a_sample_beyond_the_budget_is_alone() -> None:
    """Acceptance 31: it is neither lost nor put beside others."""
    plan = plan_micro_batches([30, 500, 30, 30], 1, max_tokens=100)
    assert sorted(map(len, plan[0])) == [1, 3]
    assert [1] in plan[0]


def test_fewer_samples_than_ranks() -> None:
    """Ranks without a sample run a filler, else the others wait for them for ever."""
    assert plan_micro_batches([10, 20], 4, max_tokens=100) == [[[1]], [[0]], [[]], [[]]]
    assert plan_micro_batches([], 2, max_tokens=100) == [[[]], [[]]]


def test_fixed_size_micro_batches() -> None:
    """`micro_batch_size: 2` with 12 samples on 3 ranks is 2 micro-batches of 2 everywhere, like in a plain data loader."""
    plan = plan_micro_batches(list(range(1, 13)), 3, max_samples=2)
    assert [[len(part) for part in rank] for rank in plan] == [[2, 2]] * 3


def test_the_work_is_balanced() -> None:
    """Long-tailed lengths on 8 ranks: the rank with the most padded tokens has under 3 % more than the mean, and under 10 %
    of the tokens are padding."""
    draw = random.Random(0)
    lengths = [min(int(draw.lognormvariate(6.0, 0.8)), 8192) for _ in range(2048)]
    plan = plan_micro_batches(lengths, 8, max_tokens=16384, pad_multiple=8)
    loads = _loads(plan, lengths, 8)
    assert max(loads) < 1.03 * sum(loads) / len(loads)
    assert sum(loads) < 1.1 * sum(lengths)


def test_whole_groups_are_balanced() -> None:
    """GUPO keeps groups whole. 256 groups of 8 on 8 ranks: within 10 % of the mean."""
    draw = random.Random(1)
    lengths = [min(int(draw.lognormvariate(6.0, 0.8)), 8192) for _ in range(2048)]
    plan = plan_micro_batches(lengths, 8, max_tokens=16384, groups=[i // 8 for i in range(2048)])
    loads = _loads(plan, lengths)
    assert max(loads) < 1.1 * sum(loads) / len(loads)


def test_a_hundred_thousand_samples() -> None:
    """A quadratic planner would take hours here; the suite's own limit would end it."""
    draw = random.Random(2)
    lengths = [draw.randrange(1, 4096) for _ in range(100_000)]
    plan = plan_micro_batches(lengths, 128, max_tokens=16384)
    loads = _loads(plan, lengths)
    assert max(loads) < 1.02 * sum(loads) / len(loads)


@pytest.mark.parametrize("limit", ["max_tokens", "max_samples", "pad_multiple", "count_multiple"])
def test_wrong_limits(limit: str) -> None:
    """A budget of 0 would otherwise divide by zero or never end."""
    with pytest.raises(ValueError, match=f"{limit} must be at least 1, not 0"):
        plan_micro_batches([1], 1, **{limit: 0})
    with pytest.raises(ValueError, match="1 groups for 2 samples"):
        plan_micro_batches([1, 2], 1, groups=["a"])
