"""A plan as text for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NODES_SHOWN = 8


def plan_text(plan: dict[str, Any]) -> str:
    """Short tables: the model, the layout, memory of a rank of every stage, the servers, a step's time and traffic."""
    lines = [*_model(plan), *_layout(plan), *_memory(plan)]
    if "seconds" in plan:
        lines += [*_servers(plan), *_time(plan), *_traffic(plan)]
    if "teacher" in plan:
        lines += _teacher(plan["teacher"])
    return "\n".join(lines)


def _model(plan: dict[str, Any]) -> Iterator[str]:
    active = plan["parameters_active"]
    more = f", {big(active)} active" if active != plan["parameters"] else ""
    yield f"model    {plan['model']}: {big(plan['parameters'])} parameters{more}"
    yield "         " + ", ".join(f"{part} {big(count)}" for part, count in plan["parameters_by_part"].items() if count)


def _layout(plan: dict[str, Any]) -> Iterator[str]:
    layout, step = plan["layout"], plan["step"]
    axes = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert")
    yield (
        f"layout   {layout['nodes']} x {layout['ranks_per_node']} = {layout['world']} ranks: "
        + ", ".join(f"{axis} {layout[axis]}" for axis in axes)
        + (", sequence" if layout["sequence"] else "")
    )
    rows = layout["placement"]
    for row in rows[:_NODES_SHOWN] if len(rows) > 1 else []:
        ranges = ", ".join(f"{axis} {_range(row[axis])}" for axis in ("pipeline", "data", "context", "tensor"))
        yield f"         node {row['node']}: ranks {_range(row['ranks'])}: {ranges}"
    if len(rows) > _NODES_SHOWN:
        yield f"         and {len(rows) - _NODES_SHOWN} nodes more (all of them under --json)"
    yield (
        f"step     {step['samples']} samples, at most {big(step['tokens_at_most'])} tokens, {step['optimizer_steps']} optimizer "
        f"step(s), {step['micro_batches']} micro-batches of at most {step['micro_batch_tokens']} tokens a rank"
    )


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    parts = [part for part in _all_parts(plan) if any(stage["memory_gib"].get(part) for stage in plan["stages"])]
    yield ""
    yield "GiB a rank, by pipeline stage"
    yield "  ".join([f"{'stage':>5}", f"{'layers':>6}", *(f"{part:>11}" for part in parts), f"{'peak':>8}"])
    for stage in plan["stages"]:
        numbers = [f"{stage['memory_gib'].get(part, 0.0):11.3g}" for part in parts]
        row = [f"{stage['stage']:5}", f"{stage['layers']:6}", *numbers, f"{stage['memory_gib_total']:8.3g}"]
        mark = "  <- largest" if stage["stage"] == plan["largest_stage"] and len(plan["stages"]) > 1 else ""
        yield "  ".join(row) + mark
    if "gpu" in plan:
        gpu = plan["gpu"]
        verdict = "fits" if plan["memory_gib_total"] <= gpu["usable_gib"] else "does NOT fit"
        yield (
            f"{verdict}: {plan['memory_gib_total']:.1f} GiB of the {gpu['usable_gib']:.1f} that a plan may use of an "
            f"{gpu['name']} ({gpu['memory_gib']:.1f}; the rest is for CUDA, NCCL and the allocator)"
        )
    yield "The peak is the fullest phase's: training, GUPO and weight sync come one after the other."


def _servers(plan: dict[str, Any]) -> Iterator[str]:
    yield ""
    for server in plan["servers"]:
        memory = server["memory_gib"]
        fit = f"{server['full_length_sequences_per_server']} full-length sequences at once" if server["fits"] else "does NOT fit"
        yield (
            f"servers  {server['role']}: {server['servers']} on {server['gpus']} GPUs, a GPU holds {memory['weights']:.1f} GiB "
            f"of weights and {memory['kv_cache']:.1f} of key-value cache: {fit} a server"
        )


def _time(plan: dict[str, Any]) -> Iterator[str]:
    seconds, assumed, cost = plan["seconds"], plan["assumed"], plan["cost"]
    yield ""
    yield (
        f"a step   {seconds['step']:.1f} s at full length: "
        + ", ".join(
            f"{name.replace('_', ' ')} {value:.1f}" for name, value in seconds.items() if name != "step" and value >= 0.05
        )
    )
    yield (
        f"         {plan['flops']['total']:.3g} floating-point operations; bubble {plan['pipeline_bubble']:.1%}; training at "
        f"{plan['mfu']:.0%} of the bf16 peak"
    )
    yield (
        f"         assumed: layers at {assumed['efficiency']:.0%} of the bf16 peak ({assumed['fp8_efficiency']:.0%} of FP8's), "
        f"decoding at {assumed['decode_efficiency']:.0%} of the memory bandwidth; no GPU has confirmed these yet"
    )
    yield (
        f"the run  {big(int(cost['tokens_per_day']))} tokens a day, {cost['run_hours']:.1f} hours on {cost['gpus']:.0f} GPUs "
        f"(servers included) = {cost['gpu_hours']:.0f} GPU hours"
    )


def _traffic(plan: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "Traffic of a step, busiest rank, one direction"
    for kind, item in plan["traffic"].items():
        yield (
            f"  {kind:<12}{item['link']:<9}{item['bytes'] / 1e9:9.3g} GB in {item['messages']:8.0f} messages, "
            f"{item['seconds']:7.3g} s if nothing overlaps: {item['what']}"
        )


def _teacher(teacher: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"Teacher's signal, {big(teacher['tokens_per_step'])} response tokens a step at most"
    for name, row in teacher["payloads"].items():
        rate = f" {row['bytes_per_second'] / 1e6:9.3g} MB/s" if "bytes_per_second" in row else ""
        mark = "  <- in use" if name == teacher["in_use"] else ""
        numbers = f"{row['bytes_per_token']:10.6g} bytes a token {row['bytes_per_step'] / 1e6:10.4g} MB a step{rate}"
        yield f"  {name:<20}{numbers}: {row['what']}{mark}"


def _all_parts(plan: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(part for stage in plan["stages"] for part in stage["memory_gib"]))


def _range(pair: list[int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def big(number: int) -> str:
    """A number with its unit: 70.55B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
