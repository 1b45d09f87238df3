"""Rank 0's served teachers: started or found, checked before training, and asked as soon as a group of responses is complete."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.config.schema import Config, TeacherSource
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt, load_prompt_sets, load_tokenizer
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.server import Endpoint, running_servers
from megatron_gvpo.rollout.teacher import Text
from megatron_gvpo.rollout.teacher_cache import weights_digest
from megatron_gvpo.rollout.teacher_engine import TeacherEngine, TeacherServers, model_path_of
from megatron_gvpo.rollout.teacher_wire import Scored
from megatron_gvpo.train.teacher_tokens import Translator, check_same_tokens, difference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# A text may take more tokens in another tokenizer; twice as many is room for any two that are in use.
_LONGER_TEXTS = 2


def wants_served_teacher(config: Config) -> bool:
    """Whether the run's objective asks for a signal that teacher servers give."""
    needs = objective_config(config.objective.name, config.objective.options).needs()
    return needs.teacher != "none" and config.teacher.where == "served"


def check_colocated_teachers(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
    """DataError for a teacher beside the student whose tokens are not the student's, and for a domain without one."""
    section = config.teacher
    needs = objective_config(config.objective.name, config.objective.options).needs()
    if needs.teacher == "none" or section.where != "colocated":
        return
    sources: dict[str, TeacherSource] = {**section.by_domain, **({"": section} if section.path else {})}
    _check_domains(sources, prompts)
    student_vocab = read_shape(config.model.path).vocab
    for source in sources.values():
        check_same_tokens(tokenizer, student_vocab, source.path, align=section.align_vocabulary)


def _check_domains(sources: Mapping[str, TeacherSource], prompts: Sequence[Prompt]) -> None:
    missing = None if "" in sources else next((p for p in prompts if p.domain not in sources), None)
    if missing is not None:
        raise DataError(
            f"prompt {missing.id}: teacher.by_domain has no teacher for its domain {missing.domain!r}; add one, or set "
            "teacher.path for all others"
        )


@dataclass(frozen=True)
class _Foreign:
    """What it takes to ask a teacher of another tokenizer. prompts: the ids of each prompt in the teacher's tokens, by id."""

    translator: Translator
    prompts: dict[str, list[int]]


@dataclass(frozen=True)
class _Waiting:
    samples: list[Sample]
    foreign: bool
    scores: Future[list[Scored]]


class ServedTeachers:
    """A context manager: the servers that it starts end with it.

        teachers.submit(prompt, samples)     # returns at once
        metrics = teachers.collect()         # every submitted sample has its signal

    DataError or ServerError, in one line, before training, for a teacher that cannot give what the objective needs: other
    tokens, another vocabulary, no scores, no teacher for a domain of the prompts.
    """

    def __init__(self, config: Config, run_dir: Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._foreign: dict[str, _Foreign] = {}
        self._waiting: list[_Waiting] = []
        self._stack = ExitStack()
        try:
            self._open(run_dir, prompts)
        except BaseException:
            self._stack.close()
            raise
        self._before = self.engine.counts()

    def submit(self, prompt: Prompt, samples: list[Sample]) -> None:
        """Let the prompt's teacher score its responses. Raises what went wrong with an earlier submission."""
        for waiting in self._waiting:
            if waiting.scores.done():
                waiting.scores.result()
        domain = prompt.domain if prompt.domain in self._sources else ""
        foreign = self._foreign.get(domain)
        texts = [self._text(prompt, sample, foreign) for sample in samples]
        self._waiting.append(_Waiting(samples, foreign is not None, self.engine.submit(domain, texts)))

    def collect(self) -> dict[str, float]:
        """Wait for all scores and put them into their samples; metrics of what was scored since the last call.

        Each request has its own limit and tries, so this ends; an error names server and sample.
        """
        for waiting in self._waiting:
            for sample, score in zip(waiting.samples, waiting.scores.result(), strict=True):
                _fill(sample, score, waiting.foreign)
        self._waiting = []
        now = self.engine.counts()
        new = {name: now[name] - self._before[name] for name in now}
        self._before = now
        asked = max(new["tokens"] - new["from_cache"], 1.0)
        return {
            "teacher/tokens": new["tokens"],
            "teacher/from_cache": new["from_cache"],
            "teacher/second_requests": new["second_requests"],
            "teacher/bytes_per_token": new["bytes"] / asked,
        }

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ServedTeachers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, run_dir: Path, prompts: Sequence[Prompt]) -> None:
        config, section = self._config, self._config.teacher
        self._sources: dict[str, TeacherSource] = {domain: source for domain, source in section.by_domain.items()}
        if section.path or section.servers.urls:
            self._sources[""] = section
        _check_domains(self._sources, prompts)
        teachers: dict[str, TeacherServers] = {}
        servers = config.rollout.servers
        first_gpu = servers.count * servers.tensor if servers.launch == "local" else 0
        for domain, source in self._sources.items():
            source = self._with_folder(source)
            shared, max_length = self._common_ids(domain, source)
            endpoints = self._stack.enter_context(
                running_servers(
                    source.path,
                    source.servers,
                    run_dir=run_dir / "servers",
                    max_length=max_length,
                    name=re.sub(r"\W", "_", f"teacher_{domain}" if domain else "teacher"),
                    seed=config.train.seed,
                    first_gpu=first_gpu,
                )
            )
            first_gpu += source.servers.count * source.servers.tensor if source.servers.launch == "local" else 0
            head = read_shape(source.path).vocab
            weights = weights_digest(source.path) if section.cache else ""
            if section.cache and not weights:
                log.warning("teacher.cache is not used: %s holds no weights to tell one teacher from another by", source.path)
            teachers[domain] = TeacherServers(endpoints, shared, max_length, weights, head)
        self.engine = self._stack.enter_context(TeacherEngine(teachers, section, temperature=config.rollout.temperature))

    def _with_folder(self, source: TeacherSource) -> TeacherSource:
        """The source with the folder of its tokenizer and config.json: the configured one, or the one its server names."""
        if source.path:
            return source
        endpoint = Endpoint(source.servers.urls[0].rstrip("/"), source.servers.api_key)
        told = model_path_of(endpoint, self._config.teacher.request_timeout_s)
        if not (Path(told) / "config.json").is_file():
            raise DataError(
                f"{endpoint}: serves {told!r}, which is no folder here: name one with the teacher's tokenizer and config.json in "
                "teacher.path, so that its tokens can be compared with the student's"
            )
        return source.model_copy(update={"path": told})

    def _common_ids(self, domain: str, source: TeacherSource) -> tuple[int, int]:
        """(ids that it may be asked for, tokens of the longest text), after its tokens were compared with the student's."""
        config = self._config
        student_vocab = read_shape(config.model.path).vocab
        if config.teacher.signal == "sequence" and difference(self._tokenizer, load_tokenizer(source.path)):
            self._foreign[domain] = _Foreign(Translator(source.path), self._foreign_prompts(source))
            teacher = read_shape(source.path)
            return teacher.vocab, min(_LONGER_TEXTS * config.model.max_length, teacher.max_positions)
        align = config.teacher.align_vocabulary
        return check_same_tokens(self._tokenizer, student_vocab, source.path, align=align), config.model.max_length

    def _foreign_prompts(self, source: TeacherSource) -> dict[str, list[int]]:
        """Every training prompt as the teacher would be given it: its own template and tokens."""
        config = self._config
        longest = _LONGER_TEXTS * config.model.max_length
        sets = load_prompt_sets(config.data, load_tokenizer(source.path), max_length=longest, max_new_tokens=1)
        return {prompt.id: prompt.token_ids for prompt in sets.train}

    def _text(self, prompt: Prompt, sample: Sample, foreign: _Foreign | None) -> Text:
        label = f"a sample of group {sample.group}"
        if foreign is None:
            return Text(label, sample.prompt_ids, sample.response_ids)
        if prompt.id not in foreign.prompts:
            raise DataError(f"prompt {prompt.id} is too long for the teacher, or it has no such prompt under its own template")
        text = str(self._tokenizer.decode(sample.response_ids, skip_special_tokens=True))
        return Text(label, foreign.prompts[prompt.id], foreign.translator.response(text, sample.finish_reason == "stop"))


def _fill(sample: Sample, score: Scored, foreign: bool) -> None:
    if foreign:
        sample.teacher_logprob = sum(score.logprobs)
        return
    sample.teacher_logprobs = score.logprobs
    sample.teacher_top = score.top
