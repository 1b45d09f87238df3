"""Rows like those of a real run of the demo, for the tests of the report: numbers in the ranges it shows, drawn with a seed."""

from __future__ import annotations

import math
import random
from typing import Any


def demo_rows(steps: int = 60, seed: int = 0, eval_every: int = 20) -> list[dict[str, Any]]:
    """Step 0 holds the evaluation before training; every later row is a rollout batch."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = [{"step": 0, **_evaluation(0.46, 0.31)}]
    for step in range(1, steps + 1):
        skill = 1 - math.exp(-step / 25)
        mean = min(max(0.33 + 0.42 * skill + draw.gauss(0, 0.02), 0), 1)
        parts = {
            "time/rollout": 0.9 + 0.1 * draw.random(),
            "time/reward": 0.01 + 0.005 * draw.random(),
            "time/logprobs": 0.22,
            "time/forward_backward": 0.55 + 0.05 * draw.random(),
            "time/optimizer": 0.02,
            "time/sync": 0.12 + 0.05 * draw.random(),
            "time/other": 0.03 + 0.01 * draw.random(),
        }
        if step % eval_every == 0:
            parts["time/eval"] = 2.4
        row: dict[str, Any] = {
            "step": step,
            "reward/mean": mean,
            "reward/std": math.sqrt(mean * (1 - mean)),
            "reward/unparsed": float(draw.randrange(3)),
            "loss": 0.08 + 0.02 * draw.random(),
            "grad_norm": math.nan if step == 17 else 0.4 * math.exp(draw.gauss(0, 0.4)),
            "lr": 2e-4 * min(1, step / 5),
            "logprob_diff/mean": 2e-7 * math.exp(draw.gauss(0, 0.2)),
            "logprob_diff/max": 3e-6 * math.exp(draw.gauss(0, 0.3)),
            "objective/term_variance": 0.01 * skill + 0.002 * draw.random(),
            "objective/term_reference": -0.009 * skill - 0.002 * draw.random(),
            "objective/term_reward": -0.02 - 0.01 * draw.random(),
            "objective/groups": 32.0,
            "objective/flat_groups": float(int(4 + 10 * skill)),
            "tokens/trained": float(draw.randrange(950, 1100)),
            "response/length": 3.6 + 0.2 * draw.random(),
            "drop/small_group": 0.0,
            "drop/empty": float(step == 9),
            "skipped": float(step == 17),
            **parts,
            "time/step": sum(parts.values()),
        }
        if step % eval_every == 0 or step == steps:
            row.update(_evaluation(0.46 + 0.36 * skill, 0.31 + 0.38 * skill))
        rows.append(row)
    return rows


def _evaluation(greedy: float, sampled: float) -> dict[str, float]:
    return {
        "eval/greedy": greedy,
        "eval/greedy_se": math.sqrt(greedy * (1 - greedy) / 400),
        "eval/sampled": sampled,
        "eval/sampled_se": math.sqrt(sampled * (1 - sampled) / 400),
        "eval/logprob_diff/mean": 2.1e-7,
        "eval/logprob_diff/max": 4e-6,
    }
