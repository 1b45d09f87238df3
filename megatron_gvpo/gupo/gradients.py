"""Each group's gradient of the output layer under each posterior sample, streamed: only running sums over samples are kept.

Legend: M samples, T tokens, R rows that are worked on together, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.gupo.head import GroupSpan, Head, HeadTokens, normalise
from megatron_gvpo.gupo.posterior import PosteriorHeads
from megatron_gvpo.gupo.rows import RowSet
from megatron_gvpo.logprobs.matmul import add_weight_gradient_, operand
from megatron_gvpo.logprobs.rows import spans


@dataclass(frozen=True)
class SampleLogprobs:
    """Under each sample: log-normalisers [M, T] and log-probs of the targets [M, T], in the compute dtype."""

    normalisers_MT: Tensor
    logprobs_MT: Tensor


def sample_logprobs(head: Head, tokens: HeadTokens, posterior: PosteriorHeads, budget_bytes: int | None = None) -> SampleLogprobs:
    """One product of the head's size per sample."""
    shape = (posterior.samples, len(tokens))
    normalisers_MT = torch.zeros(shape, dtype=head.dtype, device=head.device)
    logprobs_MT = torch.zeros_like(normalisers_MT)
    size = head.tokens_per_chunk(budget_bytes)
    scratch_CV = torch.empty(min(size, len(tokens)), head.valid, dtype=head.dtype, device=head.device)
    everything = RowSet(0, head.valid)
    bias_V = None if head.bias_V is None else head.bias_V[: head.valid]
    for m in range(posterior.samples):
        weight_VH = posterior.rows(m, everything)
        for at, hidden_CH, targets_C in tokens.chunks(size, head.device):
            z_CV = head.logits_into(scratch_CV[: targets_C.numel()], hidden_CH, weight_VH, bias_V)
            normalisers_MT[m, at], logprobs_MT[m, at] = normalise(z_CV, targets_C, head.shard)
    return SampleLogprobs(normalisers_MT, logprobs_MT)


@dataclass(frozen=True)
class Moments:
    """One group's gradient on R rows over the samples: mean and variance (1/(M-1)), [R, H] each; scratch of the iteration."""

    span: GroupSpan
    mean_RH: Tensor
    variance_RH: Tensor


@dataclass(frozen=True)
class _Piece:
    """Tokens `at` of one group. place_C1, here_C: where their targets lie among the rows that are worked on, if there are any."""

    at: slice
    hidden_CH: Tensor
    targets_C: Tensor
    place_C1: Tensor | None
    here_C: Tensor | None


class GroupGradients:
    """g_b^(m) = sum over the group's tokens of coefficient_t (onehot - softmax(z_t^(m))) h_t^T, for blocks of rows.

    coefficients_MT: d(B Loss)/d log-prob of each token under each sample (M of them, or one that is held for all).
    normalisers_MT: the samples' log-normalisers. Without them the rows have to be the whole shard, and are normalised here: one
    product less, for coefficients that did not need the samples' log-probs.
    """

    def __init__(
        self,
        head: Head,
        tokens: HeadTokens,
        posterior: PosteriorHeads,
        coefficients_MT: Tensor,
        normalisers_MT: Tensor | None,
        budget_bytes: int | None = None,
    ) -> None:
        self._head = head
        self._tokens = tokens
        self._posterior = posterior
        # The gradient of a log-prob by a logit carries 1/temperature.
        self._coefficients_MT = (coefficients_MT / head.temperature).to(head.device, head.dtype)
        self._normalisers_MT = normalisers_MT
        self._chunk = head.tokens_per_chunk(budget_bytes)

    def moments(self, rows: RowSet) -> Iterator[Moments]:
        """The moments of every group of this rank on these rows, one group after the other; each is overwritten by the next."""
        head, posterior = self._head, self._posterior
        weights = [posterior.rows(m, rows) for m in range(posterior.samples)]
        bias_R = None if head.bias_V is None else rows.take(head.bias_V[: head.valid])
        longest = max((span.stop - span.start for span in self._tokens.groups), default=0)
        scratch_CR = torch.empty(min(self._chunk, longest), len(rows), dtype=head.dtype, device=head.device)
        first, gradient, total, squares = (
            torch.empty(len(rows), head.hidden_size, dtype=head.dtype, device=head.device) for _ in range(4)
        )
        for span in self._tokens.groups:
            pieces = self._pieces(span, rows)
            for m, weight_RH in enumerate(weights):
                self._gradient_into(gradient if m else first, pieces, m, weight_RH, bias_R, scratch_CR)
                if m == 0:
                    total.zero_()
                    squares.zero_()
                else:
                    # Sums of differences to the first sample: the squares of the values themselves would cancel.
                    gradient -= first
                    total += gradient
                    squares.addcmul_(gradient, gradient)
            count = posterior.samples
            squares.addcmul_(total, total, value=-1.0 / count).clamp_(min=0.0).mul_(1.0 / (count - 1))
            first.add_(total, alpha=1.0 / count)
            yield Moments(span, first, squares)

    def _pieces(self, span: GroupSpan, rows: RowSet) -> list[_Piece]:
        """A group's tokens by chunks, on the layer's device: made once for all samples."""
        pieces = []
        for a, b in spans(span.stop - span.start, self._chunk):
            at = slice(span.start + a, span.start + b)
            hidden_CH, targets_C = self._tokens.chunk(at.start, at.stop, self._head.device)
            place_C1 = here_C = None
            if len(rows):
                place_C, here_C = rows.locate(*self._head.shard.local(targets_C))
                place_C1 = place_C[:, None]
            pieces.append(_Piece(at, hidden_CH, targets_C, place_C1, here_C))
        return pieces

    def _gradient_into(
        self,
        out_RH: Tensor,
        pieces: list[_Piece],
        m: int,
        weight_RH: Tensor,
        bias_R: Tensor | None,
        scratch_CR: Tensor,
    ) -> None:
        head, fresh = self._head, True
        coefficients_T = self._coefficients_MT[0 if self._coefficients_MT.shape[0] == 1 else m]
        for piece in pieces:
            coefficient_C = coefficients_T[piece.at]
            z_CR = head.logits_into(scratch_CR[: piece.targets_C.numel()], piece.hidden_CH, weight_RH, bias_R)
            if self._normalisers_MT is None:
                normaliser_C, _ = normalise(z_CR, piece.targets_C, head.shard)
            else:
                normaliser_C = self._normalisers_MT[m, piece.at]
            d_CR = z_CR.sub_(normaliser_C[:, None]).exp_().mul_(-coefficient_C[:, None])
            if piece.place_C1 is not None and piece.here_C is not None:
                d_CR.scatter_add_(1, piece.place_C1, (coefficient_C * piece.here_C)[:, None])
            add_weight_gradient_(out_RH, operand(d_CR, weight_RH), piece.hidden_CH, fresh)
            fresh = False
