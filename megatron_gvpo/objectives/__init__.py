"""What is optimised: one family a file, a registry, and a contract kit for third-party plug-ins.

Importing this package imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.config.objectives import ObjectiveConfig, objective_config
    from megatron_gvpo.objectives.base import Comm, LocalComm, Objective, Outputs, Prepared, TokenLoss, denominator
    from megatron_gvpo.objectives.batch import Batch, SequenceTable, TokenTable, whole_batch
    from megatron_gvpo.objectives.registry import create_objective, load_objective, register

_HOME = {
    "ObjectiveConfig": "megatron_gvpo.config.objectives",
    "objective_config": "megatron_gvpo.config.objectives",
    "Comm": "megatron_gvpo.objectives.base",
    "LocalComm": "megatron_gvpo.objectives.base",
    "Objective": "megatron_gvpo.objectives.base",
    "Outputs": "megatron_gvpo.objectives.base",
    "Prepared": "megatron_gvpo.objectives.base",
    "TokenLoss": "megatron_gvpo.objectives.base",
    "denominator": "megatron_gvpo.objectives.base",
    "Batch": "megatron_gvpo.objectives.batch",
    "SequenceTable": "megatron_gvpo.objectives.batch",
    "TokenTable": "megatron_gvpo.objectives.batch",
    "whole_batch": "megatron_gvpo.objectives.batch",
    "create_objective": "megatron_gvpo.objectives.registry",
    "load_objective": "megatron_gvpo.objectives.registry",
    "register": "megatron_gvpo.objectives.registry",
}

__all__ = [
    "Batch",
    "Comm",
    "LocalComm",
    "Objective",
    "ObjectiveConfig",
    "Outputs",
    "Prepared",
    "SequenceTable",
    "TokenLoss",
    "TokenTable",
    "create_objective",
    "denominator",
    "load_objective",
    "objective_config",
    "register",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
