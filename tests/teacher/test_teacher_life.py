"""A real teacher server that dies in mid-step. Other faults, which a healthy server cannot show: test_served."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.config.schema import ServersSection, TeacherSection
from megatron_gvpo.rollout.errors import ServerError
from megatron_gvpo.rollout.server import LocalServer
from megatron_gvpo.rollout.teacher import Text
from megatron_gvpo.rollout.teacher_engine import TeacherEngine, TeacherServers
from tests.servers import MAX_LENGTH, VOCAB, TestServer, TinyModels, reference_logprobs


@pytest.mark.heavy
def test_a_server_killed_in_mid_step_costs_no_sample(sglang_server: TestServer, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Two real servers, one killed while 240 responses are scored: every response has its own scores, those of a Hugging Face
    forward pass. With the survivor gone from the pool too there is an error that names them, and no wait without end."""
    texts = [Text(f"text {i}", [3, 5 + i % 40], [(7 * i + j) % VOCAB for j in range(1 + i % 30)]) for i in range(240)]
    section = TeacherSection(servers=ServersSection(concurrency=4), batch=2, request_timeout_s=30, retries=1, hedge_after_s=0.0)
    with LocalServer(tiny_models.first, ServersSection(), run_dir=tmp_path, max_length=MAX_LENGTH, name="doomed") as doomed:
        servers = TeacherServers([doomed.endpoint, sglang_server.endpoint], VOCAB, MAX_LENGTH)
        with TeacherEngine({"": servers}, section, temperature=1.0) as engine:
            future = engine.submit("", texts)
            doomed.stop()
            scores = future.result(120)
    for text, score in zip(texts[::17], scores[::17], strict=True):
        want = reference_logprobs(tiny_models.first, list(text.prompt_ids), list(text.response_ids), 1.0)
        assert score.logprobs == pytest.approx(want, abs=1e-4), text.label
    assert [len(score.logprobs) for score in scores] == [len(text.response_ids) for text in texts]
    gone = TeacherServers([doomed.endpoint], VOCAB, MAX_LENGTH)
    with pytest.raises(ServerError, match="doomed"):
        TeacherEngine({"": gone}, section, temperature=1.0)
