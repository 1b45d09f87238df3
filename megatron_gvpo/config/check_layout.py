"""The model's shape against the ranks, and the precision against both."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gvpo.config.alignment import FP8_MULTIPLE
from megatron_gvpo.config.facts import Facts, Problem, wrong
from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.megatron_fields import OWNED, transformer_fields
from megatron_gvpo.config.schema import Config, ParallelSection
from megatron_gvpo.config.wording import did_you_mean


def problems(facts: Facts) -> Iterator[Problem]:
    config, parallel = facts.config, facts.config.parallel
    yield from _world(parallel)
    yield from _switches(parallel)
    if facts.shape is not None:
        yield from _divides(facts.shape, parallel)
        yield from _experts(facts.shape, parallel)
    if facts.shape is not None or parallel.pipeline == 1:
        yield from _stages(facts.shape, parallel)
    yield from _precision(config, facts.shape)
    yield from _megatron(config)


def unbuildable(facts: Facts) -> Iterator[Problem]:
    """Models whose sizes can be planned with, and whose layers the trainer does not build."""
    shape = facts.shape
    if shape is None:
        return
    if shape.experts is not None:
        yield wrong(
            f"{shape.family} models (mixtures of experts) can be planned, not trained; llama, qwen2 and qwen3 can", "model.path"
        )
    if shape.out_bias or shape.mlp_bias:
        yield wrong("a bias on the attention's output projection or in the MLP is not supported", "model.path")


def _world(parallel: ParallelSection) -> Iterator[Problem]:
    model = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.world_size % model:
        yield wrong(
            f"tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {model} does not divide "
            f"nodes {parallel.nodes} x gpus_per_node {parallel.gpus_per_node} = {parallel.world_size} ranks",
            *(f"parallel.{key}" for key in ("tensor", "pipeline", "context") if getattr(parallel, key) > 1),
            "parallel.gpus_per_node",
        )


def _switches(parallel: ParallelSection) -> Iterator[Problem]:
    if parallel.sequence and parallel.tensor == 1:
        yield wrong(
            "sequence parallelism splits over the tensor-parallel ranks; set parallel.tensor above 1", "parallel.sequence"
        )
    if parallel.virtual_pipeline is not None:
        if parallel.pipeline == 1:
            yield wrong("needs parallel.pipeline above 1", "parallel.virtual_pipeline")
        elif parallel.virtual_pipeline == 1:
            yield wrong("one chunk per stage is the plain pipeline; leave it out, or take 2 or more", "parallel.virtual_pipeline")
    if parallel.pipeline == 1:
        for key in ("first_stage_layers", "last_stage_layers"):
            if getattr(parallel, key) is not None:
                yield wrong("needs parallel.pipeline above 1", f"parallel.{key}")


def _divides(shape: ModelShape, parallel: ParallelSection) -> Iterator[Problem]:
    tensor = parallel.tensor
    if shape.heads % tensor:
        yield wrong(f"{tensor} does not divide the model's {shape.heads} attention heads", "parallel.tensor")
    elif shape.kv_heads % tensor:
        yield wrong(f"{tensor} does not divide the model's {shape.kv_heads} key-value heads", "parallel.tensor")
    if shape.experts is None and shape.ffn % tensor:
        yield wrong(f"{tensor} does not divide the model's feed-forward width {shape.ffn}", "parallel.tensor")


def _experts(shape: ModelShape, parallel: ParallelSection) -> Iterator[Problem]:
    expert_tensor = parallel.expert_tensor or parallel.tensor
    if shape.experts is None:
        for key in ("expert", "expert_tensor"):
            if (getattr(parallel, key) or 1) > 1:
                yield wrong("the model has no experts", f"parallel.{key}")
        return
    if shape.experts.count % parallel.expert:
        yield wrong(f"{parallel.expert} does not divide the model's {shape.experts.count} experts", "parallel.expert")
    if shape.experts.ffn % expert_tensor:
        yield wrong(
            f"{expert_tensor} does not divide an expert's width {shape.experts.ffn}", "parallel.expert_tensor", "parallel.tensor"
        )
    if parallel.world_size % (grid := parallel.expert * expert_tensor * parallel.pipeline):
        yield wrong(
            f"expert {parallel.expert} x expert_tensor {expert_tensor} x pipeline {parallel.pipeline} = {grid} does not divide "
            f"the {parallel.world_size} ranks",
            "parallel.expert",
            "parallel.expert_tensor",
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield wrong("a model with experts trains at tensor > 1 only with sequence: true", "parallel.sequence", "parallel.tensor")


def _stages(shape: ModelShape | None, parallel: ParallelSection) -> Iterator[Problem]:
    if shape is None or parallel.pipeline == 1:
        return
    ends = [(key, getattr(parallel, key)) for key in ("first_stage_layers", "last_stage_layers")]
    given = [(key, layers) for key, layers in ends if layers is not None]
    middle, stages = shape.layers - sum(layers for _, layers in given), parallel.pipeline - len(given)
    keys = [f"parallel.{key}" for key, _ in given]
    if middle < stages or (stages == 0 and middle):
        yield wrong(
            f"leaves {middle} of the model's {shape.layers} layers for the other {stages} stages", *keys, "parallel.pipeline"
        )
        return
    if stages and middle % stages:
        yield wrong(
            f"{stages} stages do not divide {middle} layers evenly; give first_stage_layers or last_stage_layers",
            "parallel.pipeline",
            *keys,
        )
        return
    chunks = parallel.virtual_pipeline or 1
    per_stage = [*given, ("pipeline", middle // stages)] if stages else given
    for key, layers in per_stage:
        if layers % chunks:
            yield wrong(
                f"{chunks} chunks do not divide the {layers} layers of a stage",
                "parallel.virtual_pipeline",
                f"parallel.{key}",
            )


def _precision(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    precision = config.precision
    if precision.fp8 == "none":
        if precision.fp8_params:
            yield wrong("needs a recipe in precision.fp8", "precision.fp8_params")
        return
    if config.train.device == "cpu":
        yield wrong("FP8 needs a GPU; train.device is cpu", "precision.fp8", "train.device")
    if precision.params != "bf16":
        yield wrong(f"FP8 runs beside bf16, not {precision.params}", "precision.params", "precision.fp8")
    if precision.fp8 == "delayed" and (precision.bf16_first_layers or precision.bf16_last_layers):
        yield wrong(
            "delayed scaling cannot keep layers in bf16: set bf16_first_layers and bf16_last_layers to 0, or take tensorwise",
            "precision.fp8",
        )
    if shape is None:
        return
    per_stage = shape.layers // config.parallel.pipeline
    for key in ("bf16_first_layers", "bf16_last_layers"):
        if precision.fp8 != "delayed" and getattr(precision, key) > per_stage:
            yield wrong(f"{getattr(precision, key)} is more than the {per_stage} layers of a pipeline stage", f"precision.{key}")
    multiple, tensor = FP8_MULTIPLE[precision.fp8], config.parallel.tensor
    ffn = shape.experts.ffn if shape.experts else shape.ffn
    expert_tensor = (config.parallel.expert_tensor or tensor) if shape.experts else tensor
    sizes = {"hidden size": shape.hidden, "feed-forward width per rank": ffn // expert_tensor}
    for name, size in sizes.items():
        if size % multiple:
            yield wrong(f"the model's {name}, {size}, is no multiple of {multiple}, which {precision.fp8} needs", "precision.fp8")


def _megatron(config: Config) -> Iterator[Problem]:
    """`model.megatron` passes fields through by name; the names are read from Megatron-Core's source, not imported."""
    if not config.model.megatron:
        return
    known = transformer_fields()
    for name in config.model.megatron:
        if name in OWNED:
            yield wrong(f"is set by {OWNED[name]}", f"model.megatron.{name}")
        elif known and name not in known:
            yield wrong(
                f"Megatron-Core's TransformerConfig has no such field{did_you_mean(name, known)}", f"model.megatron.{name}"
            )
