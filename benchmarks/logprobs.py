"""Time and peak memory of the log-prob engine against others, in one run: forward and backward of sum_t c_t logprob_t.

    python benchmarks/logprobs.py --vocab 151936 --tokens 4096 --hidden 1024 --json benchmarks/results/logprobs_cpu.json

Every method runs in processes of its own, one method after another, for `--rounds` rounds; the best round counts. Peak
memory is what a method takes beyond its inputs and their gradients. Peers that are not installed are listed as such: verl's
is read from its package without its dependencies, liger-kernel's and cut-cross-entropy's need a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import multiprocessing as mp
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Shape:
    """One problem; `kept` is the share of positions that have a target."""

    vocab: int
    tokens: int
    hidden: int
    tp: int
    dtype: str
    device: str
    threads: int
    kept: float = 1.0


@dataclass(frozen=True)
class Result:
    method: str
    kept: float
    seconds: float  # best round, wall clock, slowest rank
    cpu_seconds: float  # of that round, all threads and ranks: what is left of noise from other programs
    peak_mib: float  # beyond inputs and gradients, the largest rank's
    matmuls: int  # of tokens * hidden * vocab multiply-adds
    note: str = ""


@dataclass
class Problem:
    """One rank's tensors."""

    hidden: Any
    weight: Any
    targets: Any
    coefficients: Any
    shard: Any


Step = Callable[[Problem], None]


def plain(p: Problem) -> None:
    import torch.nn.functional as F

    logprobs = F.linear(p.hidden, p.weight).log_softmax(-1)
    (logprobs.gather(1, p.targets.clamp(min=0)[:, None]).squeeze(1).float() * p.coefficients).sum().backward()


def megatron(p: Problem) -> None:
    import torch.nn.functional as F
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = F.linear(p.hidden, p.weight)
    losses = vocab_parallel_cross_entropy(logits[:, None].float(), p.targets.clamp(min=0)[:, None])
    (-losses.squeeze(1) * p.coefficients).sum().backward()


def verl(p: Problem) -> None:
    logprobs, _ = _verl_module().FusedLinearForPPOFunction.apply(p.hidden, p.weight, p.targets.clamp(min=0))
    (logprobs * p.coefficients).sum().backward()


def liger(p: Problem) -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    # It has no per-token coefficients with a fused gradient: the plain sum, which costs the same.
    liger_fused_linear_cross_entropy(p.hidden, p.weight, p.targets, reduction="sum", ignore_index=-1).backward()


def cut_cross_entropy(p: Problem) -> None:
    from cut_cross_entropy import linear_cross_entropy

    losses = linear_cross_entropy(p.hidden, p.weight, p.targets, ignore_index=-1, reduction="none")
    (-losses * p.coefficients).sum().backward()


def recompute(p: Problem) -> None:
    from megatron_gvpo.logprobs import linear_token_logprobs

    (linear_token_logprobs(p.hidden, p.weight, p.targets, p.shard).logprobs * p.coefficients).sum().backward()


def score(p: Problem) -> None:
    from megatron_gvpo.logprobs import linear_score_loss

    linear_score_loss(p.hidden, p.weight, p.targets, p.coefficients, p.shard).loss.backward()


# Name: (step, matmuls it does, whether positions without a target cost it nothing, whether it knows tensor parallelism)
METHODS: dict[str, tuple[Step, int, bool, bool]] = {
    "plain": (plain, 3, False, False),
    "megatron": (megatron, 3, False, True),
    "verl": (verl, 4, False, False),
    "liger": (liger, 3, True, False),
    "cut_cross_entropy": (cut_cross_entropy, 4, True, False),
    "ours-recomputed": (recompute, 4, True, True),
    "ours-known-coefficients": (score, 3, True, True),
}


def _verl_module() -> Any:
    """verl's fused linear, from its package's file: importing verl itself asks for ray and more."""
    if "verl_fused" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("verl is not installed")
        path = Path(next(iter(spec.submodule_search_locations))) / "utils/experimental/torch_functional.py"
        file_spec = importlib.util.spec_from_file_location("verl_fused", path)
        assert file_spec is not None
        assert file_spec.loader is not None
        module = importlib.util.module_from_spec(file_spec)
        file_spec.loader.exec_module(module)
        sys.modules["verl_fused"] = module
    return sys.modules["verl_fused"]


def _missing(method: str, shape: Shape) -> str:
    """Why this method cannot run here, or nothing."""
    needs = {"megatron": "megatron", "verl": "verl", "liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
    if shape.tp > 1 and not METHODS[method][3]:
        return "knows no tensor parallelism"
    if method in ("liger", "cut_cross_entropy") and shape.device != "cuda":
        return "needs a GPU"
    if method in needs and importlib.util.find_spec(needs[method]) is None:
        return "not installed"
    return ""


def _child(rank: int, shape: Shape, method: str, port: int, warm: bool, pipe: Any) -> None:
    os.environ.update(OMP_NUM_THREADS=str(shape.threads), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(shape.threads)
    group = None
    if shape.tp > 1 or method == "megatron":
        backend = "nccl" if shape.device == "cuda" else "gloo"
        if shape.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, rank=rank, world_size=shape.tp)
        group = dist.group.WORLD if shape.tp > 1 else None
        if method == "megatron":
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(shape.tp)
            if shape.device == "cpu":
                # Its buffers are made on "the current CUDA device"; here that is the CPU.
                torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    problem = _problem(rank, shape, group)
    step = METHODS[method][0]
    if warm:
        step(problem)
        problem.hidden.grad = problem.weight.grad = None
    gc.collect()
    memory = _Peak(shape.device)
    started, cpu = time.perf_counter(), time.process_time()
    step(problem)
    if shape.device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    gradients = sum(x.grad.numel() * x.grad.itemsize for x in (problem.hidden, problem.weight))
    pipe.send((seconds, cpu_seconds, (memory.peak() - gradients) / 2**20))
    os._exit(0)


def _problem(rank: int, shape: Shape, group: Any) -> Problem:
    import torch

    from megatron_gvpo.logprobs import VocabShard

    shard = VocabShard.of(rank, shape.tp, shape.vocab, group=group)
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=generator).to(shape.device, dtype).requires_grad_()
    weight = (torch.randn(shard.width, shape.hidden) / shape.hidden**0.5).to(shape.device, dtype).requires_grad_()
    targets = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator)
    if shape.kept < 1.0:
        # Runs of prompt and response, as in a packed batch.
        place = torch.arange(shape.tokens) % 256
        targets[place >= round(256 * shape.kept)] = -1
    coefficients = torch.randn(shape.tokens, generator=generator)
    return Problem(hidden, weight, targets.to(shape.device), coefficients.to(shape.device), shard)


class _Peak:
    """Bytes above the level at construction. On Linux the kernel's high-water mark of resident memory, reset first."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._base = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._base = self._status("VmRSS")

    def peak(self) -> int:
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() - self._base
        return self._status("VmHWM") - self._base

    @staticmethod
    def _status(key: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {key} in /proc/self/status")


def measure(method: str, shape: Shape, warm: bool) -> tuple[float, float, float]:
    """(seconds of the slowest rank, CPU seconds of all, MiB of the largest rank) of one round."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(shape.tp):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, shape, method, port, warm, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        found = []
        for process, pipe in ranks:
            if not pipe.poll(_LIMIT_S):
                raise RuntimeError(f"{method}: no result within {_LIMIT_S:.0f} s")
            try:
                found.append(pipe.recv())
            except EOFError:
                process.join(10)
                raise RuntimeError(f"{method}: a rank ended with exit code {process.exitcode}") from None
    finally:
        for process, _ in ranks:
            process.kill()
            process.join(10)
    return max(f[0] for f in found), sum(f[1] for f in found), max(f[2] for f in found)


def run(shape: Shape, methods: list[str], rounds: int) -> list[Result]:
    """Every method on the whole batch, and ours on a batch of which half the positions have a target."""
    jobs = [(method, 1.0) for method in methods] + [(method, 0.5) for method in methods if method.startswith("ours")]
    best: dict[tuple[str, float], tuple[float, float, float]] = {}
    results = []
    for _ in range(rounds):
        for method, kept in jobs:
            if _missing(method, shape):
                continue
            this = measure(method, Shape(**{**asdict(shape), "kept": kept}), warm=shape.device == "cuda")
            print(f"  {method} ({kept:.0%} of positions): {this[0]:.2f} s, {this[2]:.0f} MiB", file=sys.stderr, flush=True)
            before = best.get((method, kept))
            best[method, kept] = this if before is None else (*min(before[:2], this[:2]), max(before[2], this[2]))
    for method, kept in jobs:
        note = _missing(method, shape)
        matmuls = METHODS[method][1]
        if note:
            if kept == 1.0:
                results.append(Result(method, kept, float("nan"), float("nan"), float("nan"), matmuls, note))
            continue
        results.append(Result(method, kept, *best[method, kept], matmuls))
    return results


def matmul_rate(shape: Shape) -> float:
    """TFLOP/s of a plain product of this size (at most 1024 rows on a CPU), the best of three."""
    import torch

    torch.set_num_threads(shape.threads * shape.tp if shape.device == "cpu" else shape.threads)
    rows = shape.tokens if shape.device == "cuda" else min(shape.tokens, 1024)
    dtype = getattr(torch, shape.dtype)
    left = torch.randn(rows, shape.hidden, device=shape.device).to(dtype)
    right = torch.randn(shape.vocab // shape.tp, shape.hidden, device=shape.device).to(dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        out = left @ right.t()
        if shape.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
        del out
    return 2.0 * rows * right.shape[0] * shape.hidden / best / 1e12


def table(shape: Shape, results: list[Result], rate: float) -> str:
    """Markdown; ratios are to the first method that ran on the whole batch."""
    base = next((r for r in results if r.seconds == r.seconds and r.kept == 1.0), results[0])
    lines = [
        f"V = {shape.vocab}, T = {shape.tokens}, H = {shape.hidden}, TP = {shape.tp}, {shape.dtype}, {shape.device}",
        "",
        f"| method | positions with a target | s | time / {base.method} | CPU s | CPU / {base.method} | peak MiB | "
        f"memory / {base.method} | of the matmul rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.note:
            lines.append(f"| {r.method} | | {r.note} | | | | | | |")
            continue
        flops = 2.0 * r.matmuls * shape.tokens * shape.hidden * (shape.vocab // shape.tp)
        done = flops * (r.kept if METHODS[r.method][2] else 1.0) / r.seconds / 1e12
        lines.append(
            f"| {r.method} | {r.kept:.0%} | {r.seconds:.2f} | {r.seconds / base.seconds:.3f} | {r.cpu_seconds:.2f} | "
            f"{r.cpu_seconds / base.cpu_seconds:.3f} | "
            f"{r.peak_mib:.0f} | {r.peak_mib / base.peak_mib:.4f} | {done / rate:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; the first is the one compared with")
    parser.add_argument("--json", type=Path, help="append this run to a JSON file")
    args = parser.parse_args()
    threads = max(1, len(os.sched_getaffinity(0)) // args.tp)
    shape = Shape(args.vocab, args.tokens, args.hidden, args.tp, args.dtype, args.device, threads)
    results = run(shape, args.methods.split(","), args.rounds)
    rate = matmul_rate(shape)
    print(table(shape, results, rate))
    if args.json:
        import torch

        name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU, {threads} threads a rank"
        entry = {
            "device": name,
            "torch": torch.__version__,
            "shape": asdict(shape),
            "rounds": args.rounds,
            "matmul_tflops": rate,
            "results": [{k: (None if v != v else v) for k, v in asdict(r).items()} for r in results],
        }
        runs = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*runs, entry], indent=1) + "\n")


if __name__ == "__main__":
    main()
