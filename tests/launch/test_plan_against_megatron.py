"""`plan`'s count of a rank's parameters against Megatron-Core models that were really built, on four gloo ranks."""

from __future__ import annotations

from pathlib import Path

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import ModelSection, ParallelSection, PrecisionSection, TrainSection
from megatron_gvpo.launch.parameters import rank_parameters
from tests.ranks import run_ranks

STUDENT = Path(__file__).resolve().parents[2] / "examples" / "chain_sum" / "student"
LAYOUTS = (
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4},
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 3},
)


def _held(rank: int, world: int) -> list[tuple[int, int]]:
    """(pipeline stage, parameters) of this rank under each layout."""
    from megatron_gvpo.mcore.model import build_model
    from megatron_gvpo.mcore.startup import shutdown, start

    found = []
    precision, train = PrecisionSection(params="fp32"), TrainSection(device="cpu")
    for layout in LAYOUTS:
        parallel = ParallelSection(gpus_per_node=world, **layout)
        ranks = start(parallel, train, precision)
        chunks = build_model(ModelSection(path=str(STUDENT)), parallel, precision, ranks)
        found.append((ranks.pipeline.rank, sum(p.numel() for chunk in chunks for p in chunk.parameters())))
        if layout is LAYOUTS[-1]:
            shutdown()
    return found


def test_a_ranks_parameters_are_megatrons() -> None:
    """Why: the plan's weights, gradients and optimizer memory are this number times a few bytes."""
    shape = read_shape(STUDENT)
    for held in run_ranks(_held, 4, init=False, timeout=150.0):
        for layout, (stage, count) in zip(LAYOUTS, held, strict=True):
            assert rank_parameters(shape, ParallelSection(gpus_per_node=4, **layout), stage).total == count, layout
