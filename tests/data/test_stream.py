"""The order of the training prompts: a resumed run must see what the run that was never stopped saw.

Not covered: that the loop saves this state (tests of train).
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt
from megatron_gvpo.data.stream import PromptStream


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", [i], 8) for i in range(count)]


def _ids(prompts: list[Prompt]) -> list[str]:
    return [p.id for p in prompts]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 30), before=st.integers(0, 5), after=st.integers(1, 5), count=st.integers(1, 12), shuffle=st.booleans()
)
def test_a_resume_continues_the_order(size: int, before: int, after: int, count: int, shuffle: bool) -> None:
    """Acceptance 39: 2 + 2 steps with a resume equal 4 straight ones, also over the ends of epochs. The state is JSON."""
    straight = PromptStream(_prompts(size), seed=3, shuffle=shuffle)
    expected = [_ids(straight.next(count)) for _ in range(before + after)]
    first = PromptStream(_prompts(size), seed=3, shuffle=shuffle)
    for _ in range(before):
        first.next(count)
    second = PromptStream(_prompts(size), seed=3, shuffle=shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [_ids(second.next(count)) for _ in range(after)] == expected[before:]
    assert second.drawn == straight.drawn == (before + after) * count


def test_every_prompt_once_an_epoch() -> None:
    """No prompt is lost or doubled, whatever the draw's size; epochs and seeds differ in order."""
    stream = PromptStream(_prompts(10), seed=0)
    drawn = [p for _ in range(5) for p in _ids(stream.next(4))]
    assert stream.epoch == 2
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(_ids(_prompts(10)))
    assert drawn[:10] != drawn[10:]
    assert _ids(PromptStream(_prompts(10), seed=1).next(10)) != drawn[:10]
    assert _ids(PromptStream(_prompts(4), seed=0, shuffle=False).next(6)) == ["p0", "p1", "p2", "p3", "p0", "p1"]


def test_the_order_is_a_contract() -> None:
    """Another Python or another machine must give this order, else a resume elsewhere repeats some prompts and loses others."""
    assert _ids(PromptStream(_prompts(6), seed=5).next(6)) == ["p2", "p3", "p1", "p5", "p4", "p0"]


def test_a_position_in_other_data_is_refused() -> None:
    """The position would silently point at other prompts."""
    state = PromptStream(_prompts(10), seed=0).state_dict()
    for other in (
        PromptStream(_prompts(11), seed=0),
        PromptStream(_prompts(10), seed=1),
        PromptStream([*_prompts(9), Prompt("q", "other", [99], 8)], seed=0),
    ):
        with pytest.raises(DataError, match="belongs to other training data"):
            other.load_state_dict(state)
    with pytest.raises(DataError, match="no training prompt"):
        PromptStream([], seed=0)
