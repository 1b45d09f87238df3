"""A served teacher against a real SGLang server and float64 Hugging Face forward passes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gvpo.config.schema import TeacherSection
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.logprobs import FullTeacher, TopKTeacher, VocabShard, divergence
from megatron_gvpo.rollout.errors import RequestRefused
from megatron_gvpo.rollout.teacher import Text
from megatron_gvpo.rollout.teacher_engine import TeacherEngine, TeacherServers
from tests.ranks import run_ranks
from tests.servers import MAX_LENGTH, VOCAB, TestServer, TinyModels

PARITY = 1e-4
KINDS = ("tv", "jsd", "reverse_kl", "forward_kl")


def texts() -> list[Text]:
    """Every id of the vocabulary as a response token, the last one too; ragged, behind a prompt that several share."""
    prompt = [3, 50, 7, 9]
    pieces = [list(range(i, min(i + 13, VOCAB))) for i in range(0, VOCAB, 13)]
    return [Text(f"text {n}", prompt, piece) for n, piece in enumerate(pieces)]


def engine_of(server: TestServer, **section: Any) -> TeacherEngine:
    servers = {"": TeacherServers([server.endpoint], VOCAB, MAX_LENGTH)}
    return TeacherEngine(servers, TeacherSection(request_timeout_s=60, **section), temperature=1.0)


@pytest.fixture
def exact(sglang_server: TestServer) -> list[torch.Tensor]:
    """[T, V] float64 log-probs of each text's positions."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sglang_server.models.first, dtype=torch.float64).eval()
    found = []
    with torch.no_grad():
        for text in texts():
            ids = torch.tensor([[*text.prompt_ids, *text.response_ids]])
            found.append(model(ids).logits[0, len(text.prompt_ids) - 1 : -1].log_softmax(-1))
    return found


def test_sampled_and_top_k_are_those_of_a_float64_forward_pass(sglang_server: TestServer, exact: list[torch.Tensor]) -> None:
    """The served signal at every id and place, and the likeliest ids with theirs, to 1e-4; acceptance case 18 on a real server.
    Does not cover bfloat16 or GPUs."""
    with engine_of(sglang_server, signal="topk", top_k=9) as engine:
        scores = engine.submit("", texts()).result()
    for text, score, exact_TV in zip(texts(), scores, exact, strict=True):
        at = torch.tensor(text.response_ids)[:, None]
        np.testing.assert_allclose(score.logprobs, exact_TV.gather(1, at)[:, 0], atol=PARITY)
        assert score.top is not None
        ids_TK = torch.from_numpy(score.top.ids).long()
        np.testing.assert_allclose(score.top.logprobs, exact_TV.gather(1, ids_TK), atol=PARITY, err_msg=text.label)
        np.testing.assert_allclose(score.top.logprobs, exact_TV.topk(9, 1).values, atol=PARITY)


def test_the_binary_form_says_what_the_lists_say(sglang_server: TestServer) -> None:
    """Why: an older server sends lists; both must be read as the same numbers, ids and places."""
    text = texts()[-1]
    ids = [*text.prompt_ids, *text.response_ids]
    body = {
        "input_ids": [ids],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": [len(text.prompt_ids) - 1],
        "top_logprobs_num": 5,
    }
    with sglang_server.http() as http:
        lists = http.post("/generate", json=body).json()[0]["meta_info"]
        flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
        flat = http.post("/generate", json=body | flags).json()[0]["meta_info"]
    assert lists["input_top_logprobs"][0] is None
    want_ids = [[entry[1] for entry in row] for row in lists["input_top_logprobs"][1:]]
    got = np.frombuffer(base64.b64decode(flat["input_top_logprobs_idx_flat_b64"]), "<i4").reshape(-1, 5)
    assert got.tolist() == want_ids
    assert len(want_ids) == len(text.response_ids)
    assert "input_top_logprobs" not in flat


def test_the_whole_vocabulary_as_top_k_is_the_full_divergence(sglang_server: TestServer, exact: list[torch.Tensor]) -> None:
    """Top-k with its tail at k = V equals the full divergence to 1e-6, from what a real server sent."""
    with engine_of(sglang_server, signal="topk", top_k=VOCAB) as engine:
        scores = engine.submit("", texts()).result()
    student_TV = torch.randn(len(exact[0]), VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    top = scores[0].top
    assert top is not None
    ids_TK, logprobs_TK = torch.from_numpy(top.ids.copy()).long(), torch.from_numpy(top.logprobs.copy()).double()
    whole_TV = torch.zeros_like(student_TV).scatter(1, ids_TK, logprobs_TK)
    shard = VocabShard.of(0, 1, VOCAB)
    for kind in KINDS:
        topk_T = divergence(kind, student_TV, TopKTeacher(ids_TK, logprobs_TK), shard, beta=0.3)
        full_T = divergence(kind, student_TV, FullTeacher(whole_TV), shard, beta=0.3)
        torch.testing.assert_close(topk_T, full_T, atol=1e-6, rtol=0, msg=kind)
        exact_T = divergence(kind, student_TV, FullTeacher(exact[0]), shard, beta=0.3)
        torch.testing.assert_close(topk_T, exact_T, atol=PARITY, rtol=0, msg=kind)


def test_more_than_the_vocabulary_is_refused_and_the_server_lives(sglang_server: TestServer) -> None:
    """Acceptance case 37 on a real server: top_logprobs_num above the vocabulary ends it for every client. Stopped in ours."""
    with pytest.raises(RequestRefused, match=f"is above the vocabulary of {VOCAB}"):
        engine_of(sglang_server, signal="topk", top_k=VOCAB + 1)
    with engine_of(sglang_server) as engine:
        assert len(engine.submit("", texts()).result()) == len(texts())


def test_the_sampled_estimators_have_the_full_divergence_as_their_mean() -> None:
    """Many draws from the student: the mean of -Delta is KL(q||p), and that of (1 - e^Delta)+ is total variation, within four
    standard errors. This is what lets one number a token stand for a distribution."""
    generator = torch.Generator().manual_seed(1)
    student_V = torch.randn(40, generator=generator, dtype=torch.float64)
    teacher_V = student_V + 0.7 * torch.randn(40, generator=generator, dtype=torch.float64)
    logq_V, logp_V = student_V.log_softmax(0), teacher_V.log_softmax(0)
    drawn_n = torch.multinomial(logq_V.exp(), 200_000, replacement=True, generator=generator)
    delta_n = (logp_V - logq_V)[drawn_n]
    shard = VocabShard.of(0, 1, 40)
    for kind, estimates_n in (("reverse_kl", -delta_n), ("tv", -torch.expm1(delta_n.clamp(max=0.0)))):
        full = float(divergence(kind, student_V[None], FullTeacher(teacher_V[None]), shard))
        error = float(estimates_n.std() / len(estimates_n) ** 0.5)
        assert abs(float(estimates_n.mean()) - full) < 4 * error, kind


def _samples() -> list[Sample]:
    rows = [([3, 5 + i], [(11 * i + 7 * j) % VOCAB for j in range(3 + 5 * i)]) for i in range(6)]
    return [Sample(f"g{i}", prompt, ids, [1] * len(ids)) for i, (prompt, ids) in enumerate(rows)]


def _beside(rank: int, world: int, student: str, teacher: str) -> list[float]:
    """Every sample's log-probs, one after another, by the colocated full signal in float32."""
    from megatron_gvpo.config.schema import Config
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.train.build import build

    config = Config.model_validate(
        {
            "model": {"path": student, "max_length": MAX_LENGTH},
            "precision": {"params": "fp32"},
            "objective": {"name": "gkd", "teacher": "full"},
            "teacher": {"path": teacher, "where": "colocated", "signal": "full"},
            "train": {"device": "cpu"},
        }
    )
    ranks = start(config.parallel, config.train, config.precision)
    built = build(config, ranks)
    samples = _samples()
    kept = list(range(len(samples)))
    plan = plan_micro_batches([len(s) for s in samples], 1, max_samples=4)
    share = built.engine.cut(samples, kept, plan)
    assert built.teacher is not None
    share, taught = built.teacher.add(samples, kept, share)
    assert share.teachers is not None
    order = sorted(range(len(share.tokens)), key=lambda t: (int(share.tokens.sequence_T[t]), int(share.tokens.position_T[t])))
    found = [float(taught["teacher_logprobs"][t]) for t in order]
    shutdown()
    return found


@pytest.mark.heavy
def test_server_colocated_model_and_float64_forward_pass_agree(sglang_server: TestServer, tiny_models: TinyModels) -> None:
    """The same teacher gives the same number at every sampled token, whichever way it is asked, to 1e-4 nats: an off-by-one, a
    temperature, a padded vocabulary or a head cut wrongly would show. Does not cover bfloat16."""
    from transformers import AutoModelForCausalLM

    samples = _samples()
    with engine_of(sglang_server) as engine:
        scores = engine.submit("", [Text(s.group, s.prompt_ids, s.response_ids) for s in samples]).result(120)
    served = [value for score in scores for value in score.logprobs]
    paths = (str(tiny_models.second), str(tiny_models.first))
    (beside,) = run_ranks(_beside, 1, *paths, init=False, timeout=120)
    model = AutoModelForCausalLM.from_pretrained(tiny_models.first, dtype=torch.float64).eval()
    exact: list[float] = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logp_TV = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)
        exact += logp_TV.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].tolist()
    assert served == pytest.approx(exact, abs=PARITY)
    assert beside == pytest.approx(exact, abs=PARITY)
