"""What `plan` says of a teacher's payloads, against what is really sent or held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_gvpo.config import load_config
from megatron_gvpo.launch.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]


def test_the_plan_knows_what_each_payload_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: the choice between sampled, top-k and whole distributions is one of bytes. The binary form's number is the real
    encoding; JSON's is a typical one (measured by benchmarks/teacher.py)."""
    monkeypatch.chdir(ROOT)
    config = load_config("yaml_configs/demo_chain_sum_gkd_tv.yaml", ["teacher.top_k=128"])
    teacher = make_plan(config)["teacher"]
    rows = teacher["payloads"]
    assert teacher["in_use"] == "colocated full"
    assert teacher["tokens_per_step"] == 32 * 4 * 8
    assert rows["colocated full"]["bytes_per_token"] == 128 * 4  # hidden size, float32
    assert rows["colocated full"]["bytes_per_step"] == 128 * 4 * 32 * 4 * 8
    assert [name for name, row in rows.items() if not row["possible"]] == ["served full"]
    arrays = np.zeros((30, 128), "<f4").nbytes + np.zeros((30, 128), "<i4").nbytes
    encoded = arrays * 4 / 3 / 30
    assert rows["served topk"]["bytes_per_token"] - rows["served sampled"]["bytes_per_token"] == pytest.approx(encoded)
    assert "teacher" not in make_plan(load_config("yaml_configs/demo_chain_sum_gvpo.yaml"))
