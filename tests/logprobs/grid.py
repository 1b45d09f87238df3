"""Every function of the engine on every layout, against the dense float64 reference; run inside gloo ranks.

Each rank holds the whole problem, computes the reference for itself, and compares its own shard of results and
gradients. Returned are the largest errors, relative to the largest number of the reference or 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo import logprobs as lp
from tests.logprobs import dense

KINDS = ("reverse_kl", "forward_kl", "jsd", "tv")
BETA = 0.3


@dataclass(frozen=True)
class Layout:
    """vocab ids, padded to `padded`, of T positions; `extreme` makes logits of about 1e4 that float32 holds exactly."""

    dtype: torch.dtype
    vocab: int
    padded: int
    positions: int
    chunk: int | None
    per_token_temperature: bool
    sequence_parallel: bool
    extreme: bool = False


@dataclass
class Problem:
    """One problem in the layout's dtype, whole on every rank."""

    layout: Layout
    shard: lp.VocabShard
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    targets: Tensor
    weights: Tensor  # of the positions in the scalar that is differentiated
    temperature: float | Tensor

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.t() + self.bias

    @property
    def teacher_logits(self) -> Tensor:
        return self.teacher_hidden @ self.teacher_weight.t()

    def mine(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's columns (or rows of the weight)."""
        return x.narrow(dim, self.shard.start, self.shard.width)

    def my_positions(self, x: Tensor) -> Tensor:
        """This rank's positions under sequence parallelism."""
        if not self.layout.sequence_parallel or self.shard.world == 1:
            return x
        return x.chunk(self.shard.world)[dist.get_rank(self.shard.group)]


def problem(layout: Layout, rank: int, world: int) -> Problem:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if layout.extreme:  # small integers: products and sums of them are exact in float32
            x = (x * 2).round()
        return x.to(layout.dtype)

    total, width = layout.positions, 5
    scale = 1024.0 if layout.extreme else 1.0
    targets = torch.randint(0, layout.vocab, (total,), generator=generator)
    targets[1::5] = -1
    temperature: float | Tensor = 1.0
    if layout.per_token_temperature:
        temperature = (torch.rand(total, generator=generator, dtype=torch.float64) + 0.5).to(layout.dtype)
    return Problem(
        layout,
        lp.VocabShard.of(rank, world, layout.vocab, layout.padded, dist.group.WORLD if world > 1 else None),
        normal(total, width),
        normal(layout.padded, width) * scale,
        normal(layout.padded) * scale,
        normal(total, width + 1),
        normal(layout.padded, width + 1) * scale,
        targets,
        normal(total),
        temperature,
    )


def layouts(dtype: torch.dtype) -> Iterator[Layout]:
    for chunk, padded, per_token, sequence_parallel in itertools.product((1, 7, None), (13, 16), (False, True), (False, True)):
        yield Layout(dtype, 13, padded, 12, chunk, per_token, sequence_parallel)
    yield Layout(dtype, 13, 16, 12, 7, False, True, extreme=True)
    yield Layout(dtype, 7, 7, 12, 7, True, False)
    yield Layout(dtype, 13, 16, 0, 7, True, True)
    yield Layout(dtype, 3, 16, 12, 7, True, True)  # ranks without a single real id


Case = Callable[[Problem], tuple[list[Tensor], list[Tensor]]]


def errors(rank: int, world: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """For each function the largest error of values and of gradients, over all layouts."""
    worst: dict[str, tuple[float, float]] = {}
    for layout in layouts(dtype):
        this = problem(layout, rank, world)
        for name, case in cases(this):
            values, grads = case()
            before = worst.get(name, (0.0, 0.0))
            worst[name] = (max(before[0], *values), max(before[1], *grads))
    return worst


def cases(this: Problem) -> Iterator[tuple[str, Callable[[], tuple[list[float], list[float]]]]]:
    for entropy in (False, True):
        yield f"token_logprobs entropy={entropy}", lambda e=entropy: _token(this, e, linear=False)
        yield f"linear_token_logprobs entropy={entropy}", lambda e=entropy: _token(this, e, linear=True)
        yield f"linear_score_loss entropy={entropy}", lambda e=entropy: _score(this, e)
    yield "support token_logprobs", lambda: _support(this)
    for kind in KINDS:
        for teacher in ("full", "topk", "hidden"):
            yield f"divergence {kind} {teacher}", lambda k=kind, t=teacher: _divergence(this, k, t, linear=False)
            yield f"linear_divergence {kind} {teacher}", lambda k=kind, t=teacher: _divergence(this, k, t, linear=True)


def _reference(this: Problem, fn: Callable[[Tensor], list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients of the weighted sum of them for [hidden, weight, bias, logits], in float64."""
    hidden, weight, bias = (x.double().clone().requires_grad_() for x in (this.hidden, this.weight, this.bias))
    logits = hidden @ weight.t() + bias
    logits.retain_grad()
    values = fn(logits[:, : this.layout.vocab])
    _weighted(values, this.weights.double()).backward()
    return values, [x.grad if x.grad is not None else torch.zeros_like(x) for x in (hidden, weight, bias, logits)]


def _weighted(values: list[Tensor], weights_T: Tensor) -> Tensor:
    """A different weight for each value, so that no two gradients can be confused."""
    return sum(((i + 1) * (weights_T * value).sum() for i, value in enumerate(values)), torch.zeros(()))


def _leaves(this: Problem, linear: bool) -> list[Tensor]:
    if not linear:
        return [this.mine(this.logits, 1).detach().clone().requires_grad_()]
    parts = (this.my_positions(this.hidden), this.mine(this.weight), this.mine(this.bias))
    return [x.detach().clone().requires_grad_() for x in parts]


def _expected(this: Problem, grads: list[Tensor], linear: bool) -> list[Tensor]:
    hidden, weight, bias, logits = grads
    if not linear:
        return [this.mine(logits, 1)]
    return [this.my_positions(hidden), this.mine(weight), this.mine(bias)]


def _compare(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [error(g, w) for g, w in zip(got, want, strict=True)] or [0.0]


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    if got.numel() == 0:
        return 0.0
    scale = max(1.0, float(want.detach().abs().max()))
    difference = float((got.detach().double() - want.detach()).abs().max()) / scale
    return difference if difference == difference else float("inf")


def _finish(this: Problem, values: list[Tensor], leaves: list[Tensor], fn: Any, linear: bool) -> Any:
    want, want_grads = _reference(this, fn)
    _weighted(values, this.weights).backward()
    return _compare(values, want), _compare([x.grad for x in leaves], _expected(this, want_grads, linear))  # type: ignore[misc]


def _options(this: Problem, linear: bool, leaves: list[Tensor]) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": this.temperature, "chunk_tokens": this.layout.chunk}
    if linear:
        options |= {"bias": leaves[2], "sequence_parallel": this.layout.sequence_parallel}
    return options


def _double(temperature: float | Tensor) -> float | Tensor:
    return temperature.double() if isinstance(temperature, Tensor) else temperature


def _token(this: Problem, entropy: bool, linear: bool) -> Any:
    leaves = _leaves(this, linear)
    call = lp.linear_token_logprobs if linear else lp.token_logprobs
    inputs = leaves[:2] if linear else leaves
    found = call(*inputs, this.targets, this.shard, entropy=entropy, **_options(this, linear, leaves))
    values = [found.logprobs] if found.entropy is None else [found.logprobs, found.entropy]
    return _finish(
        this,
        values,
        leaves,
        lambda z: list(dense.logprobs(z, this.targets, _double(this.temperature)))[: len(values)],
        linear,
    )


def _score(this: Problem, entropy: bool) -> Any:
    leaves = _leaves(this, linear=True)
    found = lp.linear_score_loss(
        *leaves[:2], this.targets, this.weights, this.shard, scale=3.0, entropy=entropy, **_options(this, True, leaves)
    )
    (3.0 * found.loss).backward()
    want, want_grads = _reference(this, lambda z: list(dense.logprobs(z, this.targets, _double(this.temperature)))[:1])
    got = [found.loss, found.logprobs]
    expected = [(this.weights.double() * want[0]).sum(), want[0]]
    if found.entropy is not None:
        got.append(found.entropy)
        logits = (this.hidden.double() @ this.weight.double().t() + this.bias.double())[:, : this.layout.vocab]
        expected.append(dense.logprobs(logits, this.targets, _double(this.temperature))[1])
    grads = [x.grad / 3.0 for x in leaves if x.grad is not None]
    return _compare(got, expected), _compare(grads, _expected(this, want_grads, linear=True))


def _support(this: Problem) -> Any:
    """Each position keeps the ids 0, 2, 4 ... and its target."""
    kept_TV = torch.zeros(this.layout.positions, this.layout.vocab, dtype=torch.bool)
    kept_TV[:, ::2] = True
    active = this.targets >= 0
    kept_TV[active, this.targets[active]] = True
    support = lp.Support.of([row.nonzero().squeeze(1).tolist() for row in kept_TV])
    leaves = _leaves(this, linear=True)
    found = lp.linear_token_logprobs(*leaves[:2], this.targets, this.shard, support=support, **_options(this, True, leaves))
    score_leaves = _leaves(this, linear=True)
    lp.linear_score_loss(
        *score_leaves[:2],
        this.targets,
        this.weights,
        this.shard,
        support=support,
        **_options(this, True, score_leaves),
    ).loss.backward()
    values, grads = _finish(
        this,
        [found.logprobs],
        leaves,
        lambda z: [dense.support_logprobs(z, this.targets, kept_TV, _double(this.temperature))],
        True,
    )
    # The two paths form the same gradient.
    return values, [*grads, *_compare([x.grad for x in score_leaves], [x.grad.double() for x in leaves])]  # type: ignore[union-attr, misc]


def _divergence(this: Problem, kind: str, teacher_kind: str, linear: bool) -> Any:
    tau = _double(this.temperature)
    teacher_logits = this.teacher_hidden.double() @ this.teacher_weight.double().t()
    logp_TV = dense.log_softmax(teacher_logits[:, : this.layout.vocab], tau)
    active = this.targets >= 0
    local_teacher: lp.Teacher
    if teacher_kind == "full":
        local_teacher = lp.FullTeacher(this.mine(this.teacher_logits, 1))
    elif teacher_kind == "hidden":
        local_teacher = lp.HiddenTeacher(
            this.my_positions(this.teacher_hidden) if linear else this.teacher_hidden, this.mine(this.teacher_weight)
        )
    else:
        top = logp_TV.topk(min(4, this.layout.vocab - 1), 1)
        # Log-probs a little below the true ones, as a server rounds them: the tail is what is left, not what it was.
        # And an unused place, as in a batch of ragged lists.
        unused = torch.full_like(top.indices[:, :1], -1)
        known = (top.values - 0.01).to(this.layout.dtype)
        local_teacher = lp.TopKTeacher(torch.cat([unused, top.indices], 1), torch.cat([known[:, :1], known], 1))
        tail = (1 - known.double().exp().sum(1)).log()
        logp_TV = torch.cat([known.double(), tail[:, None]], 1)
        ids = top.indices

    def reference(z_TV: Tensor) -> list[Tensor]:
        logq_TV = dense.log_softmax(z_TV, tau)
        if teacher_kind == "topk":
            logq_TV = dense.buckets(logq_TV, ids)
        # Only the gradient of xlogy at p = 0 would be NaN, and p has none.
        value_T = dense.divergence(kind, logp_TV, logq_TV, BETA)
        return [torch.where(active, value_T, 0.0)]

    leaves = _leaves(this, linear)
    call = lp.linear_divergence if linear else lp.divergence
    inputs = leaves[:2] if linear else leaves
    value = call(kind, *inputs, local_teacher, this.shard, beta=BETA, active=active, **_options(this, linear, leaves))
    return _finish(this, [value], leaves, reference, linear)
