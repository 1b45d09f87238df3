"""The interface of an objective, and what passes through it.

    batch --prepare (no grad, global)--> Prepared --loss (with grad, per micro-batch)--> TokenLoss --(step)--> commit

Legend: N sequences of the global batch, T unmasked response tokens that this rank (or this micro-batch) holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import ObjectiveConfig
from megatron_gvpo.objectives.batch import Batch, SequenceTable, TokenTable


class Comm(Protocol):
    """Reductions over the ranks that hold different tokens of the global batch (data- and context-parallel ranks)."""

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over those ranks; the argument is not changed. Every rank must call it."""
        ...

    def gather_tokens(self, values_T: Tensor, tokens: TokenTable) -> tuple[Tensor, Tensor, Tensor]:
        """Every rank's tokens: (values, sequence row, position), in the order of sequence and position, on every rank."""
        ...


class LocalComm:
    """The `Comm` of a single process."""

    def sum(self, values: Tensor) -> Tensor:
        return values.clone()

    def gather_tokens(self, values_T: Tensor, tokens: TokenTable) -> tuple[Tensor, Tensor, Tensor]:
        stride = int(tokens.position_T.max()) + 1 if len(tokens) else 1
        order = torch.argsort(tokens.sequence_T * stride + tokens.position_T)
        return values_T[order], tokens.sequence_T[order], tokens.position_T[order]


class Divergences(Protocol):
    """A handle on the output layer at this micro-batch's T tokens, for objectives that need whole distributions."""

    def divergence(self, kind: str, *, beta: float = 0.5) -> Tensor:
        """[T], differentiable: the divergence between the student and the teacher the run was given, at every token."""
        ...


@dataclass(frozen=True)
class Outputs:
    """What the model gave for one micro-batch. Rows are the T unmasked response tokens, in the order of `tokens`."""

    tokens: TokenTable  # signals in the dtype and on the device of logprobs_T
    logprobs_T: Tensor  # with grad
    entropy_T: Tensor | None = None  # with grad; only where the objective's needs ask for it
    head: Divergences | None = None


@dataclass(frozen=True)
class TokenLoss:
    """One micro-batch's loss, token by token; the engine sums it and divides by the global denominator.

    Terms are kept apart (not summed by the objective) so that a group's weight can be multiplied in from outside.
    metrics: [T] values without grad; the run reports the mean over all unmasked tokens of the global batch.
    """

    loss_T: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What `prepare` found for one global batch.

    denominator: the global one, by which the engine divides (the same on every rank); 0 means there is nothing to train on.
    coefficients_T: d(denominator * Loss)/dlogprob of each local token, where they are known before the forward pass; then
        the objective's `loss` is not called.
    loss_sum: denominator * Loss, global, for the log; None: sum(coefficient * logprob) or the sum of `loss_T` is logged.
    token_data: per-token tensors [T] for `loss`, cut by micro-batch with the tokens.
    metrics: numbers of the whole global batch.
    pending: what `commit` will take over if the step is accepted. `prepare` itself remembers nothing.
    """

    denominator: float
    coefficients_T: Tensor | None = None
    loss_sum: float | None = None
    token_data: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    pending: Mapping[str, Any] = field(default_factory=dict)


ConfigT = TypeVar("ConfigT", bound=ObjectiveConfig)


class Objective(ABC, Generic[ConfigT]):
    """Turns log-probs, rewards and teacher signals into a loss. Knows nothing of Megatron.

    A plug-in sets `name` and `Config`, and writes `prepare`; where the coefficients of the log-probs are not known before the
    forward pass it also writes `loss`. State, if any, changes in `commit` only and is saved by `state_dict`.
    """

    name: ClassVar[str]
    Config: ClassVar[type[ObjectiveConfig]] = ObjectiveConfig

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        return self.config.needs()

    @property
    def surrogate(self) -> bool:
        """True where the loss holds something detached that depends on the policy: its slope is then not its gradient."""
        return False

    @abstractmethod
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        """Coefficients or per-token data, and the denominator, for one global batch; no grad, pure, repeatable."""

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        """Per-token loss terms of one micro-batch, with grad. `token_data`: this micro-batch's rows of `prepared.token_data`."""
        raise TypeError(f"objective {self.name!r} gives no coefficients in prepare(), so it has to define loss()")

    def commit(self, prepared: Prepared, accepted: bool) -> None:
        """After the optimizer step: the only place where the objective may change what it remembers."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of this objective; JSON values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; ValueError for keys it does not know."""
        if state:
            raise ValueError(f"objective {self.name!r} keeps no state, but the checkpoint has: {', '.join(state)}")


def denominator(needs: Needs, sequences: SequenceTable, constant: float = 1.0) -> float:
    """The global denominator that `needs` names, counted once over the whole batch."""
    return {
        "tokens": float(sequences.tokens_N.sum()),
        "sequences": float(len(sequences)),
        "groups": float(sequences.groups),
        "constant": constant,
    }[needs.denominator]
