"""One rank of a cluster run, built without memory and without a cluster: the real model, DDP buffers and optimizer on the meta
device, under a fake process group of the full world size. For a process of its own: there is no way back.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore import cpu_device
from megatron_gvpo.mcore.bridge import Names
from megatron_gvpo.mcore.hf_folder import hf_tensors
from megatron_gvpo.mcore.model import build_model, facts_of, unwrapped
from megatron_gvpo.mcore.optimizer import make_training
from megatron_gvpo.mcore.spec import transformer_engine_works
from megatron_gvpo.mcore.startup import Ranks, build_groups, current_ranks
from megatron_gvpo.mcore.weights import global_name

_META = torch.device("meta")
_Held = tuple[Any, str, Tensor]  # a chunk, and one of its parameters with its name there


def dry_run_rank(config: Config, rank: int) -> dict[str, Any]:
    """What rank `rank` really holds, and every contradiction found, as JSON values.

    Checked are the shards of distributed checkpoints against the parameters, the gradient buckets against the data-parallel
    ranks, and the Hugging Face names and sizes of what would be exported. ValueError, one line, for a model that cannot be built.
    """
    started = time.perf_counter()
    ranks = _join(config, rank)
    without_fp8 = config.precision.fp8 != "none" and not transformer_engine_works()
    precision = config.precision.model_copy(update={"fp8": "none", "fp8_params": False}) if without_fp8 else config.precision
    with _META:
        chunks = build_model(config.model, config.parallel, precision, ranks)
        parameters: list[_Held] = [(chunk, name, param) for chunk in chunks for name, param in chunk.named_parameters()]
        problems = [*_shards(chunks), *_export(parameters, ranks)]
        dtype = parameters[0][2].dtype
        steps = config.train.steps * config.train.optimizer_steps
        # Megatron-Core's offloaded optimizer wants real memory on both sides.
        optimizer = config.optimizer.model_copy(update={"cpu_offload": False})
        training = make_training(chunks, optimizer, precision, steps, dtype)
        buckets, more = _buckets(training.chunks, parameters, ranks, config.optimizer.distributed)
        problems += more
    return {
        "rank": rank,
        "world": ranks.world,
        "tensor": ranks.tensor.rank,
        "context": ranks.context.rank,
        "data": ranks.data.rank,
        "pipeline": ranks.pipeline.rank,
        "parameters": sum(param.numel() for _, _, param in parameters),
        "model_parameters": sum(_whole(chunk, name, param, ranks) for chunk, name, param in parameters),
        "buckets": buckets,
        "optimizer_elements": _optimizer_elements(training.optimizer),
        "without_fp8": without_fp8,
        "transformer_engine": transformer_engine_works(),
        "problems": problems,
        "seconds": time.perf_counter() - started,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def _join(config: Config, rank: int) -> Ranks:
    """Every group of the real world, of which this process is the only member that exists."""
    cpu_device.enable(_META)
    world = config.parallel.world_size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    build_groups(config.parallel, config.train)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(config.train.seed)
    return current_ranks(_META, rank % config.parallel.gpus_per_node, config.parallel.virtual_pipeline)


def _whole(chunk: Any, name: str, param: Tensor, ranks: Ranks) -> int:
    """This parameter's share of the published count: over all tensor-parallel ranks, without vocabulary padding, and nothing for
    the last stage's copy of a tied embedding."""
    model = unwrapped(chunk)
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return 0
    facts = facts_of(model)
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return facts.shape.vocab * facts.shape.hidden
    return param.numel() * (ranks.tensor.size if getattr(param, "tensor_model_parallel", False) else 1)


def _shards(chunks: list[Any]) -> list[str]:
    """Each piece of a distributed checkpoint, times the number of pieces along each axis, must be the whole tensor."""
    problems = []
    for chunk in chunks:
        state = chunk.sharded_state_dict()
        problems += [f"{name} is in no distributed checkpoint" for name, _ in chunk.named_parameters() if name not in state]
        apply_factories(state)  # gate and up lie in one matrix and are saved as two
        for entry in nested_values(state):
            if not isinstance(entry, ShardedTensor):
                continue
            axes = entry.axis_fragmentations or (1,) * len(entry.global_shape)
            first = entry.prepend_axis_num
            pieces = [size * count for size, count in zip(entry.local_shape, axes[first:], strict=True)]
            if pieces != list(entry.global_shape[first:]):
                problems.append(f"{entry.key}: shards of {list(entry.local_shape)} x {list(axes)} are not {entry.global_shape}")
    return problems


def _export(parameters: list[_Held], ranks: Ranks) -> list[str]:
    """Every parameter must become tensors that the Hugging Face model has, of the right sizes."""
    problems: list[str] = []
    for chunk, local, param in parameters:
        model = unwrapped(chunk)
        facts = facts_of(model)
        expected = hf_tensors(facts.shape)
        names, name = Names(facts, model.config), global_name(model, local)
        cut = bool(getattr(param, "tensor_model_parallel", False))
        shards = [param.detach() for _ in range(ranks.tensor.size if cut else 1)]
        for hf_name, tensor in names.from_shards(name, shards, param.partition_dim if cut else None):  # pyright: ignore[reportAttributeAccessIssue]
            if hf_name not in expected:
                problems.append(f"{name} would be exported as {hf_name}, which the model does not have")
            elif tuple(tensor.shape) != expected[hf_name]:
                problems.append(f"{hf_name} would be exported as {list(tensor.shape)}, not {list(expected[hf_name])}")
    return problems


def _buckets(wrapped: list[Any], parameters: list[_Held], ranks: Ranks, distributed: bool) -> tuple[dict[str, int], list[str]]:
    """Gradient buffers: together every parameter once, each bucket divisible over the ranks that share it."""
    dense = [buffer for chunk in wrapped for buffer in chunk.buffers]
    expert = [buffer for chunk in wrapped for buffer in chunk.expert_parallel_buffers]
    buckets = [bucket for buffer in (*dense, *expert) for bucket in buffer.buckets]
    held = sum(param.numel() for buffer in (*dense, *expert) for param in buffer.params)
    wanted = sum(param.numel() for _, _, param in parameters)
    problems = [] if held == wanted else [f"the gradient buffers hold {held} parameters, the model {wanted}"]
    for bucket in buckets if distributed else []:
        ranks_of = dist.get_world_size(bucket.data_parallel_group) if hasattr(bucket, "data_parallel_group") else 1
        if bucket.grad_data.numel() % ranks_of:
            problems.append(f"a bucket of {bucket.grad_data.numel()} elements does not divide over {ranks_of} ranks")
    found = {
        "buffers": len(dense) + len(expert),
        "buckets": len(buckets),
        "elements": sum(bucket.grad_data.numel() for bucket in buckets),
        "largest": max((bucket.grad_data.numel() for bucket in buckets), default=0),
    }
    if found["elements"] < wanted:
        problems.append(f"the buckets have room for {found['elements']} of {wanted} parameters")
    return found, problems


def _optimizer_elements(optimizer: Any) -> int:
    """Parameters whose Adam state this rank keeps."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return sum(param.numel() for part in parts for group in part.optimizer.param_groups for param in group["params"])
