"""The contract that every objective keeps, ours or a stranger's, as checks that run in seconds and need no model.

    from megatron_gvpo.objectives.contract import check_contract
    check_contract(MyObjective, {"beta": 0.1})

Under pytest one line is enough: see `objectives.pytest_plugin`. Each check raises `ContractError` with one sentence.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_gvpo.config.needs import DataPolicy, Denominator, Needs, TeacherSignal
from megatron_gvpo.config.objectives import ObjectiveConfig
from megatron_gvpo.objectives.base import LocalComm, Objective, Prepared
from megatron_gvpo.objectives.contract_world import ContractError, Response, Result, World, random_response, run

TOLERANCE = 1e-10  # relative, float64: layouts may only change the order of sums
SLOPE_TOLERANCE = 1e-5  # relative, of central differences


class Kit:
    """One objective with its options, and what its checks share."""

    def __init__(self, objective_class: type[Objective[Any]], options: Mapping[str, Any] | None = None) -> None:
        self.objective_class = objective_class
        self.config = objective_class.Config.model_validate(dict(options or {}))

    def make(self) -> Objective[Any]:
        return self.objective_class(self.config)

    @property
    def needs(self) -> Needs:
        return self.make().needs

    def world(self, seed: int = 0) -> World:
        return World.random(seed)


def declaration(kit: Kit) -> None:
    """The name, the config and the needs are such as a run can check."""
    cls = kit.objective_class
    require(isinstance(getattr(cls, "name", None), str) and bool(cls.name), "it has no `name`")
    require(issubclass(cls.Config, ObjectiveConfig), "its `Config` is not a subclass of ObjectiveConfig")
    refuses = cls.Config.model_config.get("extra") == "forbid"
    require(refuses, "its Config accepts unknown keys, so a misspelt option would be ignored")
    needs = kit.needs
    for value, allowed, key in (
        (needs.teacher, TeacherSignal, "teacher"),
        (needs.data, DataPolicy, "data"),
        (needs.denominator, Denominator, "denominator"),
    ):
        require(value in get_args(allowed), f"its needs say {key}={value!r}, which is none of {', '.join(get_args(allowed))}")
    require(needs.min_group_size >= 1, "its needs ask for groups of fewer than one")


def shapes(kit: Kit) -> None:
    """Coefficients, token data, loss terms and metrics have one row a token, and are finite."""
    result = run(kit.make(), kit.world())
    rank, prepared = result.ranks[0], result.prepared
    tokens = len(kit.world().batch(kit.needs).tokens)
    require(math.isfinite(prepared.denominator) and prepared.denominator > 0, f"its denominator is {prepared.denominator}")
    require(math.isfinite(result.loss) and bool(result.grad_PV.isfinite().all()), "its loss or gradient is not finite")
    if prepared.coefficients_T is not None:
        _rows(prepared.coefficients_T, tokens, "coefficients_T")
        require(not prepared.coefficients_T.requires_grad, "its coefficients carry a gradient")
    for key, value in prepared.token_data.items():
        _rows(value, tokens, f"token_data[{key!r}]", exact=False)
    _rows(rank.terms[0].loss_T, tokens, "loss_T")
    for key, value in rank.terms[0].metrics.items():
        _rows(value, tokens, f"the metric {key!r}")
        require(not value.requires_grad, f"the metric {key!r} carries a gradient")
    for key, value in prepared.metrics.items():
        require(isinstance(value, float | int), f"the metric {key!r} of prepare() is no number")


def masks(kit: Kit) -> None:
    """Masked tokens put into responses change nothing, and get no gradient."""
    _compare_padded(kit, masked_value=1e3, what="masked tokens with other values")


def nan_at_masked(kit: Kit) -> None:
    """NaN at masked places changes nothing."""
    _compare_padded(kit, masked_value=math.nan, what="NaN at masked places")


def empty_responses(kit: Kit) -> None:
    """A response without an unmasked token enters no mean, no group size and no denominator."""
    world = kit.world()
    plain = run(kit.make(), world)
    generator = torch.Generator().manual_seed(7)
    blank = [random_response(g, 50.0, 3, generator) for g in ("g0", "g2", "alone")]
    blank = [replace(r, mask_L=torch.zeros_like(r.mask_L)) for r in blank]
    more = run(kit.make(), World([*blank, *world.responses]))
    _same_loss(plain, more, "an empty response")
    blank_PV, others_PV = more.grad_PV.split([len(more.grad_PV) - len(plain.grad_PV), len(plain.grad_PV)])
    _same(plain.grad_PV, others_PV, "an empty response changes the gradient of others")
    require(bool((blank_PV == 0).all()), "an empty response has a gradient")


def nothing_to_train(kit: Kit) -> None:
    """A batch without any unmasked token has denominator 0 and gradient 0, and all ranks still make the same calls."""
    world = kit.world().map(lambda r: replace(r, mask_L=torch.zeros_like(r.mask_L)))
    result = run(kit.make(), world, ranks=2)
    require(result.prepared.denominator == 0, f"its denominator is {result.prepared.denominator} where there is no token")
    require(bool((result.grad_PV == 0).all()), "it has a gradient where there is no token")


def groups_of_one(kit: Kit) -> None:
    """A group of one is finite where the objective takes it, and leaves no trace where it does not."""
    world = kit.world()
    alone = random_response("alone", 1.0, 4, torch.Generator().manual_seed(3))
    result = run(kit.make(), World([*world.responses, alone]))
    finite = math.isfinite(result.loss) and bool(result.grad_PV.isfinite().all())
    require(finite, "a group of one makes the loss or the gradient NaN or infinite: declare min_group_size=2, or handle it")
    if kit.needs.min_group_size > 1:
        _same_loss(run(kit.make(), world), result, "a dropped group of one")


def permutation(kit: Kit) -> None:
    """The order of the samples does not matter: each keeps its gradient, and groups are found by their id."""
    world = kit.world()
    order = torch.randperm(len(world.responses), generator=torch.Generator().manual_seed(5)).tolist()
    plain, shuffled = run(kit.make(), world), run(kit.make(), World([world.responses[i] for i in order]))
    _same_loss(plain, shuffled, "another order of the samples")
    lengths = [len(r.ids_L) for r in world.responses]
    parts = plain.grad_PV.split(lengths)
    _same(torch.cat([parts[i] for i in order]), shuffled.grad_PV, "another order of the samples changes the gradients")


def reward_shift(kit: Kit) -> None:
    """A constant added to all rewards of a group changes no gradient."""
    world = kit.world()
    shifted = world.map(lambda r: replace(r, reward=r.reward + (3.0 if r.group == "g0" else -5.0)))
    plain, moved = run(kit.make(), world), run(kit.make(), shifted)
    _same(plain.grad_PV, moved.grad_PV, "a constant added to a group's rewards changes the gradient", 1e-8)


def micro_batch_splits(kit: Kit) -> None:
    """Every split into micro-batches gives the same loss and gradient, fillers included."""
    world = kit.world()
    plain = run(kit.make(), world)
    for count in (2, 3, 7, len(plain.grad_PV) + 1):
        split = run(kit.make(), world, micro_batches=count)
        _same_loss(plain, split, f"a split into {count} micro-batches")
        _same(plain.grad_PV, split.grad_PV, f"a split into {count} micro-batches changes the gradient")


def rank_splits(kit: Kit) -> None:
    """Every split over ranks gives the same loss and gradient: groups and sequences cut, uneven, ranks without a token."""
    world = kit.world()
    plain = run(kit.make(), world)
    for ranks in (2, 3, 12):
        for scatter in (False, True):
            split = run(kit.make(), world, ranks=ranks, micro_batches=2, scatter=scatter)
            what = f"a split of {'tokens' if scatter else 'sequences'} over {ranks} ranks"
            denominators = {r.prepared.denominator for r in split.ranks}
            require(len(denominators) == 1, f"{what} gives the ranks different denominators: {sorted(denominators)}")
            _same_loss(plain, split, what)
            _same(plain.grad_PV, split.grad_PV, f"{what} changes the gradient")
            for key, value in plain.prepared.metrics.items():
                for r in split.ranks:
                    _same_number(value, r.prepared.metrics.get(key, math.nan), f"{what} changes the metric {key!r}")


def purity(kit: Kit) -> None:
    """prepare() is repeatable, remembers nothing, and leaves the batch as it was."""
    objective = _trained(kit)
    batch = kit.world(1).batch(kit.needs)
    before, state = copy.deepcopy(batch), json.dumps(objective.state_dict())
    first = objective.prepare(batch, LocalComm())
    for _ in range(2):
        _same_prepared(first, objective.prepare(batch, LocalComm()), "prepare() called again gives something else")
    require(json.dumps(objective.state_dict()) == state, "prepare() changes the state, which only commit() may")
    require(_tensors_equal(batch, before), "prepare() changes the batch that it is given")


def gradient(kit: Kit) -> None:
    """The gradient is the slope of the loss, by central differences in the policy's logits."""
    world = kit.world()
    plain = run(kit.make(), world)
    logits_PV = world.stacked("logprobs")
    generator = torch.Generator().manual_seed(11)
    scale, step = float(plain.grad_PV.abs().max()), 1e-5
    for _ in range(16):
        row, column = (int(torch.randint(n, (), generator=generator)) for n in logits_PV.shape)
        bump_PV = torch.zeros_like(logits_PV)
        bump_PV[row, column] = step
        up, down = (run(kit.make(), world.with_policy(logits_PV + sign * bump_PV)).loss for sign in (1, -1))
        slope, said = (up - down) / (2 * step), float(plain.grad_PV[row, column])
        close = abs(slope - said) <= SLOPE_TOLERANCE * max(scale, 1e-3)
        require(close, f"its gradient is {said:.6g} where the loss has the slope {slope:.6g}")


def rejected_step(kit: Kit) -> None:
    """A step that is not accepted teaches the objective nothing."""
    objective = _trained(kit)
    batch = kit.world(1).batch(kit.needs)
    first = objective.prepare(batch, LocalComm())
    objective.commit(objective.prepare(kit.world(2).batch(kit.needs), LocalComm()), accepted=False)
    _same_prepared(first, objective.prepare(batch, LocalComm()), "a step that was not accepted changes what follows")


def state_round_trip(kit: Kit) -> None:
    """What a checkpoint keeps is JSON, and enough to go on as if never stopped; unknown keys are refused."""
    objective, resumed = _trained(kit), kit.make()
    try:
        text = json.dumps(objective.state_dict())
    except TypeError as error:
        raise ContractError(f"its state is not made of JSON values: {error}") from None
    resumed.load_state_dict(json.loads(text))
    require(json.dumps(resumed.state_dict()) == text, "a loaded state is not the one that was saved")
    for seed in (4, 5):
        batch = kit.world(seed).batch(kit.needs)
        ours, theirs = objective.prepare(batch, LocalComm()), resumed.prepare(batch, LocalComm())
        _same_prepared(ours, theirs, "after a resume prepare() gives something else")
        objective.commit(ours, accepted=True)
        resumed.commit(theirs, accepted=True)
    try:
        kit.make().load_state_dict({"no such key": 1})
    except ValueError:
        return
    raise ContractError("it loads a state with unknown keys, so a wrong checkpoint would pass for a right one")


@dataclass(frozen=True)
class Check:
    """A check, and whether it says anything about this objective."""

    run: Callable[[Kit], None]
    applies: Callable[[Kit], bool] = lambda kit: True

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", "check")


CHECKS: tuple[Check, ...] = (
    Check(declaration),
    Check(shapes),
    Check(masks),
    Check(nan_at_masked),
    Check(empty_responses),
    Check(nothing_to_train),
    Check(groups_of_one),
    Check(permutation),
    Check(reward_shift, lambda kit: kit.needs.rewards and kit.needs.groups),
    Check(micro_batch_splits),
    Check(rank_splits),
    Check(purity),
    Check(gradient, lambda kit: not kit.make().surrogate),
    Check(rejected_step),
    Check(state_round_trip),
)


def check_contract(objective_class: type[Objective[Any]], options: Mapping[str, Any] | None = None) -> list[str]:
    """Run every check that applies; returns their names. ContractError, naming the check, at the first that fails."""
    kit = Kit(objective_class, options)
    names = []
    for check in CHECKS:
        if check.applies(kit):
            run_check(check, kit)
            names.append(check.name)
    return names


def run_check(check: Check, kit: Kit) -> None:
    """One check. Its ContractError names the objective and the check; what the objective raises itself becomes one too."""
    try:
        check.run(kit)
    except ContractError as error:
        raise ContractError(f"{kit.objective_class.__name__} breaks `{check.name}`: {error}") from None
    except Exception as error:
        raise ContractError(f"{kit.objective_class.__name__} breaks `{check.name}`: {type(error).__name__}: {error}") from error


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractError(otherwise)


def _trained(kit: Kit) -> Objective[Any]:
    """The objective after three steps, the second of which was not accepted."""
    objective = kit.make()
    for seed, accepted in ((1, True), (2, False), (3, True)):
        objective.commit(objective.prepare(kit.world(seed).batch(kit.needs), LocalComm()), accepted)
    return objective


def _compare_padded(kit: Kit, masked_value: float, what: str) -> None:
    world = kit.world()
    plain = run(kit.make(), world)
    padded = world.map(lambda r: replace(_padded(r), masked_value=masked_value))
    more = run(kit.make(), padded)
    _same_loss(plain, more, what)
    parts = more.grad_PV.split([len(r.ids_L) for r in padded.responses])
    kept = [part[_kept_places(r)] for part, r in zip(parts, world.responses, strict=True)]
    _same(plain.grad_PV, torch.cat(kept), f"{what}: the gradient of unmasked tokens changes")
    masked_P = torch.cat([r.mask_L for r in padded.responses]) == 0
    require(bool((more.grad_PV[masked_P] == 0).all()), f"{what}: a masked token has a gradient")


def _padded(response: Response) -> Response:
    """The response with one masked position put before every token, and two at the end."""
    length = len(response.ids_L)
    places = _kept_places(response)

    def spread(values: Tensor) -> Tensor:
        wide = values.new_zeros(2 * length + 2, *values.shape[1:])
        wide[places] = values
        return wide

    logits = {name: spread(values) for name, values in response.logits.items()}
    return replace(response, ids_L=spread(response.ids_L), mask_L=spread(response.mask_L), logits=logits)


def _kept_places(response: Response) -> Tensor:
    return torch.arange(len(response.ids_L)) * 2 + 1


def _rows(value: Tensor, tokens: int, what: str, exact: bool = True) -> None:
    fits = list(value.shape) == [tokens] if exact else list(value.shape[:1]) == [tokens]
    require(fits, f"{what} has the shape {list(value.shape)}, where there are {tokens} tokens")


def _same_loss(a: Result, b: Result, what: str) -> None:
    _same_number(a.loss, b.loss, f"{what} changes the loss")


def _same_number(a: float, b: float, otherwise: str) -> None:
    require(abs(a - b) <= TOLERANCE * max(1.0, abs(a)), f"{otherwise}: {a:.12g} against {b:.12g}")


def _same(a: Tensor, b: Tensor, otherwise: str, tolerance: float = TOLERANCE) -> None:
    require(a.shape == b.shape, f"{otherwise}: shapes {list(a.shape)} and {list(b.shape)}")
    scale = max(float(a.abs().max()), 1e-3) if a.numel() else 1.0
    worst = float((a - b).abs().max()) if a.numel() else 0.0
    require(worst <= tolerance * scale, f"{otherwise}, by {worst:.3g} where the largest entry is {scale:.3g}")


def _same_prepared(a: Prepared, b: Prepared, otherwise: str) -> None:
    require(_tensors_equal(a, b), otherwise)


def _tensors_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal all the way down, bit for bit; NaN equals NaN."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.shape == b.shape
            and bool(torch.equal(a.isnan(), b.isnan()))
            and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
        )
    if isinstance(a, Mapping):
        return set(a) == set(b) and all(_tensors_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_tensors_equal(x, y) for x, y in zip(a, b, strict=True))
    if is_dataclass(a):
        return _tensors_equal(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)
