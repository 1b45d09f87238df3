"""The command that trains: train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_gvpo.cli.app import app
from megatron_gvpo.cli.options import ConfigFile, Sets, checked_config
from megatron_gvpo.config import ConfigError


@app.command()
def train(
    config: ConfigFile,
    sets: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the run directory's newest checkpoint")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="delete what the run directory holds, and start anew")] = False,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE_OR_DIR", help="train on these recorded samples; no server is started"),
    ] = None,
    stop_after: Annotated[int | None, typer.Option("--stop-after", min=1, help="save and leave with 85 after this step")] = None,
) -> int:
    """Train CONFIG. Starts its ranks on this machine; under srun or torchrun this process is one of them."""
    from megatron_gvpo.launch.local import is_rank
    from megatron_gvpo.train.main import train as run

    one_of_many = is_rank(os.environ)
    # Every rank reads the config again; what there is to warn of has been said by then.
    checked = checked_config(config, sets, quiet=one_of_many)
    if replay is not None and not replay.exists():
        raise ConfigError([f"--replay: {replay}: no such file or directory"])
    if checked.parallel.nodes > 1 and not one_of_many:
        raise ConfigError(
            [f"{config}: parallel.nodes: {checked.parallel.nodes} machines are started by srun (see `sbatch`) or torchrun"]
        )
    return run(checked, config, overrides=sets or (), resume=resume, fresh=fresh, replay=replay, stop_after=stop_after)
