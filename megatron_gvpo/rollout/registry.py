"""How a run finds servers that other machines of its job start: each writes its addresses and key to a folder all of them see."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout.endpoint import Endpoint
from megatron_gvpo.rollout.errors import StartError

_LOOK_EVERY_S = 0.5


def register(folder: Path, endpoints: Sequence[Endpoint]) -> Path:
    """Write the addresses of this machine's servers, whole or not at all; only this user may read the file: it holds the key."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{socket.gethostname()}-{os.getpid()}.json"
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump([{"url": endpoint.url, "api_key": endpoint.api_key} for endpoint in endpoints], file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return path


def registered_servers(servers: ServersSection, name: str) -> list[Endpoint]:
    """Wait until all of `servers.nodes` machines have registered; StartError past `start_timeout_s`, with how many have."""
    folder, deadline = Path(servers.registry), time.monotonic() + servers.start_timeout_s
    while True:
        files = sorted(folder.glob("*.json"))
        if len(files) >= servers.nodes:
            entries = [entry for file in files for entry in json.loads(file.read_text(encoding="utf-8"))]
            return [Endpoint(entry["url"], entry["api_key"], f"{name}{i}") for i, entry in enumerate(entries)]
        if time.monotonic() > deadline:
            raise StartError(
                f"{name}s",
                f"{len(files)} of {servers.nodes} machines registered in {folder} within {servers.start_timeout_s:g} s; "
                "the logs of those that serve say why",
            )
        time.sleep(_LOOK_EVERY_S)
