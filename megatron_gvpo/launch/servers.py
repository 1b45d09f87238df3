"""The servers' side of a plan: what fits in their memory, and how long a batch of rollouts or of teacher scores takes.

Decoding reads all weights and every sequence's keys and values once a token, so memory bandwidth is its limit (compute beyond
it). SGLang keeps about an eighth of a GPU's memory for activations and CUDA graphs by default.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.schema import Config, ServersSection
from megatron_gvpo.launch.hardware import GIB, Assumptions
from megatron_gvpo.launch.parameters import active_parameters, count_parameters

_STATIC_SHARE = 0.87
# Launches and all-reduces of one layer in one decoding step, seconds; measured by nobody here.
_LAYER_OVERHEAD_S = 8e-6


@dataclass(frozen=True)
class ServerPlan:
    """One kind of servers. weights, kv_cache: bytes on each of their GPUs. sequences: of full length, at once on one server."""

    role: str
    servers: int
    gpus_each: int
    weights: int
    kv_cache: int
    bytes_per_token: int
    sequences: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.sequences >= 1

    def as_json(self) -> dict[str, object]:
        return {
            "role": self.role,
            "servers": self.servers,
            "gpus": self.servers * self.gpus_each,
            "memory_gib": {"weights": self.weights / GIB, "kv_cache": max(self.kv_cache, 0) / GIB},
            "kv_bytes_per_token": self.bytes_per_token,
            "full_length_sequences_per_server": self.sequences,
            "fits": self.fits,
            "seconds_per_step": self.seconds,
        }


def server_count(section: ServersSection) -> int:
    return len(section.urls) if section.launch == "none" else section.count


def rollout_servers(config: Config, shape: ModelShape, assumed: Assumptions) -> ServerPlan:
    """The servers that sample: seconds to sample one step's batch."""
    section = config.rollout.servers
    weights, cache, per_token, sequences = _memory(section, shape, config.model.max_length, assumed)
    samples = config.rollout.prompts_per_step * config.rollout.group_size
    each = -(-samples // server_count(section))
    seconds = 0.0
    if sequences:
        batch = min(each, sequences, section.concurrency)
        waves = -(-each // batch)
        seconds = waves * config.rollout.max_new_tokens * _decode_step(section, shape, config, batch, assumed)
        prompts = config.model.max_length - config.rollout.max_new_tokens
        groups = -(-each // config.rollout.group_size)  # the responses of a group share their prompt's cache
        seconds += (
            groups * prompts * 2 * active_parameters(shape) / (section.tensor * assumed.gpu.bf16_flops * assumed.efficiency)
        )
    return ServerPlan("rollout", server_count(section), section.tensor, weights, cache, per_token, sequences, seconds)


def teacher_servers(config: Config, teacher: ModelShape, assumed: Assumptions) -> ServerPlan:
    """The servers that score: seconds for one step's sequences, each read once."""
    section = config.teacher.servers
    weights, cache, per_token, sequences = _memory(section, teacher, config.model.max_length, assumed)
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * config.model.max_length
    speed = server_count(section) * section.tensor * assumed.gpu.bf16_flops * assumed.efficiency
    seconds = 2 * active_parameters(teacher) * tokens / speed
    return ServerPlan("teacher", server_count(section), section.tensor, weights, cache, per_token, sequences, seconds)


def weight_bytes(section: ServersSection) -> int:
    """Bytes of one weight on a server: its dtype, or one under SGLang's `--quantization fp8`."""
    if "fp8" in section.args or "--quantization=fp8" in section.args:
        return 1
    return 4 if section.dtype == "float32" else 2


def _memory(section: ServersSection, shape: ModelShape, length: int, assumed: Assumptions) -> tuple[int, int, int, int]:
    weights = sum(count_parameters(shape).values()) * weight_bytes(section) // section.tensor
    cache = int(assumed.gpu.memory_gib * GIB * _STATIC_SHARE) - weights
    # A GPU holds whole key-value heads: where there are fewer than GPUs, copies of them.
    heads = max(shape.kv_heads // section.tensor, 1)
    per_token = 2 * shape.layers * heads * shape.head_dim * (4 if section.dtype == "float32" else 2)
    return weights, cache, per_token, max(cache, 0) // (per_token * length)


def _decode_step(section: ServersSection, shape: ModelShape, config: Config, batch: int, assumed: Assumptions) -> float:
    gpu = assumed.gpu
    size = weight_bytes(section)
    read = sum(count_parameters(shape).values()) * size / section.tensor
    if shape.experts is not None:
        # A small batch wakes only some of the experts.
        awake = 1 - (1 - shape.experts.per_token / shape.experts.count) ** batch
        dense = active_parameters(shape) * size / section.tensor
        read = dense + (read - dense) * awake
    heads = max(shape.kv_heads // section.tensor, 1)
    mean_length = config.model.max_length - config.rollout.max_new_tokens / 2
    read += batch * mean_length * 2 * shape.layers * heads * shape.head_dim * 2
    compute = 2 * active_parameters(shape) * batch / (section.tensor * gpu.bf16_flops * assumed.efficiency)
    return max(read / (gpu.memory_bandwidth * assumed.decode_efficiency), compute) + shape.layers * _LAYER_OVERHEAD_S
