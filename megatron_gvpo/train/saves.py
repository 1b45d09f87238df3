"""What a run remembers between processes, and going on from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.checkpoint import load_checkpoint, save_checkpoint
from megatron_gvpo.train.build import Built
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.main import CHECKPOINTS_DIR

log = logging.getLogger(__name__)


class Saves:
    """Checkpoints of a run, in `RUN/checkpoints`. All methods are collective.

    controller: rank 0's, where there is one; its data position is part of what is saved.
    """

    def __init__(self, config: Config, run_dir: Path, exchange: Exchange, built: Built, controller: Controller | None) -> None:
        self._config = config
        self._folder = run_dir / CHECKPOINTS_DIR
        self._exchange = exchange
        self._built = built
        self._controller = controller

    def save(self, step: int) -> None:
        """Everything that the next step depends on, as of the end of `step`."""
        state = self._exchange.from_controller(lambda: self._state(step))
        checkpoint = self._config.checkpoint
        save_checkpoint(
            self._folder, step, self._built.engine.training, state, keep=checkpoint.keep, keep_every=checkpoint.keep_every
        )

    def resume(self) -> int:
        """Take back the newest whole checkpoint; the number of steps that are done. 0 where there is none yet."""
        state = load_checkpoint(self._folder, self._built.engine.training)
        if state is None:
            log.warning("%s holds no checkpoint: starting at step 1", self._folder)
            return 0
        if state["objective_name"] != self._config.objective.name:
            raise ValueError(
                f"{self._folder}: its checkpoint is of objective {state['objective_name']!r}, and the config names "
                f"{self._config.objective.name!r}: resume with the objective that wrote it"
            )
        self._built.objective.load_state_dict(state["objective"])
        if self._controller is not None and state["stream"] is not None:
            self._controller.stream.load_state_dict(state["stream"])
        log.info("resumed after step %d", state["step"])
        return int(state["step"])

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "objective_name": self._config.objective.name,
            "objective": self._built.objective.state_dict(),
            "stream": None if self._controller is None else self._controller.stream.state_dict(),
        }
