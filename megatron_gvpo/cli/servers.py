"""The command that starts servers: serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_gvpo.cli.app import app
from megatron_gvpo.cli.options import ConfigFile, Json, Sets, checked_config, print_json

if TYPE_CHECKING:
    from megatron_gvpo.rollout.server import Endpoint


@app.command()
def serve(
    config: ConfigFile,
    sets: Sets = None,
    teacher: Annotated[bool, typer.Option("--teacher", help="serve the teacher in place of the student")] = False,
    logs: Annotated[Path, typer.Option("--logs", help="folder of the servers' logs")] = Path("runs/serve"),
    json: Json = False,
) -> None:
    """Start CONFIG's SGLang servers on this machine, print their addresses and key, and stop them on Ctrl-C."""
    from megatron_gvpo.launch.serve import serve as serve_until_stopped

    def announce(endpoints: Sequence[Endpoint], key: str) -> None:
        urls = [endpoint.url for endpoint in endpoints]
        if json:
            print_json({"urls": urls, "api_key": key})
        else:
            print(f"ready. In another config: servers: {{launch: none, urls: [{', '.join(urls)}], api_key: {key}}}", flush=True)

    serve_until_stopped(checked_config(config, sets), "teacher" if teacher else "student", logs, announce)
