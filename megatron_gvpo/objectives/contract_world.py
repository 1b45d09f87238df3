"""A small world to run an objective in: a tabular policy, samples with every signal, and ranks that are threads.

Legend: N samples, T unmasked tokens, P all response positions of all samples, V ids. Everything is float64.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.objectives.base import Comm, Objective, Outputs, Prepared, TokenLoss
from megatron_gvpo.objectives.batch import Batch, TokenTable, whole_batch

VOCAB = 5
WAIT_S = 120.0  # seconds that a simulated rank waits for the others; a wrong number of calls is found at once


class ContractError(AssertionError):
    """The objective breaks the contract; the text says how, in one line."""


@dataclass(frozen=True)
class KitSample:
    """A `SampleLike` with plain lists."""

    group: str
    response_ids: list[int]
    mask: list[int]
    reward: float | None = None
    logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    rollout_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    teacher_logprob: float | None = None


@dataclass(frozen=True)
class Response:
    """A response with the logits of every policy that is asked about it: each [L, V]."""

    group: str
    reward: float
    ids_L: Tensor
    mask_L: Tensor
    logits: dict[str, Tensor]  # by signal name; `logprobs` is the policy that is trained
    masked_value: float = 0.0  # what stands at masked places of every signal

    def sample(self, needs: Needs) -> KitSample:
        """The sample with the signals that `needs` declares, and no other."""
        wanted = {
            "logprobs": needs.current,
            "old_logprobs": needs.old,
            "rollout_logprobs": needs.rollout,
            "ref_logprobs": needs.reference,
            "teacher_logprobs": needs.teacher in ("sampled", "topk", "full"),
        }
        signals = {name: self._signal(name) for name, is_wanted in wanted.items() if is_wanted}
        whole = None
        if needs.teacher == "sequence":
            whole = sum(v for v, m in zip(self._signal("teacher_logprobs"), self.mask_L.tolist(), strict=True) if m)
        reward = self.reward if needs.rewards else None
        return KitSample(self.group, self.ids_L.tolist(), self.mask_L.tolist(), reward, teacher_logprob=whole, **signals)

    def _signal(self, name: str) -> list[float]:
        logprobs_LV = self.logits[name].log_softmax(-1)
        values_L = logprobs_LV.gather(1, self.ids_L[:, None])[:, 0]
        return torch.where(self.mask_L.bool(), values_L, self.masked_value).tolist()


@dataclass(frozen=True)
class World:
    """The responses of one global batch."""

    responses: list[Response]

    @staticmethod
    def random(seed: int, sizes: Sequence[int] = (3, 2, 5), flat: Sequence[int] = (1,)) -> World:
        """Groups of the given sizes, their samples in mixed order; those numbered in `flat` have equal rewards."""
        generator = torch.Generator().manual_seed(seed)
        responses = []
        for g, size in enumerate(sizes):
            for member in range(size):
                length = 1 + int(torch.randint(6, (), generator=generator))
                reward = 0.35 if g in flat else float(torch.randn((), generator=generator, dtype=torch.float64))
                responses.append(random_response(f"g{g}", reward, length, generator, hole=member % 2 == 1))
        order = torch.randperm(len(responses), generator=generator)
        return World([responses[i] for i in order])

    def map(self, change: Callable[[Response], Response]) -> World:
        return World([change(r) for r in self.responses])

    def batch(self, needs: Needs) -> Batch:
        return whole_batch([r.sample(needs) for r in self.responses], needs.min_group_size)[0]

    def stacked(self, name: str) -> Tensor:
        """[P, V]: the logits of one policy at all positions of all responses."""
        return torch.cat([torch.zeros(0, VOCAB, dtype=torch.float64), *(r.logits[name] for r in self.responses)])

    def starts(self) -> Tensor:
        """[N] int64: the row of `stacked` at which each response starts."""
        lengths = torch.tensor([len(r.ids_L) for r in self.responses], dtype=torch.int64)
        return lengths.cumsum(0) - lengths

    def with_policy(self, logits_PV: Tensor) -> World:
        """The same world under another policy."""
        parts = logits_PV.split([len(r.ids_L) for r in self.responses])
        changed = [replace(r, logits={**r.logits, "logprobs": part}) for r, part in zip(self.responses, parts, strict=True)]
        return World(changed)


def random_response(group: str, reward: float, length: int, generator: torch.Generator, hole: bool = False) -> Response:
    """`length` positions, the first masked where `hole` and there is another one."""
    policies = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    base_LV = torch.randn(length, VOCAB, generator=generator, dtype=torch.float64)

    def near() -> Tensor:
        return base_LV + 0.4 * torch.randn(length, VOCAB, generator=generator, dtype=torch.float64)

    ids_L = torch.randint(VOCAB, (length,), generator=generator)
    mask_L = torch.ones(length, dtype=torch.int64)
    if hole and length > 1:
        mask_L[0] = 0
    return Response(group, reward, ids_L, mask_L, {name: near() for name in policies})


class TableHead:
    """`Divergences` of a tabular policy: dense, small, and differentiable; the definitions of the `logprobs` room."""

    def __init__(self, student_TV: Tensor, teacher_TV: Tensor) -> None:
        self.log_q, self.log_p = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)

    def divergence(self, kind: str, *, beta: float = 0.5) -> Tensor:
        log_p, log_q = self.log_p, self.log_q
        p, q = log_p.exp(), log_q.exp()
        if kind == "reverse_kl":
            return (q * (log_q - log_p)).sum(-1)
        if kind == "forward_kl":
            return (p * (log_p - log_q)).sum(-1)
        if kind == "tv":
            return (p - q).abs().sum(-1) / 2
        if kind == "jsd":
            log_m = (beta * p + (1 - beta) * q).log()
            return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)
        raise ValueError(f"there is no divergence {kind!r}; it is one of reverse_kl, forward_kl, jsd, tv")


@dataclass
class _Shared:
    slots: list[Any]
    barrier: threading.Barrier


class ThreadComm:
    """The `Comm` of ranks that are threads; it finds out when they do not all make the same calls."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchange(f"sum of {list(values.shape)}", values.clone())).sum(0)

    def gather_tokens(self, values_T: Tensor, tokens: TokenTable) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._exchange("gather_tokens", (values_T.clone(), tokens.sequence_T, tokens.position_T))
        values, sequence, position = (torch.cat([part[i] for part in parts]) for i in range(3))
        stride = int(position.max()) + 1 if len(position) else 1
        order = torch.argsort(sequence * stride + position)
        return values[order], sequence[order], position[order]

    def finish(self) -> None:
        """Every rank calls it when its `prepare` is done."""
        self._exchange("end of prepare", None)

    def abort(self) -> None:
        self._shared.barrier.abort()

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self._shared.slots[self._rank] = (what, value)
        self._shared.barrier.wait(WAIT_S)
        found = list(self._shared.slots)
        self._shared.barrier.wait(WAIT_S)
        calls = sorted({name for name, _ in found})
        if len(calls) > 1:
            raise ContractError(f"ranks call different collectives in prepare(), which would hang: {' against '.join(calls)}")
        return [v for _, v in found]


@dataclass
class RankResult:
    """What one simulated rank found."""

    prepared: Prepared
    loss_sum: float
    grad_PV: Tensor
    terms: list[TokenLoss] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """One step's loss and gradient in the policy's logits, as the engine would put them together."""

    loss: float
    grad_PV: Tensor
    ranks: list[RankResult]

    @property
    def prepared(self) -> Prepared:
        return self.ranks[0].prepared


def run(objective: Objective[Any], world: World, ranks: int = 1, micro_batches: int = 1, scatter: bool = False) -> Result:
    """One step over `ranks` threads with `micro_batches` each. The objective itself is left as it is.

    scatter: tokens of a sequence go to different ranks, as under context parallelism; else whole sequences do.
    """
    batch = world.batch(objective.needs)
    key_T = torch.arange(len(batch.tokens)) if scatter else batch.tokens.sequence_T
    shared = _Shared([None] * ranks, threading.Barrier(ranks))

    def one(rank: int) -> RankResult:
        comm = ThreadComm(shared, rank)
        rows = (key_T % ranks == rank).nonzero().flatten()
        try:
            own = copy.deepcopy(objective)
            return rank_step(own, world, Batch(batch.sequences, batch.tokens.select(rows)), comm, micro_batches)
        except BaseException:
            comm.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(ranks)]
        errors = [f.exception() for f in futures]
    # A rank that failed breaks the others' barrier: its own error is the one to show.
    real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    results = [f.result() for f in futures]
    prepared = results[0].prepared
    scale = 1.0 / prepared.denominator if prepared.denominator else 0.0
    loss_sum = sum(r.loss_sum for r in results) if prepared.loss_sum is None else prepared.loss_sum
    grad_PV = torch.stack([r.grad_PV for r in results]).sum(0) * scale
    return Result(loss_sum * scale, grad_PV, results)


def rank_step(objective: Objective[Any], world: World, batch: Batch, comm: Comm, micro_batches: int) -> RankResult:
    """What one rank does with its share of `batch.tokens`: prepare, then loss and gradient (sums, not yet divided)."""
    with torch.no_grad():
        prepared = objective.prepare(batch, comm)
    if isinstance(comm, ThreadComm):
        comm.finish()
    logits_PV = world.stacked("logprobs").clone().requires_grad_()
    teacher_PV = world.stacked("teacher_logprobs")
    ids_P = torch.cat([torch.zeros(0, dtype=torch.int64), *(r.ids_L for r in world.responses)])
    row_T = world.starts()[batch.sequences.sample_N[batch.tokens.sequence_T]] + batch.tokens.position_T
    result = RankResult(prepared, 0.0, torch.zeros_like(logits_PV))
    # One more micro-batch than tokens leaves at least one filler, which has no token at all.
    for micro in torch.arange(len(batch.tokens)).tensor_split(micro_batches):
        rows_T = row_T[micro]
        lp_T = logits_PV[rows_T].log_softmax(-1).gather(1, ids_P[rows_T][:, None])[:, 0]
        if prepared.coefficients_T is not None:
            terms = TokenLoss(prepared.coefficients_T[micro] * lp_T)
        else:
            entropy_T = -(logits_PV[rows_T].log_softmax(-1).exp() * logits_PV[rows_T].log_softmax(-1)).sum(-1)
            outputs = Outputs(
                batch.tokens.select(micro),
                lp_T,
                entropy_T if objective.needs.entropy else None,
                TableHead(logits_PV[rows_T], teacher_PV[rows_T]) if objective.needs.teacher in ("topk", "full") else None,
            )
            terms = objective.loss(outputs, prepared, {k: v[micro] for k, v in prepared.token_data.items()})
        result.terms.append(terms)
        loss = terms.loss_T.sum()
        result.loss_sum += float(loss.detach())
        if loss.requires_grad:
            result.grad_PV += torch.autograd.grad(loss, logits_PV)[0]
    return result
