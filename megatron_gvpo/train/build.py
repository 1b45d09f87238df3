"""From a config to this rank's engine: model, weights, optimizer, objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.batches import Layout
from megatron_gvpo.mcore.forward import HeadSettings
from megatron_gvpo.mcore.head import use_hidden_state_head
from megatron_gvpo.mcore.model import build_model, output_shard
from megatron_gvpo.mcore.optimizer import make_training
from megatron_gvpo.mcore.startup import Ranks
from megatron_gvpo.mcore.step import Engine
from megatron_gvpo.mcore.weights import init_random, load_hf
from megatron_gvpo.objectives.base import Objective
from megatron_gvpo.objectives.registry import create_objective


@dataclass(frozen=True)
class Built:
    """chunks: the bare model chunks (for weights in and out); reference: those of a frozen reference model, if any."""

    engine: Engine
    objective: Objective[Any]
    chunks: list[Any]
    reference: list[Any] | None


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
    multiple = (parallel.tensor if head.sequence_parallel else 1) * (2 * parallel.context if parallel.context > 1 else 1)
    layout = Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.virtual_pipeline is not None)
    return Built(Engine(ranks, training, objective, head, layout), objective, chunks, reference)


def _model(config: Config, ranks: Ranks) -> list[Any]:
    chunks = build_model(config.model, config.parallel, config.precision, ranks)
    if config.model.init == "pretrained":
        load_hf(chunks, config.model.path)
    else:
        init_random(chunks, config.train.seed)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    return chunks
