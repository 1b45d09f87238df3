"""GPU memory that ran out: one line that says what it went into, by the plan, and which knob to turn first."""

from __future__ import annotations

import torch

from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.plan import make_plan

# The part of the plan, and what makes it smaller, the cheapest remedy first.
_KNOBS = {
    "activations": "lower train.micro_batch_tokens, then model.recompute: full, then raise parallel.tensor or parallel.context",
    "logprobs": "lower train.micro_batch_tokens, or raise parallel.tensor, over which the vocabulary is cut",
    "optimizer": "optimizer.distributed with more data-parallel ranks, or optimizer.cpu_offload",
    "gradients": "raise parallel.tensor or parallel.pipeline, or precision.grad_reduce_fp32: false",
    "weights": "raise parallel.tensor or parallel.pipeline",
    "reference": "an objective setting without a frozen reference, or raise parallel.tensor or parallel.pipeline",
    "teacher": "teacher.where: served, or teacher.offload",
    "gupo": "lower gupo.rows or gupo.memory_gib",
    "weight_sync": "lower rollout.bucket_mib",
    "fp8_copies": "precision.fp8_params, which keeps no second copy",
}


class MemoryLimitError(RuntimeError):
    """A rank's GPU is full."""


def memory_limit(error: torch.OutOfMemoryError, config: Config, rank: int) -> MemoryLimitError:
    """The error to raise in its place: the plan's largest parts, each with its remedy, and what torch says."""
    plan = make_plan(config)
    parts = sorted(plan["memory_gib"].items(), key=lambda part: -part[1])
    advice = "; ".join(f"{name} {size:.1f} GiB ({_KNOBS[name]})" for name, size in parts[:3] if size > 0 and name in _KNOBS)
    said = " ".join(str(error).split()).split(" If reserved")[0]
    return MemoryLimitError(
        f"rank {rank}: GPU memory ran out. The plan needs {plan['memory_gib_total']:.1f} GiB on the largest rank, most of it: "
        f"{advice}. Torch: {said}"
    )
