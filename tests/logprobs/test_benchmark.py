"""The benchmark runs and its table is complete: a benchmark that rotted is found the day it is needed. Asserts no timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_shape_runs(tmp_path: Path) -> None:
    """Two methods on a small vocabulary, the JSON beside the table, and the fused path's memory below the plain one's."""
    out = tmp_path / "logprobs.json"
    arguments = ["--vocab", "32000", "--tokens", "512", "--hidden", "32", "--rounds", "1", "--json", str(out)]
    command = [sys.executable, "benchmarks/logprobs.py", *arguments, "--methods", "plain,liger,ours-known-coefficients"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())
    rows = {(row["method"], row["kept"]): row for row in run["results"]}
    assert rows["liger", 1.0]["note"]
    assert rows["ours-known-coefficients", 1.0]["peak_mib"] < rows["plain", 1.0]["peak_mib"]
    assert rows["ours-known-coefficients", 0.5]["seconds"] > 0
    assert "| ours-known-coefficients | 50% |" in done.stdout
