"""`explain` beyond its numbers: what it refuses, how it names what was dropped, and the table for people."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, ObjectiveConfigError, objective_config
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.explain import ExplainError, explain
from megatron_gvpo.report.explain_table import print_explanation
from tests.objectives.helpers import random_samples, sample

SIGNAL_CASES = [
    ("gvpo", {}, "logprobs"),
    ("gvpo", {}, "old_logprobs"),
    ("gvpo", {"reference": "rollout"}, "rollout_logprobs"),
    ("gvpo", {"reference": "frozen"}, "ref_logprobs"),
    ("grpo", {}, "old_logprobs"),
    ("grpo", {"kl_coef": 0.1}, "ref_logprobs"),
    ("opd", {}, "teacher_logprobs"),
    ("rloo", {}, "reward"),
]


@pytest.mark.parametrize(("name", "options", "signal"), SIGNAL_CASES)
def test_a_missing_signal_is_named_with_its_line(name: str, options: dict[str, Any], signal: str) -> None:
    """An absent signal is never guessed: one line says which sample lacks what."""
    samples = random_samples(0)
    samples[3] = replace(samples[3], **{signal: None})
    with pytest.raises(ExplainError, match=rf"^line 14: no '{signal}', which {name} needs$"):
        explain(samples, name, options, lines=range(11, 11 + len(samples)))


def test_a_sequence_teacher_may_be_given_either_way() -> None:
    """gvpo_opd reads the response's own teacher log-prob (other tokenizers) or the sum over its tokens, sample by sample."""
    samples = random_samples(0)
    plain = explain(samples, "gvpo_opd", {})
    for i in (2, 5):
        summed = sum(v for v, m in zip(samples[i].teacher_logprobs or [], samples[i].mask, strict=True) if m)
        samples[i] = replace(samples[i], teacher_logprobs=None, teacher_logprob=summed)
    mixed = explain(samples, "gvpo_opd", {})
    assert mixed["loss"] == pytest.approx(plain["loss"], rel=1e-12)
    samples[2] = replace(samples[2], teacher_logprob=None)
    with pytest.raises(ExplainError, match="line 3: neither 'teacher_logprob' nor 'teacher_logprobs'"):
        explain(samples, "gvpo_opd", {})


def test_objectives_that_need_distributions_are_refused_in_one_sentence() -> None:
    """A samples file holds log-probs of single tokens: gkd, and opd with its state baseline, cannot be computed from it."""
    for name, options in (("gkd", {}), ("opd", {"baseline": "kl"})):
        with pytest.raises(ExplainError, match="whole next-token distributions") as caught:
            explain(random_samples(0), name, options)
        assert "\n" not in str(caught.value)


def test_wrong_options_are_refused() -> None:
    """The same words as in a config."""
    with pytest.raises(ObjectiveConfigError, match=r"objective.betta: unknown key; did you mean 'beta'"):
        explain([], "gvpo", {"betta": 1.0})


def test_lines_of_the_file_name_what_was_dropped() -> None:
    """Blank lines of a file shift the count: the caller's line numbers are the ones that are shown."""
    samples = [sample("a", mask=[0], logprobs=[-1.0]), sample("a", logprobs=[-1.0])]
    assert explain(samples, "sft", {}, lines=[4, 9])["dropped"] == [{"line": 4, "why": "no unmasked response token"}]


def test_the_answer_is_json_and_keeps_the_order_of_the_file() -> None:
    """What `--json` prints: no NaN, one entry a sample, gradients of full length."""
    samples = random_samples(3)
    for name in sorted(set(BUILTIN_CONFIGS) - {"gkd"}):
        found = json.loads(json.dumps(explain(samples, name, {}), allow_nan=False))
        assert set(found) == {"objective", "loss", "samples", "metrics", "dropped"}
        assert [s["group"] for s in found["samples"]] == [s.group for s in samples]
        assert [len(s["token_grads"]) for s in found["samples"]] == [len(s.response_ids) for s in samples]


def _shown(samples: list[Sample], name: str, options: dict[str, Any]) -> str:
    out = io.StringIO()
    result = explain(samples, name, options)
    console = Console(file=out, width=200)
    print_explanation(samples, list(range(1, len(samples) + 1)), result, objective_config(name, options).needs(), console)
    return out.getvalue()


def test_the_table_says_who_is_pushed_where_and_why() -> None:
    """Up and down, rewards against the group, equal rewards, drops: each is in the text. How it looks is not tested."""
    samples = [
        sample("a", 1.0, logprobs=[-1.0, -1.0], old_logprobs=[-1.0, -1.0]),
        sample("a", 0.0, logprobs=[-1.0], old_logprobs=[-2.0]),
        sample("b", 1.0, logprobs=[-1.0], old_logprobs=[-1.0]),
        sample("b", 1.0, logprobs=[-1.0], old_logprobs=[-1.0]),
        sample("c", 1.0, logprobs=[-1.0], old_logprobs=[-1.0]),
    ]
    text = _shown(samples, "gvpo", {})
    rows = {line: row for row in text.splitlines() if row.startswith("│") for line in [row.split("│")[1].strip()]}
    assert "group a: 2 responses, mean reward 0.5" in text
    assert " up " in rows["1"]
    assert "against the group: reward +0.5, log-ratio to old -0.5" in rows["1"]
    assert " down " in rows["2"]
    assert "all rewards of the group are equal" in rows["3"]
    assert "is left with 1" in rows["5"]


def test_the_table_of_every_objective_prints() -> None:
    """No objective's signals or metrics break the table."""
    for name in sorted(set(BUILTIN_CONFIGS) - {"gkd"}):
        assert f"{name}: loss" in _shown(random_samples(2), name, {})
