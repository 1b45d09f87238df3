"""Fake teacher servers whose scores depend on the ids, so that a shift or a swap shows."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from tests.rollout.fake_server import Answer, Behaviour

VOCAB = 100


def value(token: int, at: int, shift: float = 0.0) -> float:
    """The fake log-prob of `token` at place `at` of its sequence."""
    return -(1 + token / VOCAB + at / 1000) - shift


def top_row(token: int, k: int) -> tuple[list[int], list[float]]:
    """The fake likeliest ids at a position with `token`, and their log-probs."""
    return [(token + j) % VOCAB for j in range(k)], [math.log(0.5 ** (j + 1)) for j in range(k)]


def teacher(shift: float = 0.0, *, compact: bool = True, short_by: int = 0) -> Behaviour:
    """Scores as the real server sends them; `compact` as newer servers do, else nested lists."""

    def answer(body: dict[str, Any]) -> Answer:
        return 200, [
            _one(ids, start, body.get("top_logprobs_num", 0), shift, compact, short_by)
            for ids, start in zip(body["input_ids"], body["logprob_start_len"], strict=True)
        ]

    return answer


def _one(ids: list[int], start: int, k: int, shift: float, compact: bool, short_by: int) -> dict[str, Any]:
    scored = list(enumerate(ids))[start + 1 :]
    scored = scored[: len(scored) - short_by]
    entries: list[Any] = [[None, ids[start], None], *([value(token, at, shift), token, None] for at, token in scored)]
    meta: dict[str, Any] = {"input_token_logprobs": entries, "finish_reason": {"type": "length", "length": 0}}
    rows = [top_row(token, k) for _, token in scored]
    if k and compact:
        meta |= flat(np.array([r[0] for r in rows]).reshape(-1, k), np.array([r[1] for r in rows]).reshape(-1, k))
    elif k:
        meta["input_top_logprobs"] = [None, *([[p, i, None] for i, p in zip(*row, strict=True)] for row in rows)]
    return {"output_ids": [], "meta_info": meta}


def flat(ids: Any, logprobs: Any) -> dict[str, Any]:
    """The compact fields of a real server (0.5.23) for these [T, K] arrays."""
    return {
        "input_top_logprobs_val_flat_b64": base64.b64encode(logprobs.astype("<f4").tobytes()).decode(),
        "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": list(ids.shape),
        "input_top_logprobs_null_prefix": 1,
    }
