"""Tiny random Hugging Face models of every family, and one rank's Megatron model of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import ModelSection, ParallelSection, PrecisionSection, TrainSection

# 300 ids: padded to 384 rows, of which the last shard at TP2 holds 84 that are padding.
VOCAB = 300
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small enough that this tiny model has frequencies of all three kinds.
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}

# name: (family, tied, rope)
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("llama", False, {}),
    "llama-tied": ("llama", True, {}),
    "llama3-scaling": ("llama", False, LLAMA3),
    "llama-linear": ("llama", True, LINEAR),
    "qwen2": ("qwen2", False, {}),
    "qwen2-tied": ("qwen2", True, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-tied": ("qwen3", True, {}),
}
# Four key-value heads, for what is cut over four tensor-parallel ranks.
FOUR_HEADS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama-four": ("llama", False, {}),
    "llama-four-tied": ("llama", True, {}),
}


def make_hf(folder: Path, name: str, layers: int = 4, shard: str = "50GB") -> Path:
    """Write the model `name` with random weights: also norms and biases, which start as ones and zeros, are made random."""
    import torch
    import transformers

    family, tied, scaling = (MODELS | FOUR_HEADS)[name]
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if name in FOUR_HEADS else 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, **scaling},
    }
    if family == "qwen3":
        sizes["head_dim"] = 32  # not hidden / heads, as in the real ones
    model = model_class(config_class(**sizes)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    path = folder / name
    model.save_pretrained(path, max_shard_size=shard)
    return path


def sections(world: int, **parallel: Any) -> tuple[ParallelSection, TrainSection, PrecisionSection]:
    train = TrainSection(device="cpu", collective_timeout_s=60)
    return ParallelSection(gpus_per_node=world, **parallel), train, PrecisionSection(params="fp32")


def build(path: str | Path, ranks: Any, parallel: ParallelSection, **model: Any) -> list[Any]:
    """This rank's chunks with the weights of the folder."""
    from megatron_gvpo.mcore.model import build_model
    from megatron_gvpo.mcore.weights import load_hf

    chunks = build_model(ModelSection(path=str(path), **model), parallel, PrecisionSection(params="fp32"), ranks)
    load_hf(chunks, path)
    return chunks


def logits(chunks: list[Any], ids: Any, ranks: Any) -> Any:
    """[B, S, padded vocabulary] logits on the last pipeline stage's ranks, None elsewhere; through Megatron's own schedule."""
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(ids.size(1)).unsqueeze(0)
    rows = list(ids.split(1))  # virtual stages want at least as many micro-batches as there are stages

    def forward_step(iterator: Any, model: Any) -> Any:
        return model(next(iterator), positions, None), lambda output, non_loss_data=True: output

    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows),
            seq_length=ids.size(1),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not ranks.is_last_stage:
        return None
    mine = torch.cat(found)
    shards = [torch.empty_like(mine) for _ in range(ranks.tensor.size)]
    dist.all_gather(shards, mine, group=ranks.tensor.group)
    return torch.cat(shards, dim=-1)
