"""The endless, resumable order in which training prompts are drawn."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt


class PromptStream:
    """Epoch after epoch over the prompts, each in an order of its own that (seed, epoch) alone decides.

    Every prompt comes once an epoch, also where a draw runs over the epoch's end.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("there is no training prompt to draw from: set data.train")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._go_to(0, 0)

    @property
    def epoch(self) -> int:
        """Whole passes over the prompts so far."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Prompts drawn so far, over all epochs."""
        return self._epoch * len(self._prompts) + self._position

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        chosen: list[Prompt] = []
        while len(chosen) < count:
            part = self._order[self._position : self._position + count - len(chosen)]
            chosen += [self._prompts[i] for i in part]
            self._position += len(part)
            if self._position == len(self._order):
                self._go_to(self._epoch + 1, 0)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values, and what it belongs to."""
        return {**self._belongs_to(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position. DataError where it belongs to other prompts or another seed: the order would differ."""
        for key, value in self._belongs_to().items():
            if state.get(key) != value:
                raise DataError(
                    f"the checkpoint's data position belongs to other training data ({key} was {state.get(key)}, is {value}): "
                    "resume with the data, the seed and the filters of the run that wrote it"
                )
        self._go_to(int(state["epoch"]), int(state["position"]))

    def _belongs_to(self) -> dict[str, Any]:
        return {
            "prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)  # a text seed is hashed, so near seeds are unrelated


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids)).encode())
    return digest.hexdigest()
