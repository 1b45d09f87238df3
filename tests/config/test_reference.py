"""The reference page and the shipped configs, which must not fall behind the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from megatron_gvpo.config import load_config
from megatron_gvpo.config.objectives import BUILTIN_CONFIGS
from megatron_gvpo.config.reference import reference_markdown
from megatron_gvpo.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "yaml_configs").glob("*.yaml"))


def test_the_page_is_current() -> None:
    """Why: a reference written by hand is wrong within a week. To mend: see the page's second line."""
    assert (ROOT / "docs" / "config.md").read_text() == reference_markdown()


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _models(field.annotation)


@pytest.mark.parametrize("model", [*list(_models(Config))[1:], *BUILTIN_CONFIGS.values()])
def test_every_key_says_what_it_means_and_has_a_default(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_pass_the_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why: these are what a newcomer starts from. Files are not asked for: models are made or brought by the user."""
    monkeypatch.chdir(ROOT)
    load_config(path, files=False)
