"""Bytes and messages of a step along every kind of parallelism, and what they cost over their link.

Counted for the busiest rank, one direction. A ring all-gather or reduce-scatter of n bytes over g ranks brings each rank
(g - 1)/g n bytes, an all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.activations import element_bytes, micro_batch_tokens, micro_batches
from megatron_gvpo.launch.hardware import LINK_SHARE, Gpu
from megatron_gvpo.launch.layout import Link, link
from megatron_gvpo.launch.parameters import count_parameters, rank_parameters, stage_layers
from megatron_gvpo.launch.work import no_grad_passes

# Start-up of one collective, seconds: what makes many small messages slow.
_LATENCY_S = {"none": 0.0, "nvlink": 10e-6, "network": 30e-6}


@dataclass(frozen=True)
class Traffic:
    """bytes, messages: of one step on the busiest rank. seconds: over the link, as if nothing overlapped."""

    what: str
    link: Link
    bytes: float
    messages: float
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def step_traffic(config: Config, shape: ModelShape, needs: Needs, gpu: Gpu) -> dict[str, Traffic]:
    """By kind: tensor, context, pipeline, expert, gradients, parameters, weight_sync; kinds that do not occur are left out."""
    found = {
        "tensor": _tensor(config, shape, needs, gpu),
        "context": _context(config, shape, needs, gpu),
        "pipeline": _pipeline(config, shape, needs, gpu),
        "expert": _expert(config, shape, needs, gpu),
        "gradients": _data(config, shape, gpu, gradients=True),
        "parameters": _data(config, shape, gpu, gradients=False),
        "weight_sync": _weight_sync(config, shape, gpu),
    }
    return {kind: traffic for kind, traffic in found.items() if traffic.bytes}


def priced(what: str, kind: Link, size: float, messages: float, gpu: Gpu) -> Traffic:
    speed = {"none": float("inf"), "nvlink": gpu.nvlink, "network": gpu.network}[kind] * LINK_SHARE
    return Traffic(what, kind, size, messages, size / speed + messages * _LATENCY_S[kind])


def _passes(config: Config, needs: Needs) -> tuple[float, float]:
    """Forward and backward passes through the layers in one step; recomputation is one more forward."""
    steps = config.train.optimizer_steps
    again = steps if config.model.recompute == "full" else 0
    return steps + again + no_grad_passes(config, needs), float(steps)


def _layers(config: Config, shape: ModelShape) -> int:
    return max(stage_layers(shape, config.parallel))


def _wide(config: Config, shape: ModelShape) -> float:
    return micro_batch_tokens(config) * shape.hidden * element_bytes(config)


def _tensor(config: Config, shape: ModelShape, needs: Needs, gpu: Gpu) -> Traffic:
    """Sequence parallelism: two all-gathers and two reduce-scatters a layer forward, and two all-gathers more backward (the
    weight gradients need their inputs whole). Without it: two all-reduces each way (arXiv 2205.05198, section 4.2)."""
    ranks = config.parallel.tensor
    forward, backward = _passes(config, needs)
    # Experts without tensor parallelism of their own leave only the attention's collectives.
    blocks = 1 if shape.experts is not None and (config.parallel.expert_tensor or ranks) == 1 else 2
    one = (ranks - 1) / ranks * _wide(config, shape) * blocks
    count = (2 * forward + 3 * backward) if config.parallel.sequence else 2 * (forward + backward)
    calls = micro_batches(config) * _layers(config, shape) * blocks * count
    size = one / blocks * calls
    return priced("activations of the layers", link(config.parallel, "tensor"), size, calls, gpu)


def _context(config: Config, shape: ModelShape, needs: Needs, gpu: Gpu) -> Traffic:
    """Keys and values travel once round the ring forward; backward they do so again, and their gradients with them."""
    parallel = config.parallel
    forward, backward = _passes(config, needs)
    keys = 2 * shape.kv_heads * shape.head_dim // parallel.tensor * element_bytes(config)
    hops = micro_batches(config) * _layers(config, shape) * (parallel.context - 1)
    size = hops * micro_batch_tokens(config) * keys * (forward + 2 * backward)
    return priced("keys and values", link(parallel, "context"), size, hops * (forward + 2 * backward), gpu)


def _pipeline(config: Config, shape: ModelShape, needs: Needs, gpu: Gpu) -> Traffic:
    parallel = config.parallel
    if parallel.pipeline == 1:
        return priced("", "none", 0, 0, gpu)
    forward, backward = _passes(config, needs)
    # Recomputation sends nothing.
    forward -= config.train.optimizer_steps if config.model.recompute == "full" else 0
    messages = micro_batches(config) * (parallel.virtual_pipeline or 1) * (forward + backward)
    size = messages * _wide(config, shape) / (parallel.tensor if parallel.sequence else 1)
    return priced("activations between stages", link(parallel, "pipeline"), size, messages, gpu)


def _expert(config: Config, shape: ModelShape, needs: Needs, gpu: Gpu) -> Traffic:
    """Tokens to their experts and back: two all-to-alls a layer, each way."""
    experts, parallel = shape.experts, config.parallel
    if experts is None or parallel.expert == 1:
        return priced("", "none", 0, 0, gpu)
    forward, backward = _passes(config, needs)
    own = _wide(config, shape) / (parallel.tensor if parallel.sequence else 1)
    calls = 2 * micro_batches(config) * _layers(config, shape) * (forward + backward)
    size = calls * own * experts.per_token * (parallel.expert - 1) / parallel.expert
    return priced("tokens to experts and back", link(parallel, "expert"), size, calls, gpu)


def _data(config: Config, shape: ModelShape, gpu: Gpu, *, gradients: bool) -> Traffic:
    """The distributed optimizer scatters gradients and gathers weights, once an optimizer step; otherwise gradients are
    all-reduced and weights stay."""
    parallel, steps = config.parallel, config.train.optimizer_steps
    ranks = parallel.data * parallel.context
    held = max((rank_parameters(shape, parallel, stage) for stage in (0, parallel.pipeline - 1)), key=lambda rank: rank.total)
    expert_ranks = 1
    if shape.experts is not None:
        grid = parallel.expert * (parallel.expert_tensor or parallel.tensor) * parallel.pipeline
        expert_ranks = parallel.world_size // grid
    elements = held.dense * (ranks - 1) / ranks + held.experts * (expert_ranks - 1) / expert_ranks
    if not config.optimizer.distributed and not gradients:
        elements = 0.0
    size = (4 if config.precision.grad_reduce_fp32 else element_bytes(config)) if gradients else element_bytes(config)
    if not gradients and config.precision.fp8_params:
        size = 1
    times = steps * (2 if gradients and not config.optimizer.distributed else 1)
    buckets = max(1.0, held.total / 40e6)  # Megatron-Core's buckets hold 40 million parameters or more
    what = "gradients" if gradients else "weights after the optimizer's step"
    return priced(what, link(parallel, "data_context"), elements * size * times, buckets * steps, gpu)


def _weight_sync(config: Config, shape: ModelShape, gpu: Gpu) -> Traffic:
    """From rank 0 to the servers: the whole model once, in buckets, after it was put together from the ranks that hold it."""
    size = sum(count_parameters(shape).values()) * element_bytes(config)
    buckets = -(-size // (config.rollout.bucket_mib * 2**20))
    return priced("the model to the servers", "network", size, buckets, gpu)
