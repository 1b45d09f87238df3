"""`megatron-gvpo serve`: a config's servers on this machine, until a signal comes or one of them dies."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Literal

from megatron_gvpo.config import Config, ConfigError
from megatron_gvpo.rollout.endpoint import Endpoint
from megatron_gvpo.rollout.errors import ServerError
from megatron_gvpo.rollout.server import LOOPBACK, LocalServer

_LOOK_EVERY_S = 0.5


def serve(
    config: Config,
    role: Literal["student", "teacher"],
    log_dir: str | Path,
    announce: Callable[[Sequence[Endpoint], str], None],
    host: str = LOOPBACK,
) -> None:
    """Start the role's servers at the address `host` of this machine, call `announce(endpoints, key)` when all answer, and return
    on SIGTERM or SIGINT.

    All share one key, the configured one or a fresh one, because a config that uses them by `urls` names one. Raises ConfigError
    for a role that the config gives no model, ServerError (naming the log) when a server does not start or dies.
    """
    path = config.model.path if role == "student" else config.teacher.path
    if not path:
        raise ConfigError([f"{'model' if role == 'student' else 'teacher'}.path: is missing: there is nothing to serve"])
    servers = (config.rollout if role == "student" else config.teacher).servers
    servers = servers.model_copy(update={"api_key": servers.api_key or secrets.token_hex(24)})
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ExitStack() as stack:
            started: list[LocalServer] = []
            for index in range(servers.count):
                server = LocalServer(
                    path,
                    servers,
                    run_dir=log_dir,
                    max_length=config.model.max_length,
                    name=f"{role}{index}",
                    seed=config.train.seed + index,
                    first_gpu=index * servers.tensor,
                    host=host,
                )
                stack.callback(server.stop)
                server.start()
                started.append(server)
            for server in started:
                server.wait_ready()
            announce([server.endpoint for server in started], servers.api_key)
            while not stopped:
                for server in started:
                    if not server.alive():
                        raise ServerError(server.name, f"has ended; its log is {server.log_path}")
                time.sleep(_LOOK_EVERY_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
