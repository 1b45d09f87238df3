"""What a response is worth: exact match, math-verify, reasoning-gym's own scorers, or a function of the user's.

A reward function takes (text, answer, meta): the response's text, the prompt's right answer and its other fields, and
returns a number.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.extract import Extraction, extract

RewardFunction = Callable[[str, Any, Mapping[str, Any]], float]

_FULL_SCORE = 1.0 - 1e-9  # reasoning-gym gives partial credit, 0.01 to 0.2, for text around or beside the answer


def reward_function(name: str, mode: Extraction) -> Callable[[str, Any, Mapping[str, Any]], float | None]:
    """The function called `name`, behind the extraction: it gives None where the response holds no answer of that form.

    DataError for a `module:function` that cannot be imported or is none.
    """
    function = _BUILT_IN[name](mode) if name in _BUILT_IN else _imported(name)

    def score(text: str, answer: Any, meta: Mapping[str, Any]) -> float | None:
        part = extract(text, mode)
        if part is None:
            return None
        value = float(function(part, answer, meta))
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value}")
        return value

    return score


def missing_field(name: str, answer: Any, meta: Mapping[str, Any]) -> str | None:
    """What the reward function `name` needs of a prompt and this one lacks; None where nothing is missing."""
    if name in ("exact", "math_verify") and answer is None:
        return "a right answer (data.answer_key)"
    if name == "reasoning_gym":
        metadata = meta.get("metadata")
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            return "its reasoning-gym task (metadata.source_dataset); for other data use reward.name: exact"
    return None


def _exact(mode: Extraction) -> RewardFunction:
    """1 where the response equals the answer, character by character; the answer goes through the same extraction."""

    def score(text: str, answer: Any, meta: Mapping[str, Any]) -> float:
        right = str(answer)
        return float(text == (extract(right, mode) or right.strip()))

    return score


def _math_verify(mode: Extraction) -> RewardFunction:
    """1 where both are the same mathematical object: 0.5 and 1/2, 3x+1 and 1+3x."""
    from math_verify import parse, verify

    # It warns at every call that its own time limit is off. That limit is an alarm signal, which a C loop never sees;
    # the process that runs this is killed instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    as_gold = functools.lru_cache(maxsize=4096)(lambda gold: parse(gold, parsing_timeout=None))  # pyright: ignore[reportArgumentType]

    def score(text: str, answer: Any, meta: Mapping[str, Any]) -> float:
        right = str(answer)
        gold = as_gold(right if "$" in right or "\\boxed" in right else f"${right}$")
        if not gold:
            raise ValueError(f"the right answer {right!r} is no mathematics that math-verify can read")
        form = text if mode in ("all", "last_number") else f"${text}$"
        return float(verify(gold, parse(form, parsing_timeout=None), timeout_seconds=None))  # pyright: ignore[reportArgumentType]

    return score


def _reasoning_gym(mode: Extraction) -> RewardFunction:
    """1 where the task's own scorer gives full marks; its partial credit for near misses counts as 0."""
    import reasoning_gym

    scorer = functools.lru_cache(maxsize=None)(reasoning_gym.get_score_answer_fn)

    def score(text: str, answer: Any, meta: Mapping[str, Any]) -> float:
        entry = {"question": meta.get("question", ""), "answer": answer, "metadata": meta["metadata"]}
        full: Any = scorer(meta["metadata"]["source_dataset"])
        return float(full(text, entry) >= _FULL_SCORE)

    return score


_BUILT_IN: dict[str, Callable[[Extraction], RewardFunction]] = {
    "exact": _exact,
    "math_verify": _math_verify,
    "reasoning_gym": _reasoning_gym,
}


def _imported(name: str) -> RewardFunction:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise DataError(f"reward.name: {name!r} is none of {', '.join(_BUILT_IN)}, and no module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DataError(f"reward.name: cannot import {name}: {error}") from error
    if not callable(function):
        raise DataError(f"reward.name: {name} is no function")
    return cast(RewardFunction, function)
