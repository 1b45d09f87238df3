"""The report of a run: one file that stands alone, says what went wrong, and works for runs that have hardly begun.

Not covered: whether it looks good (a person has to look).
"""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.samples import Sample, write_samples
from megatron_gvpo.report.jsonl import JsonlSink
from megatron_gvpo.report.run_report import write_report
from tests.report.runs import demo_rows

PANELS = (
    *("Held-out accuracy", "Reward of the rollouts", "Loss", "Groups without a signal", "Trainer against server"),
    *("Gradient norm", "GVPO&#x27;s three terms", "Learning rate", "Time of each step", "The whole run"),
)


def _report(folder: Path, rows: list[dict[str, Any]]) -> str:
    sink = JsonlSink(folder / "metrics.jsonl")
    for row in rows:
        sink.write(row["step"], {key: value for key, value in row.items() if key != "step"})
    sink.close()
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_whole_run(tmp_path: Path) -> None:
    """Every part is there: numbers before and after, the curves, the time with `other`, the drops, the config."""
    config = Config.model_validate({"train": {"steps": 60}, "model": {"path": "examples/chain_sum/student"}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    html = _report(tmp_path, demo_rows())
    for panel in PANELS:
        assert f"<h3>{panel}</h3>" in html
    assert "46.0 ± 2.5 %" in html
    assert "+32.7 ± 3.2 points" in html
    assert "objective gvpo · model student · 60 steps · 32 prompts x 8 responses a step" in html
    assert re.search(r"</span>other</td><td>2\.\d s</td><td>1\.\d %</td>", html)
    assert "1 of 60 steps had a loss or a gradient that was not finite, at step 17." in html
    assert "Samples were not trained on: 1 empty." in html
    assert "All other metrics" in html
    assert "prompts_per_step: 32" in html


def test_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    """It is mailed and opened offline. Each curve is well-formed SVG with something in it; the same rows give the same file."""
    rows = demo_rows()
    html = _report(tmp_path, rows)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", html)
    assert "<script" not in html
    assert "@import" not in html
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(pictures) == len(PANELS) + 1
    for picture in pictures:
        root = ElementTree.fromstring(base64.b64decode(picture))
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 5
    assert _report(tmp_path, rows) == html


def test_what_models_write_is_text(tmp_path: Path) -> None:
    """A response may hold HTML; it must be shown, not run. The first and the last kept step are shown, the newest by number."""
    (tmp_path / "samples").mkdir()
    for step, text in ((1, "early <script>alert(1)</script>"), (2, "middle"), (10, "late & <b>bold</b>")):
        sample = Sample("g", [1], [2, 3], [1, 1], reward=0.5, meta={"prompt_text": "1 < 2?", "text": text})
        write_samples(tmp_path / "samples" / f"step_{step}.jsonl", [sample])
    html = _report(tmp_path, [{"step": 10}])
    assert "early &lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "late &amp; &lt;b&gt;bold&lt;/b&gt;" in html
    assert "1 &lt; 2?" in html
    assert "middle" not in html
    assert "<script" not in html


def test_secrets_of_the_config_are_hidden(tmp_path: Path) -> None:
    """Reports are shared; a server's key is not. Keys that are not secret and keys without a value stay as they are."""
    config = Config.model_validate({"rollout": {"servers": {"api_key": "hunter2"}}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    html = _report(tmp_path, [{"step": 1}])
    assert "hunter2" not in html
    assert "api_key: (hidden)" in html
    assert "max_new_tokens: 1024" in html
    assert "tokenizer: &#x27;&#x27;" in html


def test_what_went_wrong_is_said(tmp_path: Path) -> None:
    """Log-probs that differ, time that no part claims, rewards that could not be computed: a person should not have to look."""
    rows: list[dict[str, Any]] = [
        {"step": step, "logprob_diff/mean": 0.2, "time/step": 1.0, "time/other": 0.5, "reward/timeout": 3.0} for step in range(4)
    ]
    html = _report(tmp_path, rows)
    assert "the mean difference of their log-probs reached 0.2 nats (alarm 0.05)" in html
    assert "of the time is in no part of the step." in html
    assert "The reward function took too long for 12 responses, which got a reward of 0." in html
    rows[2]["logprob_diff/mean"] = math.nan
    assert "Trainer and server disagreed" in _report(tmp_path, rows)


def test_a_sound_run_says_so(tmp_path: Path) -> None:
    """The absence of notices is a statement of its own."""
    html = _report(tmp_path, [{"step": 1, "loss": 0.1, "grad_norm": 1.0, "logprob_diff/mean": 1e-7}])
    assert "Every step was finite, no sample was dropped, and trainer and server agreed to" in html


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "eval/greedy": 0.5}],
        [{"step": 1, "loss": math.nan}],
        [{"step": 1, "reward/mean": 0.0, "loss": 0.0, "time/step": 0.0, "time/other": 0.0}],
        [{"step": 3, "loss": 1.0, "my/metric": 2}],
    ],
)
def test_runs_that_have_hardly_begun(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """`report` is called on running and on broken runs as well."""
    assert "</html>" in _report(tmp_path, rows)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    """One line, with what is missing."""
    with pytest.raises(DataError, match=r"no run directory: it has no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"metrics\.jsonl: holds no step yet"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"report\.html: cannot be written: No such file"):
        write_report(tmp_path, tmp_path / "absent" / "report.html")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml: not YAML"):
        write_report(tmp_path)
