"""An output layer at one micro-batch's positions: what an objective is given instead of logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_gvpo.logprobs.divergence import Teacher, linear_divergence
from megatron_gvpo.logprobs.score import ScoreLoss, linear_score_loss
from megatron_gvpo.logprobs.shard import VocabShard
from megatron_gvpo.logprobs.support import Support
from megatron_gvpo.logprobs.token import TokenLogprobs, linear_token_logprobs
from megatron_gvpo.logprobs.topk import TopK, linear_top_k
from megatron_gvpo.logprobs.weight_grad import WeightGrad


@dataclass(frozen=True)
class Head:
    """hidden [T, H] ([T/W, H] with `sequence_parallel`), weight [shard.width, H], bias [shard.width] or None.

    Each method computes its logits anew by chunks and holds none: asking twice costs twice. All arguments and results
    are those of the function of the same name with `linear_` before it.
    """

    hidden: Tensor
    weight: Tensor
    shard: VocabShard
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0
    sequence_parallel: bool = False
    chunk_tokens: int | None = None
    memory_budget: int | None = None
    weight_grad: WeightGrad = "auto"

    def token_logprobs(self, targets: Tensor, *, entropy: bool = False, support: Support | None = None) -> TokenLogprobs:
        return linear_token_logprobs(
            self.hidden,
            self.weight,
            targets,
            self.shard,
            bias=self.bias,
            temperature=self.temperature,
            entropy=entropy,
            chunk_tokens=self.chunk_tokens,
            memory_budget=self.memory_budget,
            sequence_parallel=self.sequence_parallel,
            support=support,
            weight_grad=self.weight_grad,
        )

    def score_loss(
        self,
        targets: Tensor,
        coefficients: Tensor,
        *,
        scale: float | Tensor = 1.0,
        entropy: bool = False,
        support: Support | None = None,
    ) -> ScoreLoss:
        return linear_score_loss(
            self.hidden,
            self.weight,
            targets,
            coefficients,
            self.shard,
            scale=scale,
            bias=self.bias,
            temperature=self.temperature,
            entropy=entropy,
            chunk_tokens=self.chunk_tokens,
            memory_budget=self.memory_budget,
            sequence_parallel=self.sequence_parallel,
            support=support,
            weight_grad=self.weight_grad,
        )

    def divergence(self, kind: str, teacher: Teacher, *, beta: float = 0.5, active: Tensor | None = None) -> Tensor:
        return linear_divergence(
            kind,
            self.hidden,
            self.weight,
            teacher,
            self.shard,
            bias=self.bias,
            temperature=self.temperature,
            beta=beta,
            chunk_tokens=self.chunk_tokens,
            memory_budget=self.memory_budget,
            sequence_parallel=self.sequence_parallel,
            weight_grad=self.weight_grad,
            active=active,
        )

    def top_k(self, k: int) -> TopK:
        return linear_top_k(
            self.hidden,
            self.weight,
            k,
            self.shard,
            bias=self.bias,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            memory_budget=self.memory_budget,
            sequence_parallel=self.sequence_parallel,
        )
