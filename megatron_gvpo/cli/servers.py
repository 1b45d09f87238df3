"""The command that starts servers: serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_gvpo.cli.app import app
from megatron_gvpo.cli.options import ConfigFile, Json, Sets, checked_config, print_json

if TYPE_CHECKING:
    from megatron_gvpo.rollout.endpoint import Endpoint


@app.command()
def serve(
    config: ConfigFile,
    sets: Sets = None,
    teacher: Annotated[bool, typer.Option("--teacher", help="serve the teacher in place of the student")] = False,
    logs: Annotated[Path, typer.Option("--logs", help="folder of the servers' logs")] = Path("runs/serve"),
    host: Annotated[
        str,
        typer.Option("--host", help="address of this machine at which the servers listen"),
    ] = "127.0.0.1",
    registry: Annotated[
        Path | None, typer.Option("--register", metavar="FOLDER", help="write the addresses there, for servers.registry")
    ] = None,
    json: Json = False,
) -> None:
    """Start CONFIG's SGLang servers on this machine, print their addresses and key, and stop them on Ctrl-C."""
    from megatron_gvpo.launch.serve import serve as serve_until_stopped
    from megatron_gvpo.rollout.registry import register

    def announce(endpoints: Sequence[Endpoint], key: str) -> None:
        urls = [endpoint.url for endpoint in endpoints]
        if registry is not None:
            print(f"ready: {', '.join(urls)}; registered in {register(registry, endpoints)}", flush=True)
            return
        if json:
            print_json({"urls": urls, "api_key": key})
        else:
            print(f"ready. In another config: servers: {{launch: none, urls: [{', '.join(urls)}], api_key: {key}}}", flush=True)

    serve_until_stopped(checked_config(config, sets), "teacher" if teacher else "student", logs, announce, host)
