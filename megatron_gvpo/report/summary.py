"""The numbers of a run that matter, out of its rows: before and after, totals, shares of the time, drops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.report.names import TIME_OTHER, TIME_PARTS, TIME_STEP

Rows = Sequence[Mapping[str, Any]]

EVALUATIONS = {"eval/greedy": "greedy", "eval/sampled": "sampled"}


@dataclass(frozen=True)
class Change:
    """A held-out accuracy before and after training, as shares, with standard errors (nan where the rows have none)."""

    name: str
    before: float
    before_se: float
    after: float
    after_se: float
    after_step: int

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gain_se(self) -> float:
        """Standard error of the gain, taking both evaluations as independent: an upper bound for the same prompts."""
        return math.hypot(self.before_se, self.after_se)


def changes(rows: Rows) -> list[Change]:
    """The first and the last evaluation of each kind; none for a run that was evaluated fewer than two times."""
    found: list[Change] = []
    for key, name in EVALUATIONS.items():
        having = [row for row in rows if key in row]
        if len(having) > 1:
            first, last = having[0], having[-1]
            ses = [float(row.get(f"{key}_se", math.nan)) for row in (first, last)]
            found.append(Change(name, first[key], ses[0], last[key], ses[1], last["step"]))
    return found


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric, where it was logged."""
    having = [row for row in rows if key in row]
    return [row["step"] for row in having], [float(row[key]) for row in having]


def time_parts(rows: Rows) -> dict[str, str]:
    """The metrics that are parts of a step's time, and their names, in the order of a step; `other` last."""
    keys = {key for row in rows for key in row if key.startswith("time/")} - {TIME_STEP, TIME_OTHER}
    parts = {key: name for key, name in TIME_PARTS.items() if key in keys}
    parts.update({key: key.removeprefix("time/").replace("_", " ") for key in sorted(keys - parts.keys())})
    if any(TIME_OTHER in row for row in rows):
        parts[TIME_OTHER] = "other"
    return parts


def time_totals(rows: Rows) -> dict[str, float]:
    """Seconds of the whole run by part, by the parts' names."""
    return {name: total(rows, key) for key, name in time_parts(rows).items()}


def total(rows: Rows, key: str) -> float:
    """The sum of a metric over the steps."""
    return sum(float(row[key]) for row in rows if key in row)


def drops(rows: Rows) -> dict[str, int]:
    """Samples that were not trained on, over the run, by reason."""
    keys = sorted({key for row in rows for key in row if key.startswith("drop/")})
    return {key.removeprefix("drop/"): round(total(rows, key)) for key in keys if total(rows, key)}


def as_percent(share: float, error: float | None = None) -> str:
    """71.5 % or, with a standard error, 71.5 ± 2.3 %."""
    if error is None or math.isnan(error):
        return f"{100 * share:.1f} %"
    return f"{100 * share:.1f} ± {100 * error:.1f} %"


def as_duration(seconds: float) -> str:
    """9.4 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
