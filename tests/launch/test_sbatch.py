"""The rendered SLURM script. Does not cover a real SLURM."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config import ConfigError, load_config
from megatron_gvpo.launch.sbatch import render_sbatch
from tests.config.conftest import Run


def script(run: Run, *overrides: str, **changes: Any) -> str:
    return render_sbatch(run.load(**changes), "yaml_configs/x.yaml", overrides)


def test_bash_can_read_it(run: Run) -> None:
    """Why: a syntax error shows only after hours in the queue. Odd values must come out quoted."""
    launch = {
        "env": {"NCCL_DEBUG": "WARN", "ODD": "a b'c$d"},
        "modules": ["cuda/12.4"],
        "setup": ["source env/bin/activate"],
        "container": "image with space.sqsh",
        "srun": ["--container-mounts=/data"],
    }
    text = script(run, "objective.beta=0.2", launch=launch)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "module load cuda/12.4\nsource env/bin/activate\n" in text
    assert "'--container-image=image with space.sqsh' --container-mounts=/data" in text
    assert """env NCCL_DEBUG=WARN 'ODD=a b'"'"'c$d' megatron-gvpo train yaml_configs/x.yaml --set objective.beta=0.2""" in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"launch": {"spare_nodes": 1}}, "launch.health"),
        ({"launch": {"heterogeneous": True}}, "rollout.servers.nodes"),
        ({"launch": {"array": "0-3"}, "log": {"dir": "runs/x"}}, "{seed}"),
    ],
)
def test_what_cannot_be_a_job_is_refused(run: Run, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script(run, **changes)
    (line,) = caught.value.lines
    assert part in line


def test_servers_of_their_own_nodes(run: Run) -> None:
    """Why: the trainer must neither start servers nor look for them elsewhere, and each kind of node comes once."""
    changes: dict[str, Any] = {"rollout": {"servers": {"nodes": 2}}, "parallel": {"nodes": 3}}
    text = script(run, **changes)
    assert "#SBATCH --nodes=5\n" in text
    assert 'trainers=("${nodes[@]:0:3}")\nstudents=("${nodes[@]:3:2}")\n' in text
    assert 'more+=(--set rollout.servers.launch=none --set "rollout.servers.registry=$registry/student")' in text
    parts = script(run, launch={"heterogeneous": True}, **changes).partition("#SBATCH hetjob\n")
    assert ("#SBATCH --nodes=3\n" in parts[0], "#SBATCH --nodes=2\n" in parts[2]) == (True, True)
    assert ("srun --het-group=0 " in parts[2], "srun --het-group=1 " in parts[2]) == (True, True)
    assert "teacher" not in text


def test_an_array_is_one_seed_a_task(run: Run) -> None:
    text = script(run, launch={"array": "0-3%2"}, log={"dir": "runs/x_{seed}"})
    assert ("#SBATCH --array=0-3%2\n" in text, "#SBATCH --output=%x-%A_%a.log\n" in text) == (True, True)
    assert 'more+=(--set "train.seed=${SLURM_ARRAY_TASK_ID' in text


def test_ranks_signals_and_options(run: Run) -> None:
    launch = {"partition": "gpu", "time": "04:00:00", "sbatch": ["--qos=high"], "grace_s": 600}
    text = script(run, launch=launch, parallel={"nodes": 2, "gpus_per_node": 4}, train={"device": "cuda"})
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    wanted = {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=04:00:00", "--signal=B:USR1@600", "--requeue"}
    assert wanted | {"--partition=gpu", "--qos=high", "--open-mode=append"} <= set(options)
    cpu = script(run, parallel={"gpus_per_node": 4})
    assert "--gpus-per-node" not in cpu


def _play(run: Run, code: int, state: str, restarts: int) -> tuple[int, str]:
    """Run the script with stand-ins for SLURM's programs on the path; gives its exit code and what they were called with."""
    programs = run.folder / "bin"
    programs.mkdir(exist_ok=True)
    calls = run.folder / "calls"
    calls.write_text("")
    node = '[ "$1 $2" = "show node" ] && echo "   NodeAddr=10.0.0.1 NodeHostName=n1"\n'
    job = f'[ "$1 $2" = "show job" ] && echo "   JobState={state} Reason=None"\n'
    stand_ins = {
        "srun": f"exit {code}",
        "squeue": "true",
        "scontrol": f'[ "$1 $2" = "show hostnames" ] && echo n1\n{node}{job}true',
    }
    for name, body in stand_ins.items():
        file = programs / name
        file.write_text(f'#!/bin/bash\necho "{name} $*; address $MASTER_ADDR" >> {calls}\n{body}\n')
        file.chmod(0o755)
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(run.folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash"], input=script(run), text=True, env=environment, capture_output=True, timeout=20, check=False)
    # A failure is named, with where to look; a run that is done or was saved has nothing to complain of.
    failed = code not in (0, 85)
    assert done.stderr == (f"error: the trainer ended with exit code {code}; its logs are in logs/run-7\n" if failed else "")
    return done.returncode, calls.read_text()


def test_requeues_on_85_only_while_the_job_runs(run: Run) -> None:
    """Why: exit 85 asks for another turn; a cancelled job that came back to life would be a nuisance."""
    assert _play(run, 85, "RUNNING", 0)[1].count("scontrol requeue 7") == 1
    code, calls = _play(run, 85, "CANCELLED", 0)
    assert (code, "requeue" in calls) == (85, False)
    for code in (0, 1, 2):
        assert _play(run, code, "RUNNING", 0)[0] == code
        assert "requeue" not in _play(run, code, "RUNNING", 0)[1]


def test_the_address_is_the_first_nodes_and_a_restart_resumes(run: Run) -> None:
    _, calls = _play(run, 0, "RUNNING", 0)
    (srun,) = [line for line in calls.splitlines() if line.startswith("srun")]
    assert srun.endswith("train yaml_configs/x.yaml; address 10.0.0.1")
    assert "--nodelist=n1 " in srun
    _, calls = _play(run, 0, "RUNNING", 1)
    assert "train yaml_configs/x.yaml --resume; address 10.0.0.1" in calls


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "yaml_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_scripts_are_current(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: `slurm/` is what people copy. To mend: `megatron-gvpo sbatch yaml_configs/X.yaml --no-files -o slurm/X.sbatch`."""
    monkeypatch.chdir(ROOT)
    relative = path.relative_to(ROOT)
    rendered = render_sbatch(load_config(relative, files=False), relative)
    assert (ROOT / "slurm" / f"{path.stem}.sbatch").read_text() == rendered
