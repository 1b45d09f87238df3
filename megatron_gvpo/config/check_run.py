"""Lengths, batches, data, reward, optimizer, checkpoints, log and SLURM: keys that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_gvpo.config.facts import PROMPT_FILES, Facts, Problem, wrong
from megatron_gvpo.config.schema import Config
from megatron_gvpo.config.wording import did_you_mean

REWARDS = ("exact", "math_verify", "reasoning_gym")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SLURM_TIME = re.compile(r"(\d+-)?\d{1,2}:\d{2}(:\d{2})?|\d+(-\d{1,2})?")


def problems(facts: Facts) -> Iterator[Problem]:
    yield from _lengths(facts)
    yield from _batches(facts)
    yield from _data(facts)
    yield from _optimizer(facts.config)
    yield from _checkpoint(facts.config)
    yield from _log(facts.config)
    yield from _launch(facts.config)


def _lengths(facts: Facts) -> Iterator[Problem]:
    model, rollout, shape = facts.config.model, facts.config.rollout, facts.shape
    if rollout.max_new_tokens >= model.max_length:
        yield wrong(
            f"{rollout.max_new_tokens} tokens of response leave no room for a prompt in model.max_length {model.max_length}",
            "rollout.max_new_tokens",
            "model.max_length",
        )
    if shape is None:
        return
    if model.max_length > shape.max_positions:
        yield wrong(f"{model.max_length} is above the {shape.max_positions} positions of the model", "model.max_length")
    for token in rollout.stop_token_ids:
        if not 0 <= token < shape.vocab:
            yield wrong(f"{token} is outside the model's vocabulary of {shape.vocab}", "rollout.stop_token_ids")


def _batches(facts: Facts) -> Iterator[Problem]:
    train, data, samples = facts.config.train, facts.config.parallel.data, facts.samples_per_step
    if samples < data:
        yield wrong(
            f"a step has {samples} samples (prompts_per_step x group_size), fewer than the {data} data-parallel ranks",
            "rollout.prompts_per_step",
            "rollout.group_size",
        )
    elif train.micro_batch_size * data > samples:
        yield wrong(
            f"{train.micro_batch_size} samples on each of {data} data-parallel ranks are more than the {samples} of a step",
            "train.micro_batch_size",
        )


def _data(facts: Facts) -> Iterator[Problem]:
    config, data, reward = facts.config, facts.config.data, facts.config.reward
    if not data.train:
        yield wrong("is missing: FILE.jsonl, FILE.parquet or reasoning_gym:TASK", "data.train")
    for key in ("train", "eval"):
        value = getattr(data, key)
        if value.startswith("reasoning_gym:"):
            if not value.partition(":")[2]:
                yield wrong("names no task: reasoning_gym:TASK", f"data.{key}")
        elif value and not value.endswith(PROMPT_FILES):
            yield wrong(f"must be FILE.jsonl, FILE.parquet or reasoning_gym:TASK, got {value!r}", f"data.{key}")
    if config.train.eval_every and not data.eval:
        yield wrong("there is nothing to evaluate on: set data.eval", "train.eval_every")
    if data.system_prompt and not data.chat_template:
        yield wrong("needs data.chat_template: true", "data.system_prompt")
    if not facts.needs.rewards and not data.eval:
        return
    name = reward.name
    if name not in REWARDS and not _MODULE_FUNCTION.fullmatch(name):
        yield wrong(f"must be {', '.join(REWARDS)} or module:function, got {name!r}{did_you_mean(name, REWARDS)}", "reward.name")


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, steps = config.optimizer, config.train.steps * config.train.optimizer_steps
    if optimizer.min_lr > optimizer.lr:
        yield wrong(f"{optimizer.min_lr} is above optimizer.lr {optimizer.lr}", "optimizer.min_lr", "optimizer.lr")
    if optimizer.warmup_steps >= steps and optimizer.warmup_steps:
        yield wrong(
            f"the warm-up of {optimizer.warmup_steps} steps does not end within the run's {steps} optimizer steps",
            "optimizer.warmup_steps",
        )
    if optimizer.overlap_param_gather and not (optimizer.distributed and optimizer.overlap_grad_reduce):
        yield wrong("needs optimizer.distributed and optimizer.overlap_grad_reduce", "optimizer.overlap_param_gather")
    if optimizer.cpu_offload and config.train.device == "cpu":
        yield wrong("the state is in CPU memory already: train.device is cpu", "optimizer.cpu_offload")


def _checkpoint(config: Config) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.keep_every and (not checkpoint.every or checkpoint.keep_every % checkpoint.every):
        yield wrong(
            f"{checkpoint.keep_every} is no multiple of checkpoint.every {checkpoint.every}, so it would keep none",
            "checkpoint.keep_every",
        )


def _log(config: Config) -> Iterator[Problem]:
    if not config.log.dir:
        yield wrong("is empty: the run needs a directory", "log.dir")
    for name in _PLACEHOLDER.findall(config.log.dir):
        if name not in ("name", "seed"):
            yield wrong(f"knows {{name}} and {{seed}}, not {{{name}}}", "log.dir")


def _launch(config: Config) -> Iterator[Problem]:
    launch = config.launch
    if not _SLURM_TIME.fullmatch(launch.time):
        yield wrong(f"must be HH:MM:SS or DAYS-HH:MM:SS, got {launch.time!r}", "launch.time")
    if not launch.job_name or re.search(r"\s", launch.job_name):
        yield wrong(f"must be one word, got {launch.job_name!r}", "launch.job_name")
    for name in launch.env:
        if not _IDENTIFIER.fullmatch(name):
            yield wrong("is no name of an environment variable", f"launch.env.{name}")
    for option in launch.sbatch:
        if not option.startswith("-") or "\n" in option:
            yield wrong(f"must be options of sbatch such as --qos=high, got {option!r}", "launch.sbatch")
