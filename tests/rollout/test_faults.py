"""Faults that a healthy SGLang server cannot show, by fake servers: each ends in the declared way, within its limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_gvpo.config.schema import RolloutSection, ServersSection
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.errors import BadAnswer, RequestRefused, ServerError, TimeLimit
from megatron_gvpo.rollout.pool import Group, PromptIds
from megatron_gvpo.rollout.server import Endpoint
from megatron_gvpo.rollout.wire import Sampling
from tests.rollout.fake_server import FakeServer, after, broken, fake_servers, generated, hang, scored, status

PROMPTS = [PromptIds(f"g{i}", [5, 6, 7]) for i in range(6)]
SAMPLING = Sampling(max_new_tokens=8, stop_token_ids=(1,))


@contextmanager
def engine_on(
    fakes: Sequence[FakeServer], *, retries: int = 1, timeout_s: float = 1.0, sync_s: float = 2.0, concurrency: int = 256
) -> Iterator[RolloutEngine]:
    rollout = RolloutSection(
        request_timeout_s=timeout_s, retries=retries, sync_timeout_s=sync_s, servers=ServersSection(concurrency=concurrency)
    )
    with RolloutEngine([fake.endpoint for fake in fakes], rollout, vocab_size=100, max_length=50) as engine:
        yield engine


def generate(engine: RolloutEngine, count: int = 2) -> list[Group]:
    return sorted(engine.generate_groups(PROMPTS, count, SAMPLING), key=lambda group: group.index)


def sample(group: str = "g0", response: list[int] | None = None) -> Sample:
    response = [7, 1] if response is None else response
    return Sample(group=group, prompt_ids=[5, 6], response_ids=response, mask=[1] * len(response))


@pytest.fixture
def two() -> Iterator[Sequence[FakeServer]]:
    with fake_servers(2) as fakes:
        yield fakes


@pytest.fixture
def one() -> Iterator[FakeServer]:
    with fake_servers(1) as [fake]:
        yield fake


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_failure_that_passes_is_tried_again_and_loses_nothing(one: FakeServer, code: int) -> None:
    """A server that is busy or restarting a worker answers so for a moment; every group must still come back, once."""
    one.on("/generate", status(code), lambda body: (200, generated(body)))
    with engine_on([one]) as engine:
        groups = generate(engine)
    assert [group.index for group in groups] == list(range(6))
    assert one.count("/generate") == 7


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_tried_again(one: FakeServer, code: int) -> None:
    """A 4xx answer will be the same next time; repeating it hides the cause behind a wait."""
    one.on("/generate", status(code, "no such parameter"))
    with engine_on([one], retries=5) as engine, pytest.raises(BadAnswer, match=f"fake0 .*HTTP {code}.*no such parameter"):
        list(engine.generate_groups(PROMPTS[:1], 2, SAMPLING))
    assert one.count("/generate") == 1


def test_errors_that_stay_end_within_the_tries_and_name_the_server(one: FakeServer) -> None:
    """retries: 2 are three requests, not sixty."""
    one.on("/generate", status(500, "scheduler is unwell"))
    with (
        engine_on([one], retries=2) as engine,
        pytest.raises(ServerError, match=r"fake0 \(http.*HTTP 500: .*scheduler is unwell"),
    ):
        list(engine.generate_groups(PROMPTS[:1], 2, SAMPLING))
    assert one.count("/generate") == 3


def test_a_server_that_is_not_there_is_named_at_the_start() -> None:
    """The first thing a run does is to ask each server what it is."""
    with pytest.raises(ServerError, match=r"lost \(http://127.0.0.1:1\): /model_info: no connection"):
        RolloutEngine([Endpoint("http://127.0.0.1:1", "", "lost")], RolloutSection(retries=0), vocab_size=100, max_length=50)


@pytest.mark.parametrize(
    ("code", "answer", "message"),
    [
        (401, {"error": "Unauthorized"}, "wrong or missing api_key"),
        (200, "<html>hello</html>", "no JSON object"),
        (200, {"hello": 1}, "does not look like an SGLang server"),
    ],
)
def test_a_wrong_key_or_another_program_is_told_apart(one: FakeServer, code: int, answer: Any, message: str) -> None:
    """A wrong URL in the config is common; what answers there may be anything."""
    one.on("/model_info", lambda body: (code, answer))
    with pytest.raises(BadAnswer, match=message):
        RolloutEngine([one.endpoint], RolloutSection(retries=0), vocab_size=100, max_length=50)


def test_two_servers_of_different_models_are_refused(two: Sequence[FakeServer]) -> None:
    """Half of each group from another model would look like plain off-policy noise."""
    two[1].on("/model_info", lambda body: (200, {"model_path": "/models/other", "weight_version": "0"}))
    with pytest.raises(BadAnswer, match=r"fake1 .*serves /models/other, but fake0 .* serves /models/tiny"):
        RolloutEngine([f.endpoint for f in two], RolloutSection(retries=0), vocab_size=100, max_length=50)


def test_older_paths_are_used_where_the_newer_are_not_there(one: FakeServer) -> None:
    """What a server can do is asked, not read off its version."""
    one.on("/model_info", status(404)).on("/server_info", status(404))
    one.on("/get_model_info", lambda body: one.well_behaved("/model_info", body))
    one.on("/get_server_info", lambda body: one.well_behaved("/server_info", body))
    with engine_on([one]) as engine:
        assert engine.facts[0].model_path == "/models/tiny"


def test_a_server_that_dies_in_a_rollout_is_replaced_by_the_other(two: Sequence[FakeServer]) -> None:
    """Broken connections: its groups go to the other server whole, none lost, none twice, and the pool says who is out."""
    two[0].on("/generate", lambda body: (200, generated(body)), broken)
    with engine_on(two, concurrency=2) as engine:
        groups = generate(engine)
        assert [group.index for group in groups] == list(range(6))
        assert all(len(group.samples) == 2 for group in groups)
        [(name, why)] = engine.pool.out_of_use.items()
        assert "fake0" in name
        assert "connection broke" in why


def test_a_failed_rollout_leaves_no_error_unlooked_at(one: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Many requests fail together and one error is raised; asyncio reports every other at some later garbage collection, far from
    here and in the user's log, if nobody has looked at it."""
    one.on("/generate", status(400))
    for ask in (generate, lambda engine: engine.score([sample(f"g{i}") for i in range(40)])):
        with engine_on([one]) as engine, pytest.raises(BadAnswer):
            ask(engine)
        gc.collect()
    assert "never retrieved" not in caplog.text


def test_when_the_last_server_dies_the_error_names_them_all(two: Sequence[FakeServer]) -> None:
    """No endless wait for a server that will not come back."""
    for fake in two:
        fake.on("/generate", broken)
    with engine_on(two, retries=0) as engine:
        with pytest.raises(ServerError, match=r"no server is left: fake. .*connection broke.*; fake. .*connection broke"):
            generate(engine)
        with pytest.raises(ServerError, match=r"no server is left"):
            generate(engine)


def test_a_server_that_hangs_is_replaced_within_the_limit(two: Sequence[FakeServer]) -> None:
    """It accepts requests and answers neither them nor its health check: after request_timeout_s the other one takes over."""
    two[0].on("/generate", hang).on("/health_generate", status(503))
    with engine_on(two) as engine:
        assert [group.index for group in generate(engine)] == list(range(6))
        assert "no answer within 1 s, and its health check fails" in next(iter(engine.pool.out_of_use.values()))


def test_a_request_that_takes_too_long_on_a_healthy_server_is_an_error_that_says_so(one: FakeServer) -> None:
    """Sent again it would take as long again, and dropped it would bias the samples towards short responses."""
    one.on("/generate", hang)
    with engine_on([one], retries=5) as engine, pytest.raises(TimeLimit, match=r"fake0 .*within 1 s, though it is well"):
        generate(engine)
    assert one.count("/generate") == 6  # one for each of the groups


def test_a_short_answer_names_its_group(one: FakeServer) -> None:
    """Fewer log-probs than ids must never become a sample."""

    def short(body: dict[str, Any]) -> tuple[int, Any]:
        items = generated(body)
        items[1]["meta_info"]["output_token_logprobs"] = [[-1.5, 7, None]]
        return 200, items

    one.on("/generate", short)
    with engine_on([one]) as engine, pytest.raises(BadAnswer, match=r"fake0 .*group g0: token count mismatch: 2 output ids"):
        list(engine.generate_groups(PROMPTS[:1], 2, SAMPLING))


def test_case_33_the_stop_token_is_part_of_the_response_and_a_cut_one_is_flagged(one: FakeServer) -> None:
    """Acceptance case 33, as far as the client goes: nothing is masked, appended or guessed. Abort keeps what was sampled."""

    def three_ends(body: dict[str, Any]) -> tuple[int, Any]:
        items = generated(body)
        items[1]["meta_info"]["finish_reason"] = {"type": "length", "length": 2}
        items[2]["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
        return 200, items

    one.on("/generate", three_ends)
    with engine_on([one]) as engine:
        [group] = engine.generate_groups(PROMPTS[:1], 3, SAMPLING)
    assert [s.finish_reason for s in group.samples] == ["stop", "length", "abort"]
    assert [s.response_ids for s in group.samples] == [[7, 1]] * 3
    assert [s.mask for s in group.samples] == [[1, 1]] * 3
    assert group.samples[0].rollout_logprobs == [-1.5, -0.5]


def test_the_load_limit_holds_and_leaving_early_stops_the_rest(one: FakeServer) -> None:
    """concurrency 4 with groups of 2: two at a time. A caller that stops iterating leaves no request behind it."""
    running = peak = 0

    def count(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        time.sleep(0.1)
        running -= 1
        return 200, generated(body)

    one.on("/generate", count)
    with engine_on([one], concurrency=4) as engine:
        assert len(generate(engine)) == 6
        assert peak == 2
        groups = engine.generate_groups(PROMPTS, 2, SAMPLING, ahead=1)
        next(groups)
        groups.close()  # type: ignore[attr-defined]
        assert one.count("/generate") <= 8


def test_a_group_above_the_load_limit_is_still_served(one: FakeServer) -> None:
    """group_size above concurrency must not wait for ever."""
    with engine_on([one], concurrency=1) as engine:
        assert len(generate(engine, count=5)) == 6


def test_a_refused_request_is_never_sent(one: FakeServer) -> None:
    """Acceptance cases 34 and 37 on the way through the pool: the error names the group, the server hears nothing."""
    with engine_on([one]) as engine:
        with pytest.raises(RequestRefused, match="group long: the prompt has 50 tokens"):
            list(engine.generate_groups([PromptIds("long", [5] * 50)], 2, SAMPLING))
        with pytest.raises(RequestRefused, match="group odd: token id 100"):
            list(engine.generate_groups([PromptIds("odd", [100])], 2, SAMPLING))
    assert one.count("/generate") == 0


# --- scores ---------------------------------------------------------------------------------------------------------------


def test_case_19_a_teacher_that_returns_fewer_positions_is_an_error_with_the_samples_group(one: FakeServer) -> None:
    """Acceptance case 19 through the pool: the error names server and sample; no other server is asked to cover it up."""
    one.on("/generate", lambda body: (200, scored(body, short_by=1)))
    with engine_on([one]) as engine, pytest.raises(BadAnswer, match=r"fake0 .*sample of group g3: token count mismatch: 1 .* 2"):
        engine.score([sample("g3")])


def test_scores_keep_their_samples_and_an_empty_response_has_none(one: FakeServer) -> None:
    """Scores come back in batches; an empty response in between must not shift its neighbours."""
    samples = [sample("a"), sample("b", []), sample("c", [7, 8, 1])] + [sample("d", [9])] * 9
    with engine_on([one]) as engine:
        assert [len(row) for row in engine.score(samples)] == [2, 0, 3] + [1] * 9


def test_a_slow_score_is_asked_again(one: FakeServer) -> None:
    """Scores are the same however often they are computed, so unlike a sample they may be asked for again."""
    one.on("/generate", hang, lambda body: (200, scored(body)))
    with engine_on([one]) as engine:
        assert engine.score([sample()]) == [[-0.25, -0.25]]


def test_case_17_a_served_teacher_at_another_temperature_is_refused(one: FakeServer) -> None:
    """Acceptance case 17: the server's input log-probs are at temperature 1, whatever the request says."""
    with engine_on([one]) as engine, pytest.raises(RequestRefused, match=r"scores at temperature 1, the student samples at 0\.5"):
        engine.score([sample()], temperature=0.5)


# --- weight updates -------------------------------------------------------------------------------------------------------


def test_an_update_pauses_loads_flushes_verifies_and_continues_in_this_order(one: FakeServer) -> None:
    """The order is what makes it safe: nothing is sampled from half an update, and no old cache survives it."""
    with engine_on([one]) as engine:
        before = len(one.asked)
        engine.weights.update_from_disk("/weights/7", version="7")
        paths = [path for path, _ in one.asked[before:]]
    assert paths == [
        *("/pause_generation", "/update_weights_from_disk", "/update_weight_version"),
        *("/flush_cache", "/model_info", "/continue_generation"),
    ]
    assert one.version == "7"


@pytest.mark.parametrize(
    ("path", "behaviour", "message"),
    [
        ("/update_weights_from_disk", status(500, "disk full"), "loading from disk: .*HTTP 500: disk full"),
        ("/update_weights_from_disk", broken, "loading from disk: .*the connection broke"),
        ("/update_weights_from_disk", hang, "loading from disk: .*no answer within 2 s"),
        ("/update_weights_from_disk", lambda body: (200, {"success": False, "message": "bad shape"}), "bad shape"),
        ("/update_weight_version", lambda body: (200, {"success": True}), "holds weight version '0' after the update to '7'"),
        ("/pause_generation", status(500), "pausing"),
    ],
)
def test_a_failed_update_names_the_server_and_nothing_is_sampled_after_it(
    two: Sequence[FakeServer], path: str, behaviour: Any, message: str
) -> None:
    """One of two servers fails: the weights in use are no longer known, so neither may generate. Each kind ends in its limit."""
    two[1].on(path, behaviour)
    with engine_on(two) as engine:
        with pytest.raises(ServerError, match=f"fake1 .*{message}"):
            engine.weights.update_from_disk("/weights/7", version="7")
        with pytest.raises(ServerError, match=r"no server is left.*its weight update to version 7 failed"):
            generate(engine)
        assert all(fake.count("/continue_generation") == 0 for fake in two)


def test_a_cache_that_is_still_busy_is_flushed_a_little_later(one: FakeServer) -> None:
    """A batch may be under computation when the pause comes; the flush succeeds as soon as it is done."""
    one.on("/flush_cache", status(400, "pending requests"), status(400, "pending requests"), lambda body: (200, "Cache flushed."))
    with engine_on([one]) as engine:
        engine.weights.update_from_disk("/weights/7", version="7")
    assert one.count("/flush_cache") == 3


def test_a_server_without_update_sessions_gets_its_buckets_all_the_same(one: FakeServer) -> None:
    """Servers before 0.5.23 do not know begin/end_weight_update (404): found out by asking."""
    one.on("/begin_weight_update", status(404)).on("/end_weight_update", status(404))
    with engine_on([one]) as engine:
        control = engine.weights
        assert (control.world_size, control.group_is_current) == (2, False)
        control.init_group("127.0.0.1", 29500, backend="gloo", name="sync").wait()
        with control.update("3"):
            control.update_bucket(["a.weight"], ["float32"], [[2, 3]]).wait()
        assert one.version == "3"
        control.destroy_group().wait()
    body = next(body for path, body in one.asked if path == "/update_weights_from_distributed")
    assert (body["names"], body["shapes"], body["group_name"], body["flush_cache"]) == (["a.weight"], [[2, 3]], "sync", False)


def test_ranks_of_several_servers_follow_one_another_in_the_group(two: Sequence[FakeServer]) -> None:
    """Rank 0 sends; a server of two tensor-parallel ranks takes 1 and 2, the next one 3. The group is stale once one is lost."""
    facts = {"version": "fake", "max_req_input_len": 58, "tp_size": 2, "pp_size": 1, "dp_size": 1}
    two[0].on("/server_info", lambda body: (200, facts)).on("/generate", broken)
    with engine_on(two) as engine:
        engine.weights.init_group("127.0.0.1", 29500, backend="gloo", name="sync").wait()
        assert engine.weights.group_is_current
        joins = [next(body for path, body in fake.asked if path == "/init_weights_update_group") for fake in two]
        assert [(join["rank_offset"], join["world_size"]) for join in joins] == [(1, 4), (3, 4)]
        generate(engine)
        assert not engine.weights.group_is_current
        with pytest.raises(ServerError, match="does not hold the servers in use"):
            engine.weights.update_bucket(["a"], ["float32"], [[1]])


def test_servers_whose_ranks_cannot_join_one_group_are_refused(one: FakeServer) -> None:
    """SGLang numbers only tensor-parallel ranks in this group; others would collide and hang the sender."""
    facts = {"version": "fake", "max_req_input_len": 58, "tp_size": 1, "pp_size": 2, "dp_size": 1}
    one.on("/server_info", lambda body: (200, facts))
    with engine_on([one]) as engine, pytest.raises(RequestRefused, match=r"fake0 .*use 'disk'"):
        engine.weights.init_group("127.0.0.1", 29500, backend="gloo", name="sync")


def test_a_server_that_dies_while_it_receives_is_seen_before_the_senders_own_limit(one: FakeServer) -> None:
    """The sender sits in a broadcast that will not complete; `failed()` lets it look up."""
    one.on("/update_weights_from_distributed", after(0.2, broken))
    with engine_on([one]) as engine:
        engine.weights.init_group("127.0.0.1", 29500, backend="gloo", name="sync").wait()

        def send_one_bucket() -> None:
            with engine.weights.update("3"):
                pending = engine.weights.update_bucket(["a"], ["float32"], [[1]])
                limit = time.monotonic() + 10
                while not pending.failed() and time.monotonic() < limit:
                    time.sleep(0.02)
                assert pending.failed()
                pending.wait()

        with pytest.raises(ServerError, match=r"fake0 .*update_weights_from_distributed: the connection broke"):
            send_one_bucket()
        assert engine.pool.out_of_use
