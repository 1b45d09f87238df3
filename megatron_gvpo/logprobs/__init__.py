"""The log-prob engine: what objectives need from a vocabulary that is sharded over tensor-parallel ranks.

Imports torch only. See docs/logprobs.md for the layout, the memory and the measured speed.
"""

from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.token import TokenLogprobs, linear_token_logprobs, token_logprobs

__all__ = ["TokenLogprobs", "VocabShard", "linear_token_logprobs", "token_logprobs"]
