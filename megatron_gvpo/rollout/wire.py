"""What goes over the wire: requests as JSON bodies, answers as typed responses, both checked. No I/O here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.data.samples import FinishReason
from megatron_gvpo.rollout.errors import RequestRefused

_DEADLY = "it would kill the server"


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. temperature 0 is greedy (its log-probs are those of temperature 1); top_k -1: all ids."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, rollout: RolloutSection, eos_ids: Sequence[int]) -> Sampling:
        """The run's sampling. `eos_ids`: the model's own end tokens, which stop a response beside the configured ones."""
        stops = tuple(dict.fromkeys([*eos_ids, *rollout.stop_token_ids]))
        return cls(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_new_tokens, stops)

    def greedy(self) -> Sampling:
        """The same limits and stops, always the likeliest id: for evaluation."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True)
class Limits:
    """What a request must keep to. A server that is sent an id or a count beyond its vocabulary dies, it does not refuse.

    vocab_size: ids are in [0, vocab_size). max_prompt: tokens that a prompt may have. max_total: prompt and response together.
    """

    vocab_size: int
    max_prompt: int
    max_total: int

    def room(self, prompt_tokens: int, wanted: int) -> int:
        """Response tokens that fit behind the prompt, at most `wanted`."""
        return min(wanted, self.max_total - prompt_tokens)

    def check_ids(self, ids: Sequence[int], label: str) -> None:
        """RequestRefused for an empty prompt, one without room for a token behind it, or an id outside the vocabulary."""
        if not ids:
            raise RequestRefused(f"{label}: the prompt is empty")
        if len(ids) > self.max_prompt:
            raise RequestRefused(f"{label}: the prompt has {len(ids)} tokens, the context takes at most {self.max_prompt}")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestRefused(
                f"{label}: token id {bad} is outside the vocabulary of {self.vocab_size} (it would kill the server)"
            )

    def check_count(self, name: str, count: int, label: str) -> None:
        """RequestRefused for more candidates than there are ids (top_k, top_logprobs_num)."""
        if count > self.vocab_size:
            raise RequestRefused(
                f"{label}: {name} {count} is above the vocabulary of {self.vocab_size} (it would kill the server)"
            )


@dataclass(frozen=True)
class Response:
    """One sampled response of T tokens: ids and their log-probs at the request's temperature, before top-p and top-k.

    finish_reason "stop": the last id is the stop token itself. weight_versions: (version, first token that it sampled).
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[tuple[str, int]]
    cached_tokens: int


class Malformed(ValueError):
    """An answer that does not hold what was asked for."""


def generate_body(ids: Sequence[int], count: int, sampling: Sampling, limits: Limits, label: str) -> dict[str, Any]:
    """The request for `count` responses to one prompt; RequestRefused when it cannot or must not be sent."""
    limits.check_ids(ids, label)
    limits.check_count("top_k", sampling.top_k, label)
    for stop in sampling.stop_token_ids:
        limits.check_ids([stop], f"{label}: stop_token_ids")
    if count < 1:
        raise RequestRefused(f"{label}: asked for {count} responses")
    room = limits.room(len(ids), sampling.max_new_tokens)
    if room < 1:
        raise RequestRefused(f"{label}: no room for a response behind {len(ids)} prompt tokens (context {limits.max_total})")
    return {
        "input_ids": list(ids),
        "sampling_params": {
            "n": count,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": room,
            "stop_token_ids": list(sampling.stop_token_ids),
            # Said outright: a checkpoint's generation_config may bring other defaults, and the log-probs would not show it.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        },
        "return_logprob": True,
    }


def read_responses(answer: Any, count: int) -> list[Response]:
    """The `count` responses in an answer to `generate_body`; Malformed says what is wrong with it."""
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != count:
        raise Malformed(f"{len(items)} responses came back for the {count} asked for")
    return [_read_response(item) for item in items]


def _read_response(item: Any) -> Response:
    try:
        meta = item["meta_info"]
        reason = meta["finish_reason"]["type"]
        entries = meta.get("output_token_logprobs") or []
        ids = [int(i) for i in item["output_ids"]]
        logprobs = [_logprob(entry[0]) for entry in entries]
        entry_ids = [int(entry[1]) for entry in entries]
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version", ""), "start": 0}]
        versions = [(str(span["version"]), int(span["start"])) for span in spans]
        cached = int(meta.get("cached_tokens") or 0)
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed(f"an answer without the expected fields ({type(error).__name__}: {error})") from error
    if reason not in ("stop", "length", "abort"):
        raise Malformed(f"unknown finish reason {reason!r}")
    if len(entries) != len(ids):
        raise Malformed(f"token count mismatch: {len(ids)} output ids and {len(entries)} log-probs")
    if entry_ids != ids:
        raise Malformed("the log-probs belong to other ids than output_ids")
    return Response(ids, logprobs, cast(FinishReason, reason), versions, cached)


def score_body(
    sequences: Sequence[Sequence[int]], starts: Sequence[int], limits: Limits, labels: Sequence[str]
) -> dict[str, Any]:
    """The request for log-probs of given tokens: those of `sequences[i]` behind its first `starts[i]` ones."""
    for ids, start, label in zip(sequences, starts, labels, strict=True):
        limits.check_ids(ids, label)
        if not 1 <= start <= len(ids):
            raise RequestRefused(f"{label}: cannot score from token {start} of {len(ids)}: the first token has no log-prob")
    return {
        "input_ids": [list(ids) for ids in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first entry of what comes back is always [null, id, null]: ask for one position more and drop it.
        "logprob_start_len": [start - 1 for start in starts],
    }


def read_scores(
    answer: Any, sequences: Sequence[Sequence[int]], starts: Sequence[int], limits: Limits, labels: Sequence[str]
) -> list[list[float]]:
    """Per sequence, the log-probs (temperature 1) of its tokens from `start` on; Malformed names the sample it is about."""
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != len(sequences):
        raise Malformed(f"{len(items)} scores came back for {len(sequences)} samples")
    last = limits.vocab_size - 1
    return [_read_score(*row, last) for row in zip(items, sequences, starts, labels, strict=True)]


def _read_score(item: Any, ids: Sequence[int], start: int, label: str, last_id: int) -> list[float]:
    want = list(ids[start:])
    try:
        entries = item["meta_info"]["input_token_logprobs"]
        first, scored = entries[:1], entries[1:]
        got = [int(entry[1]) for entry in scored]
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed(f"{label}: an answer without input_token_logprobs ({type(error).__name__}: {error})") from error
    if not first or first[0][0] is not None:
        raise Malformed(f"{label}: the first of the scored positions should have no log-prob, it has {first}")
    if len(got) != len(want):
        raise Malformed(f"{label}: token count mismatch: {len(got)} positions scored, {len(want)} asked for")
    # SGLang (0.5.23 and before) labels the last id of the vocabulary 0 here; the log-prob beside it is that of the last id.
    if any(g != w and (g, w) != (0, last_id) for g, w in zip(got, want, strict=True)):
        raise Malformed(f"{label}: other tokens were scored than were sent")
    try:
        return [_logprob(entry[0]) for entry in scored]
    except TypeError as error:
        raise Malformed(f"{label}: a position without a log-prob") from error


def _logprob(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise Malformed(f"a log-prob of {number}")
    return number
