"""Fixtures of this folder."""

from tests.servers import sglang_server, tiny_models

__all__ = ["sglang_server", "tiny_models"]
