"""The diagonal empirical Fisher of the output layer, streamed over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.gupo.head import Head, HeadTokens, normalise
from megatron_gvpo.logprobs.matmul import add_weight_gradient_, operand
from megatron_gvpo.logprobs.rows import spans
from megatron_gvpo.objectives.base import Comm

# Elements of the Fisher that one reduction carries.
_REDUCED_AT_ONCE = 1 << 24


def diagonal_fisher(
    head: Head, tokens: HeadTokens, total_tokens: int, comm: Comm, budget_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """(F [V, H], log-probs [T]) of this rank's shard of the layer; arXiv 2608.17411, the Fisher of the posterior.

        F[v, h] = (1/N) sum_t s_tv^2 h_th^2        s_t = d log pi(y_t) / d logit = (onehot(y_t) - softmax) / temperature

    The sum runs over the tokens of all data- and context-parallel ranks, N is their number (`total_tokens`). Two products of
    the head's size. F is in the compute dtype; log-probs are those of the unperturbed layer.
    """
    fisher_VH = torch.zeros(head.valid, head.hidden_size, dtype=head.dtype, device=head.device)
    logprobs_T = torch.zeros(len(tokens), dtype=head.dtype, device=head.device)
    size = head.tokens_per_chunk(budget_bytes)
    scratch_CV = torch.empty(min(size, len(tokens)), head.valid, dtype=head.dtype, device=head.device)
    weight_VH = head.rows()
    bias_V = None if head.bias_V is None else head.bias_V[: head.valid]
    for at, hidden_CH, targets_C in tokens.chunks(size, head.device):
        z_CV = head.logits_into(scratch_CV[: targets_C.numel()], hidden_CH, weight_VH, bias_V)
        normaliser_C, logprobs_T[at] = normalise(z_CV, targets_C, head.shard)
        # p^2 away from the target, (1 - p)^2 at it.
        square_CV = z_CV.sub_(normaliser_C[:, None]).mul_(2.0).exp_()
        if head.valid:
            column_C, here_C = head.shard.local(targets_C)
            at_target_C = torch.expm1(logprobs_T[at]).square()
            other_C = square_CV.gather(1, column_C[:, None]).squeeze(1)
            square_CV.scatter_(1, column_C[:, None], torch.where(here_C, at_target_C, other_C)[:, None])
        add_weight_gradient_(fisher_VH, operand(square_CV, weight_VH), hidden_CH.square(), fresh=False)
    for a, b in spans(head.valid, max(1, _REDUCED_AT_ONCE // head.hidden_size)):
        fisher_VH[a:b] = comm.sum(fisher_VH[a:b])
    fisher_VH *= 1.0 / (max(total_tokens, 1) * head.temperature**2)
    return fisher_VH, logprobs_T
