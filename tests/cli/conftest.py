"""The good run of the config tests, for the command line."""

from tests.config.conftest import run

__all__ = ["run"]
