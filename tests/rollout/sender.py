"""The sender's side of a weight-update group, made as the server makes its own (a store with the group's name as prefix)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_gvpo.rollout.engine import RolloutEngine
from tests.ranks import free_port


@contextmanager
def joined_as_rank_0(engine: RolloutEngine, name: str) -> Iterator[Any]:
    """A gloo group of this process and every server of the engine."""
    port, limit, world = free_port(), timedelta(seconds=60), engine.weights.world_size
    joining = engine.weights.init_group("127.0.0.1", port, backend="gloo", name=name)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False, timeout=limit)
    prefixed = dist.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(world, 0, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    joining.wait()
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
