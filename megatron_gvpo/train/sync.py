"""The trainer's weights to the rollout servers, as one numbered version that all of them hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.weights import save_hf
from megatron_gvpo.rollout.weights import WeightControl
from megatron_gvpo.train.build import Built
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.exchange import Exchange


class WeightPush(Protocol):
    """Collective: every rank takes part in collecting the weights; rank 0 talks to the servers."""

    def push(self, version: str) -> None: ...
    def close(self) -> None: ...


class NoServers:
    """A replayed run has nobody to send weights to."""

    def push(self, version: str) -> None:
        return None

    def close(self) -> None:
        return None


class DiskPush:
    """A Hugging Face folder that the servers' machines see, overwritten for each version."""

    def __init__(self, config: Config, run_dir: Path, chunks: Sequence[Any], exchange: Exchange, control: WeightControl | None):
        self._config = config
        self._folder = run_dir / "servers" / "weights"
        self._chunks = chunks
        self._exchange = exchange
        self._control = control

    def push(self, version: str) -> None:
        save_hf(self._chunks, self._folder, self._config.model.path)

        def update() -> None:
            assert self._control is not None
            self._control.update_from_disk(self._folder, version)

        self._exchange.from_controller(update)

    def close(self) -> None:
        return None


def weight_push(config: Config, run_dir: Path, built: Built, exchange: Exchange, controller: Controller | None) -> WeightPush:
    """The way that `rollout.weight_sync` names."""
    control = None if controller is None else controller.engine.weights
    return DiskPush(config, run_dir, built.chunks, exchange, control)
