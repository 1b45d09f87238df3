"""The command line: exit codes, one line per error on stderr, JSON alone on stdout.

Does not cover training itself (tests/train), nor what plan, sbatch, doctor and explain compute (their own rooms' tests).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gvpo.cli import main
from tests.config.conftest import Run

Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *args: str | Path) -> tuple[int, str, list[str]]:
    """Exit code, stdout, lines of stderr."""
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_validate_accepts(run: Run, capsys: Capture) -> None:
    code, out, err = call(capsys, "validate", run.write({}))
    assert (code, err) == (0, [])
    assert out == f"{run.file}: ok: gvpo, 100 steps on 1 rank(s)\n"


def test_validate_refuses_with_2_and_one_line_each(run: Run, capsys: Capture) -> None:
    code, out, err = call(capsys, "validate", run.write({"rollout": {"group_sze": 1}, "train": {"steps": "x"}}))
    assert (code, out) == (2, "")
    assert [line.split(": ", 1)[1] for line in err] == [
        "rollout.group_sze: unknown key; did you mean 'group_size'?",
        "train.steps: must be a whole number, got the text 'x'",
    ]


def test_validate_json_is_alone_on_stdout(run: Run, capsys: Capture) -> None:
    code, out, err = call(capsys, "validate", run.write({"rollout": {"group_size": 1}}), "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["errors"]) == (2, False, err)
    code, out, _ = call(capsys, "validate", run.file, "--set", "rollout.group_size=2", "--json")
    assert (code, json.loads(out)) == (0, {"ok": True, "errors": [], "warnings": []})


def test_warnings_do_not_refuse(run: Run, capsys: Capture) -> None:
    file = run.write({"rollout": {"top_p": 0.9}, "objective": {"assumptions": "warn"}})
    code, _, (line,) = call(capsys, "validate", file)
    assert code == 0
    assert "rollout.top_p: warning: " in line


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["validate"], "error: Missing argument 'CONFIG'."),
        (["validte", "x"], "error: No such command 'validte'."),
        (["validate", "x", "--josn"], "error: No such option: --josn"),
        (["validate", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["plan", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["train", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["serve", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["report", "nowhere"], "error: nowhere: no run directory"),
        (["sbatch", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["explain", "nowhere.jsonl", "--objective", "gvpo"], "error: nowhere.jsonl: "),
        (["explain", "nowhere.jsonl", "--objective", "gvpo", "--set", "beta"], "--set: 'beta' is not of the form key=value"),
    ],
)
def test_wrong_input_is_2_in_one_line(capsys: Capture, args: list[str], line: str) -> None:
    """Why: a traceback for a mistyped path tells the user that the program is broken."""
    code, out, err = call(capsys, *args)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith(line)


def test_train_refuses_before_it_starts_anything(run: Run, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    code, _, err = call(capsys, "train", run.write({}), "--replay", "nowhere")
    assert (code, err) == (2, ["--replay: nowhere: no such file or directory"])
    code, _, err = call(capsys, "train", run.write({"parallel": {"nodes": 2}}))
    assert (code, err) == (2, [f"{run.file}: parallel.nodes: 2 machines are started by srun (see `sbatch`) or torchrun"])
    code, _, err = call(capsys, "train", run.write({}), "--resume", "--fresh")
    assert code == 2
    assert not (run.folder / "runs").exists()


def test_every_command_has_help(capsys: Capture) -> None:
    code, out, _ = call(capsys)
    assert code == 2
    for command in ("train", "validate", "plan", "explain", "serve", "report", "sbatch", "doctor"):
        assert command in out
        code, text, _ = call(capsys, command, "--help")
        assert code == 0
        assert "--help" in text


def test_plan_json_has_parameters_and_memory_by_part(run: Run, capsys: Capture) -> None:
    run.data.unlink()  # planning needs no data
    code, out, _ = call(capsys, "plan", run.write({}), "--json", "--set", "model.recompute=full")
    plan = json.loads(out)
    assert code == 0
    assert plan["parameters"] > 0
    assert {"weights", "gradients", "optimizer", "activations", "logprobs"} <= set(plan["memory_gib"])


def test_sbatch_writes_its_script_where_asked(run: Run, capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = call(capsys, "sbatch", run.write({}))
    assert code == 0
    assert out.startswith("#!/bin/bash\n")
    target = tmp_path / "run.sbatch"
    assert call(capsys, "sbatch", run.file, "--output", target)[0] == 0
    assert target.read_text() == out


SAMPLES = """
{"group": "a", "prompt_ids": [1], "response_ids": [2], "reward": 1, "logprobs": [-10.0], "old_logprobs": [-11.0]}
{"group": "a", "prompt_ids": [1], "response_ids": [], "reward": 5, "logprobs": [], "old_logprobs": []}
{"group": "a", "prompt_ids": [1], "response_ids": [3], "reward": 0, "logprobs": [-12.0], "old_logprobs": [-11.0]}
"""


def test_explain_gives_case_29(capsys: Capture, tmp_path: Path) -> None:
    """Why: acceptance case 29 through the command line; the blank first line must not shift the lines of the drops."""
    file = tmp_path / "samples.jsonl"
    file.write_text(SAMPLES)
    code, out, err = call(capsys, "explain", file, "--objective", "gvpo", "--set", "beta=0.1", "--json")
    result = json.loads(out)
    assert (code, err) == (0, [])
    assert result["loss"] == pytest.approx(0.16)
    assert [sample["token_grads"] for sample in result["samples"]] == [[pytest.approx(-0.04)], [], [pytest.approx(0.04)]]
    assert [drop["line"] for drop in result["dropped"]] == [3]


def test_explain_refuses_what_it_cannot_answer(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(SAMPLES)
    for args, why in (
        (["--objective", "gkd"], "gkd compares whole next-token distributions"),
        (["--objective", "gvop"], "there is no objective 'gvop'; did you mean 'gvpo'?"),
        (["--objective", "gvpo", "--set", "betta=1"], "objective.betta: unknown key; did you mean 'beta'?"),
    ):
        code, out, (line,) = call(capsys, "explain", file, *args)
        assert (code, out) == (2, "")
        assert why in line


def test_the_module_and_the_exit_code_of_a_process(run: Run) -> None:
    """Why: the code must survive the console script's and the module's way out."""
    command = [sys.executable, "-m", "megatron_gvpo.cli", "validate", str(run.write({"train": {"steps": 0}}))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error(run: Run) -> None:
    """Why: `plan --json | head -1` must not end in a traceback."""
    command = f"{sys.executable} -m megatron_gvpo.cli sbatch {run.write({})} | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_validate_loads_nothing_heavy(run: Run) -> None:
    """Why: it answers in under half a second, which an import of torch alone would spoil. Time itself is not asserted."""
    code = (
        "import sys; from megatron_gvpo.cli import main; code = main(['validate', sys.argv[1]]);"
        "print(code, [m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.write({}))], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"
