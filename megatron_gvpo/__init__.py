"""megatron-gvpo: post-training of language models on Megatron-Core.

Importing the package imports nothing heavy; each room (`objectives`, `logprobs`, `mcore`, ...) is imported where it is used.
"""

__version__ = "0.1.0"
