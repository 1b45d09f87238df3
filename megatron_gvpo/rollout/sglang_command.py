"""The SGLang server's command line, environment and settings file, for a CPU and for GPUs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_gvpo.config.schema import ServersSection

CPU_STUBS = Path(__file__).parent / "cpu_stubs"

# SGLang keeps a few positions of the context for itself (it serves prompt + response <= context_length - 2), so a server
# gets a few more than the run uses; no request ever comes to stand on them.
_SPARE_POSITIONS = 8

# Memory for the key/value cache of a CPU server. On GPUs SGLang sizes it by itself, from the free memory.
_CPU_CACHE_BYTES = 1 << 30
_CPU_CACHE_MAX_TOKENS = 1 << 18


@dataclass(frozen=True)
class ServerPlan:
    """What one server is started with: `python -m sglang.launch_server --config SETTINGS_FILE *flags`.

    settings: what `ps` must not show (the key); goes into a file that only this user can read.
    """

    settings: dict[str, str]
    flags: tuple[str, ...]
    environment: dict[str, str]


def plan_server(
    model_path: Path,
    servers: ServersSection,
    *,
    host: str,
    port: int,
    api_key: str,
    max_length: int,
    seed: int,
    first_gpu: int,
) -> ServerPlan:
    """The plan of one server at an address of this machine. `max_length`: tokens of prompt and response together."""
    context = max_length + _SPARE_POSITIONS
    flags: dict[str, object] = {
        "model-path": model_path,
        "host": host,
        "port": port,
        "device": servers.device,
        "dtype": servers.dtype,
        "tp-size": servers.tensor,
        "context-length": context,
        "random-seed": seed,
        # Token ids in, token ids out: the server needs no tokenizer, and so cannot re-tokenise, nor fail to read one that
        # was saved by another version of transformers.
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "log-level-http": "warning",
    }
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The context may pass the checkpoint's max_position_embeddings by the spare positions above.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # A server that dies shall die at once: by default it first collects dumps for a minute while clients hang.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if servers.device == "cpu":
        flags |= {
            "attention-backend": "torch_native",
            "disable-overlap-schedule": True,
            "disable-cuda-graph": True,
            "sleep-on-idle": True,  # else the scheduler spins on most of a core that the trainer needs
            "max-running-requests": min(servers.concurrency, 256),
            "max-total-tokens": cpu_cache_tokens(model_path, context),
        }
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": str(CPU_STUBS),
        }
    else:
        flags["base-gpu-id"] = first_gpu
    words = [word for name, value in flags.items() for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
    return ServerPlan({"api-key": api_key}, (*words, *servers.args), environment)


def cpu_cache_tokens(model_path: Path, context: int) -> int:
    """Tokens of key/value cache that fit the memory set aside for it (float32), and at least two whole contexts."""
    config = json.loads((model_path / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    per_token = config["num_hidden_layers"] * 2 * (config.get("num_key_value_heads") or heads) * head_dim * 4
    return max(2 * context, min(_CPU_CACHE_MAX_TOKENS, _CPU_CACHE_BYTES // per_token))
