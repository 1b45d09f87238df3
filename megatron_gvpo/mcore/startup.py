"""Start-up of one trainer rank: its place, its device, the process groups of every kind of parallelism, and the seeds."""

from __future__ import annotations

import os
import random
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_gvpo.config.schema import ParallelSection, PrecisionSection, TrainSection
from megatron_gvpo.mcore.errors import JoinError, SetupError
from megatron_gvpo.mcore.slurm import Place, find_place

# Tensor-parallel ranks are neighbours, so that they share a machine; pipeline stages, which talk least, are farthest apart.
_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Axis:
    """One kind of parallelism as this rank sees it: its rank in the group, the group's size, and the group itself."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands. `data_context`: the ranks that hold different tokens with the same weights (data x context)."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    backend: str  # "gloo" or "nccl"
    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis
    data_context: Axis
    expert: Axis
    virtual_pipeline: int | None

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1


def start(parallel: ParallelSection, train: TrainSection, precision: PrecisionSection) -> Ranks:
    """Join the job and build every process group; call once per process, before any model is built.

    Every group has `train.collective_timeout_s` as its limit. ValueError, one line, for a layout that does not fit the job or a
    device that is not there; TimeoutError naming rank 0's address where the job does not come together.
    """
    place = find_place(os.environ)
    check_layout(parallel, place)
    device = _device(train, place)
    _environment(train, parallel)
    if not dist.is_initialized():
        _join(place, device, timedelta(seconds=train.collective_timeout_s))
    build_groups(parallel, train)
    ranks = current_ranks(device, place.local_rank, parallel.virtual_pipeline)
    _seed(train.seed, ranks)
    return ranks


def shutdown() -> None:
    """Leave the job: all process groups are destroyed. Safe to call when nothing was started."""
    if "megatron.core.parallel_state" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def check_layout(parallel: ParallelSection, place: Place) -> None:
    """ValueError where tensor x pipeline x context x data cannot be the job's number of ranks."""
    model = parallel.tensor * parallel.pipeline * parallel.context
    sizes = f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} = {model}"
    if place.world != parallel.world_size:
        raise SetupError(
            f"parallel: {parallel.nodes} nodes x {parallel.gpus_per_node} gpus_per_node = {parallel.world_size} ranks, "
            f"but {place.source} started {place.world}: change parallel.nodes or parallel.gpus_per_node, or the launch"
        )
    if place.world % model:
        raise SetupError(f"{sizes} does not divide the {place.world} ranks: change one of them, or parallel.nodes")
    data_context = place.world // (parallel.tensor * parallel.pipeline)
    if parallel.expert > 1 and place.world % ((parallel.expert_tensor or parallel.tensor) * parallel.expert * parallel.pipeline):
        raise SetupError(
            f"parallel.expert {parallel.expert} does not fit: tensor x pipeline leave {data_context} data and context ranks"
        )
    if (parallel.virtual_pipeline or 1) > 1 and parallel.pipeline == 1:
        raise SetupError("parallel.virtual_pipeline needs parallel.pipeline > 1: leave it out, or raise parallel.pipeline")


def current_ranks(device: torch.device, local_rank: int, virtual_pipeline: int | None) -> Ranks:
    """What Megatron's process groups say about this rank; for code that initialised Megatron-Core by itself."""
    from megatron.core import parallel_state as mpu

    def axis(group: Any) -> Axis:
        return Axis(dist.get_rank(group), dist.get_world_size(group), group)

    return Ranks(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        local_rank=local_rank,
        device=device,
        backend=dist.get_backend(),
        tensor=axis(mpu.get_tensor_model_parallel_group()),
        pipeline=axis(mpu.get_pipeline_model_parallel_group()),
        context=axis(mpu.get_context_parallel_group()),
        data=axis(mpu.get_data_parallel_group()),
        data_context=axis(mpu.get_data_parallel_group(with_context_parallel=True)),
        expert=axis(mpu.get_expert_model_parallel_group()),
        virtual_pipeline=virtual_pipeline if (virtual_pipeline or 1) > 1 else None,
    )


def _device(train: TrainSection, place: Place) -> torch.device:
    if train.device == "cpu":
        from megatron_gvpo.mcore import cpu_device

        cpu_device.enable()
        torch.set_num_threads(train.threads)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError("train.device is cuda, but torch finds no usable GPU here: use a GPU machine, or train.device=cpu")
    visible = torch.cuda.device_count()
    if place.local_rank >= visible and visible > 1:
        raise SetupError(
            f"rank {place.rank} is number {place.local_rank} on {socket.gethostname()}, which shows {visible} GPUs: "
            "parallel.gpus_per_node is more than there are"
        )
    # Under `srun --gpus-per-task=1` every rank sees its own GPU as number 0.
    index = place.local_rank if visible > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _environment(train: TrainSection, parallel: ParallelSection) -> None:
    if train.device == "cpu":
        # gloo otherwise looks its address up by host name, which need not resolve on a laptop or in a container.
        if parallel.nodes == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    if parallel.tensor > 1 or parallel.context > 1:
        # Communication that overlaps with matrix products relies on kernels starting in the order they were queued.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _join(place: Place, device: torch.device, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "nccl"
    where: dict[str, Any] = {
        "torchrun": {"init_method": "env://"},
        "slurm": {"init_method": f"tcp://{place.address}:{place.port}"},
        "single": {"store": HashStore()},
    }[place.source]
    try:
        dist.init_process_group(backend, rank=place.rank, world_size=place.world, timeout=timeout, **where)
    except (dist.DistError, TimeoutError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise JoinError(
            f"rank {place.rank} of {place.world} could not join the job at {place.address}:{place.port} "
            f"(limit train.collective_timeout_s = {timeout.total_seconds():.0f} s): {reason}"
        ) from error


def build_groups(parallel: ParallelSection, train: TrainSection) -> None:
    """Megatron-Core's process groups of every kind, over the default group's ranks."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if (parallel.virtual_pipeline or 1) > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        # Megatron asks for minutes and makes a timedelta of them; a fraction is fine.
        distributed_timeout_minutes=train.collective_timeout_s / 60,  # pyright: ignore[reportArgumentType]
        order=_ORDER,
        create_gloo_process_groups=False,
    )


def _seed(seed: int, ranks: Ranks) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    # Stages differ, so that their dropout and initialisation do; data-parallel copies of a stage must not.
    stage_seed = seed + 100 * ranks.pipeline.rank
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
