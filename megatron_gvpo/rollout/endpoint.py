"""Where a server answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """A server's address and its key. `name` is what errors call it."""

    url: str
    api_key: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.url})" if self.name else self.url
