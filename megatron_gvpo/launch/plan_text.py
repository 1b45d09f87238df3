"""A plan as text for a person."""

from __future__ import annotations

from typing import Any


def plan_text(plan: dict[str, Any]) -> str:
    """A few short tables: the model, the layout, and the memory of a rank of every pipeline stage."""
    layout, step = plan["layout"], plan["step"]
    lines = [f"model    {plan['model']}: {_big(plan['parameters'])} parameters"]
    if plan["parameters_active"] != plan["parameters"]:
        lines[0] += f", {_big(plan['parameters_active'])} active"
    lines.append("         " + ", ".join(f"{part} {_big(count)}" for part, count in plan["parameters_by_part"].items() if count))
    axes = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert")
    lines.append(
        f"layout   {layout['nodes']} x {layout['ranks_per_node']} = {layout['world']} ranks: "
        + ", ".join(f"{axis} {layout[axis]}" for axis in axes)
        + (", sequence" if layout["sequence"] else "")
    )
    lines.append(
        f"step     {step['samples']} samples, at most {_big(step['tokens_at_most'])} tokens, {step['optimizer_steps']} optimizer "
        f"step(s), micro-batches of at most {step['micro_batch_tokens']} tokens a rank"
    )
    parts = list(plan["memory_gib"])
    header = [f"{'stage':>5}", f"{'layers':>6}", *(f"{part:>11}" for part in parts), f"{'total':>8}"]
    lines += ["", "GiB a rank, by pipeline stage", "  ".join(header)]
    for stage in plan["stages"]:
        numbers = [f"{stage['memory_gib'][part]:11.3g}" for part in parts]
        row = [f"{stage['stage']:5}", f"{stage['layers']:6}", *numbers, f"{stage['memory_gib_total']:8.3g}"]
        mark = "  <- largest" if stage["stage"] == plan["largest_stage"] and len(plan["stages"]) > 1 else ""
        lines.append("  ".join(row) + mark)
    lines.append(
        "Weights, gradients and optimizer are counted; activations and logprobs estimated; allocator and NCCL are extra."
    )
    return "\n".join(lines)


def _big(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return str(number)
