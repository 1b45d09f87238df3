"""What is sent and what is read, without a server: the shapes are those of a real one (test_real_server speaks to it)."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.rollout.errors import RequestRefused
from megatron_gvpo.rollout.wire import Limits, Malformed, Sampling, generate_body, read_responses, read_scores, score_body

LIMITS = Limits(vocab_size=100, max_prompt=59, max_total=60)
SAMPLING = Sampling(max_new_tokens=32)


def answer(ids: list[int], entries: list[list[Any]] | None = None, reason: str = "stop", **meta: Any) -> dict[str, Any]:
    entries = [[-1.0, i, None] for i in ids] if entries is None else entries
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": entries, **meta}}


def test_case_37_what_kills_a_server_is_not_sent() -> None:
    """Acceptance case 37: an id outside the vocabulary or top_k above it ends a real server for every client."""
    for ids in ([1, 100], [1, -1], [151_935]):
        with pytest.raises(RequestRefused, match="outside the vocabulary of 100"):
            generate_body(ids, 1, SAMPLING, LIMITS, "g0")
        with pytest.raises(RequestRefused, match="outside the vocabulary of 100"):
            score_body([ids], [1], LIMITS, ["g0"])
    with pytest.raises(RequestRefused, match="top_k 101 is above the vocabulary"):
        generate_body([1], 1, Sampling(top_k=101), LIMITS, "g0")
    with pytest.raises(RequestRefused, match="stop_token_ids"):
        generate_body([1], 1, Sampling(stop_token_ids=(100,)), LIMITS, "g0")
    with pytest.raises(RequestRefused, match="g0: the prompt is empty"):
        generate_body([], 1, SAMPLING, LIMITS, "g0")


def test_case_34_a_response_never_passes_the_context() -> None:
    """Acceptance case 34: room is cut to the context; a prompt that leaves none is refused and named. The filter that leaves
    such prompts out with a count is the data room's."""
    assert generate_body([5] * 40, 1, SAMPLING, LIMITS, "g0")["sampling_params"]["max_new_tokens"] == 20
    assert generate_body([5] * 59, 1, SAMPLING, LIMITS, "g0")["sampling_params"]["max_new_tokens"] == 1
    for length in (60, 61, 200):
        with pytest.raises(RequestRefused, match=f"g7: the prompt has {length} tokens, the context takes at most 59"):
            generate_body([5] * length, 1, SAMPLING, LIMITS, "g7")


def test_sampling_says_everything_that_a_checkpoint_could_change() -> None:
    """A generation_config with a repetition penalty would change the distribution while the reported log-probs stay."""
    rollout = RolloutSection(temperature=0.7, max_new_tokens=9, stop_token_ids=[4, 2])
    sampling = Sampling.from_config(rollout, eos_ids=[2])
    assert sampling.stop_token_ids == (2, 4)
    params = generate_body([1], 3, sampling, LIMITS, "g0")["sampling_params"]
    assert (params["n"], params["temperature"], params["top_p"], params["top_k"], params["max_new_tokens"]) == (
        3,
        0.7,
        1.0,
        -1,
        9,
    )
    assert (params["min_p"], params["repetition_penalty"], params["presence_penalty"], params["frequency_penalty"]) == (
        0,
        1,
        0,
        0,
    )
    greedy = sampling.greedy()
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.stop_token_ids) == (0.0, 1.0, -1, (2, 4))


def test_weight_versions_are_read_in_both_forms() -> None:
    """Spans where the server has them; one version for servers that only say it at the end."""
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    [with_spans] = read_responses(answer([7, 1], weight_versions=spans, weight_version="4"), 1)
    assert with_spans.weight_versions == [("3", 0), ("4", 1)]
    [plain] = read_responses([answer([7, 1], weight_version="4")], 1)
    assert plain.weight_versions == [("4", 0)]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([answer([7])], "1 responses came back for the 2 asked for"),
        ([answer([7]), answer([7, 1], [[-1.0, 7, None]])], "token count mismatch: 2 output ids and 1 log-probs"),
        ([answer([7]), answer([7, 1], [[-1.0, 7, None], [-1.0, 2, None]])], "belong to other ids"),
        ([answer([7]), answer([7], [[float("nan"), 7, None]])], "a log-prob of nan"),
        ([answer([7]), answer([7], [[None, 7, None]])], "without the expected fields"),
        ([answer([7]), answer([7], reason="tired")], "unknown finish reason 'tired'"),
        ([answer([7]), {"output_ids": [7]}], "without the expected fields"),
        ("Internal Server Error", "1 responses came back"),
    ],
)
def test_a_wrong_answer_is_an_error_and_never_a_sample(items: Any, message: str) -> None:
    """A short or shifted list of log-probs would train on the wrong tokens without any sign of it."""
    with pytest.raises(Malformed, match=message):
        read_responses(items, 2)


def scores(entries: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"output_ids": [], "meta_info": {"input_token_logprobs": entries}}]


def test_case_18_a_prompt_of_two_and_a_response_of_one_give_one_score() -> None:
    """Acceptance case 18: the scored position is predicted from position 1, so the server is asked from there on."""
    body = score_body([[11, 12, 13]], [2], LIMITS, ["g0"])
    assert body["logprob_start_len"] == [1]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert read_scores(scores([[None, 12, None], [-0.75, 13, None]]), [[11, 12, 13]], [2], LIMITS, ["g0"]) == [[-0.75]]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[None, 12, None], [-0.5, 13, None]], "sample a: token count mismatch: 1 positions scored, 2 asked for"),
        ([[None, 12, None], [-0.5, 13, None], [-0.5, 14, None], [-0.5, 15, None]], "3 positions scored, 2 asked for"),
        ([[-0.1, 12, None], [-0.5, 13, None], [-0.5, 14, None]], "should have no log-prob"),
        ([], "should have no log-prob"),
        ([[None, 11, None], [-0.5, 12, None], [-0.5, 13, None]], "other tokens were scored"),
        ([[None, 12, None], [-0.5, 13, None], [None, 14, None]], "a position without a log-prob"),
    ],
)
def test_case_19_fewer_positions_than_asked_for_is_an_error_with_the_samples_name(entries: Any, message: str) -> None:
    """Acceptance case 19: a shift by one would give every token its neighbour's teacher value, and nothing would look wrong."""
    with pytest.raises(Malformed, match=message):
        read_scores(scores(entries), [[11, 12, 13, 14]], [2], LIMITS, ["sample a"])


def test_scoring_the_first_token_is_refused() -> None:
    """Nothing predicts the first token of a sequence."""
    for start in (0, 4):
        with pytest.raises(RequestRefused, match=f"cannot score from token {start} of 3"):
            score_body([[1, 2, 3]], [start], LIMITS, ["g0"])


def test_the_servers_label_for_the_last_id_is_understood() -> None:
    """SGLang labels the last id of the vocabulary 0 among input log-probs. Only that: any other id in its place is an error."""
    assert read_scores(scores([[None, 5, None], [-2.0, 0, None]]), [[5, 99]], [1], LIMITS, ["g0"]) == [[-2.0]]
    with pytest.raises(Malformed, match="other tokens"):
        read_scores(scores([[None, 5, None], [-2.0, 0, None]]), [[5, 98]], [1], LIMITS, ["g0"])
