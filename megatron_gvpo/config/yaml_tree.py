"""YAML text to plain values, with the place of every key and value.

PyYAML follows YAML 1.1, in which `1e-6` is a text, `off` is false and `24:00:00` is the number 86400. A training config means
none of that, so plain scalars are resolved by the core schema of YAML 1.2 (section 10.3.2), and keys are always texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Mark:
    """A place in the file, counted from 1."""

    line: int
    column: int


@dataclass
class Tree:
    """What a YAML text says and where it says it. `problems` are (place, path, what is wrong)."""

    data: Any = None
    keys: dict[Path, Mark] = field(default_factory=dict)
    values: dict[Path, Mark] = field(default_factory=dict)
    problems: list[tuple[Mark, Path, str]] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  PyYAML fills it per class


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str) -> Tree:
    """Read one YAML document. Never raises for what is in the text: what is wrong is in `problems`."""
    tree = Tree()
    try:
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = _mark(mark) if mark else Mark(1, 1)
        tree.problems.append((place, (), f"not YAML: {error.problem or error.context}"))
        return tree
    except yaml.YAMLError as error:
        tree.problems.append((Mark(1, 1), (), f"not YAML: {' '.join(str(error).split())}"))
        return tree
    if node is not None:
        tree.data = _Walk(tree).value(node, ())
    return tree


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


class _Walk:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.open: set[int] = set()  # nodes above this one: an alias may point at its own ancestor

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.tree.values[path] = _mark(node.start_mark)
        if id(node) in self.open:
            return self.problem(node, path, "an alias that contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return dict(self.items(node, path))
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.scalar(node, path)
        finally:
            self.open.discard(id(node))

    def items(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        seen: dict[str, Mark] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problem(key, path, "a key must be a plain word")
                continue
            place = (*path, key.value)
            if key.value in seen:
                self.problem(key, place, f"duplicate key; it stands in line {seen[key.value].line} already")
                continue
            seen[key.value] = self.tree.keys[place] = _mark(key.start_mark)
            yield key.value, self.value(value, place)

    def scalar(self, node: yaml.Node, path: Path) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if kind == "float":
            return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").replace(".nan", "nan"))
        return self.problem(node, path, f"the tag {node.tag} is not read here")

    def problem(self, node: yaml.Node, path: Path, why: str) -> None:
        self.tree.problems.append((_mark(node.start_mark), path, why))
