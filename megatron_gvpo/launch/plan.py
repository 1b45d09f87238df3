"""`megatron-gvpo plan`: what a run will need, from its config and the model's config.json, without torch and without a GPU."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.config import Config
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.hf_shape import ModelShape, ShapeError, read_shape
from megatron_gvpo.config.objectives import objective_config
from megatron_gvpo.launch.memory import GIB, micro_batch_tokens, rank_memory
from megatron_gvpo.launch.parameters import (
    active_parameters,
    count_parameters,
    padded_vocab,
    rank_parameters,
    stage_layers,
)


def make_plan(config: Config) -> dict[str, Any]:
    """The plan as JSON values. `memory_gib` is the largest rank's, by part; `stages` has every pipeline stage's.

    Raises ConfigError where the model's config.json cannot be read.
    """
    shape = _shape(config.model.path, "model.path")
    colocated = config.teacher.where == "colocated" and config.teacher.path
    teacher = _shape(config.teacher.path, "teacher.path") if colocated else None
    needs = objective_config(config.objective.name, config.objective.options).needs()
    counts = count_parameters(shape)
    stages = []
    for stage, layers in enumerate(stage_layers(shape, config.parallel)):
        memory = rank_memory(config, shape, needs, stage, teacher)
        stages.append(
            {
                "stage": stage,
                "layers": layers,
                "parameters": rank_parameters(shape, config.parallel, stage).total,
                "memory_gib": {part: size / GIB for part, size in memory.items()},
                "memory_gib_total": sum(memory.values()) / GIB,
            }
        )
    largest = max(stages, key=lambda stage: stage["memory_gib_total"])
    return {
        "model": config.model.path,
        "parameters": sum(counts.values()),
        "parameters_by_part": counts,
        "parameters_active": active_parameters(shape),
        "memory_gib": largest["memory_gib"],
        "memory_gib_total": largest["memory_gib_total"],
        "largest_stage": largest["stage"],
        "stages": stages,
        "layout": _layout(config, shape),
        "step": _step(config),
    }


def _shape(folder: str, key: str) -> ModelShape:
    try:
        return read_shape(folder)
    except ShapeError as error:
        raise ConfigError([f"{key}: {error}"]) from None


def _layout(config: Config, shape: ModelShape) -> dict[str, Any]:
    parallel = config.parallel
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
    }


def _step(config: Config) -> dict[str, int]:
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    return {
        "samples": samples,
        "optimizer_steps": config.train.optimizer_steps,
        "tokens_at_most": samples * config.model.max_length,
        "micro_batch_tokens": micro_batch_tokens(config),
    }
