"""`megatron-gvpo plan`: what a run will need, from its config and the model's config.json, without torch and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_gvpo.config import Config
from megatron_gvpo.config.alignment import run_multiple
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.hf_shape import ModelShape, ShapeError, read_shape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.launch.activations import micro_batch_tokens, micro_batches
from megatron_gvpo.launch.hardware import GIB, Assumptions
from megatron_gvpo.launch.layout import link, node_rows
from megatron_gvpo.launch.memory import RankMemory, rank_memory
from megatron_gvpo.launch.parameters import (
    active_parameters,
    count_parameters,
    padded_vocab,
    rank_parameters,
    stage_layers,
)
from megatron_gvpo.launch.servers import ServerPlan, rollout_servers, teacher_servers
from megatron_gvpo.launch.teacher_payload import per_second, teacher_payloads
from megatron_gvpo.launch.timing import TrainTime, train_time
from megatron_gvpo.launch.work import step_work

DAY_S = 86400.0


@dataclass(frozen=True)
class Subject:
    """A run with what planning reads from disk, so that many layouts of it can be tried. colocated: such a teacher's shape."""

    config: Config
    shape: ModelShape
    needs: Needs
    colocated: ModelShape | None
    served: ModelShape | None


def read_subject(config: Config) -> Subject:
    """Raises ConfigError where a model's config.json cannot be read."""
    teacher = None
    if config.teacher.path:
        teacher = _shape(config.teacher.path, "teacher.path")
    colocated = config.teacher.where == "colocated"
    needs = objective_config(config.objective.name, config.objective.options).needs()
    return Subject(
        config,
        _shape(config.model.path, "model.path"),
        needs,
        teacher if colocated else None,
        None if colocated else teacher,
    )


def make_plan(config: Config, assumed: Assumptions | None = None) -> dict[str, Any]:
    """The plan as JSON values. `memory_gib` is the largest rank's, by part; `stages` has every pipeline stage's.

    Times and what fits are for `assumed`'s GPU; in the CPU device mode there are none. Raises ConfigError where a model's
    config.json cannot be read.
    """
    subject = read_subject(config)
    shape, parallel = subject.shape, config.parallel
    assumed = assumed or Assumptions()
    counts = count_parameters(shape)
    memory = stage_memory(subject)
    stages = [
        {
            "stage": stage,
            "layers": layers,
            "parameters": rank_parameters(shape, parallel, stage).total,
            "memory_gib": {part: size / GIB for part, size in memory[stage].parts.items()},
            "memory_gib_total": memory[stage].total / GIB,
            "fullest_phase": memory[stage].fullest,
        }
        for stage, layers in enumerate(stage_layers(shape, parallel))
    ]
    largest = max(stages, key=lambda stage: stage["memory_gib_total"])
    plan: dict[str, Any] = {
        "model": config.model.path,
        "parameters": sum(counts.values()),
        "parameters_by_part": counts,
        "parameters_active": active_parameters(shape),
        "memory_gib": largest["memory_gib"],
        "memory_gib_total": largest["memory_gib_total"],
        "largest_stage": largest["stage"],
        "largest_rank": largest["stage"] * (parallel.world_size // parallel.pipeline),
        "stages": stages,
        "layout": _layout(config, shape),
        "step": _step(config),
    }
    if config.train.device == "cuda":
        plan |= _on_gpus(subject, assumed, largest["memory_gib_total"])
    teacher = subject.colocated or subject.served
    if teacher is not None and subject.needs.teacher != "none":
        plan["teacher"] = teacher_payloads(config, teacher)
        if "seconds" in plan:
            plan["teacher"] = per_second(plan["teacher"], plan["seconds"]["step"])
    return plan


def stage_memory(subject: Subject) -> list[RankMemory]:
    """A rank's memory on every pipeline stage."""
    stages = range(subject.config.parallel.pipeline)
    return [rank_memory(subject.config, subject.shape, subject.needs, stage, subject.colocated) for stage in stages]


def _on_gpus(subject: Subject, assumed: Assumptions, largest_gib: float) -> dict[str, Any]:
    """What depends on the GPU: whether it fits, the servers, times, traffic, tokens a day and GPU hours."""
    config, gpu = subject.config, assumed.gpu
    servers = [rollout_servers(config, subject.shape, assumed)]
    if subject.served is not None:
        servers.append(teacher_servers(config, subject.served, assumed))
    time = train_time(config, subject.shape, subject.needs, assumed, subject.colocated)
    return {
        "gpu": {"name": gpu.name, "memory_gib": gpu.memory_gib, "usable_gib": gpu.usable_gib},
        "fits": largest_gib <= gpu.usable_gib and all(server.fits for server in servers),
        "servers": [server.as_json() for server in servers],
        "assumed": {
            "efficiency": assumed.efficiency,
            "fp8_efficiency": assumed.fp8_efficiency,
            "decode_efficiency": assumed.decode_efficiency,
            "length": "every sequence has model.max_length tokens",
        },
        "flops": _flops(subject),
        "seconds": _seconds(time, servers),
        "pipeline_bubble": time.bubble,
        "mfu": time.mfu,
        "traffic": {kind: traffic.as_json() for kind, traffic in time.traffic.items()},
        "cost": _cost(config, time, servers),
    }


def _flops(subject: Subject) -> dict[str, float]:
    work = step_work(subject.config, subject.shape, subject.needs, subject.colocated)
    parts = {"train": work.train, "recompute": work.recompute, "no_grad": work.no_grad, "teacher": work.teacher}
    return {**parts, "gupo": work.gupo, "total": work.total}


def step_seconds(time: TrainTime, servers: list[ServerPlan]) -> float:
    """One after the other: rollouts, the served teacher's scores, training, weights to the servers."""
    return time.total + sum(server.seconds for server in servers)


def _seconds(time: TrainTime, servers: list[ServerPlan]) -> dict[str, float]:
    parts = {f"{server.role}_servers": server.seconds for server in servers}
    parts |= {
        "no_grad_passes": time.no_grad,
        "forward_backward": time.forward_backward,
        "exposed_gradient_traffic": time.gradients,
        "optimizer": time.optimizer,
        "gupo": time.gupo,
        "weight_sync": time.weight_sync,
    }
    return {**parts, "step": step_seconds(time, servers)}


def _cost(config: Config, time: TrainTime, servers: list[ServerPlan]) -> dict[str, float]:
    seconds = step_seconds(time, servers)
    gpus = config.parallel.world_size + sum(server.servers * server.gpus_each for server in servers)
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * config.model.max_length
    return {
        "gpus": gpus,
        "tokens_per_day": tokens * DAY_S / seconds,
        "run_hours": config.train.steps * seconds / 3600,
        "gpu_hours": config.train.steps * seconds * gpus / 3600,
    }


def _shape(folder: str, key: str) -> ModelShape:
    try:
        return read_shape(folder)
    except ShapeError as error:
        raise ConfigError([f"{key}: {error}"]) from None


def _layout(config: Config, shape: ModelShape) -> dict[str, Any]:
    parallel = config.parallel
    axes = ("tensor", "context", "pipeline", "data_context", *(("expert",) if shape.experts else ()))
    return {
        "nodes": parallel.nodes,
        "ranks_per_node": parallel.gpus_per_node,
        "world": parallel.world_size,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "virtual_pipeline": parallel.virtual_pipeline or 1,
        "context": parallel.context,
        "data": parallel.data,
        "expert": parallel.expert,
        "sequence": parallel.sequence,
        "padded_vocabulary": padded_vocab(shape, parallel),
        "token_multiple": run_multiple(config.precision, parallel),
        "links": {axis: link(parallel, axis) for axis in axes},
        "placement": node_rows(parallel),
    }


def _step(config: Config) -> dict[str, int]:
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "samples": samples,
        "optimizer_steps": config.train.optimizer_steps,
        "tokens_at_most": samples * config.model.max_length,
        "micro_batch_tokens": micro_batch_tokens(config),
        "micro_batches": micro_batches(config),
    }
