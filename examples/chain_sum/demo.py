"""The demo: train the careless student once per seed, then show what it was, what it became, and where the rest lies.

    python examples/chain_sum/demo.py yaml_configs/demo_chain_sum_gvpo.yaml --seeds 0 1

Each seed is an ordinary `megatron-gvpo train` run; this script only starts them and reads their metrics.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[2]


def train(config: Path, seed: int, runs: Path, overrides: list[str]) -> Path:
    """One run; its directory. Exits with the run's own code where it fails."""
    run = runs / f"{config.stem}_seed{seed}"
    command = [sys.executable, "-m", "megatron_gvpo.cli", "train", str(config), "--fresh"]
    for setting in (f"train.seed={seed}", f"log.dir={run}", *overrides):
        command += ["--set", setting]
    done = subprocess.run(command, cwd=HERE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return run


def evaluations(run: Path) -> list[dict[str, float]]:
    """The metrics lines of a run that hold an evaluation, first to last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval/greedy" in line]


def cell(line: dict[str, float], name: str) -> str:
    return f"{100 * line[name]:.1f} ± {100 * line[name + '_se']:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="train the demo student once per seed and compare before and after")
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--gain", type=float, default=20.0, help="points of greedy accuracy that every seed must gain")
    options = parser.parse_args()

    table = Table(title="held-out accuracy, % ± standard error")
    for column in ("seed", "greedy before", "greedy after", "gain", "T=1 before", "T=1 after", "training"):
        table.add_column(column, justify="right")
    runs = {seed: train(options.config, seed, options.runs, options.overrides) for seed in options.seeds}
    short = []
    for seed, run in runs.items():
        first, last = evaluations(run)[0], evaluations(run)[-1]
        gain = 100 * (last["eval/greedy"] - first["eval/greedy"])
        seconds = json.loads((run / "summary.json").read_text())["train_seconds"]
        table.add_row(
            str(seed),
            cell(first, "eval/greedy"),
            cell(last, "eval/greedy"),
            f"{gain:+.1f}",
            cell(first, "eval/sampled"),
            cell(last, "eval/sampled"),
            f"{seconds / 60:.1f} min",
        )
        if gain < options.gain:
            short.append(f"seed {seed}: greedy accuracy rose by {gain:.1f} points, less than {options.gain:.0f}")
    console = Console()
    console.print(table)
    for seed, run in runs.items():
        console.print(f"seed {seed}: report {run / 'report.html'}, model {run / 'hf'}", soft_wrap=True)
    for line in short:
        print(line, file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
