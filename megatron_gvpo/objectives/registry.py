"""How a name in the YAML becomes an objective: built in, registered by decorator, an entry point, or `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from megatron_gvpo.config import objectives as configs
from megatron_gvpo.objectives.base import Objective

_BUILTIN = {
    "gvpo": "megatron_gvpo.objectives.gvpo:Gvpo",
    "gvpo_opd": "megatron_gvpo.objectives.gvpo_opd:GvpoOpd",
    "opd": "megatron_gvpo.objectives.opd:Opd",
    "tv_opd": "megatron_gvpo.objectives.tv_opd:TvOpd",
    "gkd": "megatron_gvpo.objectives.gkd:Gkd",
    "grpo": "megatron_gvpo.objectives.clipped:Grpo",
    "dr_grpo": "megatron_gvpo.objectives.clipped:DrGrpo",
    "dapo": "megatron_gvpo.objectives.clipped:Dapo",
    "gspo": "megatron_gvpo.objectives.gspo:Gspo",
    "cispo": "megatron_gvpo.objectives.clipped:Cispo",
    "rloo": "megatron_gvpo.objectives.rloo:Rloo",
    "sft": "megatron_gvpo.objectives.sft:Sft",
}
_REGISTERED: dict[str, type[Objective[Any]]] = {}

ObjectiveT = TypeVar("ObjectiveT", bound=type[Objective[Any]])


def register(objective_class: ObjectiveT) -> ObjectiveT:
    """Class decorator: the objective is known by its `name` in this process.

    ValueError where the name is taken by another class.
    """
    name = objective_class.name
    taken = _REGISTERED.get(name)
    same = taken is not None and (taken.__module__, taken.__qualname__) == (
        objective_class.__module__,
        objective_class.__qualname__,
    )
    if name in _BUILTIN or (taken is not None and not same):
        raise ValueError(f"the objective name {name!r} is taken: give {objective_class.__qualname__} another `name`")
    _REGISTERED[name] = objective_class
    configs.REGISTERED_CONFIGS[name] = objective_class.Config
    return objective_class


def load_objective(name: str) -> type[Objective[Any]]:
    """The class called `name` (see `objective_config`); ObjectiveConfigError, in one line, where there is none."""
    if name in _REGISTERED:
        return _REGISTERED[name]
    spec = _BUILTIN.get(name) or (name if ":" in name else configs.entry_point(name))
    if spec is None:
        raise configs.unknown_objective(name)
    found = configs.import_class(spec)
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise configs.ObjectiveConfigError([configs.Problem("name", f"{spec} is not a subclass of Objective")])
    return found


def create_objective(name: str, options: Mapping[str, Any]) -> Objective[Any]:
    """The objective called `name` with its checked options; ObjectiveConfigError for what is wrong with either."""
    return load_objective(name)(configs.objective_config(name, options))
