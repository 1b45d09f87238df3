"""`megatron-gvpo report RUN_DIR`: one HTML file that says what a run did, whether it went well, and where its time went."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.samples import Sample, iter_samples
from megatron_gvpo.report import page, plots
from megatron_gvpo.report.console import change_cells
from megatron_gvpo.report.jsonl import read_rows
from megatron_gvpo.report.names import CONFIG_FILE, METRICS_FILE, REPORT_FILE, SAMPLES_DIR, STEP, TIME_OTHER, TIME_STEP
from megatron_gvpo.report.summary import (
    Rows,
    as_duration,
    as_percent,
    changes,
    drops,
    series,
    time_totals,
    total,
)

_OTHER_ALARM = 0.10  # share of the time that no part claims
_DEFAULT_LOGPROB_ALARM = 0.05  # nats; the config's own is used where the run has one
_SHOWN_SAMPLES = 6
_SECRET = re.compile(r"^(\s*(?:\S*api_key|\S*token|\S*secret|\S*password)\s*:[ \t]*)(?!\s*(?:''|\"\"|null)?\s*$).+$", re.M | re.I)

# Metrics with a panel of their own; the rest go into the folded small ones.
_CHARTED = re.compile(
    r"step|eval/(greedy|sampled)(_se)?|(eval/)?logprob_diff/.*|reward/(mean|std)|loss|grad_norm|lr|objective/(term_.*|groups|flat_groups)|time/.*|drop/.*"
)


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return its path: RUN_DIR/report.html unless `out` says otherwise.

    DataError where the folder holds no metrics, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    if not (run_dir / METRICS_FILE).is_file():
        raise DataError(f"{run_dir}: no run directory: it has no {METRICS_FILE}")
    rows = read_rows(run_dir / METRICS_FILE)
    if not rows:
        raise DataError(f"{run_dir / METRICS_FILE}: holds no step yet")
    path = Path(out) if out is not None else run_dir / REPORT_FILE
    document = render(run_dir, rows)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(document, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def render(run_dir: Path, rows: Rows) -> str:
    """The HTML document of a run."""
    text, config = _config(run_dir)
    body = [
        page.cards(_cards(rows)),
        *_notices(rows, config),
        *_before_and_after(rows),
        page.heading("Did it learn?"),
        page.panels(_learning(rows)),
        page.heading("Was it sound?"),
        page.panels(_soundness(rows, config)),
        page.heading("Where did the time go?"),
        page.panels(_time(rows)),
        *_dropped(rows),
        *_samples(run_dir),
        *_the_rest(rows),
    ]
    if text:
        body.append(page.folded("Config", page.preformatted(text)))
    return page.page(run_dir.resolve().name, _facts(rows, config), [part for part in body if part])


def _config(run_dir: Path) -> tuple[str, Mapping[str, Any]]:
    """The config's text without secrets, and its values; empty where the run has none."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    return _SECRET.sub(r"\1(hidden)", text), values if isinstance(values, dict) else {}


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _facts(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    steps, planned = rows[-1]["step"], _at(config, "train", "steps")
    facts = [f"objective {_at(config, 'objective', 'name')}"] if _at(config, "objective", "name") else []
    if _at(config, "model", "path"):
        facts.append(f"model {Path(_at(config, 'model', 'path')).name}")
    facts.append(f"{steps} of {planned} steps" if planned and planned != steps else f"{steps} steps")
    size, prompts = _at(config, "rollout", "group_size"), _at(config, "rollout", "prompts_per_step")
    if size and prompts:
        facts.append(f"{prompts} prompts x {size} responses a step")
    return facts


def _cards(rows: Rows) -> list[tuple[str, str, str, bool]]:
    entries: list[tuple[str, str, str, bool]] = []
    for change in changes(rows):
        clear = change.gain > 2 * change.gain_se
        more = f"{100 * change.gain:+.1f} points, was {100 * change.before:.1f}"
        entries.append((f"held-out, {change.name}", as_percent(change.after), more, clear))
    _, rewards = series(rows, "reward/mean")
    if rewards:
        tail = rewards[-max(len(rewards) // 10, 1) :]
        entries.append(("reward, last tenth", f"{sum(tail) / len(tail):.3f}", f"first step {rewards[0]:.3f}", False))
    spent = total(rows, TIME_STEP)
    _, seconds = series([row for row in rows if row[STEP] > 0], TIME_STEP)
    if seconds:
        entries.append(("time of the steps", as_duration(spent), f"median step {as_duration(median(seconds))}", False))
    trained = total(rows, "tokens/trained")
    if trained:
        speed = f"{trained / spent:,.0f} a second" if spent else ""
        entries.append(("tokens trained on", f"{trained:,.0f}", speed, False))
    return entries


def _notices(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    """What a person should know before they trust the curves; one green line where there is nothing."""
    lines: list[str] = []
    bad = [row["step"] for row in rows if not math.isfinite(row.get("grad_norm", 0.0)) or not math.isfinite(row.get("loss", 0.0))]
    if bad:
        shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
        lines.append(f"{len(bad)} of {rows[-1]['step']} steps had a loss or a gradient that was not finite, at step {shown}.")
    alarm = float(_at(config, "rollout", "logprob_alarm") or _DEFAULT_LOGPROB_ALARM)
    _, differences = series(rows, "logprob_diff/mean")
    if differences and not max(differences) <= alarm:
        lines.append(
            f"Trainer and server disagreed: the mean difference of their log-probs reached {max(differences):.2g} nats (alarm "
            f"{alarm:g}). Rollouts are then not samples of the policy that is trained."
        )
    spent, other = total(rows, TIME_STEP), total(rows, TIME_OTHER)
    if spent and other > _OTHER_ALARM * spent:
        lines.append(f"{as_percent(other / spent)} of the time is in no part of the step.")
    lost = drops(rows)
    if lost:
        lines.append("Samples were not trained on: " + ", ".join(f"{count} {reason}" for reason, count in lost.items()) + ".")
    for kind, what in (("timeout", "took too long"), ("error", "raised an error"), ("died", "crashed its process")):
        count = round(total(rows, f"reward/{kind}"))
        if count:
            lines.append(f"The reward function {what} for {count} responses, which got a reward of 0.")
    if lines:
        return [page.notices(lines, fine=False)]
    worst = f", and trainer and server agreed to {max(differences):.1e} nats a token on average" if differences else ""
    return [page.notices([f"Every step was finite, no sample was dropped{worst}."], fine=True)]


def _before_and_after(rows: Rows) -> list[str]:
    found = changes(rows)
    if not found:
        return []
    cells = [[change.name, *change_cells(change), str(change.after_step)] for change in found]
    return [
        page.heading("Before and after"),
        page.scrolling(page.table(["held-out accuracy", "before", "after", "gain", "after step"], cells)),
        page.note(
            "Mean ± standard error over the held-out prompts, none of which is trained on. greedy: the likeliest token each "
            "time. sampled: responses drawn at the run's temperature. A gain of twice its error or more is not chance."
        ),
    ]


def _learning(rows: Rows) -> list[str]:
    return [
        page.panel(
            "Held-out accuracy",
            "Problems the model never trains on. This is the number that counts; bars are one standard error.",
            plots.accuracy(rows),
        ),
        page.panel(
            "Reward of the rollouts",
            "Mean reward of the responses that each step trains on. It should rise and level off. Thin: each step, thick: their "
            "running mean.",
            plots.curve(rows, "reward/mean", "mean reward", plots.GREEN),
        ),
        page.panel(
            "Loss",
            "Of the objective, which is no measure of quality: new rollouts every step move its target, so it need not fall.",
            plots.curve(rows, "loss", "loss"),
        ),
        page.panel(
            "Groups without a signal",
            "Prompts whose responses all got the same reward: rewards alone teach nothing there. Where there are many, the "
            "problems are too hard or too easy.",
            plots.curves(rows, {"objective/flat_groups": "equal rewards", "objective/groups": "all groups"}, "groups a step"),
        ),
    ]


def _soundness(rows: Rows, config: Mapping[str, Any]) -> list[str]:
    alarm = float(_at(config, "rollout", "logprob_alarm") or _DEFAULT_LOGPROB_ALARM)
    terms = {
        "term_variance": "variance",
        "term_reference": "covariance with the reference",
        "term_reward": "covariance with the reward",
    }
    return [
        page.panel(
            "Trainer against server",
            "The same weights must give the same log-probs. Near 1e-6 in fp32, 1e-2 in bf16; a jump means that the server has "
            "other weights than the trainer.",
            plots.logprob_difference(rows, alarm),
        ),
        page.panel(
            "Gradient norm",
            "Before clipping. Spikes now and then are normal, a steady climb is not. Dotted red: a step that was not finite, "
            "and skipped.",
            plots.curve(rows, "grad_norm", "gradient norm", plots.PURPLE),
        ),
        page.panel(
            "GVPO's three terms",
            "How the loss depends on the policy: the covariance with the reward pulls it to better answers, the variance and the "
            "covariance with the reference hold it back. Those two act once the policy has left the reference.",
            plots.curves(rows, {f"objective/{key}": name for key, name in terms.items()}, "units of the loss"),
        ),
        page.panel(
            "Learning rate", "Of the optimizer, at each step.", plots.curve(rows, "lr", "learning rate", plots.TEAL, smooth=False)
        ),
    ]


def _time(rows: Rows) -> list[str]:
    totals = time_totals(rows)
    whole = sum(totals.values())
    if not whole:
        return []
    cells = [
        (colour, name, as_duration(seconds), as_percent(seconds / whole))
        for (name, seconds), colour in zip(totals.items(), plots.part_colours(rows), strict=True)
    ]
    return [
        page.panel("Time of each step", "Wall time by part.", plots.time_by_step(rows)),
        page.panel("The whole run", "All steps together.", plots.time_shares(rows), page.time_table(cells)),
    ]


def _dropped(rows: Rows) -> list[str]:
    lost = drops(rows)
    if not lost:
        return []
    cells = [[reason.replace("_", " "), str(count)] for reason, count in lost.items()]
    return [page.heading("Samples not trained on"), page.scrolling(page.table(["reason", "samples"], cells))]


def _samples(run_dir: Path) -> list[str]:
    """A few responses of the first and of the last step, where the run kept them and their text."""
    found = {int(match[1]): path for path in (run_dir / SAMPLES_DIR).glob("step_*.jsonl") if (match := _step_of(path))}
    if not found:
        return []
    cells: list[list[str]] = []
    for step in sorted({min(found), max(found)}):
        for _, sample in itertools.islice(iter_samples(found[step]), _SHOWN_SAMPLES):
            cells.append(_sample_cells(step, sample))
    if not any(cell[2] for cell in cells):
        return []
    headings = ["step", "prompt", "response", "reward", "tokens", "ended by"]
    return [page.heading("Some responses"), page.scrolling(page.table(headings, cells, text=(1, 2)))]


def _step_of(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step_(\d+)\.jsonl", path.name)


def _sample_cells(step: int, sample: Sample) -> list[str]:
    meta = sample.meta
    prompt, text = str(meta.get("prompt_text", meta.get("prompt", ""))), str(meta.get("text", ""))
    reward = "" if sample.reward is None else f"{sample.reward:g}"
    return [str(step), _cut(prompt), _cut(text), reward, str(len(sample.response_ids)), sample.finish_reason]


def _cut(text: str, longest: int = 600) -> str:
    return text if len(text) <= longest else text[: longest - 4] + " ..."


def _the_rest(rows: Rows) -> list[str]:
    keys = sorted({key for row in rows for key in row if not _CHARTED.fullmatch(key)})
    keys = [key for key in keys if any(isinstance(row.get(key), int | float) for row in rows)]
    figure = plots.small_multiples(rows, keys)
    return [page.folded(f"All other metrics ({len(keys)})", page.image(figure, "all other metrics"))] if figure else []
