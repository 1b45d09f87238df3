"""The layout does not matter: the same weights on every split over tensor, context and data ranks. Real gloo ranks.

Pipeline stages and micro-batches belong to the trainer's side (tests/mcore): the measurement only sees a last stage's tokens.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_gvpo.config.schema import GupoSection
from megatron_gvpo.gupo import cost, group_weights
from tests.gupo.cases import OBJECTIVES, Case, GroupComm, make_case, measured, padded_shard
from tests.ranks import run_ranks

# (tensor, context, data, padded rows of the output layer); with 36 rows the last of four tensor ranks holds padding only
LAYOUTS = {
    2: [(2, 1, 1, 28), (1, 2, 1, 28), (1, 1, 2, 28)],
    4: [(4, 1, 1, 28), (4, 1, 1, 36), (1, 1, 4, 28), (2, 2, 1, 28), (2, 1, 2, 28), (1, 2, 2, 28)],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"coefficients": "held", "evidence_scale": "snr"},
    {"evidence_scale": "paper", "rows": 0.4, "memory_gib": 1e-9},
    {"coefficients": "held", "rows": 0.4, "s": 0.3},
    {"layer": "final_norm"},
]


def _groups(sizes: tuple[int, int, int, int], rank: int) -> tuple[list[int], list[dist.ProcessGroup]]:
    """(coordinates, [tensor group, context group, context-and-data group]) of this rank; tensor ranks are neighbours."""
    tensor, context, data, _ = sizes
    cells = list(itertools.product(range(data), range(context), range(tensor)))
    mine = cells[rank]
    found: list[dist.ProcessGroup] = []
    for varying in ((2,), (1,), (0, 1)):
        for key in sorted({tuple(c for axis, c in enumerate(cell) if axis not in varying) for cell in cells}):
            members = [r for r, cell in enumerate(cells) if tuple(c for a, c in enumerate(cell) if a not in varying) == key]
            group = dist.new_group(members)
            if rank in members:
                found.append(group)
    return list(mine), found


def _share(case: Case, data: tuple[int, int], context: tuple[int, int]) -> torch.Tensor:
    """The token rows of one rank: whole groups by data rank, every n-th token by context rank, in no particular order."""
    group_T = case.batch.sequences.group_N[case.batch.tokens.sequence_T]
    rows_T = (group_T.remainder(data[1]) == data[0]).nonzero().flatten()
    return rows_T[context[0] :: context[1]].flip(0)


# Below the layer's 23 rows, so that rows are drawn and blocks are cut here as they are in a large layer.
SAMPLED_ROWS, LEAST_BLOCK = 9, 4


def _measure(rank: int, world: int) -> dict[str, Any]:
    cost.SAMPLED_ROWS, cost._LEAST_BLOCK = SAMPLED_ROWS, LEAST_BLOCK
    case, out = make_case(), {}
    for sizes in LAYOUTS[world]:
        (d, c, t), (tensor_group, context_group, token_group) = _groups(sizes, rank)
        weight, shard = padded_shard(case, t, sizes[0], tensor_group, sizes[3])
        for name, (i, options) in itertools.product(OBJECTIVES, enumerate(SETTINGS)):
            gupo = GupoSection(enabled=True, **options)
            found = measured(
                case,
                OBJECTIVES[name](),
                gupo,
                rows_T=_share(case, (d, sizes[2]), (c, sizes[1])),
                comm=GroupComm(token_group),
                weight=weight,
                shard=shard,
                context=context_group,
                chunk_bytes=4000,
            )
            weights = group_weights(found.mean_evidence_G, found.active_G, gupo.eta)
            geometry = found.geometry
            numbers = (found.mean_evidence_G.tolist(), weights.tolist(), geometry.cosine_GG.tolist(), geometry.noise_scale)
            out[f"{sizes} {name} {i}"] = numbers
    out["refusal"] = _refusal_of_a_split_group(case, rank, world)
    return out


def _refusal_of_a_split_group(case: Case, rank: int, world: int) -> str:
    rows_T = torch.arange(len(case.targets_T))[rank::world]
    try:
        measured(case, OBJECTIVES["gvpo"](), GupoSection(), rows_T=rows_T)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world", sorted(LAYOUTS))
def test_every_split_gives_the_numbers_of_one_process(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence, weights, cosines and noise scale; and a plan that spreads a group over data ranks is refused.

    Such a plan would give the group the variance of a part of it, silently. Does not cover NCCL, nor layers so large that the
    samples are drawn in several pieces.
    """
    monkeypatch.setattr(cost, "SAMPLED_ROWS", SAMPLED_ROWS)
    monkeypatch.setattr(cost, "_LEAST_BLOCK", LEAST_BLOCK)
    results = run_ranks(_measure, world)
    for name, (i, options) in itertools.product(OBJECTIVES, enumerate(SETTINGS)):
        gupo = GupoSection(enabled=True, **options)
        expected = measured(make_case(), OBJECTIVES[name](), gupo)
        weights = group_weights(expected.mean_evidence_G, expected.active_G, gupo.eta)
        for sizes, result in itertools.product(LAYOUTS[world], results):
            evidence, found, cosine, noise = result[f"{sizes} {name} {i}"]
            close = {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(torch.tensor(evidence, dtype=torch.float64), expected.mean_evidence_G, **close)
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), weights, **close)
            torch.testing.assert_close(torch.tensor(cosine, dtype=torch.float64), expected.geometry.cosine_GG, **close)
            assert noise == pytest.approx(expected.geometry.noise_scale, rel=1e-8)
    for result in results:
        assert "is not whole on this rank" in result["refusal"]
        assert "plan the micro-batches with whole groups" in result["refusal"]
