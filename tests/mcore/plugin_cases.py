"""A stranger's Megatron-Core loop: a model, a wrapper and a data iterator that know nothing of ours but the plug-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.data.samples import Sample
from tests.mcore.step_cases import OBJECTIVES, TEMPERATURE, samples
from tests.mcore.tiny import VOCAB

PADDED = 384


@dataclass(frozen=True)
class Case:
    """One loop. spec `local` is Megatron's own layer; `plain` is this project's, where Megatron's has no CPU form (SP, CP)."""

    objective: str
    per_token: bool
    outputs: str
    wrapper: str = "megatron"  # megatron | torch | none
    spec: str = "local"
    tied: bool = False
    # With these, the micro-batches of all ranks are 4 or 8: Megatron's finalizer multiplies by 1 / count in float32.
    micro: int = 4

    @property
    def model(self) -> str:
        return "llama-four-tied" if self.tied else "llama-four"


def own_chunks(case: Case, layout: dict[str, int]) -> list[Any]:
    """This rank's chunks of a float64 model, built by Megatron-Core's own classes."""
    import torch
    import torch.nn.functional as F
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gvpo.mcore.spec import layer_spec

    virtual = layout.get("virtual_pipeline")
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=4,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        tensor_model_parallel_size=layout.get("tensor", 1),
        pipeline_model_parallel_size=layout.get("pipeline", 1),
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=layout.get("context", 1),
        sequence_parallel=bool(layout.get("sequence", 0)),
        calculate_per_token_loss=case.per_token,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        gradient_accumulation_fusion=False,
    )
    chunks = []
    for stage in range(virtual) if virtual else [None]:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm") if case.spec == "local" else layer_spec(config, False, stage)
        ends = {"ignore_virtual": stage is None, "vp_stage": stage}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=PADDED,
                max_sequence_length=256,
                pre_process=mpu.is_pipeline_first_stage(**ends),
                post_process=mpu.is_pipeline_last_stage(**ends),
                parallel_output=True,
                share_embeddings_and_output_weights=case.tied,
                position_embedding_type="rope",
                rotary_base=5000,
                vp_stage=stage,
            )
        )
    # Megatron's norms are float32 whatever the model is; the tests compare in float64.
    return [chunk.double() for chunk in chunks]


def wrapped(case: Case, chunks: list[Any]) -> Any:
    """The model as the stranger's loop hands it to the schedule."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    if case.wrapper == "none":
        return chunks[0]
    if case.wrapper == "torch":
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        model = torch.nn.parallel.DistributedDataParallel(chunks[0], process_group=group)
        config.no_sync_func = model.no_sync
        return model
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
    made = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    return made if len(made) > 1 else made[0]


def own_share(size: int, data_rank: int, data_size: int, drop: Sequence[str] = ()) -> list[list[Sample]]:
    """This data-parallel rank's micro-batches: groups spread over ranks, and the last rank has the fewest."""
    batch = [dataclasses.replace(s, **dict.fromkeys(drop)) for s in samples()]
    # Four in ten for the first rank of two: both the count of micro-batches and their sizes differ.
    cut = [0, *(len(batch) * (r + 1) * (r + 2) // (data_size * (data_size + 1)) for r in range(data_size))]
    mine = batch[cut[data_rank] : cut[data_rank + 1]]
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def items_of(step: Any) -> Any:
    """The stranger's own data iterator (one a chunk): it yields records of its own."""
    own = step.schedule()["data_iterator"]

    def records(inputs: Iterator[Any]) -> Iterator[dict[str, Any]]:
        for number, item in enumerate(inputs):
            yield {"number": number, "rl": item}

    return [records(i) for i in own] if isinstance(own, list) else records(own)


def through_foreign_loop(case: Case, layout: dict[str, int], folder: str) -> tuple[float, dict[str, Any]]:
    """(loss, {Hugging Face name: gradient}) of one step, finished as the stranger's loop finishes them."""
    import torch
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_gvpo.config.hf_shape import read_shape
    from megatron_gvpo.mcore import make_forward_step, prepare_step, use_hidden_state_head
    from megatron_gvpo.mcore.model import ModelFacts
    from megatron_gvpo.mcore.weights import export_hf, load_hf
    from megatron_gvpo.objectives import create_objective

    chunks = own_chunks(case, layout)
    facts = ModelFacts(read_shape(f"{folder}/{case.model}"), PADDED)
    for chunk in chunks:
        chunk.facts = facts
    load_hf(chunks, f"{folder}/{case.model}")
    for chunk in chunks:
        del chunk.facts  # the plug-in has to do without it
        if case.outputs == "hidden":
            use_hidden_state_head(chunk)
    model = wrapped(case, chunks)

    forward_step = make_forward_step(
        create_objective(case.objective, OBJECTIVES[case.objective]),
        lambda record: record["rl"],
        vocab_size=VOCAB,
        model_outputs=case.outputs,  # pyright: ignore[reportArgumentType]
        calculate_per_token_loss=case.per_token,
        temperature=TEMPERATURE,
    )
    mine = own_share(case.micro, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size())
    step = prepare_step(forward_step, mine, model)
    arguments = {**step.schedule(), "data_iterator": items_of(step)}
    get_forward_backward_func()(forward_step_func=forward_step, model=model, forward_only=False, **arguments)
    report = step.finish()
    if forward_step.objective.needs.current:
        # The forward-only pass and the loss saw the same policy.
        torch.testing.assert_close(report.sequences.sum_of("logprobs"), step.batch.sequences.sum_of("logprobs"))
    with torch.no_grad():
        for chunk in chunks:
            chunk.facts = facts
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad if case.wrapper == "megatron" else parameter.grad)
    return report.loss, {name: tensor.clone() for name, tensor in export_hf(chunks)}
