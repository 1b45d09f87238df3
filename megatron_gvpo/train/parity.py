"""Trainer against server: the same weights must give the same log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.mcore.comm import RankComm
from megatron_gvpo.objectives.batch import TokenTable, kept_samples
from megatron_gvpo.train.learn import Learner


def trainer_logprobs(learner: Learner, samples: Sequence[Sample]) -> tuple[Tensor, TokenTable]:
    """[T] float64, this rank's share of the trainer's log-probs of the samples' tokens, and those tokens."""
    kept, _ = kept_samples(samples, 1)
    share = learner.cut(samples, kept)
    return learner.engine.logprobs(share), share.tokens


def logprob_difference(trainer_T: Tensor, server_T: Tensor, comm: RankComm) -> dict[str, float]:
    """Mean and largest |trainer - server| over the tokens of all ranks, in nats."""
    difference_T = (trainer_T - server_T).abs()
    total, count = comm.sum(torch.stack([difference_T.sum(), torch.tensor(float(difference_T.numel())).double()])).tolist()
    return {"logprob_diff/mean": total / max(count, 1.0), "logprob_diff/max": comm.max(difference_T)}
