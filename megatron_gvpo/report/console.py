"""The run in the terminal: a progress bar with the numbers that matter, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megatron_gvpo.report.names import TIME_STEP
from megatron_gvpo.report.summary import EVALUATIONS, Change, Rows, as_duration, as_percent, changes, drops, time_totals, total

_SHOWN = {
    "reward/mean": ("reward", "{:.3f}"),
    "loss": ("loss", "{:.4g}"),
    "grad_norm": ("grad", "{:.3g}"),
    "logprob_diff/mean": ("diff", "{:.1e}"),
    TIME_STEP: ("time", "{:.1f} s"),
}


class ConsoleSink:
    """Shows each step. On a terminal, a live line with a bar; elsewhere (a pipe, a log file) one plain line a step.

    console: where to; stderr by default, since stdout belongs to what a command answers.
    """

    def __init__(self, total_steps: int, *, start_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._total = total_steps
        self._numbers = ""
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("[cyan]{task.fields[numbers]}"),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, numbers="")
            self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{name} {form.format(metrics[key])}" for key, (name, form) in _SHOWN.items() if key in metrics)
        if self._bar is not None:
            self._numbers = numbers or self._numbers
            self._bar.update(self._task, completed=step, numbers=self._numbers)
        elif numbers:
            self._print(f"step {step}/{self._total}  {numbers}")
        evaluated = [
            f"{name} {as_percent(metrics[key], metrics.get(f'{key}_se'))}" for key, name in EVALUATIONS.items() if key in metrics
        ]
        if evaluated:
            self._print(f"step {step}/{self._total}  held-out accuracy: {', '.join(evaluated)}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def before_and_after(results: Mapping[str, Rows]) -> Table:
    """The table that a run, or several (name -> rows, e.g. one per seed), ends with: accuracy with standard errors."""
    table = Table(title="Held-out accuracy, mean ± standard error", title_justify="left")
    for heading in ("run", "sampling", "before", "after", "gain"):
        table.add_column(heading, justify="left" if heading in ("run", "sampling") else "right")
    for name, rows in results.items():
        for change in changes(rows):
            table.add_row(name, change.name, *change_cells(change))
    return table


def change_cells(change: Change) -> tuple[str, str, str]:
    """before, after and gain, as text."""
    gain = (
        f"{100 * change.gain:+.1f}" + ("" if change.gain_se != change.gain_se else f" ± {100 * change.gain_se:.1f}") + " points"
    )
    return as_percent(change.before, change.before_se), as_percent(change.after, change.after_se), gain


def time_table(rows: Rows) -> Table:
    """Where the time of the steps went."""
    spent = total(rows, TIME_STEP)
    table = Table(title=f"Time of the steps: {as_duration(spent)}", title_justify="left")
    for heading in ("part", "seconds", "share"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for name, seconds in time_totals(rows).items():
        table.add_row(name, f"{seconds:.1f}", as_percent(seconds / spent) if spent else "")
    return table


def drop_line(rows: Rows) -> str:
    """One line on the samples that were not trained on; empty where there were none."""
    lost = drops(rows)
    return "Samples not trained on: " + ", ".join(f"{count} {reason}" for reason, count in lost.items()) if lost else ""
