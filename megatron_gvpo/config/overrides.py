"""`--set section.key=value` on top of what the file says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.schema import Config
from megatron_gvpo.config.source import dotted
from megatron_gvpo.config.yaml_tree import Path, parse_yaml


def annotation_at(path: Path, model: type[BaseModel] = Config) -> Any:
    """The declared type of the key at `path`; None where the schema knows none (an unknown key, an objective's own)."""
    annotation: Any = model
    for part in path:
        origin, args = get_origin(annotation), get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found = annotation.model_fields.get(str(part))
            annotation = found.annotation if found else None
        elif origin is list and isinstance(part, int):
            annotation = args[0]
        elif origin is dict:
            annotation = args[1]
        else:
            return None
    return annotation


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> tuple[set[Path], list[str]]:
    """Write the overrides into `data`, the last of a key winning. Returns their paths, and one line per wrong override."""
    paths: set[Path] = set()
    problems: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            problems.append(f"--set: {override!r} is not of the form section.key=value")
            continue
        problem = _write(data, keys, text)
        if problem:
            problems.append(f"--set: {dotted(keys)}: {problem}")
        else:
            paths.add(keys)
    return paths, problems


def _write(data: dict[str, Any], keys: tuple[str, ...], text: str) -> str:
    place: Any = data
    for depth, key in enumerate(keys[:-1]):
        below = place.get(key)
        if below is None:
            below = place[key] = {}
        if not isinstance(below, dict):
            return f"{dotted(keys[: depth + 1])} has no keys of its own; set it as a whole"
        place = below
    if annotation_at(keys) is str:
        place[keys[-1]] = text  # a text needs no quotes here: `--set launch.partition=0017`
        return ""
    tree = parse_yaml(text)
    if tree.problems:
        return tree.problems[0][2]
    place[keys[-1]] = tree.data
    return ""


def objective_options(overrides: Sequence[str]) -> dict[str, Any]:
    """An objective's own keys from `key=value` (or `objective.key=value`) texts, where there is no config. Raises ConfigError."""
    options: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        key = name.strip().removeprefix("objective.")
        tree = parse_yaml(text)
        if not equals or not key:
            problems.append(f"--set: {override!r} is not of the form key=value")
        elif tree.problems:
            problems.append(f"--set: {key}: {tree.problems[0][2]}")
        else:
            options[key] = tree.data
    if problems:
        raise ConfigError(problems)
    return options
