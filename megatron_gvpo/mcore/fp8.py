"""FP8 as this project asks Megatron-Core and Transformer Engine for it: recipe fields, and how tokens are padded.

FP8 belongs to the linear layers between the first and the last ones. The output layer and every log-prob stay in bf16 and fp32:
they are computed by the log-prob engine, outside any FP8 context. No machine with Transformer Engine has run this yet
(docs/gpu_status.md); what is sent to it is tested against a recording stand-in.
"""

from __future__ import annotations

from typing import Any

from megatron_gvpo.config.alignment import FP8_MULTIPLE, padded_tokens, run_multiple, token_multiple
from megatron_gvpo.config.schema import PrecisionSection

__all__ = ["FP8_MULTIPLE", "fp8_fields", "padded_tokens", "run_multiple", "token_multiple"]


def fp8_fields(precision: PrecisionSection, engine: bool) -> dict[str, Any]:
    """TransformerConfig's fields for a recipe; none without FP8. engine: whether Transformer Engine's layers are built.

    ValueError, one line, for FP8 without them, and for bf16 layers under delayed scaling, which would enter and leave the FP8
    context within a step and so reduce each layer's history of largest values at the wrong moment.
    """
    if precision.fp8 == "none":
        return {}
    if not engine:
        raise ValueError(f"precision.fp8 {precision.fp8} needs a GPU and Transformer Engine; set precision.fp8: none here")
    first, last = precision.bf16_first_layers, precision.bf16_last_layers
    if precision.fp8 == "delayed" and (first or last):
        raise ValueError("precision.fp8 delayed cannot keep layers in bf16: set bf16_first_layers and bf16_last_layers to 0")
    return {
        # Gradients of the scaled-by-block recipes keep enough range in e4m3; the per-tensor ones want e5m2 for them.
        "fp8": "e4m3" if precision.fp8 in ("mxfp8", "blockwise") else "hybrid",
        "fp8_recipe": precision.fp8,
        "fp8_param": precision.fp8_params,
        "first_last_layers_bf16": first > 0 or last > 0,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }
