"""Rank 0's part of the run: servers, prompts, rewards, evaluation. The other ranks see only the samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt, PromptSets, load_prompt_sets, load_tokenizer
from megatron_gvpo.data.rewards import Score, Scorer, count_problems
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.data.stream import PromptStream
from megatron_gvpo.objectives.shaping import answered_by_student, flat_groups, overlong_penalties
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.pool import PromptIds
from megatron_gvpo.rollout.server import running_servers
from megatron_gvpo.rollout.wire import Sampling
from megatron_gvpo.train.clock import StepClock
from megatron_gvpo.train.journal import Page
from megatron_gvpo.train.memory import Memory
from megatron_gvpo.train.teacher import ServedTeachers, check_colocated_teachers, wants_served_teacher

log = logging.getLogger(__name__)


class Controller:
    """Brings rollouts and scores them. A context manager: what it starts ends with it.

    eos_ids: the ids that end a response, from the model's generation config. vocab_size: the model's own (unpadded). train:
    False for a controller that only evaluates. memory: where the run stands in its data, and what it generated before.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        train: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.config = config
        self.memory = memory or Memory()
        self._page: Page | None = None
        self._stack = ExitStack()
        try:
            self._open(run_dir, vocab_size, eos_ids, train)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, run_dir: Path, vocab_size: int, eos_ids: Sequence[int], train: bool) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        self.sets: PromptSets = load_prompt_sets(
            config.data,
            self.tokenizer,
            max_length=config.model.max_length,
            max_new_tokens=config.rollout.max_new_tokens,
            train=train,
        )
        for reason, count in self.sets.left_out.items():
            log.warning("%d prompts left out: %s", count, reason.replace("_", " "))
        if train:
            self.stream = PromptStream(self.sets.train, seed=config.train.seed, shuffle=config.data.shuffle)
            self.memory.place(self.stream)
        self.scorer = self._stack.enter_context(Scorer(config.reward))
        self.scorer.check([*self.sets.train, *self.sets.heldout])
        model, servers = config.model, config.rollout.servers
        endpoints = self._stack.enter_context(
            running_servers(model.path, servers, run_dir=run_dir / "servers", max_length=model.max_length, seed=config.train.seed)
        )
        self.engine = self._stack.enter_context(
            RolloutEngine(endpoints, config.rollout, vocab_size=vocab_size, max_length=config.model.max_length)
        )
        self.sampling = Sampling.from_config(config.rollout, eos_ids)
        self.teachers: ServedTeachers | None = None
        if train and wants_served_teacher(config):
            self.teachers = self._stack.enter_context(ServedTeachers(config, run_dir, self.tokenizer, self.sets.train))
        elif train:
            check_colocated_teachers(config, self.tokenizer, self.sets.train)
        self.shaping = objective_config(config.objective.name, config.objective.options).shaping()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollout(self, step: int, clock: StepClock) -> tuple[list[Sample], dict[str, float]]:
        """The step's complete groups, scored and shaped as the objective asks, in the order of the prompts, with metrics."""
        self._page = self.memory.begin(step, self.stream)
        prompts = self.stream.next(self.config.rollout.prompts_per_step)
        groups, scores = self._scored(prompts, f"{step}", clock)
        metrics = self._resample_flat(groups, scores, step, clock)
        metrics |= _reward_metrics([score for group in scores for score in group])
        samples = [sample for group in groups for sample in group]
        lengths = [len(s.response_ids) for s in samples]
        shaping = self.shaping
        limit = self.config.rollout.max_new_tokens
        for sample, penalty in zip(
            samples, overlong_penalties(lengths, limit, shaping.overlong_buffer, shaping.overlong_penalty), strict=True
        ):
            sample.reward = (sample.reward or 0.0) + penalty
        if self.teachers is not None:
            with clock.part("teacher"):
                metrics |= self.teachers.collect()
        return samples, {**metrics, "data/epoch": self.stream.epoch}

    def _scored(self, prompts: Sequence[Prompt], label: str, clock: StepClock) -> tuple[list[list[Sample]], list[list[Score]]]:
        """Groups of responses and their scores: the student's, or the data's own answers for the share that keeps them."""
        by_student = answered_by_student([p.id for p in prompts], self.shaping.on_policy_share, self.config.train.seed)
        asked = [p for p, student in zip(prompts, by_student, strict=True) if student]
        with clock.part("rollout"):
            answers = {i: [self._data_answer(p, f"{label}:{i}:{p.id}")] for i, p in enumerate(prompts) if not by_student[i]}
            if self.teachers is not None:
                for i, answer in answers.items():
                    self.teachers.submit(prompts[i], answer)
            size = self.config.rollout.group_size
            sampled = iter(self._generate(asked, label, size, self.sampling, teach=True) if asked else [])
            groups = [answers[i] if i in answers else next(sampled) for i in range(len(prompts))]
        with clock.part("reward"):
            return groups, self._score(prompts, groups, self._page)

    def _resample_flat(
        self, groups: list[list[Sample]], scores: list[list[Score]], step: int, clock: StepClock
    ) -> dict[str, float]:
        """DAPO's dynamic sampling: groups of equal reward give way to groups of further prompts, a limited number of times."""
        rounds = self.shaping.resample_rounds
        replaced = 0
        for number in range(rounds):
            flat = _flat(scores)
            if not flat:
                break
            fresh, fresh_scores = self._scored(self.stream.next(len(flat)), f"{step}r{number + 1}", clock)
            for place, group, score in zip(flat, fresh, fresh_scores, strict=True):
                groups[place], scores[place] = group, score
            replaced += len(flat)
        return {"batch/resampled": float(replaced), "batch/flat_left": float(len(_flat(scores)))} if rounds else {}

    def _data_answer(self, prompt: Prompt, group: str) -> Sample:
        """The data's answer as a response: the row's `response` text where it has one, else its answer, and the end token."""
        text = prompt.meta.get("response", prompt.answer)
        if text is None:
            raise DataError(f"prompt {prompt.id} has no answer to train on: set data.answer_key, or give rows a 'response'")
        ids = [int(i) for i in self.tokenizer.encode(str(text), add_special_tokens=False)]
        ids = [*ids, *self.sampling.stop_token_ids[:1]][: prompt.max_new_tokens]
        meta = {"prompt": prompt.id, "prompt_text": prompt.text, "domain": prompt.domain, "source": "data"}
        return Sample(group, list(prompt.token_ids), ids, [1] * len(ids), meta=meta)

    def evaluate(self) -> tuple[dict[str, float], list[Sample]]:
        """Accuracy on the held-out prompts, greedy and sampled at the run's temperature, with standard errors; the samples drawn.

        A response counts as right where its reward is 1.
        """
        prompts = self.sets.heldout
        if not prompts:
            return {}, []
        greedy = self._score(prompts, self._generate(prompts, "greedy", 1, self.sampling.greedy()))
        drawn = self._generate(prompts, "eval", self.config.train.eval_samples, self.sampling)
        sampled = self._score(prompts, drawn)
        metrics: dict[str, float] = {}
        for name, scores in (("greedy", greedy), ("sampled", sampled)):
            right = [sum(s.reward >= 1.0 for s in group) / len(group) for group in scores]
            mean = sum(right) / len(right)
            variance = sum((r - mean) ** 2 for r in right) / max(len(right) - 1, 1)
            metrics[f"eval/{name}"] = mean
            metrics[f"eval/{name}_se"] = math.sqrt(variance / len(right))
        return metrics, [s for group in drawn for s in group]

    def _generate(
        self, prompts: Sequence[Prompt], label: str, count: int, sampling: Sampling, *, teach: bool = False
    ) -> list[list[Sample]]:
        """Groups in the order of the prompts. teach: each is scored as soon as it is complete, while others are sampled."""
        asked = [PromptIds(f"{label}:{i}:{p.id}", p.token_ids) for i, p in enumerate(prompts)]
        found: dict[int, list[Sample]] = {}
        page = self._page if teach else None
        for index, ask in enumerate(asked):
            if page is not None and (known := page.group(ask.group, ask.ids, count)) is not None:
                found[index] = known
                if self.teachers is not None:
                    self.teachers.submit(prompts[index], known)
        missing = [index for index in range(len(asked)) if index not in found]
        for group in self.engine.generate_groups([asked[i] for i in missing], count, sampling) if missing else ():
            index = missing[group.index]
            found[index] = group.samples
            if page is not None:
                page.add_group(asked[index].group, group.samples)
            if teach and self.teachers is not None:
                self.teachers.submit(prompts[index], group.samples)
        for index, prompt in enumerate(prompts):
            for sample in found[index]:
                sample.meta = {
                    "prompt": prompt.id,
                    "prompt_text": prompt.text,
                    **({"domain": prompt.domain} if prompt.domain else {}),
                }
        return [found[i] for i in range(len(prompts))]

    def _score(
        self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], page: Page | None = None
    ) -> list[list[Score]]:
        """Scores by group; each sample gets its reward and the text that was judged. Those that `page` has are not made anew."""
        known = {i: page.scores(group[0].group) for i, group in enumerate(samples)} if page is not None else {}
        found = {i: scores for i, scores in known.items() if scores is not None}
        missing = [(i, sample) for i, group in enumerate(samples) if i not in found for sample in group]
        for sample in (sample for group in samples for sample in group):
            sample.meta["text"] = str(self.tokenizer.decode(sample.response_ids, skip_special_tokens=True))
        made = iter(self.scorer.score([prompts[i] for i, _ in missing], [sample.meta["text"] for _, sample in missing]))
        fresh = {i: [next(made) for _ in group] for i, group in enumerate(samples) if i not in found}
        if page is not None and fresh:
            page.add_scores({samples[i][0].group: scores for i, scores in fresh.items()})
        found |= fresh
        for i, group in enumerate(samples):
            for sample, score in zip(group, found[i], strict=True):
                sample.reward = score.reward
        return [found[i] for i in range(len(samples))]


def _flat(scores: Sequence[Sequence[Score]]) -> list[int]:
    """The places of the groups whose raw rewards are all equal."""
    names = [str(place) for place, group in enumerate(scores) for _ in group]
    return [int(name) for name in flat_groups(names, [score.reward for group in scores for score in group])]


def _reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    rewards = [s.reward for s in scores]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    problems: dict[Any, int] = dict(count_problems(scores))
    return {"reward/mean": mean, "reward/std": spread, **{f"reward/{kind}": float(n) for kind, n in problems.items()}}
