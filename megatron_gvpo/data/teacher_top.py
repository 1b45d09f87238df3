"""A top-k teacher's answer for one response, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TeacherTop:
    """The teacher's K likeliest ids at each of the T response tokens, and their log-probs.

    ids [T, K] int32, distinct in a row; logprobs [T, K] float32, at temperature 1, likeliest first.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logprobs.shape:
            raise ValueError(f"ids {self.ids.shape} and logprobs {self.logprobs.shape} must both be [T, K]")
