"""`doctor` on this very machine, and on made-up findings. Does not cover a machine with a GPU or with Transformer Engine."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_gvpo.launch import doctor, probe
from megatron_gvpo.launch.bandwidth import bandwidth_text, compare
from tests.ranks import run_ranks


def test_what_this_machine_has() -> None:
    """Why: the whole chain, with the real imports in a process of their own."""
    report = doctor.examine()
    findings = {item["name"]: item for item in report["findings"]}
    assert report["ready"]
    assert findings["torch"]["status"] == findings["megatron-core"]["status"] == findings["mbridge"]["status"] == "ok"
    text = doctor.doctor_text(report)
    for item in report["findings"]:
        assert item["name"] in text
        assert item["status"] == "ok" or item["cost"]


def _module(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(body))
    sys.modules.pop(name, None)


def test_an_import_may_raise_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: Transformer Engine without its compiled part raises RuntimeError, not ImportError."""
    monkeypatch.syspath_prepend(str(tmp_path))
    _module(tmp_path, "raises_runtime", "raise RuntimeError('no\\n compiled part')")
    _module(tmp_path, "needs_other", "import surely_not_there")
    assert probe.probe("raises_runtime")["error"] == "RuntimeError: no compiled part"
    assert probe.probe("needs_other")["error"] == "needs surely_not_there, which is not installed"
    assert probe.probe("surely_not_there")["found"] is False


def test_the_other_package_called_apex_is_not_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: the registry's `apex` is an unrelated web toolkit, and its presence says nothing about fused kernels."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    facts = probe.probe("apex")
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    finding = doctor._apex(facts)
    assert (finding.status, finding.detail) == ("missing", "the package of this name that is installed is not NVIDIA's")


@pytest.mark.parametrize(
    ("version", "status"), [("0.16.0", "broken"), ("0.16.1", "ok"), ("0.17.0rc1", "ok"), ("0.19.2", "ok"), ("0.20.0", "broken")]
)
def test_the_supported_range_of_megatron_core(version: str, status: str) -> None:
    facts = {"module": "megatron.core", "found": True, "version": version, "error": ""}
    assert doctor._megatron(facts).status == status


def test_doctor_says_what_is_missing_here() -> None:
    """Right for this very machine: what cannot be imported is not called there, and costs something that is said."""
    report = doctor.examine()
    findings = {item["name"]: item for item in report["findings"]}
    names = {"transformer-engine": "transformer_engine", "nvidia-apex": "apex", "triton": "triton", "wandb": "wandb"}
    for name, module in names.items():
        if importlib.util.find_spec(module) is None:
            assert findings[name]["status"] == "missing"
            assert findings[name]["cost"]
    import torch

    assert (findings["gpu"]["status"] == "ok") == torch.cuda.is_available()
    assert (findings["nccl"]["status"] == "ok") == torch.cuda.is_available()
    assert report["ready_for_gpu"] <= torch.cuda.is_available()


@pytest.mark.parametrize(
    ("version", "detail"),
    [
        ("1.13.0", "precision.fp8: delayed; too old for mxfp8, tensorwise, blockwise"),
        ("2.2.0+cu12", "precision.fp8: delayed, mxfp8, tensorwise; too old for blockwise"),
        ("2.9.0", "precision.fp8: delayed, mxfp8, tensorwise, blockwise"),
    ],
)
def test_which_recipes_a_transformer_engine_knows(version: str, detail: str) -> None:
    facts = {"module": "transformer_engine.pytorch", "found": True, "version": version, "error": ""}
    assert doctor._transformer_engine(facts).detail == detail


def _bandwidth(rank: int, world: int) -> dict | None:
    from megatron_gvpo.launch.bandwidth import measure

    return measure()


def test_bandwidth_of_two_real_ranks() -> None:
    """Through gloo; what a CPU should reach is nobody's guess, so nothing is called slow. Does not cover NCCL or two nodes."""
    found, other = run_ranks(_bandwidth, 2, init=False, timeout=120.0)
    assert other is None
    assert (found["device"], found["ranks"], found["slow"]) == ("cpu", 2, [])
    assert found["all"] > 0
    assert [speed > 0 for speed in found["nodes"].values()] == [True]
    assert "2 ranks on cpu" in bandwidth_text(found)


def test_a_slow_node_is_named() -> None:
    """Made-up speeds of two H100 nodes: NVLink 450, eight adapters of 50 GB/s a node."""
    found = compare("NVIDIA H100 80GB HBM3", 16, {"n1": 370.0, "n2": 40.0}, 300.0, 2)
    assert found["expected"] == {"node": pytest.approx(360.0), "all": pytest.approx(320.0)}
    assert found["slow"] == ["n2: 40 GB/s between its GPUs, 360 expected"]
    assert compare("NVIDIA H100 80GB HBM3", 16, {}, 20.0, 2)["slow"] == ["over all 2 nodes: 20 GB/s, 320 expected"]
    assert compare("Another Maker", 16, {}, 20.0, 2)["slow"] == []
