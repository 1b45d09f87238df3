"""The typed YAML config. Imports neither torch nor megatron."""

from megatron_gvpo.config.schema import Config

__all__ = ["Config"]
