"""Where metrics go: no row is lost, doubled or changed on the way, also by a crash and a resume.

Not covered: wandb's server (no network in tests) and how a live progress bar looks.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.report.console import before_and_after, drop_line, time_table
from megatron_gvpo.report.jsonl import JsonlSink, read_rows
from megatron_gvpo.report.sinks import RunLog
from megatron_gvpo.report.summary import as_duration, changes
from tests.report.runs import demo_rows
from tests.report.wandb_file import read_wandb


def _write(log: RunLog | JsonlSink, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        log.write(row["step"], {key: value for key, value in row.items() if key != "step"})


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(sorted(one.items())) == repr(sorted(other.items()))


def _config(wandb: str = "off", steps: int = 10) -> Config:
    return Config.model_validate({"log": {"wandb": wandb}, "train": {"steps": steps}})


def test_a_row_is_there_at_once_and_is_strict_json(tmp_path: Path) -> None:
    """A run killed now has all its rows, and tools that know no NaN can read them."""
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 1e-6, "count": 3})
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": "NaN",
        "grad_norm": "Infinity",
        "lr": 1e-6,
        "count": 3,
    }
    [row] = read_rows(tmp_path / "m.jsonl")
    assert math.isnan(row["loss"])
    assert row["grad_norm"] == math.inf
    sink.close()


def test_a_resume_cuts_what_it_will_write_again(tmp_path: Path) -> None:
    """Killed at step 7 in the middle of a line, resumed from the checkpoint of step 5: rows 6 and 7 come once, whole."""
    path = tmp_path / "m.jsonl"
    rows = demo_rows(10)
    first = JsonlSink(path)
    _write(first, rows[:8])
    first.close()
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    second = JsonlSink(path, resume_step=5)
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3, 4, 5]
    _write(second, rows[6:])
    second.close()
    assert all(map(_same, read_rows(path), rows))
    assert len(path.read_text().splitlines()) == len(rows) == 11


def test_rows_of_one_step_are_merged_and_broken_lines_named(tmp_path: Path) -> None:
    """Other tools may append; a broken line in the middle is an error, not a hole in a curve."""
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 1, "eval/greedy": 0.5}\n\n{"step": 2')
    assert read_rows(path) == [{"step": 1, "loss": 2.0, "eval/greedy": 0.5}]
    path.write_text('{"step": 1}\n{"loss": 2.0}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2: expected a JSON object with a 'step'"):
        read_rows(path)
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read: No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_wandb_offline_reads_back_with_the_numbers_of_the_jsonl(tmp_path: Path) -> None:
    """The whole way through wandb's own files, with NaN, many rows (several 32 KiB blocks), the config, and the key left out."""
    rows = demo_rows(150)
    config = Config.model_validate(
        {
            "log": {"wandb": "offline", "wandb_project": "p"},
            "train": {"steps": 150},
            "rollout": {"servers": {"api_key": "secret"}},
        }
    )
    with RunLog(tmp_path / "run", config, console=Console(file=io.StringIO())) as log:
        _write(log, rows)
    [path] = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    found = read_wandb(path)
    written = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["_step"] for row in found.history] == [row["step"] for row in written] == [row["step"] for row in rows]
    for wandb_row, row in zip(found.history, written, strict=True):
        assert _same({key: float(value) for key, value in wandb_row.items() if not key.startswith("_")}, _floats(row))
    assert found.finished
    assert found.project == "p"
    assert found.config["train"]["steps"] == 150
    assert "secret" not in json.dumps(found.config)


def _floats(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items()}


def test_a_resumed_run_goes_on_with_the_same_wandb_run(tmp_path: Path) -> None:
    """The same id, and steps that go on where the checkpoint was; a new run in the same place gets a new id."""
    rows = demo_rows(6)
    for resume_step, part in ((None, rows[:6]), (3, rows[4:])):
        with RunLog(tmp_path, _config("offline"), resume_step=resume_step, console=Console(file=io.StringIO())) as log:
            _write(log, part)
    segments = [read_wandb(path) for path in tmp_path.glob("wandb/offline-run-*/*.wandb")]
    assert sorted([row["step"] for row in s.history] for s in segments) == [[0, 1, 2, 3, 4, 5], [4, 5, 6]]
    assert all(row["step"] == row["_step"] for s in segments for row in s.history)
    assert len({s.run_id for s in segments}) == 1
    with RunLog(tmp_path, _config("offline"), console=Console(file=io.StringIO())) as log:
        log.write(0, {"loss": 1.0})
    assert len({read_wandb(path).run_id for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}) == 2


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    """A log file of a cluster job gets one line a step, without control characters."""
    text = io.StringIO()
    with RunLog(tmp_path, _config(steps=2), console=Console(file=text, width=60)) as log:
        log.write(0, {"eval/greedy": 0.465, "eval/greedy_se": 0.025})
        log.write(1, {"reward/mean": 0.5, "loss": 0.0123, "logprob_diff/mean": 2e-7, "time/step": 1.94})
        log.console.print("checkpoint written")
    assert text.getvalue().splitlines() == [
        "step 0/2  held-out accuracy: greedy 46.5 ± 2.5 %",
        "step 1/2  reward 0.500  loss 0.0123  diff 2.0e-07  time 1.9 s",
        "checkpoint written",
    ]


def test_a_live_bar_on_a_terminal(tmp_path: Path) -> None:
    """The bar takes the place of the lines, and what is printed beside it stays readable."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=140)
    with RunLog(tmp_path, _config(steps=2), console=console) as log:
        _write(log, demo_rows(2))
        log.console.print("checkpoint written")
    assert "2/2" in text.getvalue()
    assert "checkpoint written" in text.getvalue()


def test_the_final_tables() -> None:
    """What a person reads at the end: gains with standard errors, for several seeds, and where the time went."""
    results = {"seed 0": demo_rows(seed=0), "seed 1": demo_rows(seed=1)}
    [greedy, sampled] = changes(results["seed 0"])
    assert (greedy.name, greedy.before, greedy.after_step) == ("greedy", 0.46, 60)
    assert greedy.gain_se == pytest.approx(math.hypot(greedy.before_se, greedy.after_se))
    assert sampled.gain > 0.2
    text = io.StringIO()
    console = Console(file=text, width=100)
    console.print(before_and_after(results))
    console.print(time_table(results["seed 0"]))
    shown = text.getvalue()
    assert shown.count("46.0 ± 2.5 %") == 2
    assert "+32.7 ± 3.2 points" in shown
    assert "forward and backward" in shown
    assert drop_line(results["seed 0"]) == "Samples not trained on: 1 empty"
    assert drop_line(results["seed 0"][:3]) == ""
    assert changes(results["seed 0"][:5]) == []
    assert [as_duration(s) for s in (9.41, 200, 7500)] == ["9.4 s", "3 min 20 s", "2 h 05 min"]
