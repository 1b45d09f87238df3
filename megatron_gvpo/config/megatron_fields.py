"""The names of Megatron-Core's TransformerConfig fields, read from the installed source without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

OWNED = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
    "bf16": "precision.params",
    "params_dtype": "precision.params",
    "pipeline_dtype": "precision.params",
    "fp8": "precision.fp8",
    "fp8_recipe": "precision.fp8",
    "fp8_param": "precision.fp8_params",
    "num_layers": "the model's config.json",
    "hidden_size": "the model's config.json",
    "num_attention_heads": "the model's config.json",
    "num_query_groups": "the model's config.json",
    "ffn_hidden_size": "the model's config.json",
    "kv_channels": "the model's config.json",
    "num_moe_experts": "the model's config.json",
}


def transformer_fields() -> frozenset[str]:
    """All field names; empty where Megatron-Core is not installed (then `train` finds a wrong name, `validate` cannot)."""
    spec = importlib.util.find_spec("megatron")
    folders = [Path(folder) / "core" for folder in (spec.submodule_search_locations or ())] if spec else []
    names: set[str] = set()
    for folder in folders:
        for file in (folder / "model_parallel_config.py", folder / "transformer" / "transformer_config.py"):
            if file.is_file():
                names |= _dataclass_fields(file, ("ModelParallelConfig", "TransformerConfig"))
    return frozenset(names)


def _dataclass_fields(file: Path, classes: tuple[str, ...]) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        line.target.id
        for body in tree.body
        if isinstance(body, ast.ClassDef) and body.name in classes
        for line in body.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
