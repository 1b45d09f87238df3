"""Truncated importance weights: samples of one policy, used for another."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.config.objectives import ImportanceConfig
from megatron_gvpo.objectives.batch import Batch


def importance_weights_T(config: ImportanceConfig, batch: Batch, towards: str) -> Tensor | None:
    """[T] float64, detached: min(p_towards / p_rollout, tis_cap) of each local token, or None with `tis: none`.

    towards: the signal to which samples of the server's policy are corrected, `old_logprobs` where a ratio to `old` follows,
    `logprobs` where none does. `token` weighs each token by its own ratio (and leaves the states' mismatch); `sequence` gives
    every token the ratio of its whole response.
    """
    if config.tis == "none":
        return None
    if config.tis == "token":
        log_ratio_T = batch.tokens.signal(towards) - batch.tokens.signal("rollout_logprobs")
    else:
        log_ratio_N = batch.sequences.sum_of(towards) - batch.sequences.sum_of("rollout_logprobs")
        log_ratio_T = log_ratio_N[batch.tokens.sequence_T]
    # Capped before exp(), which would overflow on the ratios that the cap is there for.
    cap = torch.tensor(config.tis_cap, dtype=log_ratio_T.dtype, device=log_ratio_T.device)
    return torch.minimum(log_ratio_T, cap.log()).exp()
