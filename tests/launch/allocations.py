"""Bytes that are really allocated: every tensor that an operation makes is followed until its storage dies.

A CPU has no allocator statistics in torch, so a dispatch mode watches the operations. Storages are counted once, however many
tensors look at them; gloo's and Python's own memory is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`live`: bytes of the storages made since the start that still live; `peak`: their most since `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        return sum(size for _, size in self._known.values())

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in inputs:  # a view makes nothing
                self._follow(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self._known[reference.cdata] = (reference, storage.nbytes())
