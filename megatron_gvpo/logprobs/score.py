"""The loss sum_t c_t logprob_t with coefficients c_t that are known before the forward pass.

Score-function objectives (GVPO arXiv 2504.19599, GVPO++ arXiv 2609.21432, on-policy distillation, RLOO) know
dLoss/dlogprob of every token beforehand. The gradients of hidden states and weight can then be formed in the forward
pass, while a chunk's logits are at hand: three matmuls, as in a head that keeps its logits, where recomputation takes
four. Backward only hands them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gvpo.logprobs.row_op import Pass, ScoreOp
from megatron_gvpo.logprobs.rows import Chunking, block_rows, rows_with_targets, spans
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.source import HeadSource
from megatron_gvpo.logprobs.support import Support
from megatron_gvpo.logprobs.token import target_op
from megatron_gvpo.logprobs.weight_grad import WeightGrad, announce, resolve


class ScoreLoss(NamedTuple):
    """loss: sum over positions of coefficient * logprob, a scalar with grad. logprobs, entropy: [T], without grad."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None = None


def linear_score_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    coefficients: Tensor,
    shard: VocabShard,
    *,
    scale: float | Tensor = 1.0,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    sequence_parallel: bool = False,
    support: Support | None = None,
    weight_grad: WeightGrad = "auto",
) -> ScoreLoss:
    """sum_t coefficients_t * logprob_t, its gradients formed in this very call.

    Shapes as in `linear_token_logprobs`; coefficients: [T], ignored where the target is -1. `scale` is the gradient that
    will arrive at `loss` in backward (1 / denominator, micro-batches, the loss scale ...): with `weight_grad`
    "main_grad" or "grad" the weight's gradient, times `scale`, is added to that buffer NOW, so that no second buffer of
    the weight's size exists, and backward refuses any other gradient (RuntimeError; on CUDA a device-side assertion).
    With "return" the gradients wait for backward and any gradient may arrive. "auto": `main_grad` where Megatron's
    buffer and flag are there, else "return". Without grad mode nothing is added anywhere.
    """
    source = HeadSource(shard, hidden, weight, bias, sequence_parallel, resolve(weight_grad, weight))
    rows = rows_with_targets(targets, shard.size, source.total, temperature)
    if coefficients.shape != targets.shape:
        raise ValueError(f"coefficients must have shape {list(targets.shape)}, not {list(coefficients.shape)}")
    op = target_op(shard, targets, rows, entropy, support)
    return score_loss(Pass(source, op, rows, Chunking(chunk_tokens, memory_budget)), coefficients, scale)


def score_loss(todo: Pass, coefficients_T: Tensor, scale: float | Tensor) -> ScoreLoss:
    """`linear_score_loss` for any operation whose first output is a log-prob."""
    assert isinstance(todo.source, HeadSource)
    assert isinstance(todo.op, ScoreOp)
    coefficients_R = todo.rows.take(coefficients_T.detach()).to(todo.source.dtype)
    wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in todo.source.tensors)
    results: Any = _ScoreFunction.apply(_Score(todo, coefficients_R, scale, wanted), *todo.source.tensors)
    return ScoreLoss(*results)


@dataclass(frozen=True)
class _Score:
    todo: Pass
    coefficients_R: Tensor
    scale: float | Tensor
    wanted: tuple[bool, ...]

    def run(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Results [R] and the gradients of the source's tensors, each times `scale`."""
        todo = self.todo
        source, op, rows, step = todo.source, todo.op, todo.rows, todo.step
        assert isinstance(op, ScoreOp)
        reader = source.open(rows, step, self.wanted)
        scaled_R = rows.divided(self.coefficients_R * self.scale)
        # A single rank needs no collective between a row's sum and its gradient: it does both while the row is in cache.
        piece = step if source.shard.world > 1 else block_rows(source.shard.valid, source.device)
        outputs: list[tuple[Tensor, ...]] = []
        for a, b in spans(rows.count, step):
            z_CV = reader.chunk(a, b)
            for i, j in spans(b - a, piece):
                partial_BN = op.partial(z_CV[i:j], a + i)
                finished = op.finish(partial_BN, a + i)
                outputs.append(finished.outputs)
                if any(self.wanted):
                    scaled_B = scaled_R[a + i : a + j]
                    op.score_gradient_(z_CV[i:j], a + i, partial_BN, finished.state_RS, scaled_B)
            if any(self.wanted):
                reader.backward(a, b, z_CV)
        if not outputs:
            outputs = [op.finish(op.partial(reader.chunk(0, 0), 0), 0).outputs]
        results = tuple(torch.cat(pieces) for pieces in zip(*outputs, strict=True))
        return results, reader.gradients() if any(self.wanted) else (None,) * len(self.wanted)


class _ScoreFunction(torch.autograd.Function):
    """Forward forms the gradients; backward hands them on."""

    @staticmethod
    def forward(ctx: Any, score: _Score, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        source = score.todo.source
        assert isinstance(source, HeadSource)
        with torch.autocast(source.device.type, enabled=False):
            results_R, gradients = score.run()
        # A coefficient of 0 times a log-prob of -inf (a banned token) is 0 here, as it is in the gradient.
        terms_R = torch.where(score.coefficients_R == 0, 0.0, score.coefficients_R * results_R[0])
        loss = terms_R.sum()
        ctx.mode = source.weight_grad if score.wanted[1] else "return"
        ctx.parameter = None if ctx.mode == "return" else source.parameter
        ctx.scale = score.scale
        ctx.save_for_backward(*gradients)
        results = tuple(score.todo.rows.put(result_R) for result_R in results_R)
        ctx.mark_non_differentiable(*results)
        ctx.set_materialize_grads(False)
        return (loss, *results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator makes ctx position-only
        ctx: Any, grad_loss: Tensor | None, *_: Tensor | None
    ) -> tuple[Any, ...]:
        if grad_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.parameter is not None:
            _check_scale(grad_loss, ctx.scale)
            announce(ctx.parameter, ctx.mode)
        ratio = grad_loss / ctx.scale
        if not ratio.is_cuda and bool(ratio == 1):  # on a GPU, asking costs more than multiplying
            return (None, *ctx.saved_tensors)
        return (None, *(None if g is None else g * ratio.to(g.dtype) for g in ctx.saved_tensors))


def _check_scale(grad_loss: Tensor, scale: float | Tensor) -> None:
    """The weight's gradient was formed for `scale`: any other would leave it wrong without a sign."""
    expected = torch.as_tensor(scale, device=grad_loss.device, dtype=grad_loss.dtype)
    same = torch.isclose(grad_loss, expected, rtol=1e-4, atol=0.0)
    if grad_loss.is_cuda:
        torch._assert_async(same)  # pyright: ignore[reportPrivateImportUsage] no wait for the device; a mismatch is reported by it
    elif not bool(same):
        raise RuntimeError(
            f"the gradient that arrived at the score loss is {float(grad_loss)}, but scale={float(scale)} was announced: "
            "the weight's gradient is already in its buffer at that scale; pass the final loss scale"
        )
