"""The one room that imports Megatron-Core. Importing this package itself imports neither torch nor Megatron.

What a training loop of your own needs is here by name: `make_forward_step`, `prepare_step`, `use_hidden_state_head`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.plugin import make_forward_step
    from megatron_gvpo.mcore.plugin_step import prepare_step

_HOME = {
    "make_forward_step": "megatron_gvpo.mcore.plugin",
    "prepare_step": "megatron_gvpo.mcore.plugin_step",
    "use_hidden_state_head": "megatron_gvpo.mcore.head",
}

__all__ = ["make_forward_step", "prepare_step", "use_hidden_state_head"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
