"""Reading a config: acceptance case 43 and its kind. Contradictions between keys are in test_check.py."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_gvpo.config import ConfigError, load_config, read_config
from tests.config.conftest import Run

Refuse = Callable[..., list[str]]


def test_case_43_unknown_key_is_named_with_its_line(refuse: Refuse) -> None:
    """Why: a misspelt key that is ignored trains with the default and nobody notices."""
    lines = refuse("train:\n  steps: 3\nrollout:\n  group_sze: 4\n")
    assert lines == ["run.yaml:4:3: rollout.group_sze: unknown key; did you mean 'group_size'?"]


def test_case_43_duplicate_key_is_refused(refuse: Refuse) -> None:
    """Why: YAML readers keep the last of two, silently."""
    lines = refuse("train:\n  steps: 3\n  seed: 1\n  steps: 4\n")
    assert lines == ["run.yaml:4:3: train.steps: duplicate key; it stands in line 2 already"]


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.e-6", ".000001", "1.0e-06"])
def test_case_43_scientific_notation_is_a_number(tmp_path: Path, text: str) -> None:
    """Why: YAML 1.1 reads 1e-6 as a text."""
    file = tmp_path / "run.yaml"
    file.write_text(f"optimizer:\n  lr: {text}\n")
    config, _ = read_config(file)
    assert math.isclose(config.optimizer.lr, 1e-6)


def test_case_43_a_number_in_quotes_is_refused(refuse: Refuse) -> None:
    lines = refuse('optimizer:\n  lr: "1e-6"\n')
    assert lines == ["run.yaml:2:7: optimizer.lr: must be a number, got the text '1e-6'"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {steps: true}", "1:16: train.steps: must be a whole number, got true"),
        ("train: {steps: 1.5}", "1:16: train.steps: must be a whole number, got 1.5"),
        ("train: {steps: 0}", "1:16: train.steps: must be at least 1, got 0"),
        ("optimizer: {lr: .inf}", "1:17: optimizer.lr: must be finite, got inf"),
        ("optimizer: {lr: .nan}", "1:17: optimizer.lr: must be finite, got nan"),
        ("train: {device: gpu}", "1:17: train.device: must be one of cpu, cuda, got the text 'gpu'"),
        ("log: {wandb: of}", "1:14: log.wandb: must be one of off, offline, online, got the text 'of'; did you mean 'off'?"),
        ("gupo: {delta: soon}", "1:15: gupo.delta: must be auto or a number, got the text 'soon'"),
        ("rollout: {servers: {urls: [1]}}", "1:28: rollout.servers.urls[0]: must be a text, got 1"),
        (
            "rollout: {servers: {urls: http://a:1}}",
            "1:27: rollout.servers.urls: must be a list of texts, got the text 'http://a:1'",
        ),
        ("rollout: [1]", "1:10: rollout: must be a section with keys of its own, got a list"),
        ("objective: gvpo", "1:12: objective: must be a section with keys of its own, got the text 'gvpo'"),
        ("parallel: {virtual_pipeline: x}", "1:30: parallel.virtual_pipeline: must be a whole number or empty, got the text 'x'"),
        ("- a", "1:1: a config is a mapping of sections, such as `model:` and `rollout:`"),
        (
            "train: {steps: !!python/name:os.system x}",
            "1:16: train.steps: the tag tag:yaml.org,2002:python/name:os.system is not read here",
        ),
        ("a: [1, 2", "1:9: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a:\n\tb: 1", "2:1: not YAML: found character '\\t' that cannot start any token"),
        ("train: &t\n  steps: *t", "1:8: train.steps: an alias that contains itself"),
        ("temperature: 1.0", "1:1: temperature: unknown key; did you mean 'rollout.temperature'?"),
    ],
)
def test_wrong_values_are_named_with_their_place(refuse: Refuse, text: str, line: str) -> None:
    """Why: each of these is read as something else, or ends in a traceback, in one system or another."""
    assert f"run.yaml:{line}" in refuse(text)


def test_all_problems_of_a_file_at_once_in_its_order(refuse: Refuse) -> None:
    lines = refuse("foo: 1\ntrain:\n  stps: 1\n  seed: -1\n  seed: 2\n", "rollout.top_k=x", "nonsense")
    assert [line.split(": ")[0] for line in lines] == [
        "run.yaml:1:1",
        "run.yaml:3:3",
        "run.yaml:4:9",
        "run.yaml:5:3",
        "--set",
        "--set",
    ]


def test_an_objectives_own_keys_are_checked(refuse: Refuse) -> None:
    lines = refuse("objective:\n  name: gvpo\n  betta: 0.1\n")
    assert lines == ["run.yaml:3:3: objective.betta: unknown key; did you mean 'beta'?"]
    (line,) = refuse("objective:\n  name: gvop\n")
    assert line.startswith("run.yaml:2:9: objective.name: there is no objective 'gvop'; did you mean 'gvpo'?")


def test_words_of_yaml_1_1_stay_texts(tmp_path: Path) -> None:
    """Why: `off` would be false, 24:00:00 the number 86400, 010 the number 8, and a date a date."""
    file = tmp_path / "run.yaml"
    file.write_text("log: {wandb: off}\nlaunch: {time: 24:00:00, account: 2026-11-30, job_name: no}\ntrain: {seed: 010}\n")
    config, _ = read_config(file)
    assert (config.log.wandb, config.launch.time, config.launch.account) == ("off", "24:00:00", "2026-11-30")
    assert (config.launch.job_name, config.train.seed) == ("no", 10)


def test_an_empty_section_and_an_empty_file_mean_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("gupo:\n")
    assert read_config(file)[0].gupo.samples == 4
    file.write_text("")
    assert read_config(file)[0].objective.name == "gvpo"


def test_set_overrides_the_file_and_reads_texts_as_they_stand(run: Run) -> None:
    config = load_config(
        run.write({"optimizer": {"lr": 1.0}}),
        [
            "optimizer.lr=2e-6",
            "launch.partition=0017",
            "launch.env.FLAG=1",
            "objective.beta=0.5",
            "rollout.servers.args=[--a, --b]",
        ],
    )
    assert config.optimizer.lr == 2e-6
    assert (config.launch.partition, config.launch.env) == ("0017", {"FLAG": "1"})
    assert config.objective.options == {"beta": 0.5}
    assert config.rollout.servers.args == ["--a", "--b"]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.groupsize=2", "--set: rollout.groupsize: unknown key; did you mean 'group_size'?"),
        ("train.steps=many", "--set: train.steps: must be a whole number, got the text 'many'"),
        ("train.steps", "--set: 'train.steps' is not of the form section.key=value"),
        (".steps=1", "--set: '.steps=1' is not of the form section.key=value"),
        ("train.steps.more=1", "--set: train.steps.more: train.steps has no keys of its own; set it as a whole"),
        ("rollout.servers.urls=[a", "--set: rollout.servers.urls: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("rollout.group_size=1", "--set: rollout.group_size: gvpo compares the responses of a group and needs at least 2, got 1"),
    ],
)
def test_a_wrong_override_is_named(run: Run, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run.write({}), ["train.steps=5", override])
    assert caught.value.lines == [line]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not a UTF-8 text"):
        load_config(tmp_path / "bytes.yaml")


def test_environment_variables_are_not_expanded(run: Run) -> None:
    """Why: a config must mean the same on every machine; what differs is given by --set."""
    assert run.load(log={"dir": "$HOME/run"}).log.dir == "$HOME/run"


def test_reading_a_config_imports_nothing_heavy(run: Run) -> None:
    """Why: `validate` has to answer in a blink. The time itself is not asserted here."""
    code = (
        "import sys; from megatron_gvpo.config import load_config; load_config(sys.argv[1]);"
        "print([m for m in ('torch', 'megatron', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.write({}))], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
