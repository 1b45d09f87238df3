"""`explain` for people: group by group, which responses an objective pushes up or down, by how much, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.objectives.batch import SampleLike

_REFERENCES = (("old_logprobs", "old"), ("rollout_logprobs", "rollout"), ("ref_logprobs", "frozen reference"))


def print_explanation(
    samples: Sequence[SampleLike], lines: Sequence[int], result: Mapping[str, Any], needs: Needs, console: Console | None = None
) -> None:
    """Print what `objectives.explain.explain` found for these samples, to stdout unless a console is given."""
    (console or Console()).print(explanation(samples, lines, result, needs))


def explanation(samples: Sequence[SampleLike], lines: Sequence[int], result: Mapping[str, Any], needs: Needs) -> RenderableType:
    """A table for each group, the metrics, and what was dropped.

    lines: each sample's line in its file. needs: those of the objective, which say what it looks at.
    """
    dropped = {entry["line"]: entry["why"] for entry in result["dropped"]}
    groups: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        if lines[i] not in dropped:
            groups.setdefault(sample.group, []).append(i)
    parts: list[RenderableType] = [Text(f"{result['objective']}: loss {result['loss']:.6g}", style="bold"), Text()]
    for name, members in groups.items():
        parts += [_group_table(name, [(lines[i], samples[i], result["samples"][i]) for i in members], needs), Text()]
    parts.append(_metrics_table(result["metrics"]))
    if dropped:
        parts += [Text(), _dropped_table(dropped)]
    return Group(*parts)


Row = tuple[int, SampleLike, Mapping[str, Any]]


def _group_table(name: str, rows: Sequence[Row], needs: Needs) -> Table:
    members = [sample for _, sample, _ in rows]
    title = f"group {name}: {len(rows)} response{'s' if len(rows) != 1 else ''}"
    rewards = [sample.reward for sample in members]
    columns: dict[str, list[float | None]] = {}
    if needs.rewards:
        columns["reward"] = list(rewards)
        title += f", mean reward {_mean(rewards):.4g}"
    for signal, label in _REFERENCES:
        if {"old_logprobs": needs.old, "rollout_logprobs": needs.rollout, "ref_logprobs": needs.reference}[signal]:
            columns[f"log-ratio to {label}"] = [_log_ratio(s, getattr(s, signal)) for s in members]
    if needs.teacher != "none":
        columns["teacher's log-ratio"] = [_teacher_ratio(s) for s in members]
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("line", "tokens", *columns, "coefficient"):
        table.add_column(heading, justify="right")
    table.add_column("push")
    table.add_column("why", overflow="fold")
    for row, (line, sample, found) in enumerate(rows):
        cells = [_number(values[row]) for values in columns.values()]
        tokens = str(sum(1 for m in sample.mask if m))
        grads = [g for g, m in zip(found["token_grads"], sample.mask, strict=True) if m]
        why = _why(row, columns, any(grads), compared=needs.groups)
        table.add_row(str(line), tokens, *cells, f"{found['coefficient']:+.4g}", _push(grads), why)
    return table


def _push(grads: Sequence[float]) -> Text:
    """A step against the gradient raises a log-prob whose gradient is negative. Counts where the tokens differ."""
    up, down = sum(g < 0 for g in grads), sum(g > 0 for g in grads)
    if not up and not down:
        return Text("none", style="dim")
    if up and down:
        return Text(f"{up} up, {down} down", style="yellow")
    word, style = ("up", "green") if up else ("down", "red")
    return Text(word if up + down == len(grads) else f"{up + down} of {len(grads)} {word}", style=style)


def _why(row: int, columns: Mapping[str, Sequence[float | None]], moved: bool, compared: bool) -> str:
    """The quantities that the objective looks at; against the mean of the group where it compares its responses."""
    rewards = columns.get("reward")
    flat = rewards is not None and compared and len(set(rewards)) == 1
    if not moved:
        return "all rewards of the group are equal" if flat else "clipped, or nothing to tell it from the others"
    reasons = []
    for name, values in columns.items():
        value = values[row]
        if value is not None and not (name == "reward" and flat):
            reasons.append(f"{name} {value - _mean(values) if compared else value:+.3g}")
    return ("equal rewards; " if flat else "") + ("against the group: " if compared else "") + ", ".join(reasons)


def _metrics_table(metrics: Mapping[str, float]) -> Table:
    table = Table(title="metrics", title_justify="left", show_header=False)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    return table


def _dropped_table(dropped: Mapping[int, str]) -> Table:
    table = Table(title=f"dropped: {len(dropped)}", title_justify="left", header_style="bold")
    table.add_column("line", justify="right")
    table.add_column("why", overflow="fold")
    for line, why in dropped.items():
        table.add_row(str(line), why)
    return table


def _unmasked_sum(sample: SampleLike, values: Sequence[float]) -> float:
    return sum(v for v, m in zip(values, sample.mask, strict=True) if m)


def _log_ratio(sample: SampleLike, reference: Sequence[float] | None) -> float | None:
    """log of the policy's probability of the response over the reference's, nats."""
    if reference is None or sample.logprobs is None:
        return None
    return _unmasked_sum(sample, sample.logprobs) - _unmasked_sum(sample, reference)


def _teacher_ratio(sample: SampleLike) -> float | None:
    """log of the teacher's probability of the response over the policy's, nats."""
    if sample.logprobs is None:
        return None
    own = _unmasked_sum(sample, sample.logprobs)
    if sample.teacher_logprob is not None:
        return sample.teacher_logprob - own
    return None if sample.teacher_logprobs is None else _unmasked_sum(sample, sample.teacher_logprobs) - own


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else 0.0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
