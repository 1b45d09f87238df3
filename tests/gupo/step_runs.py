"""GUPO through the engine on a small Megatron model, at any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.mcore.step_cases import OBJECTIVES, TEMPERATURE, samples

VOCAB = 300


@dataclass
class Run:
    """One measured batch; `gradients` by parameter name, and [G] and [G, G] results as tensors."""

    multipliers_G: Any
    uncertainty_G: Any
    cosine_GG: Any
    metrics: dict[str, float]
    gradients: dict[str, Any]


def prepare_engine(path: str, ranks: Any, parallel: Any, objective_name: str, micro: int) -> tuple[Any, Any, Any, Any]:
    """(engine, share, samples, kept) in float64, with the plan's groups whole."""
    import torch

    from megatron_gvpo.config.schema import ModelSection, OptimizerSection, PrecisionSection
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.batches import Layout
    from megatron_gvpo.mcore.forward import HeadSettings
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.model import build_model, output_shard
    from megatron_gvpo.mcore.optimizer import make_training
    from megatron_gvpo.mcore.step import Engine
    from megatron_gvpo.mcore.weights import load_hf
    from megatron_gvpo.objectives.batch import kept_samples
    from megatron_gvpo.objectives.registry import create_objective

    precision = PrecisionSection(params="fp32")
    chunks = build_model(ModelSection(path=path), parallel, precision, ranks, params_dtype=torch.float64)
    load_hf(chunks, path)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    training = make_training(chunks, OptimizerSection(distributed=False), precision, 1, torch.float64)
    objective = create_objective(objective_name, OBJECTIVES[objective_name])
    sequence = parallel.sequence and parallel.tensor > 1
    multiple = (parallel.tensor if sequence else 1) * (2 * parallel.context if parallel.context > 1 else 1)
    layout = Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.virtual_pipeline is not None)
    engine = Engine(ranks, training, objective, HeadSettings(output_shard(chunks[-1], ranks), TEMPERATURE, sequence), layout)
    batch_samples = samples()
    kept, _ = kept_samples(batch_samples, 2)
    plan = plan_micro_batches(
        [len(batch_samples[i]) for i in kept],
        ranks.data.size,
        max_samples=micro,
        count_multiple=ranks.pipeline.size if ranks.virtual_pipeline else 1,
        groups=[batch_samples[i].group for i in kept],
    )
    return engine, engine.cut(batch_samples, kept, plan), batch_samples, kept


def gradients_with(engine: Any, whole: Any, batch: Any, multipliers_G: Any) -> dict[str, Any]:
    """Every parameter's finished gradient, whole, by Hugging Face name; the model's weights are back as they were after."""
    import torch

    from megatron_gvpo.mcore.weights import export_hf

    engine.gradients(whole, batch, engine.objective.prepare(batch, engine.comm), multipliers_G)
    parameters = [p for chunk in engine.training.chunks for p in chunk.parameters()]
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.main_grad)
        found = {name: tensor.clone() for name, tensor in export_hf(engine.training.chunks)}
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)
    return found


def run(path: str, ranks: Any, parallel: Any, objective_name: str, gupo: Any, micro: int) -> Run:
    from megatron_gvpo.mcore.gupo_step import GroupWeigher

    engine, share, batch_samples, kept = prepare_engine(path, ranks, parallel, objective_name, micro)
    weigher = GroupWeigher(engine, gupo, seed=3)
    found = weigher.collect(share)
    batch, whole = engine.batch_of(batch_samples, kept, share, {"logprobs": found.logprobs_T})
    weights = weigher.weigh(found, batch, step=1)
    gradients = gradients_with(engine, whole, batch, weights.multipliers_G)
    return Run(weights.multipliers_G, weights.uncertainty_G, weights.cosine_GG, weights.metrics, gradients)
