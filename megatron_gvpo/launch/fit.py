"""`plan --fit`: the layout of a run's own GPUs that trains it fastest and fits; or what is missing, and what would help.

Every layout is checked by the same rules as `validate`, and planned by the same sums as `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_gvpo.config import Config
from megatron_gvpo.config.check_layout import problems as layout_problems
from megatron_gvpo.config.check_run import problems as run_problems
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.facts import Facts
from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.launch.hardware import GIB, Assumptions
from megatron_gvpo.launch.plan import Subject, read_subject, stage_memory
from megatron_gvpo.launch.servers import rollout_servers
from megatron_gvpo.launch.timing import train_time

_LEAST_PIECE = 4096  # tokens of a sequence that each context-parallel rank holds at least
_MOST_NODES = 64  # times the run's own, when more are asked for

# What can be changed beside the layout, from the cheapest on.
_REMEDIES: tuple[tuple[str, dict[str, dict[str, Any]]], ...] = (
    ("gradients in bf16 (less exact sums)", {"precision": {"grad_reduce_fp32": False}}),
    ("optimizer state in CPU memory (a slower optimizer step)", {"optimizer": {"cpu_offload": True}}),
    (
        "gradients in bf16 and optimizer state in CPU memory",
        {"precision": {"grad_reduce_fp32": False}, "optimizer": {"cpu_offload": True}},
    ),
)


@dataclass(frozen=True)
class Candidate:
    """One layout. sets: what `--set` takes to get there from the config. seconds: of training in a step."""

    config: Config
    sets: tuple[str, ...]
    peak_gib: float
    seconds: float


@dataclass(frozen=True)
class Found:
    """best: the fastest that fits; None where none does. closest: the one that needs least memory. tried, fitting: counts."""

    best: Candidate | None
    closest: Candidate | None
    tried: int
    fitting: int


def fit_plan(config: Config, assumed: Assumptions | None = None) -> dict[str, Any]:
    """The answer as JSON values: `found`, `sets`, `peak_gib`, `usable_gib`; or `missing_gib` and `remedies`."""
    if config.train.device != "cuda":
        raise ConfigError(["train.device: --fit looks for a layout on GPUs, and this run is for the CPU device mode"])
    assumed = assumed or Assumptions()
    subject, usable = read_subject(config), assumed.gpu.usable_gib
    found = search(subject, assumed)
    answer: dict[str, Any] = {
        "found": found.best is not None,
        "gpu": assumed.gpu.name,
        "usable_gib": usable,
        "world": config.parallel.world_size,
        "tried": found.tried,
        "fitting": found.fitting,
        "now": {"peak_gib": _peak_gib(subject), "fits": _peak_gib(subject) <= usable},
    }
    shown = found.best or found.closest
    if shown is not None:
        answer |= {
            "sets": list(shown.sets),
            "parallel": shown.config.parallel.model_dump(),
            "recompute": shown.config.model.recompute,
            "micro_batch_tokens": shown.config.train.micro_batch_tokens,
            "peak_gib": shown.peak_gib,
            "train_seconds": shown.seconds,
        }
        answer["missing_gib"] = max(0.0, shown.peak_gib - usable)
    if found.best is None:
        answer["remedies"] = list(_remedies(subject, assumed))
    if server := _server_advice(subject, assumed):
        answer["servers"] = server
    return answer


def fit_text(answer: dict[str, Any]) -> str:
    """The answer for a person."""
    counts = f"{answer['tried']} layouts of {answer['world']} GPUs tried, {answer['fitting']} fit"
    lines = ["", f"fit      {counts} in {answer['usable_gib']:.1f} GiB of an {answer['gpu']}"]
    if "sets" not in answer:
        lines.append("         no layout divides this model over these GPUs")
    elif answer["found"]:
        change = " ".join(f"--set {item}" for item in answer["sets"]) or "the config as it is"
        lines.append(f"         fastest: {change}")
        lines.append(f"         peak {answer['peak_gib']:.1f} GiB, {answer['train_seconds']:.1f} s of training a step")
    else:
        change = " ".join(f"--set {item}" for item in answer["sets"]) or "the config as it is"
        lines.append(
            f"         the smallest needs {answer['peak_gib']:.1f} GiB: {answer['missing_gib']:.1f} GiB a GPU are missing"
        )
        lines.append(f"         it is: {change}")
    for remedy in answer.get("remedies", ()):
        verdict = "fits" if remedy["fits"] else f"{remedy['missing_gib']:.1f} GiB still missing"
        lines.append(f"         with {remedy['what']}: {verdict} ({remedy['peak_gib']:.1f} GiB): {' '.join(remedy['sets'])}")
    if "servers" in answer:
        lines.append(f"         {answer['servers']}")
    return "\n".join(lines)


def search(subject: Subject, assumed: Assumptions) -> Found:
    """Every layout of the subject's GPUs that `validate` would accept."""
    usable = assumed.gpu.usable_gib
    best = closest = None
    tried = fitting = 0
    for config in _layouts(subject):
        trial = replace(subject, config=config)
        peak = _peak_gib(trial)
        tried += 1
        if closest is None or peak < closest.peak_gib:
            closest = Candidate(config, _sets(subject.config, config), peak, 0.0)
        if peak > usable:
            continue
        fitting += 1
        seconds = train_time(config, subject.shape, subject.needs, assumed, subject.colocated).total
        # The plainer of two equally fast layouts comes first.
        if best is None or seconds < best.seconds * 0.999:
            best = Candidate(config, _sets(subject.config, config), peak, seconds)
    if best is None and closest is not None:
        seconds = train_time(closest.config, subject.shape, subject.needs, assumed, subject.colocated).total
        closest = replace(closest, seconds=seconds)
    return Found(best, closest, tried, fitting)


def _layouts(subject: Subject) -> Iterator[Config]:
    """From the plainest to the most divided."""
    config, shape = subject.config, subject.shape
    world, node = config.parallel.world_size, config.parallel.gpus_per_node
    objective = objective_config(config.objective.name, config.objective.options)
    for tensor in _divisors(node):
        for pipeline in _divisors(world // tensor):
            for context in _divisors(world // (tensor * pipeline)):
                # Shorter pieces of a sequence leave a ring's hops nothing to hide behind.
                if pipeline > shape.layers or (context > 1 and context * _LEAST_PIECE > config.model.max_length):
                    continue
                for expert in _divisors(shape.experts.count) if shape.experts else [1]:
                    if world % (expert * pipeline):
                        continue
                    for ends in _stage_ends(shape, pipeline):
                        for chunks in _chunk_counts(shape, pipeline, ends):
                            parallel = config.parallel.model_copy(
                                update={
                                    "tensor": tensor,
                                    "pipeline": pipeline,
                                    "virtual_pipeline": chunks,
                                    "context": context,
                                    "expert": expert,
                                    "expert_tensor": 1 if shape.experts else None,
                                    "sequence": tensor > 1,
                                    "first_stage_layers": ends[0],
                                    "last_stage_layers": ends[1],
                                }
                            )
                            base = config.model_copy(update={"parallel": parallel})
                            if _acceptable(base, subject, objective):
                                yield from _sizes(base)


def _sizes(config: Config) -> Iterator[Config]:
    """The layout with smaller micro-batches, and with recomputation."""
    longest = config.model.max_length
    budgets = sorted({max(config.train.micro_batch_tokens, longest), max(config.train.micro_batch_tokens // 2, longest), longest})
    for recompute in ("none", "full"):
        for budget in reversed(budgets):
            model = config.model.model_copy(update={"recompute": recompute})
            yield config.model_copy(
                update={"model": model, "train": config.train.model_copy(update={"micro_batch_tokens": budget})}
            )


def _stage_ends(shape: ModelShape, pipeline: int) -> list[tuple[int | None, int | None]]:
    """(first, last) layers of uneven stages: the ends take what the middle does not divide."""
    if pipeline == 1 or shape.layers % pipeline == 0:
        return [(None, None)]
    if pipeline == 2:
        return [(-(-shape.layers // 2), None)]
    middle = -(-shape.layers // pipeline)
    left = shape.layers - middle * (pipeline - 2)
    return [(left // 2, left - left // 2)] if left >= 2 else []


def _chunk_counts(shape: ModelShape, pipeline: int, ends: tuple[int | None, int | None]) -> list[int | None]:
    if pipeline == 1 or ends != (None, None):
        return [None]
    layers = shape.layers // pipeline
    return [None, *(chunks for chunks in _divisors(layers) if 2 <= chunks <= 5)]


def _acceptable(config: Config, subject: Subject, objective: Any) -> bool:
    facts = Facts(config, objective, subject.needs, subject.shape, subject.colocated or subject.served)
    checks = (*layout_problems(facts), *run_problems(facts))
    return not any(problem.severity == "error" for problem in checks)


def _peak_gib(subject: Subject) -> float:
    """Of the largest rank: on the first, the second or the last stage."""
    return max(memory.total for memory in stage_memory(subject)) / GIB


def _sets(before: Config, after: Config) -> tuple[str, ...]:
    """What changes, as `section.key=value`."""
    sets = []
    for section in ("parallel", "model", "train", "precision", "optimizer"):
        old, new = getattr(before, section), getattr(after, section)
        for key in type(new).model_fields:
            value = getattr(new, key)
            if value != getattr(old, key):
                sets.append(f"{section}.{key}={_spelled(value)}")
    return tuple(sets)


def _spelled(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _remedies(subject: Subject, assumed: Assumptions) -> Iterator[dict[str, Any]]:
    """What else was tried: other places and precisions for state, then more nodes until it fits."""
    for what, changes in _REMEDIES:
        yield _tried(what, subject, _changed(subject.config, changes), assumed)
    nodes = subject.config.parallel.nodes
    for factor in range(2, _MOST_NODES + 1):
        config = _changed(subject.config, {"parallel": {"nodes": nodes * factor}})
        tried = _tried(f"{nodes * factor} nodes", subject, config, assumed)
        if tried["fits"]:
            yield tried
            return


def _tried(what: str, subject: Subject, config: Config, assumed: Assumptions) -> dict[str, Any]:
    found = search(replace(subject, config=config), assumed)
    shown = found.best or found.closest
    if shown is None:
        return {"what": what, "fits": False, "peak_gib": float("inf"), "missing_gib": float("inf"), "sets": []}
    return {
        "what": what,
        "fits": found.best is not None,
        "peak_gib": shown.peak_gib,
        "missing_gib": max(0.0, shown.peak_gib - assumed.gpu.usable_gib),
        "sets": [f"--set {item}" for item in _sets(subject.config, shown.config)],
    }


def _changed(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update=sections)


def _server_advice(subject: Subject, assumed: Assumptions) -> str:
    """The smallest server that holds the model, where the config's does not."""
    config = subject.config
    if rollout_servers(config, subject.shape, assumed).fits:
        return ""
    for tensor in _divisors(max(config.parallel.gpus_per_node, 1)):
        servers = config.rollout.servers.model_copy(update={"tensor": tensor})
        trial = config.model_copy(update={"rollout": config.rollout.model_copy(update={"servers": servers})})
        if tensor > config.rollout.servers.tensor and rollout_servers(trial, subject.shape, assumed).fits:
            return f"a rollout server needs {tensor} GPUs: --set rollout.servers.tensor={tensor}"
    return "no server on one node holds this model and one full-length sequence"


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


__all__ = ["Candidate", "Found", "fit_plan", "fit_text", "search"]
