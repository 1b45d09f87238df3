"""`plan --dry-run`: chosen ranks of the run, built for real on the meta device, each in a process of its own.

python -m megatron_gvpo.launch.dry_run CONFIG RANK [SECTION.KEY=VALUE ...]      prints one line of JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gvpo.config import Config, load_config
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.launch.layout import coordinates
from megatron_gvpo.launch.memory import optimizer_copies
from megatron_gvpo.launch.parameters import count_parameters, rank_parameters

_LIMIT_S = 180.0


def dry_run_ranks(path: Path, overrides: Sequence[str], config: Config, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank really holds, against the plan. `ok` is False, and `problems` says why, where they differ.

    ranks: global ranks; the first of the last pipeline stage where there is none. ConfigError for a rank that does not exist.
    """
    world, stages = config.parallel.world_size, config.parallel.pipeline
    chosen = list(ranks) or [world - world // stages]
    for rank in chosen:
        if not 0 <= rank < world:
            raise ConfigError([f"error: --rank {rank}: the run has ranks 0 to {world - 1}"])
    found = [_checked(_run(path, overrides, rank), config, rank) for rank in chosen]
    if all(item["ok"] for item in found) and {item["pipeline"] for item in found} == set(range(stages)):
        by_stage = {item["pipeline"]: item["model_parameters"] for item in found}
        whole, built = sum(count_parameters(read_shape(config.model.path)).values()), sum(by_stage.values())
        if built != whole:
            found[-1]["ok"] = False
            found[-1]["problems"].append(f"the stages together hold {built} parameters, the published model {whole}")
    return found


def dry_run_text(found: Sequence[dict[str, Any]]) -> str:
    """For a person: a line a rank, and what is wrong."""
    lines = [""]
    for item in found:
        if "parameters" in item:
            buckets = item["buckets"]
            place = ", ".join(f"{axis} {item[axis]}" for axis in ("pipeline", "data", "context", "tensor"))
            lines.append(
                f"dry run  rank {item['rank']} ({place}): {item['parameters']:,} parameters, {buckets['buckets']} gradient "
                f"buckets, optimizer state of {item['optimizer_elements']:,}; {item['seconds']:.1f} s, {item['peak_gb']:.2f} GB"
            )
            if not item["transformer_engine"]:
                lines.append("         with plain-torch layers: Transformer Engine is not installed here")
            if item["without_fp8"]:
                lines.append("         without FP8, which needs Transformer Engine")
        lines += [f"         rank {item['rank']}: {problem}" for problem in item["problems"]]
    return "\n".join(lines)


def _run(path: Path, overrides: Sequence[str], rank: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron_gvpo.launch.dry_run", str(path), str(rank), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"problems": [f"not built within {_LIMIT_S:.0f} s"]}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith('{"'):
            return json.loads(line)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"problems": [f"the process ended with code {done.returncode}: {last}"]}


def _checked(found: dict[str, Any], config: Config, rank: int) -> dict[str, Any]:
    """`found` with what contradicts the plan added to its problems."""
    problems = list(found["problems"])
    if "parameters" in found:
        shape, place = read_shape(config.model.path), coordinates(config.parallel, rank)
        for axis in ("tensor", "context", "data", "pipeline"):
            if found[axis] != getattr(place, axis):
                problems.append(f"Megatron-Core has {axis} rank {found[axis]}, the plan {getattr(place, axis)}")
        planned = rank_parameters(shape, config.parallel, place.pipeline)
        if found["parameters"] != planned.total:
            problems.append(f"the model holds {found['parameters']} parameters, the plan {planned.total}")
        dense, experts = optimizer_copies(config, shape)
        share = planned.dense / dense + planned.experts / experts
        # Buckets are padded, and a rank's part of one may fall on a larger or a smaller side.
        if abs(found["optimizer_elements"] - share) > 0.02 * share + 1e5:
            problems.append(f"the optimizer keeps state of {found['optimizer_elements']} parameters, the plan {share:.0f}")
    return {**found, "rank": rank, "problems": problems, "ok": not problems}


def _main(argv: Sequence[str]) -> None:
    path, rank, *overrides = argv
    from megatron_gvpo.mcore.dry_run import dry_run_rank

    config = load_config(path, overrides, files=False)
    try:
        found = dry_run_rank(config, int(rank))
    except ValueError as error:
        found = {"problems": [" ".join(str(error).split())]}
    print(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1:])
