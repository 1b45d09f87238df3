"""Metrics as JSON Lines: the one place that always has them, whole and readable after a crash at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.report.names import STEP

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """Appends one row a step, and has it on the way to the disk before the step goes on.

    resume_step: the step of the checkpoint a run resumes from; rows after it, which the resumed run will write again, are
    cut off. None starts a file anew.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        path = Path(path)
        rows = read_rows(path) if resume_step is not None and path.exists() else []
        kept = [row for row in rows if row[STEP] <= (resume_step or 0)]
        # Written beside and renamed: a kill in the middle of this must not lose the rows of a long run.
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(_line({STEP: step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, one per step, in the order of the steps; rows of the same step are merged.

    A last line that a crash has cut is passed over. DataError, with FILE:LINE, for any other line that is no row.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step = row[STEP]
        except (json.JSONDecodeError, KeyError, TypeError):
            if number == len(lines):  # no newline after it: it was being written when the run was killed
                continue
            raise DataError(f"{path}:{number}: expected a JSON object with a {STEP!r}") from None
        values = {key: _SPELLED.get(value, value) if isinstance(value, str) else value for key, value in row.items()}
        by_step.setdefault(step, {}).update(values)
    return [by_step[step] for step in sorted(by_step)]


def _line(row: Mapping[str, float]) -> str:
    spelled = {key: _spell(value) for key, value in row.items()}
    return json.dumps(spelled, allow_nan=False) + "\n"


def _spell(value: float) -> float | str:
    """JSON has no NaN and no infinity, and a file with them is one that jq, JavaScript and pandas refuse."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
