"""YAML file and `--set` overrides to a typed `Config`, or every problem at once, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_gvpo.config.check import check_config
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.objectives import ObjectiveConfigError, objective_config
from megatron_gvpo.config.overrides import annotation_at, apply_overrides
from megatron_gvpo.config.schema import Config
from megatron_gvpo.config.source import Source
from megatron_gvpo.config.wording import explain_error
from megatron_gvpo.config.yaml_tree import Mark, Path, parse_yaml


def load_config(path: str | FilePath, overrides: Sequence[str] = (), *, files: bool = True) -> Config:
    """The config at `path` with `overrides` (`section.key=value`) on top, checked for contradictions.

    `files=False` leaves out whether data, weights and programs exist on this machine. Raises ConfigError.
    """
    config, source = read_config(path, overrides)
    findings = check_config(config, source, files=files)
    if errors := [finding.line for finding in findings if finding.severity == "error"]:
        raise ConfigError(errors)
    return config


def read_config(path: str | FilePath, overrides: Sequence[str] = ()) -> tuple[Config, Source]:
    """The typed config and the places of its keys; contradictions between keys are not looked for. Raises ConfigError."""
    source = Source(str(path))
    tree = parse_yaml(_text(path))
    source.keys, source.values = tree.keys, tree.values
    found = [(mark, source.line(where, why, mark=mark)) for mark, where, why in tree.problems]
    data = {} if tree.data is None else tree.data
    if not isinstance(data, dict):
        raise ConfigError([source.line((), "a config is a mapping of sections, such as `model:` and `rollout:`")])
    if any(not where for _, where, _ in tree.problems):  # not YAML at all: what follows would be noise
        raise ConfigError([line for _, line in found])
    source.overrides, wrong = apply_overrides(data, overrides)
    for name in Config.model_fields:
        if name in data and data[name] is None:
            data[name] = {}  # a section whose keys are all commented out
    config, errors = _validate(Config, data, ())
    options = data.get("objective", {})
    if isinstance(options, dict) and isinstance(options.get("name", "gvpo"), str):
        errors += _objective_errors(options)
    for where, why, on_key in errors:
        found.append((source.place(where, value=not on_key), source.line(where, why, value=not on_key)))
    lines = [line for _, line in sorted(found, key=lambda item: item[0])] + wrong
    if lines or config is None:
        raise ConfigError(list(dict.fromkeys(lines)))
    return config, source


def _text(path: str | FilePath) -> str:
    try:
        return FilePath(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not a UTF-8 text (byte {error.start})"]) from None


Problem = tuple[Path, str, bool]
"""Path, what is wrong, and whether the key rather than the value is to blame."""


def _validate(model: type[BaseModel], data: dict[str, Any], prefix: Path) -> tuple[Any, list[Problem]]:
    # Strict: pydantic's lax mode reads `true` as 1 and "8" as 8, which hides slips of the pen.
    try:
        return model.model_validate(data, strict=True), []
    except ValidationError as error:
        return None, list(_problems(error, model, prefix))


def _objective_errors(options: dict[str, Any]) -> list[Problem]:
    name = options.get("name", "gvpo")
    own = {key: value for key, value in options.items() if key != "name"}
    try:
        objective_config(name, own)
    except ObjectiveConfigError as error:
        return [
            (("objective", *filter(None, problem.key.split("."))), problem.what, problem.key != "name")
            for problem in error.problems
        ]
    return []


def _problems(error: ValidationError, model: type[BaseModel] | None, prefix: Path) -> Iterator[Problem]:
    seen: set[Path] = set()
    for item in error.errors(include_url=False):
        path = _real_path(item["loc"], model)
        if path in seen:  # a union reports each of its members
            continue
        seen.add(path)
        siblings: Sequence[str] = ()
        annotation = None
        if model is not None:
            parent = annotation_at(path[:-1], model)
            if isinstance(parent, type) and issubclass(parent, BaseModel):
                siblings = list(parent.model_fields)
            annotation = annotation_at(path, model)
        on_key = item["type"] in ("extra_forbidden", "missing")
        yield (*prefix, *path), explain_error(item, annotation, siblings, _all_keys()), on_key


def _real_path(location: Sequence[Any], model: type[BaseModel] | None) -> Path:
    """pydantic appends the names of a union's members to the path; the file has no such keys."""
    path: Path = ()
    for part in location:
        container = annotation_at(path, model) if model is not None else None
        is_model = isinstance(container, type) and issubclass(container, BaseModel)
        if path and model is not None and not is_model and getattr(container, "__origin__", None) not in (list, dict):
            break
        path = (*path, part)
    return path


def _all_keys() -> list[str]:
    return [
        f"{section}.{key}"
        for section, found in Config.model_fields.items()
        if isinstance(found.annotation, type) and issubclass(found.annotation, BaseModel)
        for key in found.annotation.model_fields
    ]


__all__ = ["ConfigError", "Mark", "Source", "load_config", "read_config"]
