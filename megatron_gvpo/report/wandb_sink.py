"""Metrics to Weights & Biases, online or offline (`wandb sync RUN_DIR/wandb/offline-run-*` sends those later)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.report.names import STEP

_ID_FILE = "wandb_run_id"
_START_LIMIT_S = 90.0


class WandbSink:
    """One wandb run for one run directory: its id is kept there, so that a resumed run goes on with the same one.

    wandb's own step is the run's. Rows that a resumed run writes again replace those written offline before; wandb's server
    keeps the first ones, which are the same numbers but for the times.
    """

    def __init__(
        self, run_dir: str | Path, mode: Literal["offline", "online"], *, project: str, config: Mapping[str, Any], resume: bool
    ) -> None:
        import wandb
        from wandb.errors import Error

        run_dir = Path(run_dir)
        id_file = run_dir / _ID_FILE
        if not (resume and id_file.exists()):
            id_file.write_text(secrets.token_hex(4))
        # No console capture and no system statistics: the run directory has the logs, and wandb's threads would compete with
        # the trainer on a small machine.
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=_START_LIMIT_S, x_disable_stats=True, disable_git=True, disable_code=True
        )
        try:
            self._run = wandb.init(
                project=project,
                id=id_file.read_text().strip(),
                name=run_dir.name,
                dir=str(run_dir),
                mode=mode,
                resume="allow",
                config=dict(config),
                settings=settings,
            )
        except Error as error:
            reason = str(error).strip().splitlines()[0]
            raise DataError(
                f"log.wandb: {mode} does not start: {reason}; run `wandb login`, or set log.wandb to offline"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics}, step=step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # finish() may return before its service process has written the file
