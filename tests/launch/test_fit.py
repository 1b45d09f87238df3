"""`plan` on a GPU cluster: fits, times, traffic and placement; and `--fit`. Nothing here was compared with a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config import Config, load_config
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.schema import ParallelSection
from megatron_gvpo.launch.fit import fit_plan, fit_text
from megatron_gvpo.launch.hardware import GPUS, Assumptions
from megatron_gvpo.launch.layout import Coordinates, coordinates, link, rank_at
from megatron_gvpo.launch.plan import make_plan
from megatron_gvpo.launch.plan_text import plan_text
from tests.config.conftest import Run
from tests.launch.test_shipped import CLUSTER, ROOT

LLAMA_64 = "llama-3.1-70b_gvpo_bf16_64"


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def shipped(name: str, *overrides: str) -> Config:
    return load_config(ROOT / "yaml_configs" / f"{name}.yaml", overrides, files=False)


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize("name", CLUSTER)
def test_every_shipped_config_fits_and_is_planned_in_time(name: str) -> None:
    """Why: a shipped config that does not fit its own GPUs is a trap."""
    started = time.process_time()
    plan = make_plan(shipped(name))
    text = plan_text(plan)
    assert time.process_time() - started < 5
    assert plan["fits"], text
    assert "NOT fit" not in text
    assert plan["seconds"]["step"] == pytest.approx(sum(plan["seconds"].values()) - plan["seconds"]["step"])
    assert 0 <= plan["pipeline_bubble"] < 0.05
    assert plan["layout"]["placement"][-1]["ranks"][1] == plan["layout"]["world"] - 1
    json.dumps(plan, allow_nan=False)


@pytest.mark.usefixtures("at_root")
def test_a_70b_on_64_gpus_has_a_layout_and_on_16_it_does_not() -> None:
    """Why: 141 GB of weights, 282 of gradients and 847 of optimizer state are 79 GB on each of 16 GPUs, before a token."""
    found = fit_plan(shipped(LLAMA_64))
    assert found["found"]
    assert found["peak_gib"] <= found["usable_gib"]
    # What it says to set is a config that passes the check, and plans to the same peak.
    again = make_plan(shipped(LLAMA_64, *found["sets"]))
    assert again["memory_gib_total"] == pytest.approx(found["peak_gib"])
    assert again["fits"]

    small = fit_plan(shipped(LLAMA_64, "parallel.nodes=2"))
    assert not small["found"]
    assert small["missing_gib"] == pytest.approx(small["peak_gib"] - small["usable_gib"])
    assert small["missing_gib"] > 5
    assert [remedy for remedy in small["remedies"] if "nodes" in remedy["what"] and remedy["fits"]]
    text = fit_text(small)
    assert f"{small['missing_gib']:.1f} GiB a GPU are missing" in text
    assert "optimizer.cpu_offload=true" in text


@pytest.mark.usefixtures("at_root")
def test_what_fit_offers_is_no_slower_than_the_config() -> None:
    for name in ("qwen2.5-32b_gvpo_bf16_64", "qwen3-235b-a22b_gvpo_fp8_256"):
        config = shipped(name)
        offered, now = fit_plan(config), make_plan(config)
        servers = sum(server["seconds_per_step"] for server in now["servers"])
        assert offered["train_seconds"] <= (now["seconds"]["step"] - servers) * 1.001


def test_fit_is_refused_for_the_cpu(run: Run) -> None:
    with pytest.raises(ConfigError, match="CPU device mode"):
        fit_plan(run.load())


@pytest.mark.usefixtures("at_root")
def test_times_follow_what_they_should() -> None:
    """Directions, and one number by hand: 6 operations a weight and token, and attention, at the stated share of the peak."""

    def seconds(*overrides: str, **assumed: Any) -> dict[str, float]:
        return make_plan(shipped("qwen2.5-math-1.5b_gvpo_bf16_8", *overrides), Assumptions(**assumed))["seconds"]

    base = seconds()["forward_backward"]
    tokens, trained = 1024 * 4096, 1024 * 3072
    weights = 28 * (1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960)
    by_hand = 6 * weights * tokens + 3 * 28 * 2 * 4096 * 1536 * tokens + 6 * 151936 * 1536 * trained
    assert base == pytest.approx(by_hand / (8 * 989e12 * 0.45), rel=0.001)
    assert seconds(efficiency=0.225)["forward_backward"] == pytest.approx(2 * base)
    assert seconds("model.recompute=full")["forward_backward"] > 1.2 * base
    assert seconds("train.optimizer_steps=2")["no_grad_passes"] > 0
    assert seconds(gpu=GPUS["b200"])["forward_backward"] < base / 2


def test_the_bubble_is_the_schedules() -> None:
    """(p - 1) / v slots of waiting beside m of work, arXiv 2104.04473, section 2.2."""
    one = make_plan(shipped("llama-3.1-70b_gvpo_bf16_256", f"model.path={ROOT}/yaml_configs/models/llama-3.1-70b"))
    slots = 3 / 5
    assert one["pipeline_bubble"] == pytest.approx(slots / (1024 + slots))


@pytest.mark.parametrize("layout", [{"tensor": 8, "pipeline": 4, "nodes": 32}, {"tensor": 2, "context": 2, "nodes": 4}])
def test_coordinates_are_a_bijection_and_tensor_ranks_share_a_node(layout: dict[str, int]) -> None:
    parallel = ParallelSection(gpus_per_node=8, **layout)
    places = [coordinates(parallel, rank) for rank in range(parallel.world_size)]
    assert len(set(places)) == parallel.world_size
    assert [rank_at(parallel, place) for place in places] == list(range(parallel.world_size))
    assert coordinates(parallel, parallel.world_size - 1) == Coordinates(
        parallel.tensor - 1, parallel.context - 1, parallel.data - 1, parallel.pipeline - 1
    )
    assert link(parallel, "tensor") == "nvlink"
    assert link(parallel, "data_context") == "network"


@pytest.mark.usefixtures("at_root")
def test_the_command_line() -> None:
    """Why: `--json` is for programs: JSON alone on stdout, with the fit inside."""
    command = [sys.executable, "-m", "megatron_gvpo.cli", "plan", f"yaml_configs/{LLAMA_64}.yaml", "--fit", "--gpu", "h200"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True)
    plan = json.loads(done.stdout)
    assert plan["parameters"] == 70_553_706_496
    assert {"weights", "gradients", "optimizer", "activations", "logprobs"} <= set(plan["memory_gib"])
    assert plan["gpu"]["name"].startswith("H200")
    assert plan["fit"]["found"]
    wrong = subprocess.run([*command[:-1], "abacus"], capture_output=True, text=True, timeout=60, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_the_demos_plan_has_no_times() -> None:
    """Why: what a laptop's cores reach is nobody's guess."""
    config = load_config(ROOT / "yaml_configs" / "demo_chain_sum_gvpo.yaml", files=False)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(Path(ROOT) / "examples" / "chain_sum" / "student")})}
    )
    assert "seconds" not in make_plan(config)
