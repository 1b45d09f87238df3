"""The template project: copied, installed by entry point, used from YAML by name, and held to the contract."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.objectives.test_golden import GOLDEN

ROOT = Path(__file__).parents[2]


def test_the_template_installs_and_works_by_name(tmp_path: Path) -> None:
    """As a newcomer would: pip install a copy elsewhere, then validate, explain and the contract. Not here: training with it."""
    project = tmp_path / "project"
    shutil.copytree(
        ROOT / "examples" / "my_objective", project, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    )
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

    def python(*arguments: str, cwd: Path = ROOT) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python(*install, str(project), cwd=tmp_path)
    python("-m", "megatron_gvpo.cli", "validate", str(project / "best_of_group.yaml"))
    samples = tmp_path / "samples.jsonl"

    samples.write_text("".join(json.dumps(s) + "\n" for s in GOLDEN["samples"]))
    found = json.loads(python("-m", "megatron_gvpo.cli", "explain", str(samples), "--objective", "best_of_group", "--json"))
    rewards = [s["reward"] for s in GOLDEN["samples"]]
    pushed = [s["coefficient"] < 0 for s in found["samples"]]
    assert pushed == [r == 1.0 for r in rewards]
    assert "15 passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(project), cwd=tmp_path)
