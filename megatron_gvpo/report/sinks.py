"""Where metrics go: always to the run's JSON Lines, to the terminal, and to wandb where the config says so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from rich.console import Console

from megatron_gvpo.config.schema import Config
from megatron_gvpo.report.console import ConsoleSink
from megatron_gvpo.report.jsonl import JsonlSink
from megatron_gvpo.report.names import METRICS_FILE
from megatron_gvpo.report.wandb_sink import WandbSink


class MetricSink(Protocol):
    """Takes the rows of a run, one a step; `report.names` says what is in them."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class RunLog:
    """All sinks of a run, for its rank 0. A context manager: what was written is whole when it closes.

    resume_step: the step of the checkpoint that the run resumes from; None for a new run.
    """

    def __init__(
        self, run_dir: str | Path, config: Config, *, resume_step: int | None = None, console: Console | None = None
    ) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks: list[MetricSink] = [JsonlSink(run_dir / METRICS_FILE, resume_step=resume_step)]
        log = config.log
        if log.wandb != "off":
            settings = config.model_dump(mode="json")
            teachers = (settings["teacher"], *settings["teacher"]["by_domain"].values())
            for section in (settings["rollout"], *teachers):
                section["servers"]["api_key"] = ""  # wandb keeps for ever
            resume = resume_step is not None
            self._sinks.append(WandbSink(run_dir, log.wandb, project=log.wandb_project, config=settings, resume=resume))
        self._console = ConsoleSink(config.train.steps, start_step=resume_step or 0, console=console)
        self._sinks.append(self._console)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's row. Call it once a step, also for step 0, the evaluation before training."""
        for sink in self._sinks:
            sink.write(step, metrics)

    @property
    def console(self) -> Console:
        """The terminal that the progress bar is on: what is printed here goes above the bar."""
        return self._console.console

    def close(self) -> None:
        with ExitStack() as stack:  # one that fails must not keep the others open
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
