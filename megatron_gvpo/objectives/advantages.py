"""Group advantages, [N] float64: every group by its own size, and exactly 0 in a group of equal rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.objectives.batch import SequenceTable

STD_EPS = 1e-6


def centred_N(sequences: SequenceTable, rewards_N: Tensor) -> Tensor:
    """R_i - mean of the group."""
    return rewards_N - sequences.group_mean_N(rewards_N)


def standardised_N(sequences: SequenceTable, rewards_N: Tensor) -> Tensor:
    """(R_i - mean) / (std + 1e-6), std with k-1: groups have at least two members."""
    centre_N = centred_N(sequences, rewards_N)
    k_N = sequences.group_size_N()
    variance_N = sequences.group_sum_G(centre_N.square())[sequences.group_N] / (k_N - 1)
    return centre_N / (variance_N.sqrt() + STD_EPS)


def leave_one_out_N(sequences: SequenceTable, rewards_N: Tensor) -> Tensor:
    """R_i - mean of the others = (R_i - mean) k/(k-1): groups have at least two members."""
    k_N = sequences.group_size_N()
    return centred_N(sequences, rewards_N) * k_N / (k_N - 1)


def reward_metrics(sequences: SequenceTable, rewards_N: Tensor) -> dict[str, float]:
    """Groups of the batch, and those whose rewards are all equal (they teach a reward-driven objective nothing)."""
    flat_N = sequences.group_is_flat_N(rewards_N)
    flat_G = torch.zeros(sequences.groups, dtype=torch.bool).index_fill(0, sequences.group_N[flat_N].cpu(), True)
    return {"groups": float(sequences.groups), "flat_groups": float(flat_G.sum())}
