"""Rank 0's part of the run: servers, prompts, rewards, evaluation. The other ranks see only the samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.prompts import Prompt, PromptSets, load_prompt_sets, load_tokenizer
from megatron_gvpo.data.rewards import Score, Scorer, count_problems
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.data.stream import PromptStream
from megatron_gvpo.rollout.engine import RolloutEngine
from megatron_gvpo.rollout.pool import PromptIds
from megatron_gvpo.rollout.server import running_servers
from megatron_gvpo.rollout.wire import Sampling
from megatron_gvpo.train.clock import StepClock

log = logging.getLogger(__name__)


class Controller:
    """Brings rollouts and scores them. A context manager: what it starts ends with it.

    eos_ids: the ids that end a response, from the model's generation config. vocab_size: the model's own (unpadded).
    """

    def __init__(self, config: Config, run_dir: Path, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.config = config
        self._stack = ExitStack()
        try:
            self._open(run_dir, vocab_size, eos_ids)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, run_dir: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        config = self.config
        self.tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        self.sets: PromptSets = load_prompt_sets(
            config.data, self.tokenizer, max_length=config.model.max_length, max_new_tokens=config.rollout.max_new_tokens
        )
        for reason, count in self.sets.left_out.items():
            log.warning("%d prompts left out: %s", count, reason.replace("_", " "))
        self.stream = PromptStream(self.sets.train, seed=config.train.seed, shuffle=config.data.shuffle)
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

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rollout(self, step: int, clock: StepClock) -> tuple[list[Sample], dict[str, float]]:
        """The step's complete groups, scored, in the order of the prompts, and what there is to say about them."""
        prompts = self.stream.next(self.config.rollout.prompts_per_step)
        with clock.part("rollout"):
            samples = self._generate(prompts, f"{step}", self.config.rollout.group_size, self.sampling)
        with clock.part("reward"):
            scores = self._score(prompts, samples)
        metrics = _reward_metrics([s for group in scores for s in group])
        return [s for group in samples for s in group], {**metrics, "data/epoch": self.stream.epoch}

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

    def _generate(self, prompts: Sequence[Prompt], label: str, count: int, sampling: Sampling) -> list[list[Sample]]:
        asked = [PromptIds(f"{label}:{i}:{p.id}", p.token_ids) for i, p in enumerate(prompts)]
        found: dict[int, list[Sample]] = {}
        for group in self.engine.generate_groups(asked, count, sampling):
            found[group.index] = group.samples
        for index, prompt in enumerate(prompts):
            for sample in found[index]:
                sample.meta = {
                    "prompt": prompt.id,
                    "prompt_text": prompt.text,
                    **({"domain": prompt.domain} if prompt.domain else {}),
                }
        return [found[i] for i in range(len(prompts))]

    def _score(self, prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]]) -> list[list[Score]]:
        """Scores by group; each sample gets its reward and the text that was judged."""
        flat = [(prompt, sample) for prompt, group in zip(prompts, samples, strict=True) for sample in group]
        texts = [str(self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)) for _, sample in flat]
        scores = self.scorer.score([prompt for prompt, _ in flat], texts)
        for (_, sample), text, score in zip(flat, texts, scores, strict=True):
            sample.reward = score.reward
            sample.meta["text"] = text
        rest = iter(scores)
        return [[next(rest) for _ in group] for group in samples]


def _reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    rewards = [s.reward for s in scores]
    mean = sum(rewards) / len(rewards)
    spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    problems: dict[Any, int] = dict(count_problems(scores))
    return {"reward/mean": mean, "reward/std": spread, **{f"reward/{kind}": float(n) for kind, n in problems.items()}}
