"""The command line. Importing it loads neither torch nor megatron: each command imports what it needs when it runs."""

from __future__ import annotations

from megatron_gvpo.cli.app import app, main

__all__ = ["app", "main"]
