"""Makes a package importable, with any submodule and any name in it; using one of the names raises and says why."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


class _AbsentMeta(type):
    """Classes, so that a name can be subclassed, compared, hashed and used in `isinstance` at import time."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(f"{cls.__module__}.{cls.__qualname__}", name)
        setattr(cls, name, value)  # the same object every time: it may be a key of a table
        return value

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is not there on a CPU server (import stand-in)")


def _absent(module: str, name: str) -> type:
    return _AbsentMeta(name, (), {"__module__": module})


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _absent(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def stand_in(package: str) -> None:
    """Turn the package of this name, which is being imported, into a stand-in."""
    sys.modules[package].__class__ = _AbsentModule
    # In front: the path finder would look for the submodules as files beside the stand-in and find none.
    sys.meta_path.insert(0, _Finder(package))
