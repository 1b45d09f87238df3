"""How the config's errors speak: what a value may be, and which known word an unknown one resembles."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below", "less_than_equal": "at most"}


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no choice is near."""
    # 0.7 keeps `gpu` from being answered by `cpu`.
    near = difflib.get_close_matches(word, list(choices), 1, 0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe(annotation: Any) -> str:
    """A type as a person would say it: `a number`, `one of a, b`, `a list of texts`."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"{'one of ' if len(args) > 1 else ''}{', '.join(spell(value) for value in args)}"
    if origin in (Union, types.UnionType):
        parts = [describe(part) for part in args if part is not type(None)]
        return " or ".join([*parts, "empty"] if type(None) in args else parts)
    if origin is list:
        return f"a list of {_plural(args[0])}"
    if origin is dict:
        return "keys with values" if args[1] is Any else f"keys with {_plural(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section with keys of its own"
    return "a value"


def _plural(annotation: Any) -> str:
    return describe(annotation).removeprefix("a ") + "s"


def spell(value: Any) -> str:
    """A value as YAML spells it, in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "empty" if value is None else str(value)


def explain_error(error: Mapping[str, Any], annotation: Any, siblings: Iterable[str], elsewhere: Iterable[str]) -> str:
    """One pydantic error as a phrase. `siblings`: the keys that exist at that place; `elsewhere`: dotted names of others."""
    kind, value, context = error["type"], error.get("input"), error.get("ctx") or {}
    if kind == "extra_forbidden":
        word, known = str(error["loc"][-1]), list(siblings)
        hint = did_you_mean(word, known)
        if not hint and (others := [name for name in elsewhere if name.split(".")[-1] == word]):
            hint = f"; did you mean {others[0]!r}?"
        return "unknown key" + (hint or f"; known here: {', '.join(known)}")
    if kind == "missing":
        return "is missing"
    if kind in _BOUNDS:
        return f"must be {_BOUNDS[kind]} {next(iter(context.values()))}, got {_got(value)}"
    if kind == "finite_number":
        return f"must be finite, got {_got(value)}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"]))
    if annotation is not None:
        text = f"must be {describe(annotation)}, got {_got(value)}"
        options = [str(option) for option in get_args(annotation) if isinstance(option, str)]
        return text + (did_you_mean(value, options) if isinstance(value, str) else "")
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {_got(value)}"


def _got(value: Any) -> str:
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list):
        return "a list"
    text = f"the text {value!r}" if isinstance(value, str) else spell(value)
    return text if len(text) < 60 else text[:57] + "..."
