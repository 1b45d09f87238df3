"""The curves of a run, as SVG. Each takes the rows and gives a figure, or None where there is nothing to draw."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_gvpo.report.names import TIME_OTHER, TIME_STEP
from megatron_gvpo.report.summary import EVALUATIONS, Rows, series, time_parts, time_totals

BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, BROWN, PINK, GREY = (
    *("#2f6fb0", "#e0822f", "#3a9a6a", "#c8453b", "#7d5ba6", "#2aa3a3", "#94674a", "#d07aa8", "#b9bec6"),
)
_CYCLE = (BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN, PINK, RED)
_INK = "#333a44"

_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#aab1bb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ee",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "megatron-gvpo",  # the same rows give the same file
}
_SIZE = (6.4, 3.1)
_FEW = 25  # points up to which each one is marked
_DECADES = 1.3  # spread, in powers of ten, from which an axis is logarithmic
_MOST_BARS = 80


def accuracy(rows: Rows) -> Figure | None:
    """Held-out accuracy with bars of one standard error."""
    with _figure() as (figure, axes):
        for (key, name), colour in zip(EVALUATIONS.items(), (BLUE, ORANGE), strict=True):
            steps, values = series(rows, key)
            errors = [100 * float(row.get(f"{key}_se", 0.0)) for row in rows if key in row]
            if steps:
                percent = [100 * v for v in values]
                axes.errorbar(steps, percent, errors, color=colour, marker="o", ms=4.5, capsize=3, lw=1.8, label=name)
        axes.set_ylabel("held-out accuracy, %")
        return _done(figure, axes)


def curve(rows: Rows, key: str, label: str, colour: str = BLUE, *, smooth: bool = True) -> Figure | None:
    """One metric over the steps: each step thin, their running mean thick. Steps without a finite value are marked red."""
    with _figure() as (figure, axes):
        _line(axes, *series(rows, key), colour, "", smooth=smooth)
        axes.set_ylabel(label)
        return _done(figure, axes)


def curves(rows: Rows, keys: dict[str, str], label: str) -> Figure | None:
    """Several metrics (key -> name) of one unit."""
    with _figure() as (figure, axes):
        for (key, name), colour in zip(keys.items(), _CYCLE * (1 + len(keys) // len(_CYCLE)), strict=False):
            _line(axes, *series(rows, key), colour, name)
        axes.set_ylabel(label)
        return _done(figure, axes)


def logprob_difference(rows: Rows, alarm: float) -> Figure | None:
    """|trainer - server| log-probs, mean and largest of each step, with the alarm's height for the mean; nats."""
    with _figure() as (figure, axes):
        for key, name, colour in (("logprob_diff/mean", "mean", BLUE), ("logprob_diff/max", "largest", ORANGE)):
            _line(axes, *series(rows, key), colour, name, smooth=False)
        steps, largest = series(rows, "eval/logprob_diff/max")
        if steps:
            axes.plot(steps, largest, ls="", marker="D", ms=4, color=PURPLE, label="largest, in evaluations")
        if not axes.lines:
            return None
        axes.axhline(alarm, color=RED, lw=1.2, ls="--", label="alarm for the mean")
        axes.set_yscale("log")
        axes.set_ylabel("|difference|, nats")
        return _done(figure, axes)


def time_by_step(rows: Rows) -> Figure | None:
    """Seconds of each step, stacked by part; over many steps, means of neighbours."""
    parts = time_parts(rows)
    timed = [row for row in rows if TIME_STEP in row]
    if not timed or not parts:
        return None
    width = -(-len(timed) // _MOST_BARS)
    chunks = [timed[i : i + width] for i in range(0, len(timed), width)]
    middle = [sum(row["step"] for row in chunk) / len(chunk) for chunk in chunks]
    with _figure((6.4, 3.4)) as (figure, axes):
        floor = [0.0] * len(chunks)
        for (key, name), colour in zip(parts.items(), part_colours(rows), strict=True):
            height = [sum(float(row.get(key, 0.0)) for row in chunk) / len(chunk) for chunk in chunks]
            axes.bar(middle, height, 0.9 * width, floor, color=colour, label=name)
            floor = [a + b for a, b in zip(floor, height, strict=True)]
        axes.set_ylabel("seconds a step")
        axes.grid(axis="x", visible=False)
        return _done(figure, axes, legend_columns=4)


def time_shares(rows: Rows) -> Figure | None:
    """One bar of the whole run's time, by part."""
    totals = time_totals(rows)
    whole = sum(totals.values())
    if not whole:
        return None
    with _figure((6.4, 0.75)) as (figure, axes):
        left = 0.0
        for (name, seconds), colour in zip(totals.items(), part_colours(rows), strict=True):
            share = 100 * seconds / whole
            axes.barh(0, share, left=left, color=colour)
            if share >= 7:
                axes.text(left + share / 2, 0, f"{name}\n{share:.0f} %", ha="center", va="center", color="white", fontsize=8)
            left += share
        axes.set_xlim(0, 100)
        axes.axis("off")
        figure.tight_layout(pad=0.1)
        return figure


def part_colours(rows: Rows) -> list[str]:
    """A colour for each part of a step's time, in their order; `other` is grey."""
    parts = list(time_parts(rows))
    return [GREY if key == TIME_OTHER else _CYCLE[i % len(_CYCLE)] for i, key in enumerate(parts)]


def small_multiples(rows: Rows, keys: Sequence[str]) -> Figure | None:
    """A small curve of each metric."""
    if not keys:
        return None
    columns = 3
    lines = -(-len(keys) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10.2, 1.75 * lines))
        for place, key in enumerate(keys):
            axes = figure.add_subplot(lines, columns, place + 1)
            _line(axes, *series(rows, key), _CYCLE[place % len(_CYCLE)], "")
            axes.set_title(key, fontsize=8.5, loc="left")
            axes.tick_params(labelsize=7)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        figure.tight_layout()
        return figure


def as_svg(figure: Figure) -> str:
    """The figure as an SVG document."""
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return text.getvalue()


@contextmanager
def _figure(size: tuple[float, float] = _SIZE) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        yield figure, figure.add_subplot()


def _done(figure: Figure, axes: Axes, legend_columns: int = 3) -> Figure | None:
    """The figure with its legend, or None where nothing was drawn."""
    if not axes.lines and not axes.patches:
        return None
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=legend_columns, fontsize=8.5, borderaxespad=0.2, handlelength=1.3
        )
    figure.tight_layout()
    return figure


def _line(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str, name: str, *, smooth: bool = True) -> None:
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not finite:
        return
    at, good = [s for s, _ in finite], [v for _, v in finite]
    if len(good) <= _FEW:
        axes.plot(at, good, color=colour, lw=1.6, marker="o", ms=3, label=name or None)
    elif not smooth:
        axes.plot(at, good, color=colour, lw=1.4, label=name or None)
    else:
        axes.plot(at, good, color=colour, lw=0.8, alpha=0.45)
        axes.plot(at, _running_mean(good), color=colour, lw=2.0, label=name or None)
    if min(good) > 0 and math.log10(max(good) / min(good)) > _DECADES:
        axes.set_yscale("log")
    for step in set(steps) - set(at):
        axes.axvline(step, color=RED, lw=1.0, ls=":")


def _running_mean(values: Sequence[float]) -> list[float]:
    """An exponential mean over about a twentieth of the curve, without the pull to its start."""
    keep = 1 - 1 / max(len(values) / 20, 1.5)
    mean = weight = 0.0
    smooth: list[float] = []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smooth.append(mean / weight)
    return smooth
