"""The one room that imports Megatron-Core. Importing this package itself imports neither torch nor Megatron."""
