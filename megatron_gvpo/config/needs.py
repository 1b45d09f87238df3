"""What an objective asks of a run. Torch-free, so that `validate` can refuse a contradiction before a GPU is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TeacherSignal = Literal["none", "sequence", "sampled", "topk", "full"]
DataPolicy = Literal["on_policy", "stale", "any"]
Denominator = Literal["tokens", "sequences", "groups", "constant"]


@dataclass(frozen=True)
class Needs:
    """The signals, the data and the groups that an objective works with.

    Log-prob signals are per response token, at the run's temperature:

    - `current`: the policy's own log-probs before the loss (one no-grad pass; free at the first optimizer step of a rollout
      batch, where they are the old ones);
    - `old`: the trainer's policy at the first optimizer step of this batch of rollouts;
    - `rollout`: the behaviour policy, as the server reported it;
    - `reference`: a fixed reference model;
    - `teacher`: `sequence` is one number a response, `sampled` one a token; `topk` and `full` are distributions, and come with
      the sampled tokens' log-probs.
    """

    rewards: bool = False
    current: bool = False
    old: bool = False
    rollout: bool = False
    reference: bool = False
    teacher: TeacherSignal = "none"
    entropy: bool = False
    min_group_size: int = 1
    """2 for what divides by k-1: a smaller group is dropped and counted, and `group_size: 1` is refused."""
    data: DataPolicy = "on_policy"
    """`on_policy`: this policy's own samples. `stale`: older policies', corrected by a ratio. `any`: any full-support source."""
    rollout_corrected: bool = False
    """With `stale`: whether the step from the policy that sampled (`rollout`) to the trainer's (`old`) is corrected as well."""
    full_support: bool = False
    """True where top-p or top-k sampling breaks the method's assumption."""
    denominator: Denominator = "tokens"
    groups: bool = False
    """True where the loss couples the responses of a group."""
    old_cancels: bool = False
    """True where `current` and `old` are used through their difference alone: with one optimizer step per rollout batch it is 0,
    and the pass that computes them can be left out."""

    def unweighable(self) -> str | None:
        """Why GUPO cannot weigh the groups of such an objective; None where it can."""
        if self.teacher in ("topk", "full"):
            what = "compares whole distributions"
        elif self.entropy:
            what = "has an entropy term"
        else:
            return None
        return f"{what}, whose gradient is no multiple of a log-prob's: set gupo.enabled: false"
