"""What a step's coordination costs up to 4,096 GPUs, on paper and by count: bytes and messages of group statistics, GUPO, sample
distribution and weight sync, and the controller's CPU time.

    python benchmarks/scale.py --json benchmarks/results/scale.json

The real code runs under a fake process group of the full world size, as one rank of it; every collective is recorded and priced
by the link model below. The batch grows with the ranks. CPU times are this machine's, of one core. What is measured on fewer
samples or a smaller output layer than the run's, because this machine would not hold more, is scaled up in proportion and says
so. Nothing here has met a network.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "yaml_configs/llama-3.1-70b_gvpo_bf16_256.yaml"
BASE_RANKS, BASE_PROMPTS, BASE_SERVERS = 256, 512, 32
WORLDS = (256, 1024, 4096)
# The link model. Small collectives go up and down a binary tree; a broadcast of gloo's sends the whole object down each level of
# a binomial tree; a large one of NCCL's is cut into pieces and takes its bytes once.
LATENCY_S, NCCL_BYTES_S, NVLINK_BYTES_S, GLOO_LATENCY_S, GLOO_BYTES_S = 30e-6, 40e9, 360e9, 100e-6, 2.5e9
SAMPLED = 256  # samples that are really made, pickled and cut
HEAD_ROWS, HEAD_HIDDEN, GROUPS = 1024, 64, 64


class Recorder:
    """Replaces torch.distributed's collectives: what would be sent is counted, and every rank answers like this one."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def install(self) -> None:
        import torch.distributed as dist

        def size(group: Any) -> int:
            return dist.get_world_size(group)

        def count(name: str, tensor: Any, group: Any) -> None:
            self.calls[name].append((tensor.numel() * tensor.element_size(), size(group)))

        def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
            count("all_reduce", tensor, group)

        def broadcast(tensor: Any, src: int = 0, group: Any = None, async_op: bool = False, **more: Any) -> None:
            count("broadcast", tensor, group)

        def all_gather(parts: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> None:
            count("all_gather", tensor, group)
            for part in parts:
                part.copy_(tensor)

        def all_gather_into_tensor(out: Any, tensor: Any, group: Any = None, async_op: bool = False) -> None:
            count("all_gather", tensor, group)
            out.view(size(group), -1).copy_(tensor.reshape(1, -1).expand(size(group), -1))

        def broadcast_object_list(objects: list[Any], src: int = 0, group: Any = None, device: Any = None, **more: Any) -> None:
            self.calls["broadcast_object"].append((sum(len(pickle.dumps(item)) for item in objects), size(group)))

        for function in (all_reduce, broadcast, all_gather, all_gather_into_tensor, broadcast_object_list):
            setattr(dist, function.__name__, function)

    def take(self) -> dict[str, list[tuple[int, int]]]:
        calls, self.calls = dict(self.calls), defaultdict(list)
        return calls


def price(kind: str, size: float, ranks: int) -> float:
    """Seconds of one collective."""
    depth = math.ceil(math.log2(max(ranks, 2)))
    if kind == "broadcast_object":  # over the controller's gloo group
        return depth * (GLOO_LATENCY_S + size / GLOO_BYTES_S)
    times = {"all_reduce": 2.0, "broadcast": 1.0, "all_gather": float(max(ranks - 1, 1))}[kind]
    speed = NVLINK_BYTES_S if ranks <= 8 else NCCL_BYTES_S  # the tensor group shares a node
    return 2 * depth * LATENCY_S + times * size / speed


def summary(calls: dict[str, list[tuple[int, int]]], scale: Callable[[int], float] = float) -> dict[str, float]:
    sizes = [(kind, scale(size), ranks) for kind, found in calls.items() for size, ranks in found]
    return {
        "bytes": sum(size for _, size, _ in sizes),
        "messages": len(sizes),
        "seconds": sum(price(*item) for item in sizes),
    }


def overrides(world: int) -> list[str]:
    factor = world // BASE_RANKS
    urls = json.dumps([f"http://rollout-{i}:30000" for i in range(BASE_SERVERS * factor)])
    return [
        f"parallel.nodes={world // 8}",
        f"rollout.prompts_per_step={BASE_PROMPTS * factor}",
        f"rollout.servers.urls={urls}",
    ]


def make_samples(count: int, config: Any) -> list[Any]:
    """Full-length samples with the server's log-probs, groups of the config's size."""
    import random

    from megatron_gvpo.data.samples import Sample

    random.seed(0)
    new = config.rollout.max_new_tokens
    prompt = [random.randrange(100_000) for _ in range(config.model.max_length - new)]
    samples = []
    for index in range(count):
        length = random.randrange(new // 2, new + 1)
        samples.append(
            Sample(
                group=str(index // config.rollout.group_size),
                prompt_ids=prompt,
                response_ids=[random.randrange(100_000) for _ in range(length)],
                mask=[1] * length,
                reward=float(index % 2),
                rollout_logprobs=[-random.random() for _ in range(length)],
                weight_versions=[("1", 0)],
            )
        )
    return samples


def coordination(world: int) -> dict[str, Any]:
    """Group statistics, GUPO and sample distribution at one world size, in a process of its own."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_gvpo.config import load_config
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.comm import RankComm
    from megatron_gvpo.objectives.batch import Batch, kept_samples, sequence_table, token_table
    from megatron_gvpo.objectives.registry import create_objective
    from megatron_gvpo.train.exchange import Exchange

    config = load_config(CONFIG, overrides(world), files=False)
    parallel, size = config.parallel, config.rollout.group_size
    count = config.rollout.prompts_per_step * size
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    data = dist.new_group(list(range(0, parallel.data * parallel.tensor, parallel.tensor)))
    recorder = Recorder()
    recorder.install()
    comm = RankComm(data, torch.device("cpu"))
    found: dict[str, Any] = {"world": world, "samples": count, "data_ranks": parallel.data}

    # Sample distribution: the exchange's own broadcast to all ranks.
    samples = make_samples(SAMPLED, config)
    dist.new_group = lambda **options: dist.group.WORLD  # the exchange asks for a gloo group, which would look for its peers
    exchange = Exchange(config)
    started = time.process_time()
    exchange.from_controller(lambda: samples)
    pickling = (time.process_time() - started) * count / SAMPLED
    scale = count / SAMPLED
    found["sample_distribution"] = {**summary(recorder.take(), lambda n: n * scale), "scaled_from_samples": SAMPLED}

    # The planner, on lengths of the whole batch.
    lengths = [len(samples[i % SAMPLED]) for i in range(count)]
    started = time.process_time()
    plan_micro_batches(lengths, parallel.data, max_tokens=config.train.micro_batch_tokens, pad_multiple=parallel.tensor)
    planning = time.process_time() - started

    # Group statistics: sums of the sequences' log-probs over the data ranks, and the objective's own statistics.
    many = [replace(samples[i % SAMPLED], group=str(i // size)) for i in range(count)]
    kept, _ = kept_samples(many, 2)
    started = time.process_time()
    sums = comm.sum(torch.zeros(3, len(kept), dtype=torch.float64))
    names = ("logprobs", "old_logprobs", "rollout_logprobs")
    table = sequence_table(many, kept, dict(zip(names, sums, strict=True)))
    objective = create_objective(config.objective.name, config.objective.options)
    mine = {index: row for row, index in enumerate(kept[: max(count // parallel.data, 1)])}
    tokens = token_table(many, mine)
    values = tokens.signal("rollout_logprobs")
    tokens = tokens.with_signals(logprobs=values, old_logprobs=values)
    objective.prepare(Batch(table, tokens), comm)
    statistics = time.process_time() - started
    found["group_statistics"] = summary(recorder.take())
    found["gupo"] = gupo(config, comm, recorder)
    found["controller_cpu_s"] = {"pickle_samples": pickling, "plan": planning, "group_statistics": statistics}
    return found


def gupo(config: Any, comm: Any, recorder: Recorder) -> dict[str, Any]:
    """The measurement's collectives with a small output layer; tensors of the layer's size are scaled to the real shard."""
    import torch

    from megatron_gvpo.config.hf_shape import read_shape
    from megatron_gvpo.config.schema import GupoSection
    from megatron_gvpo.data.samples import Sample
    from megatron_gvpo.gupo.deal import deal_groups
    from megatron_gvpo.gupo.head import Head
    from megatron_gvpo.gupo.measurement import measure
    from megatron_gvpo.launch.parameters import padded_vocab
    from megatron_gvpo.logprobs import VocabShard
    from megatron_gvpo.objectives.batch import Batch, sequence_table, token_table
    from megatron_gvpo.objectives.registry import create_objective

    torch.manual_seed(0)
    samples = [
        Sample(
            group=str(i // 4),
            prompt_ids=[1],
            response_ids=[(7 * i + t) % HEAD_ROWS for t in range(8)],
            mask=[1] * 8,
            reward=i % 2,
        )
        for i in range(4 * GROUPS)
    ]
    kept = list(range(len(samples)))
    tokens = token_table(samples, {i: i for i in kept})
    hidden = torch.randn(len(tokens), HEAD_HIDDEN)
    targets = torch.tensor([t for sample in samples for t in sample.response_ids])
    zeros = torch.zeros(len(tokens), dtype=torch.float64)
    tokens = tokens.with_signals(logprobs=zeros, old_logprobs=zeros)
    sums = {"logprobs": torch.zeros(len(kept)), "old_logprobs": torch.zeros(len(kept))}
    table = sequence_table(samples, kept, sums)
    head = Head(torch.randn(HEAD_ROWS, HEAD_HIDDEN) * 0.05, VocabShard(0, HEAD_ROWS, HEAD_ROWS), 1.0, None)
    recorder.take()
    dealt, local = deal_groups(hidden, targets, tokens, table, None, device=torch.device("cpu"))
    measure(head, dealt, Batch(table, local), create_objective("gvpo", {}), comm, GupoSection(enabled=True), 0)
    calls = recorder.take()
    shape = read_shape(config.model.path)
    real = padded_vocab(shape, config.parallel) // config.parallel.tensor * shape.hidden
    small, groups = HEAD_ROWS * HEAD_HIDDEN, config.rollout.prompts_per_step

    def scaled(size: int) -> float:
        """By what the tensor's size follows: the layer, groups squared, or groups."""
        elements = size / 8
        if size >= 4 * small:
            return size / small * real
        return size * (groups / GROUPS) ** 2 if elements >= GROUPS**2 else size * groups / GROUPS

    found = summary(calls, scaled)
    numbers = (2 * groups + groups**2 + 6) * 8  # the last stage's packed measurement, to all stages
    found["bytes"] += numbers
    found["messages"] += 1
    found["seconds"] += price("broadcast", numbers, config.parallel.pipeline)
    return {**found, "scaled_from_layer": [HEAD_ROWS, HEAD_HIDDEN], "scaled_from_groups": GROUPS}


def weight_sync(world: int) -> dict[str, Any]:
    """Rank 0's share of collecting and sending the real model's weights, on the meta device, in a process of its own.

    One pipeline stage stands for all: of several, each tensor takes a broadcast more, which is added by count.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_gvpo.config import load_config
    from megatron_gvpo.mcore import cpu_device
    from megatron_gvpo.mcore.model import build_model
    from megatron_gvpo.mcore.startup import build_groups, current_ranks
    from megatron_gvpo.mcore.transport import _buckets
    from megatron_gvpo.mcore.weights import export_hf

    config = load_config(CONFIG, overrides(world), files=False)
    meta, stages = torch.device("meta"), config.parallel.pipeline
    flat = config.parallel.model_copy(update={"pipeline": 1, "virtual_pipeline": None})
    cpu_device.enable(meta)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    build_groups(flat, config.train)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(0)
    ranks = current_ranks(meta, 0, None)
    recorder = Recorder()
    with meta:
        chunks = build_model(config.model, flat, config.precision, ranks)
        recorder.install()
        dist.all_gather = lambda parts, tensor, group=None, **more: recorder.calls["all_gather"].append(
            (tensor.numel() * tensor.element_size(), dist.get_world_size(group))
        )
        buckets = list(_buckets(export_hf(chunks, everywhere=False), config.rollout.bucket_mib * 2**20, None))
    found = summary(recorder.take())
    sizes = [sum(tensor.numel() * tensor.element_size() for _, tensor in bucket) for bucket in buckets]
    tensors = sum(len(bucket) for bucket in buckets)
    servers = len(config.rollout.servers.urls) * config.rollout.servers.tensor
    whole = sum(sizes)
    # Between stages: names and sizes as objects (two messages), then the tensor.
    found["messages"] += 3 * tensors + len(sizes)
    found["bytes"] += whole + whole
    found["seconds"] += 3 * tensors * 2 * LATENCY_S + whole / NCCL_BYTES_S if stages > 1 else 0.0
    found["seconds"] += sum(price("broadcast", size, servers + 1) for size in sizes)
    return {**found, "buckets": len(sizes), "tensors": tensors}


def planned_step_s(world: int) -> float:
    from megatron_gvpo.config import load_config
    from megatron_gvpo.launch.plan import make_plan

    return float(make_plan(load_config(CONFIG, overrides(world), files=False))["seconds"]["step"])


def report(world: int) -> dict[str, Any]:
    found = {**_child("coordination", world), "weight_sync": _child("weight_sync", world)}
    step = planned_step_s(world)
    parts = {name: found[name]["seconds"] for name in ("group_statistics", "gupo", "sample_distribution", "weight_sync")}
    parts["controller_cpu"] = sum(found["controller_cpu_s"].values())
    found |= {"planned_step_s": step, "share_of_step": {name: seconds / step for name, seconds in parts.items()}}
    found["share_of_step"]["all"] = sum(parts.values()) / step
    return found


def _child(part: str, world: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--worlds", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{part} at {world} ranks: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=["coordination", "weight_sync"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.part:
        print(json.dumps({"coordination": coordination, "weight_sync": weight_sync}[options.part](options.worlds[0])))
        return
    rows = [report(world) for world in options.worlds]
    for row in rows:
        shares = ", ".join(f"{name} {share:.3%}" for name, share in row["share_of_step"].items())
        print(f"{row['world']} GPUs, {row['samples']} samples, step {row['planned_step_s']:.0f} s: {shares}")
    if options.json:
        links = {
            "latency_s": LATENCY_S,
            "nccl_bytes_s": NCCL_BYTES_S,
            "nvlink_bytes_s": NVLINK_BYTES_S,
            "gloo_latency_s": GLOO_LATENCY_S,
            "gloo_bytes_s": GLOO_BYTES_S,
        }
        options.json.write_text(json.dumps({"links": links, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
