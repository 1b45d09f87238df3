"""One sampled response and the samples file (JSON Lines): what `train` dumps, replays, explains and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Sample:
    """A prompt and one response to it. Every list is per response token; None is an absent signal.

    weight_versions: (version, first response token that it sampled), in order.
    """

    group: str
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    reward: float | None = None
    logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    rollout_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    teacher_logprob: float | None = None
    finish_reason: FinishReason = "stop"
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)
