"""The rendered script on a real SLURM of three nodes on this machine: trainers on two of them, servers on the third.

Does not cover containers, accounting, preemption by a partition, cgroup limits, or GPUs (the nodes' are copies of /dev/null).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.load import load_config
from megatron_gvpo.launch.sbatch import render_sbatch
from tests.rollout.fake_server import fake_servers
from tests.slurm.cluster import Cluster
from tests.train.fakes import Sampler, servers
from tests.train.runs import QUIET, ROOT, checkpoints, config_of, rows_of, run

STEPS = 6


def script_of(folder: Path, **sections: dict[str, Any]) -> Path:
    """A run's script in its folder, as `megatron-gvpo sbatch` renders it."""
    launch = {"setup": [f"export PATH={Path(sys.executable).parent}:$PATH"], "env": {**QUIET, "PYTHONPATH": str(ROOT)}}
    sections["launch"] = {**launch, "time": "00:20:00", **sections.get("launch", {})}
    config = config_of(folder, **sections)
    path = folder / "run.sbatch"
    path.write_text(render_sbatch(load_config(config), config.name))
    for check in (["bash", "-n"], ["shellcheck", "--severity=style"]):
        done = subprocess.run([*check, str(path)], capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), check
    return path


def logs_of(folder: Path) -> str:
    files = [*folder.glob("*.log"), *folder.glob("logs/*/*.log")]
    return "\n".join(f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-3000:]}" for path in files)


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "servers": {"rollout": {"servers": {"nodes": 1}}},
    "spare": {"launch": {"health": ["test -w ."], "spare_nodes": 1}, "parallel": {"nodes": 2}},
    "components": {"rollout": {"servers": {"nodes": 1}}, "launch": {"heterogeneous": True}, "parallel": {"nodes": 2}},
    "gpus": {"launch": {"sbatch": ["--mem=1000"]}, "parallel": {"gpus_per_node": 2}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_slurm_accepts_it(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """Why: an option that sbatch refuses shows here and not at the front of a queue."""
    script = script_of(tmp_path, **VARIANTS[name])
    assert "to start at" in cluster.ask("sbatch", "--test-only", script.name, cwd=tmp_path)


def test_a_node_that_is_ill_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    """Why: one bad node in a hundred is normal. The run must not start on it, and the log must name it."""
    ill = f'[ "$SLURMD_NODENAME" != {cluster.nodes[0]} ] || {{ echo a fan is broken; exit 1; }}'
    script = script_of(tmp_path, launch={"health": [ill], "spare_nodes": 1})
    # Only the choice of nodes is of interest: the trainer is replaced by a line that names its node.
    stand_in = "bash -c 'echo trained on $SLURMD_NODENAME'"
    script.write_text(script.read_text().replace("megatron-gvpo train config.yaml", stand_in))
    job = cluster.wait_for_end(cluster.submit(script), 60.0)
    assert job["JobState"] == "COMPLETED", logs_of(tmp_path)
    found = logs_of(tmp_path)
    assert f"left out, see logs/gvpo-{job['JobId']}/health-{cluster.nodes[0]}.log: {cluster.nodes[0]}" in found
    assert "a fan is broken" in found
    assert f"trained on {cluster.nodes[1]}" in found


@pytest.mark.heavy
def test_a_signal_in_mid_rollout_and_the_job_finishes_after_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """Why: the whole of it, with SGLang. Two trainer ranks on two nodes, two servers on the third; USR1 as SLURM sends it before
    the time limit; both ranks save the same step, the job requeues itself, goes on, and is the run that its record replays to."""
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8}
    common: dict[str, Any] = {"train": {"steps": STEPS, "micro_batch_tokens": 128}, "checkpoint": {"every": 2, "export": True}}
    rollout_servers = {"nodes": 1, "count": 2, "concurrency": 8}
    script = script_of(
        tmp_path, rollout={**rollout, "servers": rollout_servers}, parallel={"nodes": 2, "gpus_per_node": 1}, **common
    )
    number = cluster.submit(script)
    journal = tmp_path / "run" / "journal" / "step_00000003.jsonl"
    cluster.until(lambda: journal.exists() or cluster.job(number)["JobState"] == "FAILED", "step 3", 200.0)
    assert journal.exists(), logs_of(tmp_path)
    cluster.ask("scancel", "--signal=USR1", "--batch", number)
    cluster.until(lambda: cluster.job(number).get("Restarts") == "1", "the requeue", 60.0)
    job = cluster.wait_for_end(number, 250.0)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), logs_of(tmp_path)
    output = logs_of(tmp_path)
    assert "saved on a signal; requeueing job" in output
    assert "because of SIGUSR1" in output
    assert "resumed after step" in output
    assert {path.name for path in (tmp_path / "logs" / f"gvpo-{number}").glob("*.log")} >= {
        *("trainer-0.log", "trainer-1.log"),
        f"student-{cluster.nodes[2]}.log",
    }
    again = config_of(tmp_path / "again", rollout=rollout, parallel={"gpus_per_node": 2}, **common)
    done = run(again, "--replay", str(tmp_path / "run"))
    assert done.code == 0, done.errors
    assert [_comparable(row) for row in rows_of(tmp_path / "again" / "run")] == [
        _comparable(row) for row in rows_of(tmp_path / "run")
    ]
    weights = [(path / "run" / "hf" / "model.safetensors").read_bytes() for path in (tmp_path, tmp_path / "again")]
    assert weights[0] == weights[1]


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("data/")}


@pytest.mark.heavy
def test_a_cancelled_step_and_a_lost_node_end_clearly(cluster: Cluster, tmp_path: Path) -> None:
    """Why: what administrators and broken machines do. `scancel` of the trainer's step kills its ranks; the job ends, says
    so, and `sbatch SCRIPT --resume` goes on with the groups that were complete. A node whose slurmd is gone ends the job, or puts
    it back into the queue, within SLURM's own limit."""
    with fake_servers(1) as (fake,):
        sampler = Sampler(fake)
        sampler.stall_after(2 * 3 + 1)
        script = script_of(
            tmp_path,
            rollout=servers(fake, prompts_per_step=3, request_timeout_s=300.0),
            parallel={"nodes": 2, "gpus_per_node": 1},
            checkpoint={"every": 1},
        )
        number = cluster.submit(script)
        run_dir = tmp_path / "run"
        page = run_dir / "journal" / "step_00000003.jsonl"
        cluster.until(page.exists, "a stalled rollout", 120.0)
        steps = cluster.ask("squeue", "--steps", "--job", number, "--noheader", "--format=%i %j").splitlines()
        (trainer,) = [line.split()[0] for line in steps if line.endswith(" trainer")]
        cluster.ask("scancel", trainer)
        assert cluster.wait_for_end(number, 60.0)["JobState"] == "FAILED"
        assert "error: the trainer ended with exit code 137; its logs are in logs/gvpo-" in logs_of(tmp_path)
        assert checkpoints(run_dir) == ["step_00000001", "step_00000002"]

        asked = sum(sampler.asked.values())
        number = cluster.submit(script, "--resume")
        cluster.until(lambda: sum(sampler.asked.values()) > asked, "the resumed run's first request", 120.0)
        assert sum(sampler.asked.values()) <= asked + 2  # the third group of step 3 came from the journal
        cluster.kill_node(cluster.nodes[1])
        try:
            over = ("NODE_FAIL", "FAILED", "PENDING", "REQUEUED", "COMPLETING")
            cluster.until(lambda: cluster.job(number)["JobState"] in over, "the job to be taken off the lost node", 90.0)
        finally:
            cluster.ask("scancel", number, check=False)
            sampler.resume()
            cluster.start_node(cluster.nodes[1])
        cluster.until(lambda: cluster.idle() == cluster.nodes, "the node to come back", 60.0)
        assert checkpoints(run_dir)[-1] == "step_00000002"
