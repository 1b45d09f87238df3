"""`doctor` on this very machine, and on made-up findings. Does not cover a machine with a GPU or with Transformer Engine."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from megatron_gvpo.launch import doctor, probe


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
