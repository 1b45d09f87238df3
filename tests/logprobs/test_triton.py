"""The Triton kernels against the torch path, under Triton's interpreter on a CPU, forward and backward.

Why: a GPU takes the kernels, everything else here takes the torch path. Does not cover what a GPU's compiler makes of them.
Runs in a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ranks import run_ranks


def _both_paths(rank: int, world: int) -> list[tuple[str, float]]:
    from megatron_gvpo import logprobs as lp
    from megatron_gvpo.logprobs import kernels

    torch.manual_seed(0)
    assert kernels.usable(torch.zeros(1, 1)), "the kernels are not in use"
    errors: list[tuple[str, float]] = []

    def results(call: str, width: int, vocab: int, extreme: bool, dtype: torch.dtype, use: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(6, width, generator=generator) * (1e4 if extreme else 1.0)
        if extreme:
            logits[0, : min(3, vocab - 1)] = -torch.inf
        hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(width, 8, generator=generator)
        leaves = [x.to(dtype).requires_grad_() for x in (logits, hidden, weight)]
        targets = torch.randint(0, vocab, (6,), generator=generator)
        targets[4] = -1
        coefficients = torch.randn(6, generator=generator)
        shard = lp.VocabShard(0, width, vocab)
        # In the torch path's turn the kernels refuse.
        kept = kernels.usable
        if not use:
            kernels.usable = lambda z: False
        try:
            if call == "logits":
                found = lp.token_logprobs(leaves[0], targets, shard, entropy=True, temperature=0.7, chunk_tokens=4)
            elif call == "linear":
                found = lp.linear_token_logprobs(leaves[1], leaves[2], targets, shard, entropy=True, chunk_tokens=4)
            else:
                score = lp.linear_score_loss(leaves[1], leaves[2], targets, coefficients, shard, entropy=True)
                score.loss.backward()
                assert score.entropy is not None
                outputs = [score.logprobs, score.entropy]
            if call != "score":
                assert found.entropy is not None
                ((found.logprobs + 0.5 * found.entropy) * coefficients).sum().backward()
                outputs = [found.logprobs, found.entropy]
        finally:
            kernels.usable = kept
        return [*outputs, *(x.grad for x in leaves if x.grad is not None)]

    for call in ("logits", "linear", "score"):
        for width, vocab in ((16, 11), (4096, 4096), (5000, 4999)):
            for extreme in (False, True) if call == "logits" else (False,):
                for dtype in (torch.float32, torch.bfloat16):
                    pair = [results(call, width, vocab, extreme, dtype, use) for use in (True, False)]
                    for got, want in zip(*pair, strict=True):
                        scale = max(1.0, float(want.detach().float().abs().max()))
                        difference = float((got - want).detach().float().abs().max()) / scale
                        name = f"{call} {width} {vocab} {extreme} {dtype}"
                        errors.append((name, difference if difference == difference else float("inf")))
    return errors


def test_kernels_agree_with_the_torch_path() -> None:
    """Within 1e-5 (a bfloat16 step where gradients are bfloat16), for one block and several, padding, banned ids, 1e4."""
    (errors,) = run_ranks(_both_paths, 1, env={"TRITON_INTERPRET": "1"}, init=False, timeout=120)
    assert len(errors) > 40
    bad = [(name, e) for name, e in errors if e > (1e-5 if "float32" in name else 2**-7)]
    assert not bad, bad
