"""What acts on a batch before the loss: DAPO's overlong penalty and resampling, and GKD's share of on-policy data."""

from __future__ import annotations

import pytest

from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.objectives.shaping import answered_by_student, flat_groups, overlong_penalties


def test_overlong_penalty_grows_within_the_buffer() -> None:
    """Limit 100, buffer 20: nothing up to 80, half at 90, all at 100 and beyond; buffer 0 is off."""
    assert overlong_penalties([10, 80, 90, 95, 100, 130], 100, 20, 2.0) == [0.0, 0.0, -1.0, -1.5, -2.0, -2.0]
    assert overlong_penalties([10, 130], 100, 0, 2.0) == [0.0, 0.0]
    with pytest.raises(ValueError, match="longer than the response limit"):
        overlong_penalties([1], 10, 11, 1.0)


def test_flat_groups_are_those_without_a_spread() -> None:
    """Equal rewards, exactly: no arithmetic, so no rounding passes for a spread. A group of one is flat."""
    groups = ["b", "a", "b", "a", "c", "d", "d"]
    rewards = [0.35, 1.0, 0.35, 0.0, 1.0, 0.1 + 0.2, 0.3]
    assert flat_groups(groups, rewards) == ["b", "c"]


def test_the_share_of_on_policy_prompts_is_decided_prompt_by_prompt() -> None:
    """Neither order nor company changes a prompt's answerer; 0 and 1 are exact; the share is met on average."""
    keys = [f"p{i}" for i in range(4000)]
    chosen = dict(zip(keys, answered_by_student(keys, 0.3, seed=1), strict=True))
    again = dict(zip(keys[::-7], answered_by_student(keys[::-7], 0.3, seed=1), strict=True))
    assert all(chosen[k] == v for k, v in again.items())
    assert sum(chosen.values()) / len(keys) == pytest.approx(0.3, abs=0.03)
    assert not any(answered_by_student(keys, 0.0, 1))
    assert all(answered_by_student(keys, 1.0, 1))
    assert answered_by_student(keys, 0.3, 2) != list(chosen.values())
    with pytest.raises(ValueError, match="from 0 to 1"):
        answered_by_student(keys, 1.5, 0)


def test_the_config_says_what_the_loop_has_to_do() -> None:
    """Off by default; dapo and gkd turn theirs on."""
    assert all(objective_config(n, {}).shaping().resample_rounds == 0 for n in ("gvpo", "dapo", "grpo"))
    dapo = objective_config("dapo", {"dynamic_sampling": True, "max_resample_rounds": 5, "overlong_buffer": 64}).shaping()
    assert (dapo.resample_rounds, dapo.overlong_buffer, dapo.overlong_penalty) == (5, 64, 1.0)
    assert objective_config("gkd", {"on_policy_share": 0.5}).shaping().on_policy_share == 0.5
