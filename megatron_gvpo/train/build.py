"""From a config to this rank's engine: model, weights, optimizer, objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_gvpo.config.alignment import run_multiple
from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import Config, ModelSection
from megatron_gvpo.mcore.batches import Layout
from megatron_gvpo.mcore.forward import HeadSettings
from megatron_gvpo.mcore.head import use_hidden_state_head
from megatron_gvpo.mcore.model import build_model, output_shard
from megatron_gvpo.mcore.optimizer import make_training
from megatron_gvpo.mcore.startup import Ranks
from megatron_gvpo.mcore.step import Engine
from megatron_gvpo.mcore.teacher import ColocatedTeacher, teacher_parallel
from megatron_gvpo.mcore.weights import init_random, load_hf
from megatron_gvpo.objectives.base import Objective
from megatron_gvpo.objectives.registry import create_objective
from megatron_gvpo.train.teacher_signals import TeacherSignals


@dataclass(frozen=True)
class Built:
    """chunks: the bare model chunks (for weights in and out). reference: those of a frozen reference model; teacher: if any."""

    engine: Engine
    objective: Objective[Any]
    chunks: list[Any]
    reference: list[Any] | None
    teacher: TeacherSignals | None = None


def build(config: Config, ranks: Ranks) -> Built:
    """Collective. DataError or ValueError, in one line, for a model folder that does not fit."""
    objective = create_objective(config.objective.name, config.objective.options)
    chunks = _model(config, ranks)
    reference = None
    if objective.needs.reference:
        reference = _model(config, ranks)
        for chunk in reference:
            chunk.requires_grad_(False)
    parallel = config.parallel
    training = make_training(
        chunks,
        config.optimizer,
        config.precision,
        config.train.steps * config.train.optimizer_steps,
        next(chunks[0].parameters()).dtype,
    )
    head = HeadSettings(
        shard=output_shard(chunks[-1], ranks),
        temperature=config.rollout.temperature,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
    )
    multiple = run_multiple(config.precision, parallel)
    layout = Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.virtual_pipeline is not None)
    engine = Engine(ranks, training, objective, head, layout)
    return Built(engine, objective, chunks, reference, _teacher(config, engine))


def _teacher(config: Config, engine: Engine) -> TeacherSignals | None:
    """Teachers in the student's layout, each with its own sizes; or what takes in the served ones' distributions."""
    wanted, section = engine.objective.needs.teacher, config.teacher
    if wanted == "none":
        return None
    sources = {**section.by_domain, **({"": section} if section.path else {})}
    colocated: dict[str, ColocatedTeacher] = {}
    for domain, source in sources.items() if section.where == "colocated" else ():
        parallel = teacher_parallel(config.parallel, read_shape(source.path).layers)
        chunks = build_model(ModelSection(path=source.path), parallel, config.precision, engine.ranks)
        load_hf(chunks, source.path)
        for chunk in chunks:
            use_hidden_state_head(chunk)
        colocated[domain] = ColocatedTeacher(
            chunks, engine.ranks, engine.layout, engine.head, source.path, offload=section.offload
        )
    student = engine.head.shard.size
    ids = min([student, *(read_shape(source.path).vocab for source in sources.values() if source.path)])
    return TeacherSignals(section, wanted, colocated, ids=ids, last_stage=engine.ranks.is_last_stage)


def _model(config: Config, ranks: Ranks) -> list[Any]:
    chunks = build_model(config.model, config.parallel, config.precision, ranks)
    if config.model.init == "pretrained":
        load_hf(chunks, config.model.path)
    else:
        init_random(chunks, config.train.seed)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    return chunks
