"""The cluster of this folder's tests. Where a machine has no SLURM they are not collected, and the run says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing

LACKING = missing()
collect_ignore = ["test_slurm.py"] if LACKING else []


def pytest_report_header() -> list[str]:
    if not LACKING:
        return []
    return [f"left out: tests/slurm, a real SLURM on this machine, for which it lacks {', '.join(LACKING)}"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o001 == 0 and str(parent) != "/":
            parent.chmod(parent.stat().st_mode | 0o011)  # munged wants to be reachable
    started = Cluster(folder, nodes=3)
    try:
        started.start()
        yield started
    finally:
        started.stop()
