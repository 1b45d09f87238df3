"""What a teacher's signal weighs: bytes per response token, per step and per second, for the signal in use and for the others.

A served teacher's answers travel from its servers to rank 0. One beside the student sends nothing: its hidden states stay on the
rank that made them until the student's backward pass.
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.config.hf_shape import ModelShape
from megatron_gvpo.config.schema import Config

# One `[log-prob, id, null]` of SGLang's JSON (0.5.23: 33 to 36 bytes), and what base64 makes of three bytes.
_JSON_ENTRY = 35.0
_BASE64 = 4 / 3
_TOP_ENTRY = 8  # a float32 and an int32


def teacher_payloads(config: Config, teacher: ModelShape) -> dict[str, Any]:
    """`signal` and `where` in use, and `payloads` by name: bytes_per_token, bytes_per_step, and what it is.

    A step is taken with responses of rollout.max_new_tokens each. `possible` is False for what is refused: whole distributions
    from a server.
    """
    section, rollout = config.teacher, config.rollout
    element = 4 if config.precision.params == "fp32" else 2
    k = min(section.top_k, teacher.vocab)
    kinds = {
        "served sampled": (_JSON_ENTRY, "one log-prob a token, as JSON; `sequence` is their sum", True),
        "served topk": (_JSON_ENTRY + k * _TOP_ENTRY * _BASE64, f"the {k} likeliest ids in the binary form", True),
        "served topk as JSON": (_JSON_ENTRY * (1 + k), f"the {k} likeliest ids from a server without the binary form", True),
        "served full": (float(teacher.vocab * element), "whole distributions: refused from a server", False),
        "colocated sampled": (8.0, "one log-prob a token; nothing is sent", True),
        "colocated topk": (float(k * 12), "the likeliest ids, held until the backward pass; nothing is sent", True),
        "colocated full": (float(teacher.hidden * element), "hidden states, held until the backward pass; nothing is sent", True),
    }
    tokens = rollout.prompts_per_step * rollout.group_size * rollout.max_new_tokens
    signal = "sampled" if section.signal == "sequence" else section.signal
    return {
        "signal": section.signal,
        "where": section.where,
        "in_use": f"{section.where} {signal}",
        "tokens_per_step": tokens,
        "payloads": {
            name: {"bytes_per_token": size, "bytes_per_step": size * tokens, "possible": possible, "what": what}
            for name, (size, what, possible) in kinds.items()
        },
    }


def per_second(payloads: dict[str, Any], step_seconds: float) -> dict[str, Any]:
    """The same with bytes_per_second, for steps of that length."""
    rows = {n: {**row, "bytes_per_second": row["bytes_per_step"] / step_seconds} for n, row in payloads["payloads"].items()}
    return {**payloads, "payloads": rows}
