"""How long a step takes, from counted work at a stated efficiency, the pipeline's bubble, and links at a stated speed.

stage    = (layers x layer work + head work) / (tensor ranks x peak x efficiency) + its tensor, context, expert traffic
training = (micro-batches + (stages - 1) / virtual stages) x the slowest stage     (arXiv 2104.04473, section 2.2)
step     = rollouts + teacher + no-grad passes + training + exposed gradient traffic + optimizer + weight sync
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.activations import element_bytes, micro_batch_tokens, micro_batches
from megatron_gvpo.launch.hardware import Assumptions
from megatron_gvpo.launch.memory import optimizer_copies
from megatron_gvpo.launch.parameters import rank_parameters, stage_layers
from megatron_gvpo.launch.traffic import Traffic, step_traffic
from megatron_gvpo.launch.work import head_passes, no_grad_passes, step_work, token_work

# The host's side of an offloaded optimizer: bytes per second over PCIe 5 in one direction, and Adam's parameters per second.
_PCIE, _HOST_ADAM = 25e9, 1.5e9


@dataclass(frozen=True)
class TrainTime:
    """Seconds of one step in the trainer, by part. bubble: share of `forward_backward` in which a stage waits."""

    forward_backward: float
    no_grad: float
    gradients: float
    optimizer: float
    gupo: float
    weight_sync: float
    bubble: float
    mfu: float
    traffic: dict[str, Traffic]

    @property
    def total(self) -> float:
        return self.forward_backward + self.no_grad + self.gradients + self.optimizer + self.gupo + self.weight_sync


def train_time(config: Config, shape: ModelShape, needs: Needs, assumed: Assumptions, teacher: ModelShape | None) -> TrainTime:
    """teacher: a colocated teacher's shape, whose forward pass counts with the no-grad passes."""
    parallel, steps = config.parallel, config.train.optimizer_steps
    gpu, count, chunks = assumed.gpu, micro_batches(config), parallel.virtual_pipeline or 1
    traffic = step_traffic(config, shape, needs, gpu)
    passes = no_grad_passes(config, needs)
    forward_s, head_s = _stage_seconds(config, shape, assumed)
    again = 1 if config.model.recompute == "full" else 0
    # The traffic inside the layers is counted over all passes: three parts of training, one of each no-grad pass.
    inside = sum(traffic[kind].seconds for kind in ("tensor", "context", "expert") if kind in traffic)
    share = steps * (3 + again) / (steps * (3 + again) + passes)
    slots = count + (parallel.pipeline - 1) / chunks
    slowest = max(
        (3 + again) * forward_s[stage] + (head_passes(config) * head_s if stage == parallel.pipeline - 1 else 0.0)
        for stage in range(parallel.pipeline)
    )
    forward_only = max(forward + (head_s if stage == parallel.pipeline - 1 else 0.0) for stage, forward in enumerate(forward_s))
    traffic_slot = inside / (count * steps)
    between = traffic["pipeline"].seconds if "pipeline" in traffic else 0.0
    forward_backward = steps * slots * (slowest + traffic_slot * share) + between
    no_grad = passes * slots * forward_only + inside * (1 - share)
    if teacher is not None:
        no_grad += slots * max(_stage_seconds(config, teacher, assumed)[0])
    work = step_work(config, shape, needs, teacher)
    speed = gpu.bf16_flops * assumed.efficiency
    gupo = work.gupo / (parallel.world_size / parallel.pipeline * speed)
    exposed = _exposed(config, traffic, slowest)
    optimizer = steps * _optimizer(config, shape, assumed)
    sync = traffic["weight_sync"].seconds
    return TrainTime(
        forward_backward=forward_backward,
        no_grad=no_grad,
        gradients=exposed,
        optimizer=optimizer,
        gupo=gupo,
        weight_sync=sync,
        bubble=1 - count / slots,
        mfu=work.model / (forward_backward * parallel.world_size * gpu.bf16_flops),
        traffic=traffic,
    )


def _stage_seconds(config: Config, shape: ModelShape, assumed: Assumptions) -> tuple[list[float], float]:
    """Seconds of one micro-batch's forward pass through each stage's layers, and through the head."""
    parallel, gpu = config.parallel, assumed.gpu
    work = token_work(shape, config.model.max_length)
    tokens = micro_batch_tokens(config)
    bf16 = gpu.bf16_flops * assumed.efficiency * parallel.tensor
    fp8 = bf16
    if config.precision.fp8 != "none" and gpu.fp8_flops:
        fp8 = gpu.fp8_flops * assumed.fp8_efficiency * parallel.tensor
    first = config.precision.bf16_first_layers if config.precision.fp8 != "delayed" else 0
    last = shape.layers - (config.precision.bf16_last_layers if config.precision.fp8 != "delayed" else 0)
    seconds, start = [], 0
    for layers in stage_layers(shape, parallel):
        narrow = sum(first <= layer < last for layer in range(start, start + layers))
        products = narrow / fp8 + (layers - narrow) / bf16
        seconds.append(tokens * (work.products * products + work.attention * layers / bf16))
        start += layers
    trained = tokens * config.rollout.max_new_tokens / config.model.max_length
    return seconds, trained * work.head / bf16


def _exposed(config: Config, traffic: dict[str, Traffic], slot: float) -> float:
    """Gradient and parameter traffic that nothing hides. Overlapped, the last micro-batch's backward pass (two thirds of its
    slot) hides gradients, and the first one's forward pass (one third) hides parameters."""
    total = 0.0
    for kind, overlaps, share in (
        ("gradients", config.optimizer.overlap_grad_reduce, 2 / 3),
        ("parameters", config.optimizer.overlap_param_gather, 1 / 3),
    ):
        if kind in traffic:
            hidden = config.train.optimizer_steps * slot * share if overlaps else 0.0
            total += max(0.0, traffic[kind].seconds - hidden)
    return total


def _optimizer(config: Config, shape: ModelShape, assumed: Assumptions) -> float:
    """Adam reads and writes its state, the gradient and the weight once; offloaded, gradients and weights cross PCIe."""
    held = rank_parameters(shape, config.parallel, 0)
    dense, experts = optimizer_copies(config, shape)
    shard = held.dense / dense + held.experts / experts
    size = element_bytes(config)
    if config.optimizer.cpu_offload:
        return shard * ((4 + size) / _PCIE + 1 / _HOST_ADAM)
    return shard * (2 * (8 if size == 4 else 12) + 4 + size) / assumed.gpu.memory_bandwidth
