"""The log-prob engine: what objectives need from a vocabulary that is sharded over tensor-parallel ranks.

Imports torch only. See docs/logprobs.md for the layout, the memory and the measured speed.
"""

from megatron_gvpo.logprobs.context import (
    packed_zigzag_indices,
    sequence_sums,
    zigzag_indices,
    zigzag_join,
    zigzag_slice,
)
from megatron_gvpo.logprobs.divergence import (
    FullTeacher,
    HiddenTeacher,
    Teacher,
    TopKTeacher,
    divergence,
    linear_divergence,
)
from megatron_gvpo.logprobs.head import Head
from megatron_gvpo.logprobs.score import ScoreLoss, linear_score_loss
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.support import Support
from megatron_gvpo.logprobs.token import TokenLogprobs, linear_token_logprobs, token_logprobs
from megatron_gvpo.logprobs.topk import TopK, argmax, linear_top_k, target_rank, top_k

__all__ = [
    "FullTeacher",
    "Head",
    "HiddenTeacher",
    "ScoreLoss",
    "Support",
    "Teacher",
    "TokenLogprobs",
    "TopK",
    "TopKTeacher",
    "VocabShard",
    "argmax",
    "divergence",
    "linear_divergence",
    "linear_score_loss",
    "linear_token_logprobs",
    "linear_top_k",
    "packed_zigzag_indices",
    "sequence_sums",
    "target_rank",
    "token_logprobs",
    "top_k",
    "zigzag_indices",
    "zigzag_join",
    "zigzag_slice",
]
