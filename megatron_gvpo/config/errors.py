"""What a config that cannot be used raises."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """The config is wrong. `lines` holds one finished line per problem, for stderr; the exit code is 2."""

    exit_code = 2

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))
