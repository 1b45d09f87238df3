"""A teacher's answers, read and refused. The same against a real server: test_real_teacher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_gvpo.rollout.errors import RequestRefused
from megatron_gvpo.rollout.teacher_wire import Scored, read_teacher, teacher_body
from megatron_gvpo.rollout.wire import Limits, Malformed
from tests.teacher.fakes import VOCAB, flat, teacher, top_row, value

LIMITS = Limits(VOCAB, 50, 51)
SEQUENCES, STARTS, LABELS = [[5, 6, 7, 8], [9, 3]], [2, 1], ["sample a", "sample b"]


def asked(k: int) -> dict[str, Any]:
    return teacher_body(SEQUENCES, STARTS, k, LIMITS, LABELS)


def read(answer: Any, k: int) -> list[Scored]:
    return read_teacher(answer, SEQUENCES, STARTS, LIMITS, LABELS, k)


@pytest.mark.parametrize("compact", [True, False])
def test_case_18_every_response_token_has_its_own_score_and_likeliest_ids(compact: bool) -> None:
    """Acceptance case 18 for the top-k signal, in both forms: position t is predicted from the token before it, and a shift by
    one would go unnoticed for ever."""
    _, answer = teacher(compact=compact)(asked(3))
    first, second = read(answer, 3)
    assert first.logprobs == [value(7, 2), value(8, 3)]
    assert second.logprobs == [value(3, 1)]
    assert first.top is not None
    assert second.top is not None
    assert first.top.ids.tolist() == [top_row(7, 3)[0], top_row(8, 3)[0]]
    np.testing.assert_allclose(second.top.logprobs, [top_row(3, 3)[1]], rtol=1e-6)


def test_case_37_what_kills_a_server_is_not_sent() -> None:
    """Acceptance case 37: more likeliest ids than there are, or an id that there is not, ends a real server for everybody."""
    with pytest.raises(RequestRefused, match="sample a: top_logprobs_num 101 is above the vocabulary of 100"):
        asked(101)
    with pytest.raises(RequestRefused, match="sample b: token id 100 is outside the vocabulary of 100"):
        teacher_body([[1, 2], [3, 100]], [1, 1], 4, LIMITS, LABELS)
    assert asked(100)["top_logprobs_num"] == 100


def broken(change: dict[str, Any]) -> list[dict[str, Any]]:
    _, answer = teacher()(asked(2))
    answer[0]["meta_info"].update(change)
    return answer


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flat(np.zeros((1, 2)), np.zeros((1, 2)) - 1), r"shape \[1, 2\] came back, \[2, 2\] were asked for"),
        (flat(np.zeros((2, 3)), np.zeros((2, 3)) - 1), r"shape \[2, 3\] came back, \[2, 2\] were asked for"),
        (flat(np.full((2, 2), 100), np.zeros((2, 2)) - 1), "a top id outside the vocabulary of 100"),
        (flat(np.zeros((2, 2)), np.full((2, 2), np.nan)), "a top log-prob that is no log-prob"),
        (flat(np.zeros((2, 2)), np.full((2, 2), 0.5)), "a top log-prob that is no log-prob"),
        ({"input_top_logprobs_null_prefix": 0}, "0 leading positions without values"),
        ({"input_top_logprobs_idx_flat_b64_dtype": "int64"}, "arrays of int64"),
        ({"input_top_logprobs_val_flat_b64": "AAAA"}, "no readable top log-probs"),
    ],
)
def test_case_19_an_answer_of_another_form_is_an_error_that_names_the_sample(change: dict[str, Any], why: str) -> None:
    """Acceptance case 19 for the top-k signal: arrays of a wrong shape would be read as other tokens' rows."""
    with pytest.raises(Malformed, match=f"^sample a: .*{why}"):
        read(broken(change), 2)


def test_a_server_that_was_not_asked_properly_sends_none() -> None:
    """A server that ignores top_logprobs_num (a proxy that drops unknown keys, say) must not pass for one that answered."""
    _, answer = teacher()(asked(0))
    with pytest.raises(Malformed, match="sample a: no readable top log-probs"):
        read(answer, 2)
