"""The good run of the config tests, for plans and scripts."""

from tests.config.conftest import run

__all__ = ["run"]
