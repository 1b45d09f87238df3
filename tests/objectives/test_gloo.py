"""Every objective over real process groups: what the kit's simulated ranks claim, with the `Comm` that training uses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_gvpo.mcore.comm import RankComm
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.contract_world import World, rank_step, run
from megatron_gvpo.objectives.registry import create_objective
from tests.objectives.test_contract import CASES
from tests.ranks import run_ranks


def _every_objective(rank: int, world_size: int) -> dict[str, float]:
    """The largest difference to one process, in loss and gradient, of every objective; tokens go to ranks one by one."""
    assert dist.group.WORLD is not None
    comm = RankComm(dist.group.WORLD, torch.device("cpu"))
    world = World.random(0)
    worst: dict[str, float] = {}
    for name, options in CASES:
        objective = create_objective(name, options)
        batch = world.batch(objective.needs)
        mine = torch.arange(len(batch.tokens)) % world_size == rank
        found = rank_step(objective, world, Batch(batch.sequences, batch.tokens.select(mine)), comm, micro_batches=3)
        scale = 1.0 / found.prepared.denominator
        loss_sum = comm.sum(torch.tensor([found.loss_sum], dtype=torch.float64))[0]
        loss = scale * float(loss_sum if found.prepared.loss_sum is None else found.prepared.loss_sum)
        grad_PV = comm.sum(found.grad_PV) * scale
        single = run(create_objective(name, options), world)
        difference = max(abs(loss - single.loss), float((grad_PV - single.grad_PV).abs().max()))
        worst[f"{name} {options}"] = difference
    return worst


def test_real_ranks_agree_with_one_process() -> None:
    """Loss and gradient to 1e-12 over two gloo ranks that share every sequence. Not covered: models, NCCL."""
    for result in run_ranks(_every_objective, 2, timeout=150):
        assert len(result) == len(CASES)
        assert max(result.values()) < 1e-12, result
