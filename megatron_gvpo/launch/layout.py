"""Where every rank stands: its coordinates along each kind of parallelism, its node, and the link that a group talks over.

Ranks count tensor first, then context, data, and pipeline last (Megatron-Core's order "tp-cp-ep-dp-pp"): tensor-parallel ranks
are neighbours, so that they share a machine, and pipeline stages, which talk least, are farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron_gvpo.config.schema import ParallelSection

Link = Literal["none", "nvlink", "network"]


@dataclass(frozen=True)
class Coordinates:
    """A rank's index along every kind of parallelism."""

    tensor: int
    context: int
    data: int
    pipeline: int


def coordinates(parallel: ParallelSection, rank: int) -> Coordinates:
    """The coordinates of global rank `rank`."""
    rest, tensor = divmod(rank, parallel.tensor)
    rest, context = divmod(rest, parallel.context)
    pipeline, data = divmod(rest, parallel.data)
    return Coordinates(tensor, context, data, pipeline)


def rank_at(parallel: ParallelSection, place: Coordinates) -> int:
    """The inverse of `coordinates`."""
    return ((place.pipeline * parallel.data + place.data) * parallel.context + place.context) * parallel.tensor + place.tensor


def link(parallel: ParallelSection, axis: str) -> Link:
    """What the widest group of an axis talks over: NVLink where every group lies within one node.

    axis: tensor, context, data_context (gradients), pipeline, expert, expert_data.
    """
    expert_tensor = parallel.expert_tensor or parallel.tensor
    stage = parallel.world_size // parallel.pipeline
    size, stride = {
        "tensor": (parallel.tensor, 1),
        "context": (parallel.context, parallel.tensor),
        "data_context": (parallel.data * parallel.context, parallel.tensor),
        "pipeline": (parallel.pipeline, stage),
        "expert": (parallel.expert, expert_tensor),
        "expert_data": (stage // (parallel.expert * expert_tensor), parallel.expert * expert_tensor),
    }[axis]
    if size <= 1:
        return "none"
    # A group starts at a multiple of what it spans, so it lies within a node if that divides the node.
    span = size * stride
    return "nvlink" if span <= parallel.gpus_per_node and parallel.gpus_per_node % span == 0 else "network"


def node_rows(parallel: ParallelSection) -> list[dict[str, Any]]:
    """Each node with its ranks, and the ranges of coordinates they have: first and last of every kind."""
    rows = []
    for node in range(parallel.nodes):
        first = node * parallel.gpus_per_node
        places = [coordinates(parallel, rank) for rank in range(first, first + parallel.gpus_per_node)]
        row: dict[str, Any] = {"node": node, "ranks": [first, first + parallel.gpus_per_node - 1]}
        for axis in ("pipeline", "data", "context", "tensor"):
            values = [getattr(place, axis) for place in places]
            row[axis] = [min(values), max(values)]
        rows.append(row)
    return rows
