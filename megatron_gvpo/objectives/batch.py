"""What an objective sees: the scalars of every sequence of the global batch, and the unmasked tokens that this rank holds.

Legend: N sequences kept in the global batch, G groups, T unmasked response tokens on this rank. A masked token is in neither
table, so no objective can be wrong about masks, whatever value stands there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

SIGNALS = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")


class SampleLike(Protocol):
    """One response with its signals; `data.Sample` is one. Lists are per response token; None is an absent signal."""

    @property
    def group(self) -> str: ...
    @property
    def response_ids(self) -> Sequence[int]: ...
    @property
    def mask(self) -> Sequence[int]: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def logprobs(self) -> Sequence[float] | None: ...
    @property
    def old_logprobs(self) -> Sequence[float] | None: ...
    @property
    def rollout_logprobs(self) -> Sequence[float] | None: ...
    @property
    def ref_logprobs(self) -> Sequence[float] | None: ...
    @property
    def teacher_logprobs(self) -> Sequence[float] | None: ...
    @property
    def teacher_logprob(self) -> float | None: ...


@dataclass(frozen=True)
class Dropped:
    """A sample that takes no part in the step: its place in the input, why, and the reason under which it is counted."""

    index: int
    why: str
    reason: Literal["empty", "small_group"]


@dataclass(frozen=True)
class SequenceTable:
    """Scalars of the N kept sequences of the whole global batch: the same on every rank, in the order of the samples.

    `sums` holds, per signal name, the sum of the token log-probs over the sequence's unmasked tokens, [N] float64; a signal
    that is absent has no entry. `teacher_logprob` is in `sums` as well (given whole, for teachers of another tokenizer).
    """

    sample_N: Tensor  # int64, index of the sample in the input
    group_N: Tensor  # int64 in [0, G)
    tokens_N: Tensor  # int64, number of unmasked tokens of the whole sequence (over all context-parallel ranks)
    reward_N: Tensor  # float64; 0 where the objective needs none
    sums: Mapping[str, Tensor]
    groups: int

    def __len__(self) -> int:
        return self.sample_N.numel()

    def sum_of(self, signal: str) -> Tensor:
        """[N] float64: each sequence's sum of `signal`; ValueError where the batch has none (an empty batch has all)."""
        if signal not in self.sums and not len(self):
            return torch.zeros_like(self.reward_N)
        if signal not in self.sums:
            raise ValueError(f"the batch carries no {signal!r}; it has: {', '.join(self.sums) or 'no log-probs'}")
        return self.sums[signal]

    def group_size_N(self) -> Tensor:
        """[N] float64: the number of kept responses in each sequence's own group."""
        return self._group_sum(torch.ones_like(self.reward_N))[self.group_N]

    def group_mean_N(self, values_N: Tensor) -> Tensor:
        """[N]: each sequence's group mean of `values_N`. A group of equal values has exactly that value as its mean."""
        mean_G = self._group_sum(values_N) / self._group_sum(torch.ones_like(values_N))
        low_G = self._extreme(values_N, "amin")
        # A sum of n equal floats divided by n is not that float; the difference would pass for a spread.
        return torch.where(low_G == self._extreme(values_N, "amax"), low_G, mean_G)[self.group_N]

    def group_max_N(self, values_N: Tensor) -> Tensor:
        """[N]: the largest of each sequence's group."""
        return self._extreme(values_N, "amax")[self.group_N]

    def group_is_flat_N(self, values_N: Tensor) -> Tensor:
        """[N] bool: whether all values of the sequence's group are equal (max == min, before any arithmetic)."""
        return (self._extreme(values_N, "amin") == self._extreme(values_N, "amax"))[self.group_N]

    def group_sum_G(self, values_N: Tensor) -> Tensor:
        """[G]: sums over each group."""
        return self._group_sum(values_N)

    def _group_sum(self, values_N: Tensor) -> Tensor:
        return values_N.new_zeros(self.groups).index_add(0, self.group_N, values_N)

    def _extreme(self, values_N: Tensor, reduce: str) -> Tensor:
        fill = torch.inf if reduce == "amin" else -torch.inf
        return values_N.new_full((self.groups,), fill).scatter_reduce(0, self.group_N, values_N, reduce)


@dataclass(frozen=True)
class TokenTable:
    """The T unmasked response tokens that this rank holds (all of them, or those of one micro-batch), in a fixed order.

    `signals` holds per-token log-probs by name, [T]; absent signals have no entry.
    """

    sequence_T: Tensor  # int64, row of the SequenceTable
    position_T: Tensor  # int64, place in the response, counted from 0, masked tokens included
    signals: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.sequence_T.numel()

    def signal(self, name: str) -> Tensor:
        """[T]: the log-probs called `name`; ValueError where the batch has none (an empty table has all)."""
        if name not in self.signals and not len(self):
            return torch.zeros_like(self.position_T, dtype=torch.float64)
        if name not in self.signals:
            raise ValueError(f"the batch carries no {name!r}; it has: {', '.join(self.signals) or 'no log-probs'}")
        return self.signals[name]

    def with_signals(self, **signals: Tensor) -> TokenTable:
        """The same tokens with signals added or replaced."""
        return replace(self, signals={**self.signals, **signals})

    def select(self, rows: Tensor | slice) -> TokenTable:
        """The table of some of its rows."""
        return TokenTable(self.sequence_T[rows], self.position_T[rows], {k: v[rows] for k, v in self.signals.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> TokenTable:
        """Indices on `device`, signals on `device` as `dtype`."""
        signals = {k: v.to(device, dtype) for k, v in self.signals.items()}
        return TokenTable(self.sequence_T.to(device), self.position_T.to(device), signals)


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data as an objective sees it.

    sequences: the whole global batch, the same on every rank. tokens: what this rank holds.
    """

    sequences: SequenceTable
    tokens: TokenTable

    @property
    def total_tokens(self) -> int:
        """Unmasked tokens of the whole global batch: the `tokens` denominator."""
        return int(self.sequences.tokens_N.sum())


def kept_samples(samples: Sequence[SampleLike], min_group_size: int) -> tuple[list[int], list[Dropped]]:
    """Which samples take part: those with an unmasked token, in groups of at least `min_group_size` of such."""
    dropped = [Dropped(i, "no unmasked response token", "empty") for i, s in enumerate(samples) if not any(s.mask)]
    empty = {d.index for d in dropped}
    sizes: dict[str, int] = {}
    for i, s in enumerate(samples):
        if i not in empty:
            sizes[s.group] = sizes.get(s.group, 0) + 1
    kept = []
    for i, s in enumerate(samples):
        if i in empty:
            continue
        if sizes[s.group] < min_group_size:
            why = f"its group {s.group!r} is left with {sizes[s.group]}, and the objective needs {min_group_size}"
            dropped.append(Dropped(i, why, "small_group"))
        else:
            kept.append(i)
    return kept, sorted(dropped, key=lambda d: d.index)


def sequence_table(samples: Sequence[SampleLike], kept: Sequence[int], sums: Mapping[str, Tensor]) -> SequenceTable:
    """The global table of the kept samples. `sums`: [N] float64 per signal, in the order of `kept`."""
    groups: dict[str, int] = {}
    group_ids = [groups.setdefault(samples[i].group, len(groups)) for i in kept]
    rewards = [samples[i].reward for i in kept]
    return SequenceTable(
        sample_N=torch.tensor(list(kept), dtype=torch.int64),
        group_N=torch.tensor(group_ids, dtype=torch.int64),
        tokens_N=torch.tensor([sum(1 for m in samples[i].mask if m) for i in kept], dtype=torch.int64),
        reward_N=torch.tensor([0.0 if r is None else r for r in rewards], dtype=torch.float64),
        sums=dict(sums),
        groups=len(groups),
    )


def token_table(samples: Sequence[SampleLike], rows: Mapping[int, int]) -> TokenTable:
    """The unmasked tokens of the samples in `rows` (sample index -> row of the SequenceTable), in the order of `rows`.

    A signal is in the table when every one of these samples carries it; values are float64.
    """
    present = [n for n in SIGNALS if rows and all(getattr(samples[i], n) is not None for i in rows)]
    sequence: list[int] = []
    position: list[int] = []
    values: dict[str, list[float]] = {n: [] for n in present}
    for index, row in rows.items():
        sample = samples[index]
        at = [t for t, m in enumerate(sample.mask) if m]
        sequence += [row] * len(at)
        position += at
        for name in present:
            series = getattr(sample, name)
            values[name] += [series[t] for t in at]
    return TokenTable(
        torch.tensor(sequence, dtype=torch.int64),
        torch.tensor(position, dtype=torch.int64),
        {n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()},
    )


def teacher_sums(samples: Sequence[SampleLike], kept: Sequence[int], sums: Mapping[str, Tensor]) -> Tensor | None:
    """[N] float64: the teacher's log-prob of each response, as given whole, else summed over its tokens.

    `sums` may hold token sums that the samples themselves do not carry (a teacher in the trainer's job). None where a response
    has neither.
    """
    summed = sums["teacher_logprobs"].tolist() if "teacher_logprobs" in sums else [None] * len(kept)
    values: list[float] = []
    for index, total in zip(kept, summed, strict=True):
        sample = samples[index]
        value = sample.teacher_logprob if sample.teacher_logprob is not None else total
        if value is None and sample.teacher_logprobs is not None:
            value = sum(v for v, m in zip(sample.teacher_logprobs, sample.mask, strict=True) if m)
        if value is None:
            return None
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)


def whole_batch(samples: Sequence[SampleLike], min_group_size: int = 1) -> tuple[Batch, list[Dropped]]:
    """The batch of one process that holds everything: what `explain`, the contract kit and references use."""
    kept, dropped = kept_samples(samples, min_group_size)
    tokens = token_table(samples, {index: row for row, index in enumerate(kept)})
    zeros_N = torch.zeros(len(kept), dtype=torch.float64)
    sums = {k: zeros_N.index_add(0, tokens.sequence_T, v) for k, v in tokens.signals.items()}
    whole = teacher_sums(samples, kept, sums)
    if whole is not None:
        sums["teacher_logprob"] = whole
    return Batch(sequence_table(samples, kept, sums), tokens), dropped
