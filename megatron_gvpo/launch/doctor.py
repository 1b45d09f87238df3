"""`megatron-gvpo doctor`: what this machine has, what is missing, and what that costs."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout.errors import StartError
from megatron_gvpo.rollout.server import server_python

MEGATRON_RANGE = ((0, 16, 1), (0, 20, 0))
SGLANG_FROM = (0, 5, 9)
# From which version of Transformer Engine Megatron-Core 0.16 takes each recipe.
FP8_SINCE = {"delayed": (1, 0), "mxfp8": (2, 1), "tensorwise": (2, 2), "blockwise": (2, 3)}
_PROBE_LIMIT_S = 180.0

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `needed`: no run starts without it. `cost`: what a run does without it, or how to mend it."""

    name: str
    status: Status
    version: str = ""
    detail: str = ""
    cost: str = ""
    needed: bool = False


def examine() -> dict[str, Any]:
    """Everything, as JSON values: `ready` (the CPU device mode can train), `ready_for_gpu`, and the list of findings."""
    facts = _probe_all()
    findings = [
        Finding("python", "ok", platform.python_version(), sys.executable, needed=True),
        _torch(facts["torch"]),
        _gpus(facts["torch"]),
        _nccl(facts["torch"]),
        _megatron(facts["megatron.core"]),
        _package(facts["mbridge"], "mbridge", "Hugging Face weights cannot be read", needed=True),
        _package(facts["transformers"], "transformers", "tokenizers cannot be read", needed=True),
        _transformer_engine(facts["transformer_engine.pytorch"]),
        _apex(facts["apex"]),
        _package(facts["triton"], "triton", "the log-prob engine's fused kernel is off; plain torch takes its place"),
        _package(facts["wandb"], "wandb", "log.wandb must stay off; metrics still go to JSONL"),
        _package(facts["math_verify"], "math-verify", "reward.name: math_verify is not available"),
        _package(facts["reasoning_gym"], "reasoning-gym", "reasoning_gym tasks and rewards are not available"),
        _sglang(),
        _slurm(),
    ]
    by_name = {finding.name: finding for finding in findings}
    ready = all(finding.status == "ok" for finding in findings if finding.needed)
    return {
        "ready": ready,
        "ready_for_gpu": ready and all(by_name[name].status == "ok" for name in ("gpu", "transformer-engine")),
        "findings": [asdict(finding) for finding in findings],
    }


def doctor_text(report: dict[str, Any]) -> str:
    """The report as aligned lines."""
    marks = {"ok": "ok", "missing": "--", "broken": "!!"}
    lines = []
    for item in report["findings"]:
        text = f"{marks[item['status']]}  {item['name']:<19}{item['version']:<12}{item['detail']}".rstrip()
        lines.append(text + (f"\n      {item['cost']}" if item["cost"] and item["status"] != "ok" else ""))
    lines.append("")
    lines.append("ready to train on the CPU" if report["ready"] else "not ready: what is marked above is needed")
    lines.append("ready for GPUs" if report["ready_for_gpu"] else "not ready for GPUs: that needs a GPU and Transformer Engine")
    return "\n".join(lines)


def _probe_all() -> dict[str, dict[str, Any]]:
    from megatron_gvpo.launch.probe import MODULES

    command = [sys.executable, "-m", "megatron_gvpo.launch.probe"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_LIMIT_S, env=environment, check=False)
        output, end = done.stdout, f"the import ended the process with code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output, end = raw.decode() if isinstance(raw, bytes) else raw, f"the import took over {_PROBE_LIMIT_S:.0f} s"
    facts = {name: {"module": name, "found": True, "version": "", "error": "not reached"} for name in MODULES}
    for line in output.splitlines():
        if not line.startswith('{"'):
            continue  # what an import printed
        record = json.loads(line)
        if "trying" in record:
            facts[record["trying"]]["error"] = end
        else:
            facts[record["module"]] = record
    return facts


def _package(facts: dict[str, Any], name: str, cost: str, needed: bool = False) -> Finding:
    if not facts["found"]:
        return Finding(name, "missing", cost=cost, needed=needed)
    return Finding(name, "broken" if facts["error"] else "ok", facts["version"], facts["error"], cost, needed)


def _torch(facts: dict[str, Any]) -> Finding:
    finding = _package(facts, "torch", "nothing runs", needed=True)
    if finding.status != "ok":
        return finding
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "CPU build"
    return Finding("torch", "ok", facts["version"], build, needed=True)


def _gpus(facts: dict[str, Any]) -> Finding:
    gpus = facts.get("gpus") or []
    if not gpus:
        return Finding("gpu", "missing", cost="train.device: cuda is not possible here; the CPU device mode is")
    names = sorted({f"{gpu['name']} {gpu['memory_gib']} GiB" for gpu in gpus})
    return Finding("gpu", "ok", f"{len(gpus)}", ", ".join(names))


def _nccl(facts: dict[str, Any]) -> Finding:
    """NCCL comes inside torch's CUDA builds; whether it is fast shows only with the job's ranks."""
    cost = "ranks on GPUs cannot talk; the CPU device mode uses gloo"
    if not facts.get("nccl"):
        return Finding("nccl", "missing", cost=cost)
    return Finding("nccl", "ok", facts["nccl"], "its speed: srun ... megatron-gvpo doctor --bandwidth")


def _megatron(facts: dict[str, Any]) -> Finding:
    finding = _package(facts, "megatron-core", "nothing trains", needed=True)
    low, high = MEGATRON_RANGE
    if finding.status == "ok" and not low <= version_numbers(finding.version) < high:
        wanted = f">= {'.'.join(map(str, low))}, < {high[0]}.{high[1]}"
        return Finding("megatron-core", "broken", finding.version, "outside the supported range", f"install {wanted}", True)
    return finding


def _transformer_engine(facts: dict[str, Any]) -> Finding:
    finding = _package(facts, "transformer-engine", "no FP8, and no GPU layers; the plain-torch layers take their place, slower")
    if finding.status != "ok":
        return finding
    numbers = version_numbers(finding.version)
    if not numbers:
        return finding
    able = [recipe for recipe, since in FP8_SINCE.items() if numbers >= since]
    unable = [recipe for recipe in FP8_SINCE if recipe not in able]
    detail = f"precision.fp8: {', '.join(able)}" + (f"; too old for {', '.join(unable)}" if unable else "")
    return Finding("transformer-engine", "ok", finding.version, detail)


def _apex(facts: dict[str, Any]) -> Finding:
    cost = "Megatron-Core's fused optimizer and norms fall back to Transformer Engine's or torch's"
    if facts["found"] and not facts["error"] and not facts.get("nvidia"):
        why = "the package of this name that is installed is not NVIDIA's"
        return Finding("nvidia-apex", "missing", facts["version"], why, cost)
    finding = _package(facts, "nvidia-apex", cost)
    return finding


def _sglang() -> Finding:
    cost = "rollout.servers.launch: local is not possible; running servers (urls) are"
    try:
        python = server_python(ServersSection())
    except StartError as error:
        return Finding("sglang", "missing", detail=error.why, cost=cost)
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("sglang", "broken", detail=f"{python}: {error}", cost=cost)
    version = done.stdout.strip()
    if done.returncode or not version:
        return Finding("sglang", "broken", detail=f"{python} has no sglang", cost=cost)
    if version_numbers(version) < SGLANG_FROM:
        wanted = ".".join(map(str, SGLANG_FROM))
        return Finding("sglang", "broken", version, f"{python}: older than {wanted}", f"install sglang >= {wanted}")
    return Finding("sglang", "ok", version, python)


def _slurm() -> Finding:
    sbatch = shutil.which("sbatch")
    cost = "`sbatch` scripts can be rendered here, not submitted"
    return Finding("slurm", "ok", detail=sbatch) if sbatch else Finding("slurm", "missing", cost=cost)


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `0.17.0rc1+cu12` is (0, 17, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
