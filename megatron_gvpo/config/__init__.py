"""The typed YAML config. Imports neither torch nor megatron."""

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.load import load_config, read_config
from megatron_gvpo.config.schema import Config

__all__ = ["Config", "ConfigError", "load_config", "read_config"]
