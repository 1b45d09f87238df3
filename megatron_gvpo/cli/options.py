"""Arguments that several commands share."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_gvpo.config import Config, ConfigError

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="the run's YAML file", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change one key of the config; may be given often"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else, on stdout")]
NoFiles = Annotated[bool, typer.Option("--no-files", help="do not ask whether data, weights and programs exist on this machine")]


def checked_config(path: Path, sets: Sequence[str] | None, *, files: bool = True, quiet: bool = False) -> Config:
    """The config, checked; its warnings go to stderr unless `quiet`. Raises ConfigError."""
    from megatron_gvpo.config.check import check_config
    from megatron_gvpo.config.load import read_config

    config, source = read_config(path, sets or ())
    findings = check_config(config, source, files=files)
    if errors := [finding.line for finding in findings if finding.severity == "error"]:
        raise ConfigError(errors)
    for finding in findings if not quiet else ():
        print(finding.line, file=sys.stderr)
    return config


def print_json(value: Any) -> None:
    """JSON on stdout. It has no word for NaN or infinity: they become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
