"""The reference page of the config, made from the code: `python -m megatron_gvpo.config.reference > docs/config.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, ObjectiveConfig
from megatron_gvpo.config.schema import Config
from megatron_gvpo.config.wording import describe, spell

_INTRO = """# The config file

<!-- Made by `python -m megatron_gvpo.config.reference > docs/config.md`; do not edit by hand, a test compares. -->

One YAML file describes a run. Every key has a default, unknown and duplicate keys are refused, and `megatron-gvpo validate
CONFIG` names every mistake with its line in a fraction of a second:

    run.yaml:4:3: rollout.group_sze: unknown key; did you mean 'group_size'?

`--set section.key=value` changes a key for one run. Values are read as YAML 1.2: `1e-6` is a number, `off` a text. Environment
variables are not expanded. Paths are relative to the directory in which the command runs.

What `validate` checks beyond single keys: the layout against the model's sizes, the objective's needs against what the run
gives it (groups, rewards, reference, teacher, fresh samples, full support), lengths, batches, servers, and whether data,
weights and programs exist (`--no-files` leaves the last out).
"""


def reference_markdown() -> str:
    """The whole page."""
    lines = [_INTRO]
    for name, found in Config.model_fields.items():
        model = found.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        lines += _section(f"## `{name}`", f"{name}.", model)
    lines.append("## Objectives and their keys\n")
    lines.append("These stand in the section `objective`, beside `name`. A plug-in brings keys of its own.\n")
    for name, model in BUILTIN_CONFIGS.items():
        lines += _section(f"### `{name}`", "", model)
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, prefix: str, model: type[BaseModel]) -> list[str]:
    lines = [title, ""]
    if model.__doc__ and model.__doc__ != (BaseModel.__doc__ or "") and issubclass(model, ObjectiveConfig):
        lines += [" ".join(model.__doc__.split()), ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    lines += list(_rows(prefix, model))
    return [*lines, ""]


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _rows(f"{prefix}{name}.", annotation)
            continue
        value = describe(annotation) + _bounds(field)
        yield f"| `{prefix}{name}` | {value} | {_default(field)} | {field.description} |"


def _bounds(field: FieldInfo) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [f"{word} {getattr(item, key)}" for item in field.metadata for key, word in words.items() if hasattr(item, key)]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "(required)"
    if value in ("", None, [], {}):
        return "empty"
    return f"`{spell(value)}`"


if __name__ == "__main__":
    print(reference_markdown(), end="")
