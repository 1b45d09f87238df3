"""GPU memory of a trainer rank, by part, from the config alone.

Weights, gradients and optimizer state are counted exactly; activations and the log-prob engine follow what their code keeps.
Not in it: the allocator's fragmentation, NCCL's buffers and the CUDA context.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.activations import activation_bytes, element_bytes
from megatron_gvpo.launch.hardware import GIB
from megatron_gvpo.launch.head_memory import gupo_memory, head_memory
from megatron_gvpo.launch.parameters import count_parameters, fp8_parameters, padded_vocab, rank_parameters

__all__ = ["GIB", "RankMemory", "rank_memory"]

# Held from start to end; the others come and go.
_ALWAYS = ("weights", "fp8_copies", "gradients", "optimizer", "reference", "teacher")
_PHASES = {"training": ("activations", "logprobs"), "gupo": ("gupo",), "weight_sync": ("weight_sync",)}


@dataclass(frozen=True)
class RankMemory:
    """Bytes by part. Parts of different phases are never held together, so `total` can be less than the sum."""

    parts: dict[str, int]

    @property
    def always(self) -> int:
        return sum(size for part, size in self.parts.items() if part in _ALWAYS)

    @property
    def phases(self) -> dict[str, int]:
        """What each phase holds on top of `always`."""
        return {phase: sum(self.parts.get(part, 0) for part in parts) for phase, parts in _PHASES.items()}

    @property
    def total(self) -> int:
        return self.always + max(self.phases.values())

    @property
    def fullest(self) -> str:
        phases = self.phases
        return max(phases, key=lambda phase: phases[phase])


def rank_memory(config: Config, shape: ModelShape, needs: Needs, stage: int, teacher: ModelShape | None = None) -> RankMemory:
    """One rank of pipeline stage `stage`. teacher: a colocated teacher's shape."""
    parallel, precision, size = config.parallel, config.precision, element_bytes(config)
    held = rank_parameters(shape, parallel, stage)
    last = stage == parallel.pipeline - 1
    head = head_memory(config, shape) if last else 0
    parts = {
        "weights": held.total * size,
        "gradients": held.total * (4 if precision.grad_reduce_fp32 else size),
        "optimizer": _optimizer(config, shape, held.dense, held.experts),
        "activations": activation_bytes(config, shape, stage),
        "logprobs": head,
    }
    if precision.fp8 != "none" and not precision.fp8_params:
        # Each product's weight, quantised for the forward and for the backward pass, and kept over the micro-batches. Weights
        # that are themselves FP8 take these two bytes in place of bf16's.
        parts["fp8_copies"] = 2 * fp8_parameters(config, shape, stage)
    if needs.reference:
        parts["reference"] = held.total * size
    if teacher is not None:
        parts["teacher"] = rank_parameters(teacher, parallel, stage).total * size
    if config.gupo.enabled is not False and last:
        parts["gupo"] = gupo_memory(config, shape)
    parts["weight_sync"] = _weight_sync(config, shape)
    return RankMemory(parts)


def _optimizer(config: Config, shape: ModelShape, dense: int, experts: int) -> int:
    """Adam's two moments in fp32, and fp32 master weights beside bf16 ones, of this rank's shard."""
    if config.optimizer.cpu_offload:
        return 0
    dense_copies, expert_copies = optimizer_copies(config, shape)
    return (dense // dense_copies + experts // expert_copies) * (8 if element_bytes(config) == 4 else 12)


def optimizer_copies(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Over how many ranks the optimizer state of dense and of expert parameters is sharded."""
    parallel = config.parallel
    if not config.optimizer.distributed:
        return 1, 1
    dense = parallel.world_size // (parallel.tensor * parallel.pipeline)
    if shape.experts is None:
        return dense, 1
    return dense, parallel.world_size // ((parallel.expert_tensor or parallel.tensor) * parallel.expert * parallel.pipeline)


def _weight_sync(config: Config, shape: ModelShape) -> int:
    """The largest matrix gathered and put together, and a bucket with its flattened copy."""
    size = element_bytes(config)
    largest = max(padded_vocab(shape, config.parallel), 2 * shape.ffn) * shape.hidden * size
    whole = sum(count_parameters(shape).values()) * size
    return 2 * largest + 2 * min(config.rollout.bucket_mib * 2**20, whole)
