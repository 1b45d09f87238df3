"""Start-up: layouts that do not fit are refused at once, and the groups are the ones the layout says."""

from __future__ import annotations

import pytest

from megatron_gvpo.config.schema import ParallelSection, PrecisionSection, TrainSection
from megatron_gvpo.mcore.slurm import Place
from tests.ranks import RankError, run_ranks

CPU = TrainSection(device="cpu", collective_timeout_s=60)


def _place(world: int) -> Place:
    return Place(0, world, 0, "127.0.0.1", 1, "torchrun")


@pytest.mark.parametrize(
    ("parallel", "world", "words"),
    [
        (
            ParallelSection(tensor=2, pipeline=2, gpus_per_node=6),
            6,
            "tensor 2 x pipeline 2 x context 1 = 4 does not divide the 6",
        ),
        (ParallelSection(nodes=2, gpus_per_node=4), 4, "2 nodes x 4 gpus_per_node = 8 ranks, but torchrun started 4"),
        (ParallelSection(expert=4, gpus_per_node=2), 2, "expert 4 does not fit"),
        (ParallelSection(virtual_pipeline=2), 1, "virtual_pipeline needs parallel.pipeline > 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_in_one_line(parallel: ParallelSection, world: int, words: str) -> None:
    """Case 44 at start-up: the numbers are named. `validate` checks the same without starting anything."""
    from megatron_gvpo.mcore.startup import check_layout

    with pytest.raises(ValueError, match=words) as caught:
        check_layout(parallel, _place(world))
    assert "\n" not in str(caught.value)


def _start(rank: int, world: int) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    from megatron_gvpo.mcore.startup import shutdown, start

    parallel = ParallelSection(tensor=2, gpus_per_node=world)
    ranks = start(parallel, CPU, PrecisionSection(params="fp32"))
    mine = torch.tensor([float(rank)])
    dist.all_reduce(mine, group=ranks.data_context.group)
    found = {
        "tensor": (ranks.tensor.rank, ranks.tensor.size),
        "data": (ranks.data.rank, ranks.data.size),
        "device": str(ranks.device),
        "backend": ranks.backend,
        "sum": float(mine),
        # Megatron's own code asks CUDA for these; in the CPU device mode they answer for the CPU.
        "cuda tensor": str(torch.zeros(1, device="cuda").device),
        "limit": dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }
    shutdown()
    return found


def test_ranks_and_groups_follow_the_layout() -> None:
    """TP2 x DP2 from torchrun's variables: neighbours share the tensor group, and every group has the configured limit.

    Does not cover nccl, nor several machines.
    """
    found = run_ranks(_start, 4, init=False)
    assert [f["tensor"] for f in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [f["data"] for f in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [f["sum"] for f in found] == [2.0, 4.0, 2.0, 4.0]
    assert {f["device"] for f in found} == {"cpu"}
    assert {f["backend"] for f in found} == {"gloo"}
    assert {f["cuda tensor"] for f in found} == {"cpu"}
    assert {f["limit"] for f in found} == {60.0}


def _late(rank: int, world: int) -> None:
    from megatron_gvpo.mcore.startup import start

    if rank == 0:
        train = TrainSection(device="cpu", collective_timeout_s=3)
        start(ParallelSection(gpus_per_node=world), train, PrecisionSection(params="fp32"))


def test_a_job_that_does_not_come_together_ends_at_the_limit() -> None:
    """Rank 1 never joins: rank 0 says where it waited and for how long, instead of waiting for ever."""
    with pytest.raises(RankError, match=r"rank 0 of 2 could not join the job at 127.0.0.1:\d+ \(limit .* = 3 s\)"):
        run_ranks(_late, 2, init=False, timeout=90)
