"""A teacher's answers on the wire: sampled tokens' log-probs, with the likeliest ids in the compact form where the server has it.

SGLang sends the likeliest ids of a prompt's positions as nested JSON lists, or, if asked and able, as two base64 arrays. Servers
that do not know the question ignore it, so it is always asked, and the answer's own fields say which form it has.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gvpo.data.teacher_top import TeacherTop
from megatron_gvpo.rollout.wire import Limits, Malformed, read_scores, score_body

_DTYPES = {"float32": "<f4", "int32": "<i4"}


@dataclass(frozen=True)
class Scored:
    """What a teacher says of one response of T tokens. logprobs: [T] of its own ids, nats at temperature 1. top: with top-k."""

    logprobs: list[float]
    top: TeacherTop | None = None


def teacher_body(
    sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int, limits: Limits, labels: Sequence[str]
) -> dict[str, Any]:
    """The request for scores of `sequences[i]` from place `starts[i]` on, with the `top_k` likeliest ids there (0: none).

    RequestRefused for what would end the server: ids outside the vocabulary, or more likeliest ids than there are.
    """
    body = score_body(sequences, starts, limits, labels)
    if top_k:
        limits.check_count("top_logprobs_num", top_k, labels[0])
        body |= {
            "top_logprobs_num": top_k,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    return body


def read_teacher(
    answer: Any,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    limits: Limits,
    labels: Sequence[str],
    top_k: int,
    teacher_ids: int = 0,
) -> list[Scored]:
    """The answer to `teacher_body`. Malformed, naming the sample, for anything that is not exactly what was asked for.

    teacher_ids: ids of the teacher's own head, where they are more than those it may be sent.
    """
    rows = read_scores(answer, sequences, starts, limits, labels)
    if not top_k:
        return [Scored(row) for row in rows]
    items = answer if isinstance(answer, list) else [answer]
    return [
        Scored(row, _read_top(item["meta_info"], len(row), top_k, max(limits.vocab_size, teacher_ids), label))
        for item, row, label in zip(items, rows, labels, strict=True)
    ]


def is_compact(answer: Any) -> bool:
    """Whether the likeliest ids came as base64 arrays. Call after `read_teacher` accepted the answer."""
    item = answer[0] if isinstance(answer, list) else answer
    return "input_top_logprobs_val_flat_b64" in item["meta_info"]


def _read_top(meta: dict[str, Any], count: int, top_k: int, vocab_size: int, label: str) -> TeacherTop:
    try:
        compact = "input_top_logprobs_val_flat_b64" in meta
        ids, logprobs = _from_base64(meta) if compact else _from_lists(meta, top_k)
    except (KeyError, TypeError, ValueError, IndexError, binascii.Error) as error:
        raise Malformed(f"{label}: no readable top log-probs ({type(error).__name__}: {error})") from error
    if ids.shape != (count, top_k):
        raise Malformed(f"{label}: top log-probs of shape {list(ids.shape)} came back, [{count}, {top_k}] were asked for")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise Malformed(f"{label}: a top id outside the vocabulary of {vocab_size}")
    # A zero probability is an answer (-inf); NaN, or one above 1, is none.
    if np.isnan(logprobs).any() or (logprobs > 1e-3).any():
        raise Malformed(f"{label}: a top log-prob that is no log-prob")
    return TeacherTop(ids, logprobs)


def _from_base64(meta: dict[str, Any]) -> tuple[Any, Any]:
    rows, width = (int(n) for n in meta["input_top_logprobs_shape"])
    if int(meta["input_top_logprobs_null_prefix"]) != 1:
        raise ValueError(f"{meta['input_top_logprobs_null_prefix']} leading positions without values, not 1")
    arrays = []
    for name, dtype in (("idx", "int32"), ("val", "float32")):
        told = meta[f"input_top_logprobs_{name}_flat_b64_dtype"]
        if told not in _DTYPES:
            raise ValueError(f"arrays of {told}")
        raw = base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"], validate=True)
        arrays.append(np.frombuffer(raw, _DTYPES[told]).reshape(rows, width).astype(dtype))
    return arrays[0], arrays[1]


def _from_lists(meta: dict[str, Any], top_k: int) -> tuple[Any, Any]:
    entries = meta["input_top_logprobs"]
    if not entries or entries[0] is not None:
        raise ValueError("the first position should have none")
    rows = entries[1:]
    ids = np.array([[int(entry[1]) for entry in row] for row in rows], dtype=np.int32).reshape(len(rows), -1)
    values = [[-math.inf if entry[0] is None else float(entry[0]) for entry in row] for row in rows]
    logprobs = np.array(values, dtype=np.float32).reshape(len(rows), -1)
    return (ids, logprobs) if rows else (ids.reshape(0, top_k), logprobs.reshape(0, top_k))
