"""Where rank 0 stands in its training data, and what it generated before: the part of a run's state that only it has."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.stream import PromptStream
from megatron_gvpo.train.journal import Journal, Page

log = logging.getLogger(__name__)


@dataclass
class Memory:
    """journal: None for a run that keeps none (an evaluation). position: the data position of the checkpoint that is resumed.
    accept_changes: start other data from its beginning, where the checkpoint's position does not fit it."""

    journal: Journal | None = None
    position: dict[str, Any] | None = None
    accept_changes: bool = False
    _page: Page | None = field(default=None, init=False)
    _stream: PromptStream | None = field(default=None, init=False)
    _before: tuple[int, dict[str, Any]] | None = field(default=None, init=False)

    def place(self, stream: PromptStream) -> None:
        """Put a new stream where the checkpoint left off. DataError where it is another one."""
        self._stream = stream
        if self.position is None:
            return
        try:
            stream.load_state_dict(self.position)
        except DataError as error:
            if not self.accept_changes:
                raise DataError(f"{error}; or give --accept-changes, which starts the new data from its beginning") from None
            log.warning("the training data has changed, and starts from its beginning: %s", error)

    def begin(self, step: int, stream: PromptStream) -> Page | None:
        """Before the prompts of `step` are drawn: the journal's page for it."""
        self._before = (step, stream.state_dict())
        if self.journal is None:
            return None
        if self._page is not None:
            self._page.close()
        self._page = self.journal.page(step)
        if len(self._page):
            log.warning(
                "step %d: %d groups that were complete when the run ended are taken from the journal", step, len(self._page)
            )
        return self._page

    def after(self, step: int) -> dict[str, Any] | None:
        """The data position at the end of `step`, also while the prompts of the next one are out."""
        if self._before is not None and self._before[0] == step + 1:
            return self._before[1]
        return None if self._stream is None else self._stream.state_dict()
