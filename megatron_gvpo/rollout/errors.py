"""What can go wrong between this run and its servers. Every message is one line and names the server or the sample."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """Any failure of the rollout side."""


class RequestRefused(RolloutError, ValueError):
    """The request was not sent: it could not succeed, or would have killed the server."""


class ServerError(RolloutError):
    """A server failed. `server` is its name and address."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(f"{server}: {why}")
        self.server = server
        self.why = why


class BadAnswer(ServerError):
    """The server answered, with something else than was asked for (4xx, a short list, an unknown finish reason)."""


class Transient(ServerError):
    """A failure that may pass: no connection, a broken one, 429, 500, 502, 503, 504. These are tried again, within limits."""


class TimeLimit(ServerError):
    """The server did not answer within the time limit."""


class StartError(ServerError):
    """A local server did not become ready."""
