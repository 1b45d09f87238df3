"""Rank 0's side of served teachers: tokens compared before training, texts for another tokenizer, scoring beside generation.

Servers are fakes; whole runs on real ones are `make demo-opd` and the demo configs.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt, load_prompt_sets, load_tokenizer
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.train.clock import StepClock
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.teacher import ServedTeachers, check_colocated_teachers
from tests.rollout.fake_server import Answer, FakeServer, fake_servers, generated
from tests.teacher.fakes import teacher, value

ROOT = Path(__file__).resolve().parents[2] / "examples" / "chain_sum"
STUDENT, TEACHER = ROOT / "student", ROOT / "teacher"


@pytest.fixture
def two() -> Iterator[Sequence[FakeServer]]:
    with fake_servers(2) as fakes:
        fakes[1].on("/generate", teacher())
        yield fakes


@pytest.fixture
def swapped(tmp_path: Path) -> Path:
    """The teacher's folder with a tokenizer of the same size in which two ids have changed places."""
    folder = tmp_path / "swapped"
    shutil.copytree(TEACHER, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = "1", "2"
    vocab[one], vocab[two] = vocab[two], vocab[one]
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """A teacher of the student's tokenizer whose head is padded further."""
    folder = tmp_path / "larger"
    shutil.copytree(TEACHER, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 320}))
    return folder


def config(rollout: FakeServer, teacher_server: FakeServer, folder: Path, objective: str = "tv_opd", **teacher: Any) -> Config:
    def urls(fake: FakeServer) -> dict[str, Any]:
        return {"launch": "none", "urls": [fake.endpoint.url], "api_key": "key"}

    return Config.model_validate(
        {
            "model": {"path": str(STUDENT), "max_length": 32},
            "objective": {"name": objective},
            "teacher": {"path": str(folder), "servers": urls(teacher_server), "request_timeout_s": 20, "retries": 0, **teacher},
            "rollout": {
                "prompts_per_step": 4,
                "group_size": 2,
                "max_new_tokens": 8,
                "request_timeout_s": 20,
                "retries": 0,
                "servers": urls(rollout),
            },
            "data": {"train": str(ROOT / "train.jsonl")},
            "train": {"device": "cpu"},
        }
    )


def opened(settings: Config, tmp_path: Path) -> tuple[ServedTeachers, Prompt]:
    tokenizer = load_tokenizer(STUDENT)
    sets = load_prompt_sets(settings.data, tokenizer, max_length=32, max_new_tokens=8)
    return ServedTeachers(settings, tmp_path, tokenizer, sets.train), sets.train[0]


def answer(prompt: Prompt, text: str, finish: Any = "stop") -> Sample:
    ids = [int(i) for i in load_tokenizer(STUDENT).encode(text, add_special_tokens=False)] + [1] * (finish == "stop")
    return Sample("g", list(prompt.token_ids), ids, [1] * len(ids), finish_reason=finish)


def test_case_20_other_sizes_are_refused_with_both_unless_aligned(
    two: Sequence[FakeServer], larger: Path, tmp_path: Path
) -> None:
    """Acceptance case 20: one family, two paddings. Told to align, ids are compared as far as both go."""
    with pytest.raises(DataError, match="the teacher's vocabulary has 320 entries and the student's 261"):
        opened(config(*two, larger), tmp_path)
    teachers, prompt = opened(config(*two, larger, align_vocabulary=True), tmp_path)
    with teachers:
        sample = answer(prompt, " 12")
        teachers.submit(prompt, [sample])
        teachers.collect()
    assert sample.teacher_logprobs is not None


def test_case_20_the_same_size_with_another_tokenizer_is_refused(
    two: Sequence[FakeServer], swapped: Path, tmp_path: Path
) -> None:
    """Acceptance case 20: sizes agree and two ids mean other things; every score would be of another text. Compared by content,
    for a served teacher and for one beside the student."""
    with pytest.raises(DataError, match=r"another tokenizer than the student .2 of .* entries differ; the first is id"):
        opened(config(*two, swapped), tmp_path)
    beside = config(*two, swapped, objective="gkd", where="colocated", signal="full")
    with pytest.raises(DataError, match="another tokenizer than the student"):
        check_colocated_teachers(beside, load_tokenizer(STUDENT), [])
    assert not two[1].count("/generate")


def test_a_folder_may_be_named_by_the_server_itself(two: Sequence[FakeServer], tmp_path: Path) -> None:
    """A running server's own model path is used where it is a folder here; where it is not, the error says what to set."""
    info = {"model_path": str(TEACHER), "weight_version": "0"}
    settings = config(*two, Path())
    settings = settings.model_copy(update={"teacher": settings.teacher.model_copy(update={"path": ""})})
    with pytest.raises(DataError, match=r"serves '/models/tiny', which is no folder here: name one .* in teacher.path"):
        opened(settings, tmp_path)
    two[1].on("/model_info", lambda body: (200, info))
    teachers, _ = opened(settings, tmp_path)
    teachers.close()


def test_a_teacher_of_another_tokenizer_scores_the_text_in_its_own_tokens(
    two: Sequence[FakeServer], swapped: Path, tmp_path: Path
) -> None:
    """GVPO++ needs one number a response, so tokens need not agree: the text is encoded anew behind the teacher's own prompt, and
    the teacher's end token follows where the student ended, and only there."""
    teachers, prompt = opened(config(*two, swapped, objective="gvpo_opd", signal="sequence"), tmp_path)
    theirs = load_tokenizer(swapped)
    with teachers:
        samples = [answer(prompt, " 12"), answer(prompt, " 12", "length"), answer(prompt, "", "length")]
        teachers.submit(prompt, samples)
        teachers.collect()
    (asked,) = [body for path, body in two[1].asked if path == "/generate"][1:]
    head = list(theirs(prompt.text)["input_ids"])
    text = list(theirs.encode(" 12", add_special_tokens=False))
    assert asked["input_ids"] == [[*head, *text, 1], [*head, *text]]
    assert text != samples[1].response_ids
    want = [sum(value(token, len(head) + t) for t, token in enumerate(ids)) for ids in ([*text, 1], text, [])]
    assert [s.teacher_logprob for s in samples] == pytest.approx(want)
    assert samples[0].teacher_logprobs is None


def test_domains_need_a_teacher_each(two: Sequence[FakeServer], tmp_path: Path) -> None:
    """A prompt that no teacher speaks for must show before training, not at the step that draws it."""
    settings = config(*two, TEACHER)
    of_code = {"code": settings.teacher.model_copy(update={})}
    only = settings.teacher.model_copy(update={"path": "", "by_domain": of_code, "servers": type(settings.teacher.servers)()})
    with pytest.raises(DataError, match=r"teacher\.by_domain has no teacher for its domain ''"):
        opened(settings.model_copy(update={"teacher": only}), tmp_path)


def test_groups_are_scored_while_others_are_still_sampled(two: Sequence[FakeServer], tmp_path: Path) -> None:
    """Scoring overlaps with generation, group by group: here the last group is sampled only after the teacher was asked for an
    earlier one, so a run that scored after generating would never end (it would meet the request's limit)."""
    asked = threading.Event()
    served = 0
    lock = threading.Lock()

    def slow_last(body: dict[str, Any]) -> Answer:
        nonlocal served
        with lock:
            served += 1
            last = served == 4
        if last:
            asked.wait(15.0)
        return 200, generated(body)

    def scoring(body: dict[str, Any]) -> Answer:
        if two[1].count("/generate") > 1:  # the first is the probe
            asked.set()
        return teacher()(body)

    two[0].on("/generate", slow_last)
    two[1].on("/generate", scoring)
    with Controller(config(*two, TEACHER), tmp_path, vocab_size=261, eos_ids=[1]) as controller:
        clock = StepClock()
        samples, metrics = controller.rollout(1, clock)
    assert asked.is_set()
    assert len(samples) == 8
    assert all(s.teacher_logprobs is not None and len(s.teacher_logprobs) == len(s.response_ids) for s in samples)
    assert metrics["teacher/tokens"] == sum(len(s.response_ids) for s in samples)
    assert "time/teacher" in clock.metrics()
