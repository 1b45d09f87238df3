"""How names become objectives and options become configs, for our own objectives and for strangers'."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.check import check_config
from megatron_gvpo.config.load import read_config
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import (
    BUILTIN_CONFIGS,
    REGISTERED_CONFIGS,
    ObjectiveConfig,
    ObjectiveConfigError,
    objective_config,
)
from megatron_gvpo.objectives import registry
from megatron_gvpo.objectives.base import Comm, Objective, Prepared
from megatron_gvpo.objectives.batch import Batch


class Theirs(Objective[ObjectiveConfig]):
    """A stranger's objective."""

    name = "theirs"

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(0.0)


class NotAnObjective:
    Config = dict


def test_configs_and_objectives_need_no_torch_to_be_checked() -> None:
    """`validate` has half a second: neither the configs nor the package `objectives` may import torch."""
    code = (
        "import sys, megatron_gvpo.objectives, megatron_gvpo.objectives.pytest_plugin\n"
        "from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, objective_config\n"
        "[objective_config(n, {}).needs() for n in BUILTIN_CONFIGS]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", BUILTIN_CONFIGS)
def test_every_built_in_name_loads_its_class_and_config(name: str) -> None:
    """The two tables, of configs and of classes, say the same."""
    cls = registry.load_objective(name)
    assert cls.name == name
    assert cls.Config is BUILTIN_CONFIGS[name]
    assert isinstance(registry.create_objective(name, {}).needs, Needs)


def test_registering_makes_a_name_known_and_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decorator: found by class and by config; the same class twice is no conflict, another one is."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.delitem(REGISTERED_CONFIGS, "theirs", raising=False)
    assert registry.register(Theirs) is Theirs
    registry.register(Theirs)
    assert registry.load_objective("theirs") is Theirs
    assert isinstance(objective_config("theirs", {}), ObjectiveConfig)
    other = type("Other", (Theirs,), {})
    with pytest.raises(ValueError, match="'theirs' is taken"):
        registry.register(other)
    with pytest.raises(ValueError, match="'gvpo' is taken"):
        registry.register(type("Mine", (Theirs,), {"name": "gvpo"}))
    monkeypatch.delitem(REGISTERED_CONFIGS, "theirs")


def test_module_and_class() -> None:
    """`module:Class` in the YAML, and what is said when it leads nowhere."""
    assert registry.load_objective(f"{__name__}:Theirs") is Theirs
    for spec, why in (
        ("no_such_module_here:X", "no module 'no_such_module_here'"),
        (f"{__name__}:Their", "did you mean 'Theirs'"),
        (f"{__name__}:NotAnObjective", "is not"),
    ):
        for function in (registry.load_objective, lambda s: objective_config(s, {})):
            with pytest.raises(ObjectiveConfigError, match=why) as caught:
                function(spec)
            assert "\n" not in str(caught.value)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gvpoo", {}, "did you mean 'gvpo'"),
    ("gvpo", {"betta": 0.1}, "objective.betta: unknown key; did you mean 'beta'"),
    ("gvpo", {"beta": 0}, "objective.beta: must be above 0"),
    ("gvpo", {"beta": "0.1"}, "objective.beta: must be a number"),
    ("gvpo", {"beta": math.nan}, "objective.beta: must be"),
    ("gvpo", {"reference": "frozzen"}, "did you mean 'frozen'"),
    ("opd", {"shape": "sign", "baseline": "kl"}, "does not go with shape sign"),
    ("gvpo_opd", {"teacher_coef": 0.1, "length_alpha": 1.0}, "length_alpha belongs to distillation without rewards"),
    ("gkd", {"divergence": "jsd", "jsd_beta": 1.0}, "objective.jsd_beta: must be below 1"),
    ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"}, "gradient of mean zero"),
]


@pytest.mark.parametrize(("name", "options", "why"), WRONG)
def test_wrong_options_say_what_is_wrong(name: str, options: dict[str, Any], why: str) -> None:
    """Unknown keys, values out of range, numbers written as text, and options that contradict each other."""
    with pytest.raises(ObjectiveConfigError, match=why):
        objective_config(name, options)


def test_needs_follow_the_options() -> None:
    """What `validate` checks against the run: the declarations of signals and data."""

    def needs(name: str, **options: Any) -> Needs:
        return objective_config(name, options).needs()

    assert needs("gvpo").old
    assert needs("gvpo", reference="frozen").reference
    assert needs("gvpo").data == needs("gvpo_opd").data == needs("gkd").data == needs("sft").data == "any"
    assert needs("opd").data == needs("tv_opd").data == needs("rloo").data == "on_policy"
    assert needs("opd", tis="token").data == "stale"
    assert needs("grpo").data == "stale"
    assert not needs("grpo").rollout_corrected
    assert needs("grpo", tis="sequence").rollout_corrected
    assert needs("grpo", kl_coef=0.1).reference
    assert not needs("gvpo_opd").rewards
    assert needs("gvpo_opd", teacher_coef=0.1).rewards
    assert needs("opd", baseline="kl").teacher == "topk"
    assert needs("gkd", teacher="full").teacher == "full"


def test_only_differences_of_current_and_old_let_the_first_pass_go() -> None:
    """`old_cancels` saves a pass; wherever log-probs are used by themselves it would be wrong."""

    def cancels(name: str, **options: Any) -> bool:
        return objective_config(name, options).needs().old_cancels

    assert {n for n in BUILTIN_CONFIGS if cancels(n)} == {"gvpo", "gspo"}
    assert not cancels("gvpo", reference="rollout")
    assert not cancels("gvpo_opd", teacher_coef=0.1)
    assert not cancels("gspo", kl_coef=0.1)
    assert not cancels("gspo", tis="token")


@pytest.mark.parametrize(
    ("lines", "key", "why"),
    [
        (["objective: {name: gvpo_opd, length_alpha: 1.0}", "teacher: {path: t, signal: sequence}"], "length_alpha", "biases"),
        (["objective: {name: dr_grpo}", "rollout: {group_size: 1}"], "group_size", "teaches it nothing"),
    ],
)
def test_what_is_allowed_and_doubtful_is_warned_about(tmp_path: Path, lines: list[str], key: str, why: str) -> None:
    """Settings that run, and hardly do what was meant: a warning at the key."""
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(["model: {path: m}", "data: {train: d.jsonl}", *lines]) + "\n")
    findings = check_config(*read_config(path), files=False)
    assert [f.severity for f in findings if key in f.line and why in f.line] == ["warning"], findings
