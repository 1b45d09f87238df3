"""What a run remembers between processes, and going on from it.

One commit holds everything: weights, optimizer, schedule and every rank's random state through Megatron's distributed
checkpointing, and beside them, as JSON, what this module adds: the step and with it the weight version, the data position, the
objective's memory, the loop's counts, the config and what else decides the numbers, and the versions of the code. Groups that are
complete are in the journal; those in flight are drawn again.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_gvpo import __version__
from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.checkpoint import Saving, begin_save, load_checkpoint
from megatron_gvpo.train.build import Built
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.main import CHECKPOINTS_DIR
from megatron_gvpo.train.memory import Memory
from megatron_gvpo.train.recipe import changes, digest, recipe, tokenizer_digest

log = logging.getLogger(__name__)


class ResumeError(ValueError):
    """The checkpoint belongs to another run than the config describes."""


class SaveError(RuntimeError):
    """A checkpoint that the run needs could not be written."""


@dataclass(frozen=True)
class Resumed:
    """steps: how many are done. position: of the training data; None where the checkpoint has none. loop: the loop's counts."""

    steps: int = 0
    position: dict[str, Any] | None = None
    loop: dict[str, Any] = field(default_factory=dict)


class Saves:
    """Checkpoints of a run, in `RUN/checkpoints`. All methods are collective.

    memory: rank 0's, whose data position is part of what is saved; set it when there is one.
    """

    def __init__(self, config: Config, run_dir: Path, exchange: Exchange, built: Built) -> None:
        self._config = config
        self._folder = run_dir / CHECKPOINTS_DIR
        self._exchange = exchange
        self._built = built
        self.memory: Memory | None = None
        self._writing: Saving | None = None
        self._newest = -1

    def save(self, step: int, loop: dict[str, Any], *, needed: bool = True) -> None:
        """Everything that the next step depends on, as of the end of `step`.

        OSError on every rank where it cannot be written; with `checkpoint.on_error: continue`, and where it is not `needed`
        because the run goes on, that is only a warning. Older checkpoints stay as they are. With `checkpoint.asynchronous` one
        that is not needed is written in the background, and counts once `settle` has seen its end.
        """
        self.settle(wait=True)
        state = self._exchange.from_controller(lambda: self._state(step, loop))
        checkpoint = self._config.checkpoint
        background = checkpoint.asynchronous and not needed
        try:
            self._writing = begin_save(
                self._folder,
                step,
                self._built.engine.training,
                state,
                keep=checkpoint.keep,
                keep_every=checkpoint.keep_every,
                background=background,
            )
        except OSError as error:
            self._failed(error, needed)
        if not background:
            self._finish(needed)

    def settle(self, *, wait: bool) -> int:
        """Make what was written in the background a checkpoint, if it is written on every rank. wait: until it is.

        The step of the newest checkpoint that this run wrote or resumed from; -1 for none.
        """
        if self._writing is not None and (wait or not self._exchange.any(not self._writing.done)):
            self._finish(needed=False)
        return self._newest

    def _finish(self, needed: bool) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.finish()
        except OSError as error:
            self._failed(error, needed)
            return
        self._newest = writing.step
        if self.memory is not None and self.memory.journal is not None:
            self.memory.journal.prune(self._oldest_for_resuming())

    def _failed(self, error: OSError, needed: bool) -> None:
        if needed or self._config.checkpoint.on_error == "stop":
            raise SaveError(f"{error}; older checkpoints are whole") from error
        log.warning("%s; the run goes on without it (checkpoint.on_error: continue)", error)

    def resume(self, *, accept_changes: bool, live: bool) -> Resumed:
        """Take back the newest whole checkpoint; no steps where there is none yet.

        accept_changes: take one of another objective or tokenizer too. live: this run draws its prompts itself. ResumeError, in
        one line, on every rank.
        """
        state = load_checkpoint(self._folder, self._built.engine.training)
        if state is None:
            log.warning("%s holds no checkpoint: starting at step 1", self._folder)
            return Resumed()
        same_objective = self._check(state, accept_changes)
        if live and state["position"] is None:
            raise ResumeError(f"{self._folder}: its checkpoint was written by a --replay, and has no place in the training data")
        if same_objective:
            self._built.objective.load_state_dict(state["objective"])
        if self._exchange.is_controller:
            log.warning("resumed after step %d", state["step"])
        self._newest = int(state["step"])
        return Resumed(self._newest, state["position"], state["loop"])

    def _check(self, state: dict[str, Any], accept_changes: bool) -> bool:
        """Whether the objective is the one that wrote the checkpoint; what else has changed is refused, or named."""
        found = changes(state["recipe"], recipe(self._config))
        if state["tokenizer"] != tokenizer_digest(self._config):
            found["tokenizer"] = "the tokenizer's files are others"
        refused = [text for key, text in found.items() if key == "tokenizer" or key.startswith("objective.")]
        if refused and not accept_changes:
            why = f"{self._folder}: its checkpoint belongs to another run: {'; '.join(refused)}"
            raise ResumeError(f"{why}; give --accept-changes to go on from it")
        if self._exchange.is_controller:
            for text in found.values():
                log.warning("since the checkpoint was written: %s", text)
        return "objective.name" not in found

    def _state(self, step: int, loop: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": step,
            "weight_version": str(step),
            "position": None if self.memory is None else self.memory.after(step),
            "objective": self._built.objective.state_dict(),
            "loop": loop,
            "recipe": recipe(self._config),
            "digest": digest(self._config),
            "tokenizer": tokenizer_digest(self._config),
            "config": _without_keys(self._config.model_dump(mode="json")),
            "code": {
                "megatron-gvpo": __version__,
                "megatron-core": version("megatron-core"),
                "torch": version("torch"),
                "python": sys.version.split()[0],
            },
        }

    def _oldest_for_resuming(self) -> int:
        """The step of the oldest checkpoint that a resume falls back to."""
        names = sorted(path.name for path in self._folder.glob("step_*") if path.name.removeprefix("step_").isdigit())
        return int(names[-self._config.checkpoint.keep :][0].removeprefix("step_"))


def _without_keys(settings: Any) -> Any:
    """The settings with every API key blank: checkpoints are copied to places where a key has no business."""
    if not isinstance(settings, dict):
        return settings
    return {name: "" if name == "api_key" else _without_keys(value) for name, value in settings.items()}
