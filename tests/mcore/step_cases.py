"""A small batch, and its loss and full gradient: through the engine at any layout, and through transformers alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from megatron_gvpo.data.samples import Sample

SIZES = (3, 5, 3, 2)  # ragged groups
TEMPERATURE = 1.3

# Every objective that asks for token log-probs alone, with options that make its pieces act.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gvpo": {"beta": 0.2},
    "rloo": {},
    "sft": {},
    "grpo": {"clip_low": 0.1, "clip_high": 0.1},
    "dr_grpo": {"max_response_tokens": 16},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "gvpo_opd": {"length_alpha": 0.5},
    "opd": {"shape": "tanh"},
    "tv_opd": {},
}


def samples(seed: int = 0, vocab: int = 300) -> list[Sample]:
    """Shuffled groups of different sizes, lengths and masks, NaN at masked places, with every recorded signal."""
    rng = random.Random(seed)
    made = []
    for g, size in enumerate(SIZES):
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(2, 6))]
        for _ in range(size):
            n = rng.randint(1, 7)
            mask = [int(rng.random() < 0.8) for _ in range(n)]
            mask[rng.randrange(n)] = 1
            signals = {
                name: [-5.7 + rng.gauss(0, 0.3) if m else math.nan for m in mask]
                for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
            }
            ids = [rng.randrange(vocab) for _ in range(n)]
            made.append(Sample(f"g{g}", prompt, ids, mask, rng.gauss(0, 1), **signals))
    rng.shuffle(made)
    # One fully masked sample: it must change nothing.
    made.append(Sample("g0", [1, 2], [3, 4], [0, 0], 5.0, **{s: [math.nan] * 2 for s in signals}))
    return made


def through_engine(
    path: str, ranks: Any, parallel: Any, objective_name: str, *, micro: int, dtype: str = "float64"
) -> tuple[float, float, dict[str, Any]]:
    """(loss, gradient norm, {Hugging Face name: gradient}) of the batch; the gradients on every rank."""
    import torch

    from megatron_gvpo.config.schema import ModelSection, OptimizerSection, PrecisionSection
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.batches import Layout
    from megatron_gvpo.mcore.forward import HeadSettings
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.model import build_model, output_shard
    from megatron_gvpo.mcore.optimizer import make_training
    from megatron_gvpo.mcore.step import Engine
    from megatron_gvpo.mcore.weights import export_hf, load_hf
    from megatron_gvpo.objectives.batch import kept_samples
    from megatron_gvpo.objectives.registry import create_objective

    precision = PrecisionSection(params="fp32")
    params = getattr(torch, dtype)
    chunks = build_model(ModelSection(path=path), parallel, precision, ranks, params_dtype=params)
    load_hf(chunks, path)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    training = make_training(chunks, OptimizerSection(distributed=False), precision, 1, params)
    objective = create_objective(objective_name, OBJECTIVES[objective_name])
    sequence = parallel.sequence and parallel.tensor > 1
    multiple = (parallel.tensor if sequence else 1) * (2 * parallel.context if parallel.context > 1 else 1)
    engine = Engine(
        ranks,
        training,
        objective,
        HeadSettings(output_shard(chunks[-1], ranks), TEMPERATURE, sequence),
        Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.virtual_pipeline is not None),
    )
    batch_samples = samples()
    kept, _ = kept_samples(batch_samples, objective.needs.min_group_size)
    plan = plan_micro_batches(
        [len(batch_samples[i]) for i in kept],
        ranks.data.size,
        max_samples=micro,
        count_multiple=ranks.pipeline.size if ranks.virtual_pipeline else 1,
    )
    share = engine.cut(batch_samples, kept, plan)
    batch, whole = engine.batch_of(batch_samples, kept, share, {"logprobs": engine.logprobs(share)})
    loss, norm = engine.gradients(whole, batch, objective.prepare(batch, engine.comm))
    with torch.no_grad():
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return loss, norm, {name: tensor.clone() for name, tensor in export_hf(chunks)}


def through_transformers(path: Path, objective_name: str) -> tuple[float, dict[str, Any]]:
    """The same from one float64 transformers model and autograd: no Megatron, no engine, no micro-batches, no sharding."""
    import torch
    import transformers

    from megatron_gvpo.objectives.base import LocalComm, Outputs
    from megatron_gvpo.objectives.batch import whole_batch
    from megatron_gvpo.objectives.registry import create_objective

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    objective = create_objective(objective_name, OBJECTIVES[objective_name])
    batch_samples = samples()
    tracked = []
    for sample in batch_samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        first = len(sample.prompt_ids)
        logprobs = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, -1)
        tracked.append(logprobs[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0])
        sample.logprobs = tracked[-1].tolist()
    batch, _ = whole_batch(batch_samples, objective.needs.min_group_size)
    prepared = objective.prepare(batch, LocalComm())
    lp_T = torch.cat(
        [tracked[int(i)][[t for t, m in enumerate(batch_samples[int(i)].mask) if m]] for i in batch.sequences.sample_N]
    )
    if prepared.coefficients_T is not None:
        terms = prepared.coefficients_T * lp_T
        value = prepared.loss_sum if prepared.loss_sum is not None else float(terms.sum().detach())
    else:
        terms = objective.loss(Outputs(batch.tokens, lp_T), prepared, prepared.token_data).loss_T
        value = float(terms.sum().detach())
    (terms.sum() / prepared.denominator).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return value / prepared.denominator, gradients
