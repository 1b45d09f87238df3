"""`doctor --bandwidth`: how fast the job's ranks really exchange data, against what their links should do.

    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 megatron-gvpo doctor --bandwidth

Every rank runs it. Ring all-reduces of a large buffer, first among the ranks of each node, then over all; the bus bandwidth is
2 (n - 1)/n bytes / seconds, which one slow link, cable or adapter brings down for everybody.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from megatron_gvpo.launch.hardware import GPUS, LINK_SHARE, Gpu

_LIMIT_S = 120.0
_GPU_BYTES, _CPU_BYTES = 512 << 20, 8 << 20
_ROUNDS = 5


def measure() -> dict[str, Any] | None:
    """Bus bandwidths in GB/s, on rank 0; None elsewhere. Collective over the ranks that srun or torchrun started.

    `nodes`: the slowest node's and the fastest's, inside the node. `all`: over all ranks. Where the GPU is known, what is
    expected, and `slow` names what is below half of it. ValueError where this process is no rank of a job.
    """
    import torch
    import torch.distributed as dist

    from megatron_gvpo.mcore.slurm import find_place

    place = find_place(os.environ)
    if place.world < 2:
        raise ValueError("doctor --bandwidth: this process is alone; start one per GPU (srun, torchrun)")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", place.local_rank if torch.cuda.device_count() > 1 else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    where = "env://" if place.source == "torchrun" else f"tcp://{place.address}:{place.port}"
    limit = timedelta(seconds=_LIMIT_S)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=where, rank=place.rank, world_size=place.world, timeout=limit)
    try:
        return _measure(device, torch.cuda.get_device_name(device) if cuda else "cpu")
    finally:
        dist.destroy_process_group()


def _measure(device: Any, name: str) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, os.uname().nodename)
    nodes = {host: [r for r in range(world) if hosts[r] == host] for host in dict.fromkeys(hosts)}
    inside = 0.0
    for members in nodes.values():
        group: Any = dist.new_group(members)  # every rank takes part in making every group
        if rank in members and len(members) > 1:
            inside = _bus(device, group, len(members))
    everywhere = _bus(device, None, world)
    speeds = torch.tensor([inside], dtype=torch.float64, device=device)
    gathered = [torch.zeros_like(speeds) for _ in range(world)]
    dist.all_gather(gathered, speeds)
    if rank:
        return None
    by_node = {host: float(gathered[members[0]]) for host, members in nodes.items() if len(members) > 1}
    return compare(name, world, by_node, everywhere, len(nodes))


def _bus(device: Any, group: Any, ranks: int) -> float:
    """GB/s of an all-reduce, the best of a few."""
    import torch
    import torch.distributed as dist

    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    buffer = torch.ones(size // 4, device=device)
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first one opens the connections
        dist.barrier(group=group)
        started = time.perf_counter()
        dist.all_reduce(buffer, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
        buffer.fill_(1.0)
    return 2 * (ranks - 1) / ranks * size / best / 1e9


def compare(name: str, world: int, by_node: dict[str, float], everywhere: float, nodes: int) -> dict[str, Any]:
    """The numbers against the data sheet of the GPU called `name`, as JSON values."""
    gpu = known_gpu(name)
    found: dict[str, Any] = {"device": name, "ranks": world, "nodes": by_node, "all": everywhere, "slow": []}
    if gpu is None:
        return found
    per_node = max(world // nodes, 1)
    # Every GPU of a node has an adapter, and a ring crosses each node once: its adapters add up where NCCL uses them all.
    between = min(gpu.network * per_node, gpu.nvlink) if nodes > 1 else gpu.nvlink
    found["expected"] = {"node": gpu.nvlink * LINK_SHARE / 1e9, "all": between * LINK_SHARE / 1e9}
    for host, speed in by_node.items():
        if speed < found["expected"]["node"] / 2:
            found["slow"].append(f"{host}: {speed:.0f} GB/s between its GPUs, {found['expected']['node']:.0f} expected")
    if everywhere < found["expected"]["all"] / 2:
        found["slow"].append(f"over all {nodes} nodes: {everywhere:.0f} GB/s, {found['expected']['all']:.0f} expected")
    return found


def known_gpu(name: str) -> Gpu | None:
    """The data sheet of a GPU by the name that its driver gives."""
    return next((gpu for key, gpu in GPUS.items() if key.upper() in name.upper()), None)


def bandwidth_text(found: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"{found['ranks']} ranks on {found['device']}: {found['all']:.1f} GB/s over all"]
    lines += [f"  {host}: {speed:.1f} GB/s inside the node" for host, speed in found["nodes"].items()]
    lines += [f"!! {problem}" for problem in found["slow"]]
    if "expected" not in found:
        lines.append("  what this device should reach is not known here")
    return "\n".join(lines)
