"""The client against a real SGLang server and a Hugging Face forward pass. Faults: test_faults. Deaths: test_server_life."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.errors import RequestRefused, ServerError
from megatron_gvpo.rollout.pool import Group, PromptIds
from megatron_gvpo.rollout.wire import Sampling
from tests.rollout.sender import joined_as_rank_0
from tests.servers import EOS, MAX_LENGTH, VOCAB, TestServer, reference_logprobs

PARITY = 1e-4
PROMPTS = [PromptIds(f"g{i}", [3 + (7 * i + 11 * j) % (VOCAB - 3) for j in range(6 + i % 3)]) for i in range(8)]


@pytest.fixture
def engine(sglang_server: TestServer) -> Iterator[RolloutEngine]:
    rollout = RolloutSection(request_timeout_s=60, sync_timeout_s=60, retries=1)
    with RolloutEngine([sglang_server.endpoint], rollout, vocab_size=VOCAB, max_length=MAX_LENGTH) as running:
        yield running


def generate(engine: RolloutEngine, sampling: Sampling, count: int = 4) -> list[Group]:
    return sorted(engine.generate_groups(PROMPTS, count, sampling), key=lambda group: group.index)


def worst_difference(samples: list[Sample], model: Path, temperature: float) -> float:
    """Largest |server - Hugging Face| over all tokens, nats."""
    return max(
        abs(server - reference)
        for sample in samples
        for server, reference in zip(
            sample.rollout_logprobs or [],
            reference_logprobs(model, sample.prompt_ids, sample.response_ids, temperature),
            strict=True,
        )
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_rollout_logprobs_are_those_of_a_forward_pass_at_the_same_temperature(
    engine: RolloutEngine, sglang_server: TestServer, temperature: float
) -> None:
    """Acceptance case 32's server half: the same weights give the same log-probs, at every token, tempered as sampled. Groups are
    whole and named. Does not cover bfloat16 or a GPU's kernels."""
    groups = generate(engine, Sampling(temperature=temperature, max_new_tokens=12, stop_token_ids=(EOS,)))
    assert [(group.index, len(group.samples)) for group in groups] == [(i, 4) for i in range(8)]
    for group, prompt in zip(groups, PROMPTS, strict=True):
        assert all(s.group == prompt.group and s.prompt_ids == prompt.ids for s in group.samples)
        assert all(s.weight_versions == [(sglang_server.started_with_version, 0)] for s in group.samples)
    samples = [s for group in groups for s in group.samples]
    assert len({tuple(s.response_ids) for s in samples}) > len(groups)  # sampled, not greedy
    assert worst_difference(samples, sglang_server.models.first, temperature) < PARITY


def test_greedy_is_greedy_with_the_logprobs_of_temperature_1(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """What evaluation uses: the k responses of a prompt are one and the same, and each id is the likeliest."""
    groups = generate(engine, Sampling(max_new_tokens=8, stop_token_ids=(EOS,)).greedy(), count=2)
    for group in groups:
        assert group.samples[0].response_ids == group.samples[1].response_ids
    samples = [group.samples[0] for group in groups]
    first = sglang_server.models.first
    assert worst_difference(samples, first, 1.0) < PARITY
    for sample in samples:
        for t, logprob in enumerate(sample.rollout_logprobs or []):
            for rival in (2, 50):
                response = [*sample.response_ids[:t], rival]
                assert logprob > reference_logprobs(first, sample.prompt_ids, response, 1.0)[t] - PARITY


def test_case_33_ends_are_told_by_the_server_and_the_stop_token_stays(engine: RolloutEngine) -> None:
    """Acceptance case 33: "stop" has its stop token as the last id, with a log-prob and mask 1; "length" has all its tokens and
    nothing behind them, even where the last one happens to look like an end."""
    samples = [s for g in generate(engine, Sampling(max_new_tokens=20, stop_token_ids=(EOS, 50)), count=8) for s in g.samples]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    cut = [s for s in samples if s.finish_reason == "length"]
    assert stopped
    assert cut
    assert len(stopped) + len(cut) == len(samples)
    for sample in stopped:
        assert sample.response_ids[-1] in (EOS, 50)
        assert not {EOS, 50} & set(sample.response_ids[:-1])
    for sample in cut:
        assert len(sample.response_ids) == 20
    assert all(s.mask == [1] * len(s.response_ids) and len(s.rollout_logprobs or []) == len(s.mask) for s in samples)


def test_case_34_a_long_prompt_gets_the_room_that_is_left(engine: RolloutEngine) -> None:
    """Acceptance case 34 on a real server: prompt and response together fill max_length to the last token and no more."""
    for length in (MAX_LENGTH - 9, MAX_LENGTH - 1):
        [group] = engine.generate_groups([PromptIds("long", [5] * length)], 2, Sampling(max_new_tokens=100))
        assert all(len(s) <= MAX_LENGTH for s in group.samples)
        assert any(len(s) == MAX_LENGTH and s.finish_reason == "length" for s in group.samples)


def test_case_35_sampled_ids_stay_where_their_text_has_another_encoding(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """Acceptance case 35: with a tokenizer that merges pairs, most sampled texts encode to other, fewer ids. The sample keeps
    what was sampled, and its log-probs are those of exactly these ids."""
    letters = [chr(0x4E00 + i) for i in range(40)]
    pairs = [(letters[i % 40], letters[(i + 1 + i // 40) % 40]) for i in range(VOCAB - len(letters))]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.decoder = decoders.Fuse()
    samples = [s for g in generate(engine, Sampling(max_new_tokens=30, stop_token_ids=())) for s in g.samples]
    changed = [s for s in samples if tokenizer.encode(tokenizer.decode(s.response_ids)).ids != s.response_ids]
    assert changed
    assert worst_difference(changed, sglang_server.models.first, 1.0) < PARITY


def test_scores_are_those_of_a_forward_pass_at_every_id(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """Acceptance case 18 on a real server: one score per response token, at its own place; the last id of the vocabulary, which
    the server labels wrongly, among them. Twice, so that the prefix cache is in play the second time."""
    ids = [2 + (i * 37) % (VOCAB - 2) for i in range(VOCAB)]
    samples = [Sample(f"g{i}", [9, 8, 7], [*ids[i : i + 6], VOCAB - 1, 4], [1] * 8) for i in range(0, 60, 4)]
    samples.append(Sample("one", [11, 12], [13], [1]))
    for _ in range(2):
        rows = engine.score(samples)
        for sample, row in zip(samples, rows, strict=True):
            expected = reference_logprobs(sglang_server.models.first, sample.prompt_ids, sample.response_ids, 1.0)
            assert row == pytest.approx(expected, abs=PARITY)


def test_case_37_a_server_survives_what_is_stopped_in_the_client(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """Acceptance case 37: these end a real 0.5.23 server for everybody. Here they are refused, and it still generates."""
    for prompt, sampling in [
        ([3, VOCAB], Sampling()),
        ([3, 10**6], Sampling()),
        ([3], Sampling(top_k=VOCAB + 1)),
        ([], Sampling()),
    ]:
        with pytest.raises(RequestRefused):
            list(engine.generate_groups([PromptIds("g", prompt)], 1, sampling))
    with pytest.raises(RequestRefused):
        engine.score([Sample("g", [3], [VOCAB], [1])])
    assert len(generate(engine, Sampling(max_new_tokens=2))) == 8


def test_the_key_is_needed_and_shown_nowhere(sglang_server: TestServer) -> None:
    """A server on a shared machine must not obey others: no key, no answer; and neither `ps` nor the log gives it away."""
    local = sglang_server.local
    with sglang_server.http() as http:
        assert http.get("/model_info", headers={"Authorization": "Bearer wrong"}).status_code == 401
    root = psutil.Process(local.pid)
    family = [root, *root.children(recursive=True)]
    assert any("sglang" in " ".join(process.cmdline()) for process in family)
    assert not any(local.api_key in word for process in family for word in process.cmdline())
    assert local.api_key not in local.log_path.read_text()
    assert local.log_path.stat().st_mode & 0o077 == 0


# --- new weights ----------------------------------------------------------------------------------------------------------


def assert_serves(engine: RolloutEngine, model: Path, version: str) -> None:
    """The log-probs of fresh samples and of scores are the new model's, and say so; the very first ones too."""
    groups = generate(engine, Sampling(max_new_tokens=6, stop_token_ids=(EOS,)))
    samples = [s for g in groups for s in g.samples]
    assert all(s.weight_versions == [(version, 0)] for s in samples)
    assert worst_difference(samples, model, 1.0) < PARITY
    for sample, row in zip(samples, engine.score(samples), strict=True):
        assert row == pytest.approx(reference_logprobs(model, sample.prompt_ids, sample.response_ids, 1.0), abs=PARITY)


def test_case_36_no_old_prefix_survives_an_update_from_disk(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """Acceptance case 36: the same prompts before and after. Before, they are in the prefix cache (the server says how much it
    reused); after, nothing is, and the log-probs are the new model's."""
    body = {"input_ids": PROMPTS[0].ids, "sampling_params": {"max_new_tokens": 1}}

    def reused() -> int:
        with sglang_server.http() as http:
            return http.post("/generate", json=body).json()["meta_info"]["cached_tokens"]

    generate(engine, Sampling(max_new_tokens=6))
    assert reused() > 0
    engine.weights.update_from_disk(sglang_server.models.second, version="1")
    assert reused() == 0
    assert_serves(engine, sglang_server.models.second, "1")


def test_an_update_from_a_folder_without_weights_is_an_error_and_stops_generation(
    engine: RolloutEngine, sglang_server: TestServer, tmp_path: Path
) -> None:
    """The server refuses, keeps its weights, and is out of use until somebody knows what it holds."""
    with pytest.raises(ServerError, match=r"test-server .*loading from disk"):
        engine.weights.update_from_disk(tmp_path, version="9")
    with pytest.raises(ServerError, match="no server is left"):
        generate(engine, Sampling(max_new_tokens=2))


def send(engine: RolloutEngine, group: Any, model: Path, buckets: int) -> None:
    tensors = list(load_file(model / "model.safetensors").items())
    for first in range(buckets):
        part = tensors[first::buckets]
        loading = engine.weights.update_bucket(
            [name for name, _ in part],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
            [list(tensor.shape) for _, tensor in part],
        )
        for _, tensor in part:
            dist.broadcast(tensor, src=0, group=group)
        loading.wait()


def test_weights_over_a_gloo_group_take_effect_and_requests_under_way_go_on_with_them(
    engine: RolloutEngine, sglang_server: TestServer
) -> None:
    """Three buckets into a server that is generating: its responses span two versions, each with the place where the new one
    began, and from there on the log-probs are the new model's. Afterwards (case 36 again) all are. Does not cover NCCL."""
    models = sglang_server.models
    generate(engine, Sampling(max_new_tokens=4))  # the old prefixes are in the cache
    with joined_as_rank_0(engine, "test-sync") as group:
        groups: list[Group] = []
        prompts = [PromptIds(f"g{i}", [5 + i % 90]) for i in range(40)]
        long = Sampling(max_new_tokens=60, stop_token_ids=())
        rollout = threading.Thread(target=lambda: groups.extend(engine.generate_groups(prompts, 8, long)))
        rollout.start()
        with sglang_server.http() as http:
            limit = time.monotonic() + 30
            while time.monotonic() < limit and not http.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
                time.sleep(0.01)
        with engine.weights.update("2"):
            send(engine, group, models.second, buckets=3)
        rollout.join(60)
        assert len(groups) == 40
        started = sglang_server.started_with_version
        mixed = [s for g in groups for s in g.samples if [version for version, _ in s.weight_versions] == [started, "2"]]
        assert mixed
        for sample in mixed[:20]:
            start = sample.weight_versions[1][1]
            assert sample.rollout_logprobs is not None
            old = reference_logprobs(models.first, sample.prompt_ids, sample.response_ids, 1.0)
            new = reference_logprobs(models.second, sample.prompt_ids, sample.response_ids, 1.0)
            assert sample.rollout_logprobs[:start] == pytest.approx(old[:start], abs=PARITY)
            assert sample.rollout_logprobs[start:] == pytest.approx(new[start:], abs=PARITY)
        assert_serves(engine, models.second, "2")
        with engine.weights.update("3"):
            send(engine, group, models.first, buckets=1)
        assert_serves(engine, models.first, "3")
        engine.weights.destroy_group().wait()
        assert not engine.weights.group_is_current


def test_a_bucket_of_a_wrong_shape_is_an_error_that_names_the_server(engine: RolloutEngine, sglang_server: TestServer) -> None:
    """A partial update: what the server holds now is unknown, so it is out of use and says why."""

    def send_wrong_shape(group: Any) -> None:
        with engine.weights.update("4"):
            loading = engine.weights.update_bucket(["model.norm.weight"], ["float32"], [[7]])
            dist.broadcast(torch.zeros(7), src=0, group=group)
            loading.wait()

    with (
        joined_as_rank_0(engine, "test-bad") as group,
        pytest.raises(ServerError, match=r"test-server .*weights_from_dist"),
    ):
        send_wrong_shape(group)
    with pytest.raises(ServerError, match="weight update to version 4 failed"):
        generate(engine, Sampling(max_new_tokens=2))
    with sglang_server.http() as http:  # leave the session, or the next user of this server cannot open one
        http.post("/end_weight_update", json={})
