"""Contradictions between keys: acceptance case 44 and its kind. Each is refused in one line that points at the key to blame.

Does not cover what only a started run can know (GPUs, reachable servers, whether two tokenizers agree).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config import ConfigError, load_config, read_config
from megatron_gvpo.config.check import check_config
from tests.config.conftest import LLAMA, MOE, Run, write_model

ON_POLICY = {"objective": {"name": "rloo"}}


def test_the_good_config_passes(run: Run) -> None:
    """Why: every refusal below is one change away from it."""
    config, source = read_config(run.write({}))
    assert check_config(config, source) == []


def test_case_44_layout_against_world(run: Run) -> None:
    (line,) = run.refusal(parallel={"gpus_per_node": 6, "tensor": 2, "pipeline": 2})
    assert line.endswith(
        "parallel.tensor: tensor 2 x pipeline 2 x context 1 = 4 does not divide nodes 1 x gpus_per_node 6 = 6 ranks"
    )


def test_case_44_top_k_above_the_vocabulary(run: Run) -> None:
    """Why: it kills the server."""
    lines = run.refusal(rollout={"top_k": 304}, objective={"assumptions": "warn"})
    assert [line.split(" ", 1)[1] for line in lines] == ["rollout.top_k: 304 is above the model's vocabulary of 303"]


def test_case_44_kl_without_a_reference(run: Run) -> None:
    (line,) = run.refusal(objective={"name": "grpo", "kl_coef": 0.1}, model={"init": "random"})
    assert "objective.kl_coef: a frozen reference model is read from model.path" in line
    (line,) = run.refusal(objective={"reference": "frozen"}, model={"init": "random"})
    assert "objective.reference: a frozen reference" in line
    run.load(objective={"name": "grpo"}, model={"init": "random"})


def test_case_44_an_objective_that_needs_a_teacher(run: Run) -> None:
    (line,) = run.refusal(objective={"name": "tv_opd"})
    assert "objective.name: tv_opd needs a teacher: set teacher.path, or teacher.servers.urls" in line


def test_case_44_a_group_of_one(run: Run) -> None:
    (line,) = run.refusal(rollout={"group_size": 1})
    assert "rollout.group_size: gvpo compares the responses of a group and needs at least 2, got 1" in line
    run.load(rollout={"group_size": 1}, objective={"name": "sft"})


def test_a_refusal_points_at_the_line_of_its_key(run: Run) -> None:
    (line,) = run.refusal(parallel={"sequence": True})
    row, column, _ = line.split(":", 2)
    assert run.file.read_text().splitlines()[int(row) - 1] == "  sequence: true"
    assert column == "3"


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"sequence": True}, "parallel.sequence: sequence parallelism splits over the tensor-parallel ranks"),
        ({"gpus_per_node": 3, "tensor": 3}, "parallel.tensor: 3 does not divide the model's 4 attention heads"),
        ({"gpus_per_node": 4, "tensor": 4}, "parallel.tensor: 4 does not divide the model's 2 key-value heads"),
        ({"virtual_pipeline": 2}, "parallel.virtual_pipeline: needs parallel.pipeline above 1"),
        ({"gpus_per_node": 2, "pipeline": 2, "virtual_pipeline": 1}, "parallel.virtual_pipeline: one chunk per stage"),
        (
            {"gpus_per_node": 2, "pipeline": 2, "virtual_pipeline": 4},
            "parallel.virtual_pipeline: 4 chunks do not divide the 2",
        ),
        (
            {"gpus_per_node": 3, "pipeline": 3},
            "parallel.pipeline: 3 stages do not divide 4 layers evenly; give first_stage_layers",
        ),
        ({"gpus_per_node": 8, "pipeline": 8}, "parallel.pipeline: leaves 4 of the model's 4 layers for the other 8 stages"),
        ({"first_stage_layers": 1}, "parallel.first_stage_layers: needs parallel.pipeline above 1"),
        (
            {"gpus_per_node": 2, "pipeline": 2, "first_stage_layers": 4},
            "parallel.first_stage_layers: leaves 0 of the model's 4 layers for the other 1 stages",
        ),
        (
            {"gpus_per_node": 2, "pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 2},
            "parallel.first_stage_layers: leaves 1 of the model's 4 layers for the other 0 stages",
        ),
        ({"gpus_per_node": 2, "expert": 2}, "parallel.expert: the model has no experts"),
    ],
)
def test_layouts_that_do_not_fit_the_model(run: Run, parallel: dict[str, Any], why: str) -> None:
    assert any(why in line for line in run.refusal(parallel=parallel))


@pytest.mark.parametrize(
    "parallel",
    [
        {"gpus_per_node": 2, "tensor": 2, "sequence": True},
        {"gpus_per_node": 2, "pipeline": 2, "virtual_pipeline": 2},
        {"gpus_per_node": 2, "pipeline": 2, "first_stage_layers": 1},
        {"gpus_per_node": 3, "pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1},
        {"nodes": 2, "gpus_per_node": 4, "tensor": 2, "context": 2},
    ],
)
def test_layouts_that_fit_pass(run: Run, parallel: dict[str, Any]) -> None:
    run.load(parallel=parallel)


def test_experts_can_be_planned_not_trained(run: Run, tmp_path: Path) -> None:
    moe = {"model": {"path": str(write_model(tmp_path / "moe", MOE))}}
    (line,) = run.refusal(**moe)
    assert "model.path: qwen3_moe models (mixtures of experts) can be planned, not trained" in line
    load_config(run.write(moe), files=False)


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"gpus_per_node": 3, "expert": 3}, "parallel.expert: 3 does not divide the model's 8 experts"),
        ({"gpus_per_node": 2, "expert": 4}, "parallel.expert: expert 4 x expert_tensor 1 x pipeline 1 = 4 does not divide the 2"),
        ({"gpus_per_node": 2, "tensor": 2}, "parallel.tensor: a model with experts trains at tensor > 1 only with sequence"),
    ],
)
def test_experts_that_do_not_fit(run: Run, tmp_path: Path, parallel: dict[str, Any], why: str) -> None:
    moe = write_model(tmp_path / "moe", MOE)
    assert any(why in line for line in run.refusal(model={"path": str(moe)}, parallel=parallel))


@pytest.mark.parametrize(
    ("precision", "device", "why"),
    [
        ({"fp8": "tensorwise"}, "cpu", "precision.fp8: FP8 needs a GPU; train.device is cpu"),
        ({"fp8": "tensorwise", "params": "fp32"}, "cuda", "precision.params: FP8 runs beside bf16, not fp32"),
        ({"fp8_params": True}, "cuda", "precision.fp8_params: needs a recipe in precision.fp8"),
        ({"fp8": "delayed"}, "cuda", "precision.fp8: delayed scaling cannot keep layers in bf16"),
        ({"fp8": "tensorwise", "bf16_last_layers": 5}, "cuda", "precision.bf16_last_layers: 5 is more than the 4 layers"),
    ],
)
def test_precision(run: Run, precision: dict[str, Any], device: str, why: str) -> None:
    assert any(why in line for line in run.refusal(precision=precision, train={"device": device}))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"max_new_tokens": 128}}, "rollout.max_new_tokens: 128 tokens of response leave no room for a prompt"),
        ({"model": {"max_length": 513}}, "model.max_length: 513 is above the 512 positions of the model"),
        ({"rollout": {"stop_token_ids": [303]}}, "rollout.stop_token_ids: 303 is outside the model's vocabulary of 303"),
        ({"rollout": {"top_k": 0}}, "rollout.top_k: -1 samples from the whole vocabulary"),
        (
            {"rollout": {"prompts_per_step": 1, "group_size": 2}, "parallel": {"gpus_per_node": 4}},
            "fewer than the 4",
        ),
        (
            {"train": {"micro_batch_size": 33}},
            "train.micro_batch_size: 33 samples on each of 1 data-parallel ranks are more",
        ),
        ({"train": {"eval_every": 2}}, "train.eval_every: there is nothing to evaluate on: set data.eval"),
        ({"data": {"train": ""}}, "data.train: is missing"),
        ({"data": {"train": "prompts.csv"}}, "data.train: must be FILE.jsonl, FILE.parquet or reasoning_gym:TASK"),
        ({"data": {"eval": "reasoning_gym:"}}, "data.eval: names no task"),
        ({"data": {"eval": "nowhere.jsonl"}}, "data.eval: no such file: "),
        ({"data": {"system_prompt": "Be brief."}}, "data.system_prompt: needs data.chat_template: true"),
        ({"data": {"chat_template": True}}, "data.chat_template: the tokenizer in "),
        ({"reward": {"name": "exakt"}}, "reward.name: must be exact, math_verify, reasoning_gym or module:function"),
        ({"optimizer": {"lr": 1e-6, "min_lr": 1e-5}}, "optimizer.min_lr: 1e-05 is above optimizer.lr 1e-06"),
        (
            {"optimizer": {"warmup_steps": 100}},
            "optimizer.warmup_steps: the warm-up of 100 steps does not end within the",
        ),
        ({"optimizer": {"overlap_param_gather": True}}, "optimizer.overlap_param_gather: needs optimizer.distributed"),
        ({"optimizer": {"cpu_offload": True}}, "optimizer.cpu_offload: the state is in CPU memory already"),
        ({"checkpoint": {"every": 4, "keep_every": 6}}, "checkpoint.keep_every: 6 is no multiple of checkpoint.every 4"),
        ({"log": {"dir": "runs/{step}"}}, "log.dir: knows {name} and {seed}, not {step}"),
        ({"log": {"dir": ""}}, "log.dir: is empty"),
        ({"launch": {"time": "soon"}}, "launch.time: must be HH:MM:SS"),
        ({"launch": {"env": {"A-B": "1"}}}, "launch.env.A-B: is no name of an environment variable"),
        ({"launch": {"sbatch": ["qos=high"]}}, "launch.sbatch: must be options of sbatch"),
        ({"model": {"megatron": {"attention_dropuot": 0.1}}}, "has no such field; did you mean 'attention_dropout'?"),
        ({"model": {"megatron": {"sequence_parallel": True}}}, "model.megatron.sequence_parallel: is set by parallel.sequence"),
        ({"model": {"path": ""}}, "model.path: is missing"),
        ({"model": {"path": "nowhere"}}, "model.path: nowhere/config.json: No such file or directory"),
        ({"model": {"tokenizer": "nowhere"}}, "model.tokenizer: nowhere: no tokenizer there"),
        ({"gupo": {"delta": 0.0}}, "gupo.delta: must be auto or a number above 0"),
        (
            {"gupo": {"enabled": True}, "rollout": {"prompts_per_step": 2}, "parallel": {"gpus_per_node": 4}},
            "rollout.prompts_per_step: GUPO keeps a group on one rank",
        ),
        ({"gupo": {"layer": "last_block"}}, "gupo.layer: must be one of output_layer, final_norm"),
    ],
)
def test_keys_that_contradict_each_other(run: Run, changes: dict[str, dict[str, Any]], why: str) -> None:
    lines = run.refusal(**changes)
    assert any(why in line for line in lines), lines
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({"launch": "none"}, "rollout.servers.launch: launch: none needs the servers' urls"),
        ({"urls": ["http://a:1"]}, "servers that run already are used with launch: none"),
        ({"launch": "none", "urls": ["a:1"]}, "rollout.servers.urls: must be http://HOST:PORT, got 'a:1'"),
        ({"launch": "none", "urls": ["http://a:1", "http://a:1/"]}, "rollout.servers.urls: http://a:1/ is named twice"),
        ({"python": "/nowhere/python"}, "rollout.servers.python: no such program: /nowhere/python"),
    ],
)
def test_servers(run: Run, servers: dict[str, Any], why: str) -> None:
    (line,) = run.refusal(rollout={"servers": servers})
    assert why in line


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness: rloo takes this policy's own samples only: set 0"),
        ({"train": {"optimizer_steps": 2}}, "train.optimizer_steps: rloo takes this policy's own samples only"),
    ],
)
def test_on_policy_objectives_refuse_older_samples(run: Run, changes: dict[str, dict[str, Any]], why: str) -> None:
    """Why: without a ratio the gradient of stale samples is simply another one."""
    (line,) = run.refusal(**changes, **ON_POLICY)
    assert why in line
    assert "objective.tis" in line
    assert "objective.assumptions: warn" in line
    run.load(**changes, objective={"name": "rloo", "tis": "token"})
    run.load(**changes)  # GVPO takes samples of any full-support source


def test_cut_support_is_refused_or_warned_of(run: Run) -> None:
    """Why: GVPO's optimum is the promised one only if every response could have been sampled (arXiv 2504.19599)."""
    (line,) = run.refusal(rollout={"top_p": 0.9})
    assert "rollout.top_p: gvpo assumes samples from the full support, and top_p 0.9 cuts it" in line
    config, source = read_config(run.write({"rollout": {"top_p": 0.9}, "objective": {"assumptions": "warn"}}))
    (finding,) = check_config(config, source)
    assert finding.severity == "warning"
    assert "rollout.top_p: warning: gvpo assumes" in finding.line


@pytest.mark.parametrize(
    ("name", "teacher", "rollout", "why"),
    [
        (
            "tv_opd",
            {"signal": "sequence"},
            {},
            "teacher.signal: tv_opd needs the teacher's sampled signal, and sequence",
        ),
        ("gkd", {}, {}, "objective.name: gkd needs the teacher's topk signal, and sampled does not hold it"),
        ("gkd", {"signal": "full"}, {}, "teacher.signal: a server cannot send whole distributions"),
        ("gkd", {"signal": "topk", "top_k": 304}, {}, "teacher.top_k: 304 is above the teacher's vocabulary of 303"),
        (
            "tv_opd",
            {},
            {"temperature": 0.7},
            "rollout.temperature: a served teacher scores at temperature 1 and the student",
        ),
        (
            "gkd",
            {"signal": "topk", "path": "other"},
            {},
            "teacher.path: the teacher's vocabulary has 400 entries and the",
        ),
    ],
)
def test_teachers(run: Run, tmp_path: Path, name: str, teacher: dict[str, Any], rollout: dict[str, Any], why: str) -> None:
    other = write_model(tmp_path / "other", {**LLAMA, "vocab_size": 400})
    teacher = {"path": str(run.model), **teacher}
    if teacher["path"] == "other":
        teacher["path"] = str(other)
    (line,) = run.refusal(objective={"name": name}, teacher=teacher, rollout=rollout)
    assert why in line


def test_teachers_that_fit_pass(run: Run) -> None:
    here = {"path": str(run.model)}
    run.load(objective={"name": "gvpo_opd"}, teacher=here)
    run.load(objective={"name": "gkd"}, teacher={**here, "signal": "full", "where": "colocated"}, rollout={"temperature": 0.7})
    urls = {"launch": "none", "urls": ["http://a:1"]}
    run.load(objective={"name": "tv_opd"}, teacher={"servers": urls})


def test_gupo_is_refused_where_no_log_prob_coefficient_describes_the_gradient(run: Run) -> None:
    teacher = {"path": str(run.model), "signal": "full", "where": "colocated"}
    (line,) = run.refusal(objective={"name": "gkd"}, teacher=teacher, gupo={"enabled": "observe"})
    assert "gupo.enabled: gkd compares whole distributions" in line


def test_weights_that_are_not_there(run: Run) -> None:
    (run.model / "model.safetensors").unlink()
    (line,) = run.refusal()
    assert "model.path: " in line
    assert "no model.safetensors" in line
    run.load(model={"init": "random"})
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (run.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (run.model / "model-1.safetensors").touch()
    (line,) = run.refusal()
    assert "1 of 2 weight files are missing, model-2.safetensors first" in line


def test_files_need_not_exist_where_a_run_is_only_planned(run: Run) -> None:
    """Why: `plan` runs on a laptop, where neither weights nor data are."""
    (run.model / "model.safetensors").unlink()
    run.data.unlink()
    load_config(run.write({}), files=False)
    with pytest.raises(ConfigError):
        load_config(run.file)


def test_all_contradictions_at_once_in_the_files_order(run: Run) -> None:
    lines = run.refusal(train={"eval_every": 2}, rollout={"group_size": 1, "top_k": 0})
    assert [line.split(": ")[1] for line in lines] == ["rollout.group_size", "rollout.top_k", "train.eval_every"]


def test_every_option_of_every_objective_reaches_the_check(run: Run, refuse: Callable[..., list[str]]) -> None:
    """Why: an objective's own contradiction (one that its config class finds) must carry the file and line as well."""
    (line,) = refuse("objective:\n  name: gvpo_opd\n  teacher_coef: 0.1\n  length_alpha: 1\n")
    assert line.startswith("run.yaml:1:1: objective: length_alpha belongs to distillation without rewards")
