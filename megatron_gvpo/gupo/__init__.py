"""GUPO (arXiv 2608.17411): weigh each prompt group's gradient by how certain it is under a posterior of the output layer.

Importing this package imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.gupo.deal import deal_groups
    from megatron_gvpo.gupo.head import GroupSpan, Head, HeadTokens
    from megatron_gvpo.gupo.measurement import Measurement, measure
    from megatron_gvpo.gupo.weights import group_multipliers, group_weights

_HOME = {
    "GroupSpan": "megatron_gvpo.gupo.head",
    "Head": "megatron_gvpo.gupo.head",
    "HeadTokens": "megatron_gvpo.gupo.head",
    "Measurement": "megatron_gvpo.gupo.measurement",
    "deal_groups": "megatron_gvpo.gupo.deal",
    "group_multipliers": "megatron_gvpo.gupo.weights",
    "group_weights": "megatron_gvpo.gupo.weights",
    "measure": "megatron_gvpo.gupo.measurement",
}

__all__ = [
    "GroupSpan",
    "Head",
    "HeadTokens",
    "Measurement",
    "deal_groups",
    "group_multipliers",
    "group_weights",
    "measure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
