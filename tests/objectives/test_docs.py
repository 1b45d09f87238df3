"""The page about objectives names every objective and every key of its own, and its pictures are what the code draws."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, ObjectiveConfig
from megatron_gvpo.report.objective_plots import distillation_weights, response_weights, write_figures

DOCS = Path(__file__).parents[2] / "docs"


def test_every_objective_and_key_is_on_the_page() -> None:
    """A key that was added and not explained, or a picture that is linked and not there."""
    page = (DOCS / "objectives.md").read_text()
    for name, config in BUILTIN_CONFIGS.items():
        assert f"`{name}`" in page
        keys = set(config.model_fields) - set(ObjectiveConfig.model_fields) - {"seed", "beta", "reference", "teacher"}
        missing = [key for key in keys if not re.search(rf"\b{key}\b", page)]
        assert not missing, f"{name}: {missing}"
    for picture in re.findall(r"\((img/[^)]+)\)", page):
        assert (DOCS / picture).stat().st_size < 100_000


def test_pictures_are_drawn_from_the_objectives(tmp_path: Path) -> None:
    """The curves' values by hand, and all files written. How they look is not tested."""
    assert distillation_weights("raw", [-1.0, 2.0]) == pytest.approx([-1.0, 2.0])
    assert distillation_weights("clip", [-1.0, 4.0], clip=2.0) == pytest.approx([-1.0, 2.0])
    # k = 8, reward above the mean by 1/2, log-ratio above it by 7/8: beta w / (k - 1)
    assert response_weights("gvpo", 1.0, [0.0, 1.0], {"beta": 0.2}) == pytest.approx(
        [0.2 * 0.5 / 7, 0.2 * (0.5 - 0.2 * 7 / 8) / 7]
    )
    assert [path.name for path in write_figures(tmp_path)] == ["distillation_weights.svg", "response_weights.svg"]
