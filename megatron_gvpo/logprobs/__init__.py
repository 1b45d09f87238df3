"""The log-prob engine: what objectives need from a vocabulary that is sharded over tensor-parallel ranks.

Imports torch only. See docs/logprobs.md for the layout, the memory and the measured speed.
"""

from megatron_gvpo.logprobs.score import ScoreLoss, linear_score_loss
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.token import TokenLogprobs, linear_token_logprobs, token_logprobs

__all__ = ["ScoreLoss", "TokenLogprobs", "VocabShard", "linear_score_loss", "linear_token_logprobs", "token_logprobs"]
