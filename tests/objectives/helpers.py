"""Samples for the objectives' tests."""

from __future__ import annotations

import math
import random
from typing import Any

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.objectives.base import LocalComm, Prepared
from megatron_gvpo.objectives.batch import Batch, whole_batch
from megatron_gvpo.objectives.gradients import token_gradients
from megatron_gvpo.objectives.registry import create_objective

SIGNALS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")


def sample(group: str, reward: float = 0.0, length: int = 1, mask: list[int] | None = None, **signals: Any) -> Sample:
    """A sample of plain ids; `length` is that of the first signal given."""
    lists = [v for v in signals.values() if isinstance(v, list)]
    length = len(lists[0]) if lists else length
    return Sample(group, [1, 2], [3] * length, mask or [1] * length, reward, **signals)


def random_samples(seed: int, sizes: tuple[int, ...] = (3, 2, 5, 2), flat: tuple[int, ...] = (1,)) -> list[Sample]:
    """Groups of the given sizes in mixed order, masks with holes, NaN at every masked place, one group of equal rewards."""
    rng = random.Random(seed)
    samples = []
    for g, size in enumerate(sizes):
        for _ in range(size):
            length = rng.randint(1, 6)
            mask = [int(rng.random() < 0.75) for _ in range(length)]
            mask[rng.randrange(length)] = 1
            base = [-rng.expovariate(1.0) - 0.1 for _ in range(length)]
            signals = {n: [b + rng.gauss(0, 0.4) if m else math.nan for b, m in zip(base, mask, strict=True)] for n in SIGNALS}
            reward = 0.7 if g in flat else rng.gauss(0, 1)
            samples.append(sample(f"g{g}", reward, mask=mask, **signals))
    rng.shuffle(samples)
    return samples


def prepared_of(name: str, options: dict[str, Any], samples: list[Sample]) -> tuple[Prepared, Batch]:
    """What the objective prepares for these samples on one process."""
    objective = create_objective(name, options)
    batch, _ = whole_batch(samples, objective.needs.min_group_size)
    return objective.prepare(batch, LocalComm()), batch


def grads_of(name: str, options: dict[str, Any], samples: list[Sample]) -> list[float]:
    """dLoss/dlogprob of every kept unmasked token, in order."""
    objective = create_objective(name, options)
    batch, _ = whole_batch(samples, objective.needs.min_group_size)
    prepared = objective.prepare(batch, LocalComm())
    gradient_T, _ = token_gradients(objective, batch, prepared, batch.tokens.signal("logprobs"))
    return (gradient_T / prepared.denominator).tolist()
