"""Checks of one GPU against the CPU and against `plan`; run by tests/gpu/run.sh. With --device cpu only the device differs.

The reference is a process of its own in the CPU device mode, because that mode replaces parts of torch.cuda for good.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "chain_sum" / "student"
# A 1B-shaped Llama; `--device cpu` takes a hundredth of it, so that the script ends in time.
LARGE = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SMALL = {
    **LARGE,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 4096,
}
# How far log-probs (nats) and gradients (of their norms) may be from the CPU's float32: with sums in another order, and in bf16,
# whose 8 bits leave a logit of 30 an error of a tenth.
TOLERANCES = {"fp32": (1e-3, 2e-3), "bf16": (0.5, 0.3)}


def config(model: Path, device: str, params: str, length: int, samples: int) -> Any:
    from megatron_gvpo.config.schema import Config

    return Config(
        model={"path": str(model), "max_length": length, "init": "random"},
        precision={"params": params},
        rollout={"prompts_per_step": samples // 4, "group_size": 4, "max_new_tokens": length // 2},
        train={"device": device, "micro_batch_tokens": 4 * length, "steps": 1},
        optimizer={"lr": 1e-6},
    )


def batch(vocab: int, length: int, count: int) -> list[Any]:
    import random

    from megatron_gvpo.data.samples import Sample

    random.seed(1)
    samples = []
    for index in range(count):
        new = length // 2 - index % 4
        ids = [random.randrange(vocab) for _ in range(length // 2 + new)]
        samples.append(
            Sample(
                group=str(index // 4),
                prompt_ids=ids[: length // 2],
                response_ids=ids[length // 2 :],
                mask=[1] * new,
                reward=float(index % 2),
                rollout_logprobs=[-1.0] * new,
            )
        )
    return samples


def run_model(model: str, device: str, params: str, length: int, samples: int, init: str) -> dict[str, Any]:
    """One rank, one batch: log-probs, the gradient norm and a few gradients, then timed optimizer steps."""
    import torch

    from megatron_gvpo.config.hf_shape import read_shape
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.objectives.batch import kept_samples
    from megatron_gvpo.train.build import build

    run = config(Path(model), device, params, length, samples)
    run = run.model_copy(update={"model": run.model.model_copy(update={"init": init})})
    ranks = start(run.parallel, run.train, run.precision)
    built = build(run, ranks)
    engine, objective = built.engine, built.objective
    data = batch(read_shape(model).vocab, length, samples)
    kept, _ = kept_samples(data, objective.needs.min_group_size)
    plan = plan_micro_batches([len(data[i]) for i in kept], 1, max_tokens=run.train.micro_batch_tokens)
    share = engine.cut(data, kept, plan)
    logprobs = engine.logprobs(share)
    signals = {"logprobs": logprobs, "old_logprobs": logprobs}
    seen, whole = engine.batch_of(data, kept, share, signals)
    prepared = objective.prepare(seen, engine.comm)
    loss, norm = engine.gradients(whole, seen, prepared)
    # One number a parameter: sums in float64 of a fixed pattern of signs.
    gradients = {}
    for name, parameter in sorted(built.chunks[0].named_parameters()):
        flat = parameter.main_grad.detach().double().flatten()
        signs = torch.cos(torch.arange(flat.numel(), device=flat.device, dtype=torch.float64))
        gradients[name] = [float((flat * signs).sum()), float(flat.norm())]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        engine.step(whole, seen, objective.prepare(seen, engine.comm))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    shutdown()
    return {
        "device": name,
        "loss": loss,
        "gradient_norm": norm,
        "logprobs": logprobs.tolist(),
        "gradients": gradients,
        "step_seconds": min(seconds),
        "peak_bytes": peak,
    }


def in_a_process(**arguments: Any) -> dict[str, Any]:
    """`run_model` in a process of its own; what it printed last is its result."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8))}
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{arguments}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def difference(left: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """Largest differences: log-probs in nats, gradients relative to each parameter's norm."""
    logprobs = max(abs(a - b) for a, b in zip(left["logprobs"], right["logprobs"], strict=True))
    relative = [
        max(abs(left["gradients"][name][i] - right["gradients"][name][i]) for i in (0, 1))
        / max(right["gradients"][name][1], 1e-12)
        for name in right["gradients"]
    ]
    return {"logprobs": logprobs, "gradients": max(relative)}


def planned(model: Path, length: int, samples: int) -> dict[str, float]:
    """`plan` for the same run on one GPU, as if it were an H100 or H200."""
    from megatron_gvpo.launch.plan import make_plan

    plan = make_plan(config(model, "cuda", "bf16", length, samples))
    seconds = plan["seconds"]
    return {"gib": plan["memory_gib_total"], "seconds": seconds["forward_backward"] + seconds["optimizer"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_model(**json.loads(options.one))))
        return 0
    device = options.device
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("no GPU here: nothing was checked (tests/gpu/run.sh --cpu runs the same script without one)", file=sys.stderr)
            return 2
    started, failures = time.perf_counter(), []
    report: dict[str, Any] = {"device": device}

    demo = {"model": str(DEMO), "length": 32, "samples": 16, "init": "pretrained"}
    reference = in_a_process(device="cpu", params="fp32", **demo)
    for params, (nats, share) in TOLERANCES.items():
        found = in_a_process(device=device, params=params, **demo)
        apart = difference(found, reference)
        report[f"demo_{params}"] = {**apart, "device": found["device"], "tolerances": [nats, share]}
        print(
            f"demo model, {params}, on {found['device']}: log-probs differ by {apart['logprobs']:.2e} nats, gradients by "
            f"{apart['gradients']:.2e} of their norms"
        )
        if apart["logprobs"] > nats or apart["gradients"] > share:
            failures.append(f"demo model in {params}: further from the CPU's float32 than {nats} nats and {share} of the norms")

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE if device == "cuda" else SMALL))
        length, samples = (2048, 16) if device == "cuda" else (128, 8)
        found = in_a_process(model=folder, device=device, params="bf16", length=length, samples=samples, init="random")
        expected = planned(Path(folder), length, samples)
    large = {"seconds": found["step_seconds"], "gib": found["peak_bytes"] / 2**30, "planned": expected}
    report["large"] = {**large, "loss": found["loss"], "gradient_norm": found["gradient_norm"]}
    print(
        f"random model: a step {large['seconds']:.3f} s (planned {expected['seconds']:.3f} on an H100), at most "
        f"{large['gib']:.2f} GiB (planned {expected['gib']:.2f})"
        + ("" if device == "cuda" else "; a CPU's numbers mean nothing here")
    )
    if not all(abs(value) < 1e4 for value in found["logprobs"]):
        failures.append("the random model's log-probs are not finite")
    if device == "cuda" and abs(large["gib"] / expected["gib"] - 1) > 0.2:
        failures.append(f"peak memory is {large['gib']:.2f} GiB, plan says {expected['gib']:.2f}: more than 20 % apart")

    report |= {"failures": failures, "total_seconds": time.perf_counter() - started}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"{'failed' if failures else 'passed'} in {report['total_seconds']:.0f} s on {device}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
