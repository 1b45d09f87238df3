"""A batch compared with a teacher beside the student: through the engine at any layout, and through transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.data.samples import Sample
from tests.mcore.step_cases import TEMPERATURE, samples

# Objective, its options, the teacher's signal. JSD's share is uneven, so that swapping the two shows.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tv": ("gkd", {"divergence": "tv", "teacher": "full"}, "full"),
    "jsd": ("gkd", {"divergence": "jsd", "jsd_beta": 0.3, "teacher": "full"}, "full"),
    "reverse_kl": ("gkd", {"divergence": "reverse_kl", "teacher": "full"}, "full"),
    "forward_kl": ("gkd", {"divergence": "forward_kl", "teacher": "full"}, "full"),
    "topk": ("gkd", {"divergence": "forward_kl"}, "topk"),
    "opd_kl": ("opd", {"baseline": "kl"}, "full"),
    "opd_kl_topk": ("opd", {"baseline": "kl"}, "topk"),
    "sampled": ("opd", {}, "sampled"),
    "sequence": ("gvpo_opd", {"length_alpha": 0.5}, "sequence"),
}
TOP_K = 7
STUDENT_VOCAB = 300


def make_teacher(folder: Path, name: str, vocab: int, seed: int, tied: bool = False) -> Path:
    """A Llama of other sizes than the student in every respect: layers, width, and (if asked) vocabulary."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=8,  # the student has four
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / name)
    return folder / name


def batch(domains: bool) -> list[Sample]:
    """The step tests' batch; with `domains` every second group is `code`."""
    made = samples()
    for sample in made:
        sample.teacher_logprobs = None
        sample.meta = {"domain": "code" if domains and int(sample.group[1:]) % 2 else ""}
    return made


def through_engine(
    student: str,
    teachers: dict[str, str],
    ranks: Any,
    parallel: Any,
    case: str,
    *,
    micro: int,
    offload: bool = False,
    served: bool = False,
) -> tuple[float, dict[str, float], dict[str, Any]]:
    """(loss, metrics, {Hugging Face name: gradient}) in float64, on every rank. served: the signals come with the samples."""
    import torch

    from megatron_gvpo.config.schema import ModelSection, OptimizerSection, PrecisionSection, TeacherSection
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.mcore.batches import Layout
    from megatron_gvpo.mcore.forward import HeadSettings
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.model import build_model, output_shard
    from megatron_gvpo.mcore.optimizer import make_training
    from megatron_gvpo.mcore.step import Engine
    from megatron_gvpo.mcore.teacher import ColocatedTeacher
    from megatron_gvpo.mcore.weights import export_hf, load_hf
    from megatron_gvpo.objectives.batch import kept_samples
    from megatron_gvpo.objectives.registry import create_objective
    from megatron_gvpo.train.teacher_signals import TeacherSignals

    name, options, signal = CASES[case]
    precision = PrecisionSection(params="fp32")

    def model(path: str) -> list[Any]:
        chunks = build_model(ModelSection(path=path), parallel, precision, ranks, params_dtype=torch.float64)
        load_hf(chunks, path)
        for chunk in chunks:
            use_hidden_state_head(chunk)
        return chunks

    chunks = model(student)
    training = make_training(chunks, OptimizerSection(distributed=False), precision, 1, torch.float64)
    objective = create_objective(name, options)
    sequence = parallel.sequence and parallel.tensor > 1
    multiple = (parallel.tensor if sequence else 1) * (2 * parallel.context if parallel.context > 1 else 1)
    layout = Layout(ranks.context.size, ranks.context.rank, multiple, uniform=ranks.virtual_pipeline is not None)
    head = HeadSettings(output_shard(chunks[-1], ranks), TEMPERATURE, sequence)
    engine = Engine(ranks, training, objective, head, layout)
    beside = {
        domain: ColocatedTeacher(model(path), ranks, layout, head, path, offload=offload)
        for domain, path in ({} if served else teachers).items()
    }
    section = TeacherSection(path="x", where="colocated", signal=signal, top_k=TOP_K)  # type: ignore[arg-type]
    wanted = objective.needs.teacher
    signals = TeacherSignals(section, wanted, beside, ids=STUDENT_VOCAB, last_stage=ranks.is_last_stage)
    batch_samples = batch(domains=len(teachers) > 1)
    if served:
        score_as_a_server(batch_samples, Path(teachers[""]))
    kept, _ = kept_samples(batch_samples, objective.needs.min_group_size)
    plan = plan_micro_batches(
        [len(batch_samples[i]) for i in kept],
        ranks.data.size,
        max_samples=micro,
        count_multiple=ranks.pipeline.size if ranks.virtual_pipeline else 1,
    )
    share, taught = signals.add(batch_samples, kept, engine.cut(batch_samples, kept, plan))
    given = {**taught, "logprobs": engine.logprobs(share)}
    prepared_batch, whole = engine.batch_of(batch_samples, kept, share, given)
    prepared = objective.prepare(prepared_batch, engine.comm)
    items = engine._forward_backward(whole, prepared_batch, prepared, None)
    loss, metrics = engine.global_numbers(items, prepared_batch, prepared)
    with torch.no_grad():
        for chunk in training.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    return loss, metrics, {name: tensor.clone() for name, tensor in export_hf(chunks)}


def score_as_a_server(batch_samples: list[Sample], teacher: Path) -> None:
    """Put the teacher's log-probs and likeliest ids into the samples, tempered, where a real server would give temperature 1."""
    import torch
    import transformers

    from megatron_gvpo.data.teacher_top import TeacherTop

    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64, attn_implementation="eager")
    for sample in batch_samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        logp_TV = torch.log_softmax(logits_TV / TEMPERATURE, -1)
        sample.teacher_logprobs = logp_TV.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0].tolist()
        top = logp_TV.topk(TOP_K, 1)
        sample.teacher_top = TeacherTop(top.indices.int().numpy(), top.values.float().numpy())


def through_transformers(student: Path, teachers: dict[str, Path], case: str) -> tuple[float, dict[str, Any]]:
    """The same by two float64 transformers models, softmax over the whole vocabulary, and autograd."""
    import torch
    import transformers

    from megatron_gvpo.objectives.base import LocalComm
    from megatron_gvpo.objectives.batch import whole_batch
    from megatron_gvpo.objectives.registry import create_objective

    def load(path: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")

    name, options, _ = CASES[case]
    model = load(student)
    others = {domain: load(path).requires_grad_(False) for domain, path in teachers.items()}
    objective = create_objective(name, options)
    batch_samples = batch(domains=len(teachers) > 1)
    ids_shared = min(STUDENT_VOCAB, *(other.config.vocab_size for other in others.values()))
    logq, logp, sampled = [], [], []
    for sample in batch_samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        rows = slice(len(sample.prompt_ids) - 1, -1)
        other = others[sample.meta["domain"]]
        logq.append(torch.log_softmax(model(ids).logits[0, rows] / TEMPERATURE, -1))
        logp.append(torch.log_softmax(other(ids).logits[0, rows, :ids_shared] / TEMPERATURE, -1))
        at = torch.tensor(sample.response_ids)[:, None]
        sampled.append(logq[-1].gather(1, at)[:, 0])
        sample.logprobs = sampled[-1].tolist()
        sample.teacher_logprobs = logp[-1].gather(1, at)[:, 0].tolist()
    whole, _ = whole_batch(batch_samples, objective.needs.min_group_size)
    masks = [[t for t, m in enumerate(batch_samples[int(i)].mask) if m] for i in whole.sequences.sample_N]
    order = [int(i) for i in whole.sequences.sample_N]

    def pick(rows: list[Any]) -> Any:
        return torch.cat([rows[i][mask] for i, mask in zip(order, masks, strict=True)])

    lp_T, logq_TV, logp_TV = pick(sampled), pick(logq), pick(logp)
    prepared = objective.prepare(whole, LocalComm())
    if name == "gkd":
        terms = _dense_divergence(case, logp_TV, torch.log_softmax(logq_TV[:, :ids_shared], -1), options)
        value = float(terms.sum().detach())
    elif prepared.coefficients_T is not None:
        terms = prepared.coefficients_T * lp_T
        value = prepared.loss_sum if prepared.loss_sum is not None else float(terms.sum().detach())
    else:
        kl_T = _dense_divergence(case, logp_TV, logq_TV, options).detach()
        advantage_T = prepared.token_data["advantage"] + kl_T
        terms = -advantage_T * prepared.token_data["weight"] * lp_T
        value = float(terms.sum().detach())
    (terms.sum() / prepared.denominator).backward()
    return value / prepared.denominator, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _dense_divergence(case: str, logp_TV: Any, logq_TV: Any, options: dict[str, Any]) -> Any:
    import torch

    p, q = logp_TV.exp(), logq_TV.exp()
    if case in ("topk", "opd_kl_topk"):
        top = p.topk(TOP_K, 1)
        p_TB = torch.cat([top.values, 1 - top.values.sum(1, keepdim=True)], 1)
        kept = q.gather(1, top.indices)
        q_TB = torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1)
        if case == "opd_kl_topk":
            return (q_TB * (q_TB.log() - p_TB.log())).sum(1)
        return (p_TB * (p_TB.log() - q_TB.log())).sum(1)
    if case == "tv":
        return 0.5 * (p - q).abs().sum(1)
    if case in ("reverse_kl", "opd_kl"):
        return (q * (logq_TV - logp_TV)).sum(1)
    if case == "forward_kl":
        return (p * (logp_TV - logq_TV)).sum(1)
    b = options["jsd_beta"]
    m = b * p + (1 - b) * q
    return (b * p * (logp_TV - m.log()) + (1 - b) * q * (logq_TV - m.log())).sum(1)
