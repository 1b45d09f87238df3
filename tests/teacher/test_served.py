"""Served teachers over several servers, by fakes: faults, hedging, cache, domains. Real servers: test_real_teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.schema import ServersSection, TeacherSection
from megatron_gvpo.rollout.errors import BadAnswer, RequestRefused, RolloutError, ServerError
from megatron_gvpo.rollout.teacher import Text
from megatron_gvpo.rollout.teacher_cache import weights_digest
from megatron_gvpo.rollout.teacher_engine import TeacherEngine, TeacherServers
from megatron_gvpo.rollout.teacher_wire import Scored
from tests.rollout.fake_server import Behaviour, FakeServer, broken, fake_servers, hang, status
from tests.teacher.fakes import VOCAB, teacher, top_row, value

TEXTS = [Text(f"sample {i}", [5, 6 + i % 3], [7 + i, 3, 1 + i % 5][: 1 + i % 3]) for i in range(40)]
PROBE = [0, 0, 0]


@contextmanager
def engine_on(
    fakes: Sequence[FakeServer], *, domains: Sequence[str] = ("",), weights: str = "", temperature: float = 1.0, **section: Any
) -> Iterator[TeacherEngine]:
    """One teacher per domain; the fakes are shared out among them."""
    settings: dict[str, Any] = {"request_timeout_s": 5.0, "retries": 1, "batch": 2, "hedge_after_s": 0.0, **section}
    each = len(fakes) // len(domains)
    teachers = {
        domain: TeacherServers([f.endpoint for f in fakes[i * each : (i + 1) * each]], VOCAB, 50, weights)
        for i, domain in enumerate(domains)
    }
    with TeacherEngine(teachers, TeacherSection(servers=ServersSection(concurrency=4), **settings), temperature=temperature) as e:
        yield e


@pytest.fixture
def three() -> Iterator[Sequence[FakeServer]]:
    with fake_servers(3) as fakes:
        for fake in fakes:
            fake.on("/generate", teacher())
        yield fakes


def check(scores: list[Scored], shift: float = 0.0) -> None:
    """Every sample has its own scores, at their places: none lost, none shifted, none swapped."""
    assert len(scores) == len(TEXTS)
    for text, score in zip(TEXTS, scores, strict=True):
        first = len(text.prompt_ids)
        want = [value(token, first + t, shift) for t, token in enumerate(text.response_ids)]
        assert score.logprobs == pytest.approx(want), text.label


def probe_then(*behaviours: Behaviour) -> list[Behaviour]:
    """Well at the probe before training, then this; the last one stays."""
    return [teacher(), *behaviours]


def test_a_teacher_killed_in_mid_step_loses_no_sample(three: Sequence[FakeServer]) -> None:
    """A server that dies breaks its connections and answers nothing more; its requests go to the others."""
    three[0].on("/generate", *probe_then(teacher(), teacher(), broken))
    with engine_on(three) as engine:
        check(engine.submit("", TEXTS).result())


def test_a_teacher_that_stalls_gives_way_within_the_limit(three: Sequence[FakeServer]) -> None:
    """Its health check hangs too, as a server's whose scheduler is stuck; past the request's limit it is out of use."""
    three[1].on("/generate", *probe_then(hang)).on("/health_generate", status(503))
    with engine_on(three, request_timeout_s=0.5, retries=0) as engine:
        check(engine.submit("", TEXTS).result())


def test_a_hedged_request_does_not_wait_for_a_stalled_server(three: Sequence[FakeServer]) -> None:
    """One server in three never answers, and its health check is well. Without hedging this is an error (test_faults); with it
    the other servers' answers count. How much time it saves: benchmarks/teacher.py."""
    three[2].on("/generate", *probe_then(hang))
    with engine_on(three, request_timeout_s=60.0, hedge_after_s=0.2) as engine:
        check(engine.submit("", TEXTS).result())
        assert engine.counts()["second_requests"] >= 1


def test_a_hedge_by_medians_waits_for_a_few_answers_first(three: Sequence[FakeServer]) -> None:
    """The default limit is three medians of what was seen; fast servers are not asked twice."""
    with engine_on(three, hedge_after_s=None) as engine:
        check(engine.submit("", TEXTS).result())


def test_all_teachers_gone_is_an_error_that_names_each(three: Sequence[FakeServer]) -> None:
    for fake in three:
        fake.on("/generate", *probe_then(broken))
    with engine_on(three, retries=0) as engine, pytest.raises(ServerError, match=r"no server is left: fake0.*fake1.*fake2"):
        engine.submit("", TEXTS).result()


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (teacher(short_by=1), "the probe before training: token count mismatch: 1 positions scored, 2 asked for"),
        (lambda body: (200, [{"output_ids": [], "meta_info": {}}]), "without input_token_logprobs"),
        (status(400, "log-probs are switched off"), "log-probs are switched off"),
        (teacher(compact=True), None),
        (teacher(compact=False), None),
    ],
)
def test_the_probe_finds_out_before_training(three: Sequence[FakeServer], behaviour: Behaviour, why: str | None) -> None:
    """A teacher that cannot give what the objective needs must show before a GPU has worked for an hour; each server is asked."""
    three[1].on("/generate", behaviour)
    if why is None:
        with engine_on(three, signal="topk", top_k=4):
            return
    with pytest.raises(BadAnswer, match=why), engine_on(three):
        pass


def test_a_teacher_without_the_binary_form_is_used_and_said_so_once(
    three: Sequence[FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    """No silent fallback: what the slower form costs is logged, once a server."""
    for fake in three:
        fake.on("/generate", teacher(compact=False))
    with engine_on(three, signal="topk", top_k=4) as engine:
        scores = engine.submit("", TEXTS).result()
    check(scores)
    top = scores[4].top
    assert top is not None
    assert top.ids.tolist() == [top_row(token, 4)[0] for token in TEXTS[4].response_ids]
    assert caplog.text.count("as JSON lists") == 3


def test_case_17_another_temperature_is_refused_before_anything_is_sent(three: Sequence[FakeServer]) -> None:
    """Acceptance case 17: a server's input log-probs are at temperature 1, and untempered ones would be wrong without a sign."""
    why = "student samples at 0.5: set rollout.temperature to 1, or teacher.where to colocated"
    with pytest.raises(RequestRefused, match=why), engine_on(three, temperature=0.5):
        pass
    assert not three[0].count("/generate")


def test_each_domain_is_scored_by_its_own_teacher(three: Sequence[FakeServer]) -> None:
    """Two teachers by domain; a domain of no teacher's goes to the one for all others."""
    three[1].on("/generate", teacher(shift=5.0))
    with engine_on(three[:2], domains=("", "code")) as engine:
        futures = [engine.submit(domain, TEXTS) for domain in ("code", "", "poems")]
        for future, shift in zip(futures, (5.0, 0.0, 0.0), strict=True):
            check(future.result(), shift)


def test_the_cache_makes_the_second_time_free(three: Sequence[FakeServer], tmp_path: Path) -> None:
    """A second epoch over fixed answers, or a run once more, asks the servers for the probe alone. Other weights, or another
    k, are another key. Scores come back bit for bit."""
    asked: list[int] = []

    def run(weights: str, k: int) -> list[Scored]:
        before = three[0].count("/generate")
        with engine_on(three[:1], weights=weights, cache=str(tmp_path / "cache"), signal="topk", top_k=k) as engine:
            scores = engine.submit("", TEXTS).result()
        asked.append(three[0].count("/generate") - before)
        return scores

    first, again = run("a", 4), run("a", 4)
    assert asked == [21, 1]
    check(again)
    for one, two in zip(first, again, strict=True):
        assert one.logprobs == two.logprobs
        assert one.top is not None
        assert two.top is not None
        assert (one.top.ids == two.top.ids).all()
        assert (one.top.logprobs == two.top.logprobs).all()
    run("b", 4)
    run("a", 5)
    assert asked[2:] == [21, 21]


def test_a_response_that_fills_the_context_is_scored(three: Sequence[FakeServer]) -> None:
    """Scoring sends prompt and response as one prompt: the longest one must not be refused for want of room behind it."""
    text = Text("the longest", [5] * 10, [6] * 40)
    with engine_on(three[:1]) as engine:
        (score,) = engine.submit("", [text]).result()
        assert len(score.logprobs) == 40
        with pytest.raises(RolloutError, match="the prompt has 51 tokens, the context takes at most 50"):
            engine.submit("", [Text("too long", [5] * 10, [6] * 41)]).result()


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    """Two teachers of one shape and size must not share scores; a folder without weights names no teacher at all."""
    for name, fill in (("one", b"\x01"), ("two", b"\x02")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        assert weights_digest(folder) == ""
        (folder / "model.safetensors").write_bytes(fill * 1_000_000)
    assert weights_digest(tmp_path / "one") != weights_digest(tmp_path / "two")
    (tmp_path / "two" / "model.safetensors").write_bytes(b"\x01" * 1_000_000)
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")
