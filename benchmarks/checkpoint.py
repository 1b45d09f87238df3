"""How long a checkpoint holds up training: saved at once, and in the background.

    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint_cpu.json

One CPU rank trains a random Llama of about 40 million parameters on recorded samples, through the run's own loop, three ways: no
checkpoints, one every second step, and one every second step in the background. What counts is the time from the
end of a step's work to the start of the next one's, and how much longer the steps themselves get while files are being written
(best of the steps of each kind: other programs on the machine only ever add).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of each run; every second one saves")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="gvpo-checkpoint-") as folder:
        found = {name: measure(Path(folder), name, options.steps) for name in ("none", "at once", "in the background")}
    report = {"steps": options.steps, "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), **found}
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")


def measure(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Seconds of a step, and of what a save adds between two steps."""
    from megatron_gvpo.config.schema import Config
    from megatron_gvpo.train.rank import Options, run_rank
    from megatron_gvpo.train.saves import Saves

    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    samples = _record(folder / "samples.jsonl")
    config = Config.model_validate(
        {
            "model": {"path": str(model), "init": "random", "max_length": 128},
            "precision": {"params": "fp32"},
            "train": {"device": "cpu", "steps": steps, "micro_batch_tokens": 1024},
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every": 0 if name == "none" else 2, "asynchronous": name == "in the background", "export": False},
            "log": {"dump_samples": False, "report": False},
        }
    )
    calls: dict[str, list[float]] = {"save": [], "settle": []}
    timed = {kind: _timed(getattr(Saves, kind), calls[kind]) for kind in calls}
    originals = {kind: getattr(Saves, kind) for kind in calls}
    run_dir = folder / name.replace(" ", "_")
    try:
        for kind, wrapper in timed.items():
            setattr(Saves, kind, wrapper)
        run_rank(config, run_dir, Options(replay=samples))
    finally:
        for kind, original in originals.items():
            setattr(Saves, kind, original)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # The last save is waited for whatever the setting, and is left out; a save's time is carried into the next step's row.
    work = [row["time/step"] - row.get("time/checkpoint", 0.0) for row in rows[1:]]
    bytes_written = sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    return {
        "checkpoint_mib": round(bytes_written / 2**20 / max(len(list((run_dir / "checkpoints").glob("step_*"))), 1), 1),
        "step_s": [round(seconds, 3) for seconds in sorted(work)],
        "save_call_s": [round(seconds, 3) for seconds in calls["save"][:-1]],
        "settle_call_s": [round(seconds, 3) for seconds in calls["settle"]],
        "stall_per_save_s": round((sum(calls["save"][:-1]) + sum(calls["settle"])) / max(len(calls["save"]) - 1, 1), 3),
    }


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - begin)

    return wrapper


def _record(path: Path) -> Path:
    from megatron_gvpo.data.samples import Sample, write_samples

    draw = random.Random(0)
    samples = []
    for group in range(2):
        prompt = [draw.randrange(3, 32000) for _ in range(16)]
        for _ in range(4):
            ids = [draw.randrange(3, 32000) for _ in range(48)]
            logprobs = [draw.uniform(-3.0, -0.1) for _ in ids]
            samples.append(Sample(f"g{group}", prompt, ids, [1] * len(ids), reward=draw.random(), rollout_logprobs=logprobs))
    write_samples(path, samples)
    return path


if __name__ == "__main__":
    main()
