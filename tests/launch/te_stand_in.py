"""A stand-in for Transformer Engine that records what Megatron-Core asks of it. For a process of its own.

Every module and every name exists; classes are empty torch modules, so that Megatron-Core's subclasses can be defined, and
recipes keep their arguments. Nothing is computed.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

RECORDED: list[tuple[str, dict[str, Any]]] = []


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


def recipe(name: str) -> type:
    class Recipe:
        def __init__(self, **arguments: Any) -> None:
            RECORDED.append((name, arguments))

    Recipe.__name__ = name
    return Recipe


@contextmanager
def fp8_autocast(**arguments: Any):
    RECORDED.append(("fp8_autocast", arguments))
    yield


@contextmanager
def fp8_model_init(enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False):
    arguments = {"enabled": enabled, "recipe": recipe, "preserve_high_precision_init_val": preserve_high_precision_init_val}
    RECORDED.append(("fp8_model_init", arguments))
    yield


_REAL: dict[str, Any] = {"Format": Format, "fp8_autocast": fp8_autocast, "fp8_model_init": fp8_model_init}
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []  # a package, so that anything below it can be imported
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _REAL:
            return _REAL[name]
        made: Any
        if name in _RECIPES:
            made = recipe(name)
        elif name.islower():  # a module below this one, or a function that nobody calls here
            return importlib.import_module(f"{self.__name__}.{name}")
        else:
            import torch

            made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def install() -> None:
    """Before Megatron-Core is imported."""
    import torch

    sys.meta_path.insert(0, _Finder())
    torch.cuda.current_device = lambda: 0
