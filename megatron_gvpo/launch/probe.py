"""Imports the packages that `doctor` asks about, one by one, and prints a JSON line for each.

Runs in a process of its own (`python -m megatron_gvpo.launch.probe`): an import may raise anything (Transformer Engine's
raises RuntimeError without its compiled part) or end the process, and then the last line names the culprit.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
from typing import Any

# Module, and the distribution that has its version.
MODULES = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "mbridge": "mbridge",
    "transformers": "transformers",
    "transformer_engine.pytorch": "transformer-engine",
    "apex": "apex",
    "wandb": "wandb",
    "math_verify": "math-verify",
    "reasoning_gym": "reasoning-gym",
    "triton": "triton",
}


def probe(module: str) -> dict[str, Any]:
    """What importing `module` gives: `found` (no such package), `error` (the last line of what it raised), `version`."""
    facts: dict[str, Any] = {"module": module, "version": _version(MODULES.get(module, module))}
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        ours = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        return {**facts, "found": not ours, "error": "" if ours else f"needs {error.name}, which is not installed"}
    except Exception as error:  # noqa: BLE001  whatever an import raises is the finding
        return {**facts, "found": True, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    facts |= {"found": True, "error": ""}
    if module == "torch":
        facts |= _cuda(loaded)
    if module == "apex":
        # The registry's package of this name is an unrelated web toolkit: NVIDIA's is known by what it has inside.
        facts["nvidia"] = importlib.util.find_spec("apex.multi_tensor_apply") is not None
    return facts


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda(torch: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"cuda_build": torch.version.cuda or "", "gpus": []}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            facts["gpus"].append({"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1)})
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return facts


if __name__ == "__main__":
    for name in MODULES:
        print(json.dumps({"trying": name}), flush=True)
        print(json.dumps(probe(name)), flush=True)
