"""What acts on a batch before the loss: overlong rewards, groups to sample anew, prompts that keep the data's answer.

Pure functions; the train loop calls them with what `ObjectiveConfig.shaping()` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def overlong_penalties(lengths: Sequence[int], limit: int, buffer: int, penalty: float) -> list[float]:
    """What to add to each response's reward (DAPO, arXiv 2503.14476, equation 13, times `penalty`).

    0 up to `limit - buffer` tokens, then linearly down to -penalty at `limit` and beyond. buffer 0: no penalty at all.
    ValueError where the buffer is longer than the limit.
    """
    if buffer > limit:
        raise ValueError(f"the overlong buffer of {buffer} tokens is longer than the response limit of {limit}")
    if buffer == 0:
        return [0.0] * len(lengths)
    return [-penalty * min(max(length - (limit - buffer), 0) / buffer, 1.0) for length in lengths]


def flat_groups(groups: Sequence[str], rewards: Sequence[float]) -> list[str]:
    """The groups whose rewards are all equal, in the order of their first sample: those that dynamic sampling samples anew.

    A group of one is flat. `rewards` are the raw ones, before any shaping.
    """
    spans: dict[str, tuple[float, float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        low, high = spans.get(group, (reward, reward))
        spans[group] = (min(low, reward), max(high, reward))
    return [group for group, (low, high) in spans.items() if low == high]


def answered_by_student(prompt_keys: Sequence[str], share: float, seed: int) -> list[bool]:
    """Which prompts the student answers; the others keep the data's answer (GKD's share of on-policy data).

    Decided for each prompt by itself, from its key and the seed, so that neither order nor layout nor resume changes it.
    ValueError for a share outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the on-policy share is a number from 0 to 1, got {share}")

    def uniform(key: str) -> float:
        digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2.0**64

    return [uniform(key) < share for key in prompt_keys]
