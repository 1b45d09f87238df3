"""The house's lines: which room may import which, and what stays light. An import goes down, never up.

Reads the source, so an import inside a function counts as well as one at the top of a file.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_gvpo"
FLOORS = [
    {"config"},
    {"objectives", "logprobs"},
    {"gupo", "data"},
    {"mcore", "rollout"},
    {"train", "launch", "report"},
    {"cli"},
]
# Rooms on one floor that must not know each other.
STRANGERS = [("mcore", "rollout"), ("objectives", "logprobs")]


def floor(room: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE).parts
        if inside[0] != "__init__.py":
            yield inside[0].removesuffix(".py"), path


def broken(rule: Callable[[str, str], bool]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for room, path in files()
        for line, name in imports(path)
        if rule(room, name)
    ]  # type: ignore[operator]


def test_imports_go_down() -> None:
    """Why: a room that knows its users cannot be read, tested or replaced alone."""

    def goes_up(room: str, name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "megatron_gvpo" and len(parts) > 1 and floor(parts[1]) > floor(room)

    assert broken(goes_up) == []


@pytest.mark.parametrize(("a", "b"), STRANGERS)
def test_neighbours_that_do_not_meet(a: str, b: str) -> None:
    """Why: the trainer and the server's client are glued in one place, the train room."""

    def meets(room: str, name: str) -> bool:
        return (room == a and name.startswith(f"megatron_gvpo.{b}")) or (room == b and name.startswith(f"megatron_gvpo.{a}"))

    assert broken(meets) == []


def test_only_mcore_knows_megatron() -> None:
    """Why: one room follows Megatron-Core's changes; nothing outside notices its version."""
    assert broken(lambda room, name: room != "mcore" and (name == "megatron" or name.startswith("megatron."))) == []


def test_rollout_knows_no_process_groups_and_config_no_torch() -> None:
    """Why: the client runs anywhere HTTP does, and `validate` answers at once."""
    assert broken(lambda room, name: room == "rollout" and name.startswith("torch.distributed")) == []
    assert broken(lambda room, name: room == "config" and name.split(".")[0] in {"torch", "megatron", "transformers"}) == []


@pytest.mark.parametrize("module", ["megatron_gvpo", "megatron_gvpo.config", "megatron_gvpo.objectives", "megatron_gvpo.cli"])
def test_importing_is_light(module: str) -> None:
    """Why: the command line answers in a fraction of a second. Does not cover what a command imports when it runs."""
    code = f"import sys, {module}; heavy = [m for m in ('torch', 'megatron', 'transformers') if m in sys.modules]; print(heavy)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
