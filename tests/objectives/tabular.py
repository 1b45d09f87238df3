"""A tabular autoregressive policy over a handful of sequences: every log-prob exact, no network, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.objectives.base import LocalComm, Objective
from megatron_gvpo.objectives.batch import Batch, whole_batch
from megatron_gvpo.objectives.gradients import token_loss
from tests.objectives.helpers import sample


class Tree:
    """Sequences over {0, 1, end = 2} of at most two ids; a sequence stops at `end` or is cut at two ids.

    The 7 sequences: (2), (0 2), (0 0), (0 1), (1 2), (1 0), (1 1). States: the empty prefix, 0, and 1. Logits: [3, 3].
    """

    states, ids = 3, 3
    sequences: tuple[tuple[int, ...], ...] = ((2,), (0, 2), (0, 0), (0, 1), (1, 2), (1, 0), (1, 1))

    def state_ids(self, sequence: Sequence[int]) -> list[tuple[int, int]]:
        return [(0 if t == 0 else 1 + sequence[0], token) for t, token in enumerate(sequence)]

    def logprobs_S(self, logits: Tensor) -> Tensor:
        """[7]: the log-prob of every sequence."""
        table = logits.log_softmax(-1)
        return torch.stack([torch.stack([table[s, v] for s, v in self.state_ids(y)]).sum() for y in self.sequences])

    def logits_of(self, probabilities_S: Tensor) -> Tensor:
        """Logits of the policy with these sequence probabilities."""
        mass = torch.zeros(self.states, self.ids, dtype=torch.float64)
        for p, y in zip(probabilities_S, self.sequences, strict=True):
            for s, v in self.state_ids(y):
                mass[s, v] += p
        return mass.log()


@dataclass
class Problem:
    """A fixed batch of responses to one kind of prompt, whose log-probs under any policy are exact.

    chosen: indices into `tree.sequences` per group. signals: logits of the fixed policies by signal name.
    """

    tree: Tree
    batch: Batch
    state_T: Tensor
    id_T: Tensor

    @staticmethod
    def build(
        chosen: Sequence[Sequence[int]], rewards_S: Tensor, signals: dict[str, Tensor], teacher_shift: float = 0.0
    ) -> Problem:
        tree = Tree()
        samples = []
        for g, members in enumerate(chosen):
            for y in members:
                at = tree.state_ids(tree.sequences[y])
                lists = {n: [float(logits.log_softmax(-1)[s, v]) for s, v in at] for n, logits in signals.items()}
                # `logprobs` only reserves the place: every evaluation puts the policy's own there.
                samples.append(sample(f"g{g}", float(rewards_S[y]), logprobs=[0.0] * len(at), **lists))
        batch, _ = whole_batch(samples)
        if "teacher_logprob" in batch.sequences.sums:
            sums = dict(batch.sequences.sums)
            sums["teacher_logprob"] = sums["teacher_logprob"] + teacher_shift
            batch = replace(batch, sequences=replace(batch.sequences, sums=sums))
        flat = [y for members in chosen for y in members]
        pairs = [pair for y in flat for pair in tree.state_ids(tree.sequences[y])]
        return Problem(tree, batch, torch.tensor([s for s, _ in pairs]), torch.tensor([v for _, v in pairs]))

    def under(self, logits: Tensor, **extra: Tensor) -> Batch:
        """The batch with the current policy's log-probs filled in, and signals replaced by `extra` logits."""
        tokens, sums = self.batch.tokens, dict(self.batch.sequences.sums)
        for name, values in {"logprobs": logits, **extra}.items():
            lp_T = values.detach().log_softmax(-1)[self.state_T, self.id_T]
            tokens = tokens.with_signals(**{name: lp_T})
            sums[name] = torch.zeros(len(self.batch.sequences), dtype=torch.float64).index_add(0, tokens.sequence_T, lp_T)
        return Batch(replace(self.batch.sequences, sums=sums), tokens)

    def gradient(self, objective: Objective[Any], logits: Tensor, **extra: Tensor) -> tuple[float, Tensor]:
        """Loss and its gradient in the logits."""
        batch = self.under(logits, **extra)
        prepared = objective.prepare(batch, LocalComm())
        leaf = logits.detach().requires_grad_()
        lp_T = leaf.log_softmax(-1)[self.state_T, self.id_T]
        loss = token_loss(objective, batch, prepared, lp_T).loss_T.sum() / prepared.denominator
        (gradient,) = torch.autograd.grad(loss, leaf)
        value = float(loss.detach()) if prepared.loss_sum is None else prepared.loss_sum / prepared.denominator
        return value, gradient


def minimise(function: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, steps: int = 300) -> Tensor:
    """The minimum of a smooth loss given by value and gradient (L-BFGS with line search)."""
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=steps, tolerance_grad=1e-14, tolerance_change=1e-18, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        value, gradient = function(logits.detach())
        logits.grad = gradient
        return value

    optimizer.step(closure)
    return logits.detach()


def sampled_groups(probabilities_S: Tensor, groups: int, size: int, seed: int) -> list[list[int]]:
    """Groups of responses drawn from any policy."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probabilities_S, groups * size, True, generator=generator).view(groups, size).tolist()
