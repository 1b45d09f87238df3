"""Where each value of a config came from: a line of the file, a `--set`, or a default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_gvpo.config.yaml_tree import Mark, Path

_SET = Mark(1 << 60, 0)  # sorts behind every line of the file


def dotted(path: Path) -> str:
    """`("servers", "urls", 0)` as `servers.urls[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text


@dataclass
class Source:
    """The places of a config's keys and values. `file` is the path as the user wrote it."""

    file: str
    keys: dict[Path, Mark] = field(default_factory=dict)
    values: dict[Path, Mark] = field(default_factory=dict)
    overrides: set[Path] = field(default_factory=set)

    def overridden(self, path: Path) -> bool:
        return any(path[: len(given)] == given for given in self.overrides)

    def given(self, path: Path) -> bool:
        """Whether the user wrote this key, in the file or by --set."""
        return path in self.keys or self.overridden(path)

    def culprit(self, paths: Iterable[Path]) -> Path:
        """The first of `paths` that the user wrote; else the first one."""
        paths = list(paths)
        return next((path for path in paths if self.given(path)), paths[0])

    def place(self, path: Path, *, value: bool = False) -> Mark:
        """The key's (or the value's) place; the nearest enclosing section's where the key is not written."""
        if self.overridden(path):
            return _SET
        marks = self.values if value and path in self.values else self.keys
        while path and path not in marks:
            path = path[:-1]
        return marks.get(path, Mark(1, 1))

    def line(self, path: Path, why: str, *, value: bool = False, mark: Mark | None = None) -> str:
        """One finished line: `FILE:LINE:COL: section.key: why`."""
        mark = mark or self.place(path, value=value)
        where = "--set" if mark == _SET else f"{self.file}:{mark.line}:{mark.column}"
        return f"{where}: {dotted(path)}: {why}" if path else f"{where}: {why}"
