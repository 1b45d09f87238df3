"""How many tokens a micro-batch is padded to: one function of recipe, tensor, sequence and context parallelism.

Torch-free: the config check, `plan` and the trainer ask the same function.
"""

from __future__ import annotations

import math

from megatron_gvpo.config.schema import ParallelSection, PrecisionSection

FP8_MULTIPLE = {"none": 1, "delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""FP8 matrix products want both inner sizes to be multiples of this (Transformer Engine's documentation; MXFP8 and block
scaling quantise in blocks of 32 and 128). The weight gradient's inner size is the number of tokens."""


def token_multiple(recipe: str, tensor: int = 1, sequence: bool = False, context: int = 1) -> int:
    """What the padded tokens of a micro-batch are a multiple of, before sequence and context parallelism split them.

    After both splits every rank holds a multiple of the recipe's size, so that the matrix products of the gathered sequence
    and of each rank's own part are aligned alike. Context parallelism also wants 2 CP equal chunks of each sequence (zigzag).
    """
    shards = tensor if sequence else 1
    chunks = 2 * context if context > 1 else 1
    return math.lcm(FP8_MULTIPLE[recipe] * shards * context, shards * chunks)


def padded_tokens(tokens: int, recipe: str, tensor: int = 1, sequence: bool = False, context: int = 1) -> int:
    """`tokens` rounded up to `token_multiple`; 0 stays 0. ValueError for a negative number or an unknown recipe."""
    if recipe not in FP8_MULTIPLE:
        raise ValueError(f"precision.fp8 {recipe!r} is none of {', '.join(FP8_MULTIPLE)}")
    if tokens < 0:
        raise ValueError(f"{tokens} tokens cannot be padded")
    multiple = token_multiple(recipe, tensor, sequence, context)
    return -(-tokens // multiple) * multiple


def run_multiple(precision: PrecisionSection, parallel: ParallelSection) -> int:
    """`token_multiple` of a run."""
    return token_multiple(precision.fp8, parallel.tensor, parallel.sequence and parallel.tensor > 1, parallel.context)
