"""Weights from and to Hugging Face folders, at any tensor x pipeline x virtual-pipeline layout.

Loading needs no communication: every rank reads what it holds. Exporting gathers over the tensor group and broadcasts over the
pipeline group, one parameter at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_gvpo.mcore.agreement import attempt, from_rank_0, words
from megatron_gvpo.mcore.bridge import Names
from megatron_gvpo.mcore.hf_folder import HfFolder, HfWriter, RandomTensors, TensorSource, copy_description, replace_folder
from megatron_gvpo.mcore.model import facts_of, unwrapped

SHARD_BYTES = 5 * 1000**3


def load_hf(chunks: Sequence[Any], path: str | Path) -> None:
    """Fill every parameter of this rank's chunks from the safetensors of `path`; values are cast to the parameter's dtype.

    ValueError, in one line, where the folder does not hold exactly the model's tensors (the missing or unexpected ones are
    named), where a shape differs, or where a file cannot be read. Not collective.
    """
    _fill(chunks, HfFolder(path, facts_of(chunks[0]).shape))


def init_random(chunks: Sequence[Any], seed: int) -> None:
    """Fill every parameter at random (normal, standard deviation 0.02): the same model for every layout. Not collective."""
    _fill(chunks, RandomTensors(facts_of(chunks[0]).shape, seed))


def export_hf(chunks: Sequence[Any], *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the model, one at a time, in the weights' dtype, on the rank's device.

    Collective over the tensor and pipeline groups: run the iterator to its end on every rank. Tensors may be views of live
    weights: use or copy them before the next optimizer step. everywhere=False: data- and context-parallel copies other than
    the first take no part and yield nothing, which saves them the work.
    """
    if not everywhere and mpu.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    models = [unwrapped(chunk) for chunk in chunks]
    names = Names(facts_of(models[0]), models[0].config)
    stage, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    for owner, piece in _pieces(models, stages):
        param = _parameter(models[piece.chunk], piece.local_name) if owner == stage else None
        shards = _gather_tensor_ranks(param, piece) if owner == stage else []
        if owner == stage:
            converted = names.from_shards(piece.name, shards, piece.partition_dim)
        else:
            converted = []
        if stages > 1:
            converted = _share_with_stages(converted, owner)
        yield from converted


def save_hf(
    chunks: Sequence[Any], out_dir: str | Path, source_dir: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> dict[str, int]:
    """Write the model as a Hugging Face folder that replaces `out_dir`, with config and tokenizer from `source_dir`.

    Collective over all ranks; rank 0 writes, into a folder beside `out_dir` that is renamed when it is whole. Returns
    {"tensors": count, "bytes": size} on rank 0 (zeros elsewhere). OSError on every rank where rank 0 could not write.
    """
    target, source = Path(out_dir), Path(source_dir)
    part = target.with_name(target.name + ".part")
    writer = HfWriter(part, shard_bytes)
    written = {"tensors": 0, "bytes": 0}
    error: Exception | None = None
    writes = dist.get_rank() == 0
    if writes:
        error = attempt(lambda: _fresh(part))
    for name, tensor in export_hf(chunks, everywhere=False):
        # After a failure the loop goes on: the other ranks are in its collectives.
        if writes and error is None:
            error = attempt(partial(writer.add, name, tensor))
            written = {
                "tensors": written["tensors"] + 1,
                "bytes": written["bytes"] + tensor.numel() * tensor.element_size(),
            }
    if writes and error is None:
        dtype = next(unwrapped(chunks[0]).parameters()).dtype
        error = attempt(lambda: _finish(writer, part, target, source, dtype))
    trouble = from_rank_0(words(error))
    if trouble:
        raise OSError(f"the model could not be written to {target}: {trouble}") from error
    return written


def _fill(chunks: Sequence[Any], source: TensorSource) -> None:
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    for chunk in chunks:
        model = unwrapped(chunk)
        names = Names(facts_of(model), model.config)
        with torch.no_grad():
            for local_name, param in model.named_parameters():
                name = global_name(model, local_name)
                tensors = [source.tensor(hf_name) for hf_name in names.hf_names(name)]
                param.copy_(names.to_shard(name, tensors, param, rank, size))


@dataclass(frozen=True)
class _Piece:
    """A parameter as its stage holds it. partition_dim: the dimension that tensor parallelism cuts; None where it is whole."""

    chunk: int
    local_name: str
    name: str  # with the layer's number in the whole model
    partition_dim: int | None


def _pieces(models: Sequence[Any], stages: int) -> list[tuple[int, _Piece]]:
    """Every parameter of the whole model with the stage that owns it, in the same order on every rank: by layer."""
    mine: list[_Piece] = []
    for number, model in enumerate(models):
        for local_name, param in model.named_parameters():
            # The last stage's copy of a tied embedding is the first stage's embedding.
            if local_name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                continue
            cut = bool(getattr(param, "tensor_model_parallel", False))
            mine.append(_Piece(number, local_name, global_name(model, local_name), param.partition_dim if cut else None))
    everyone: list[Any] = [mine]
    if stages > 1:
        everyone = [None] * stages
        dist.all_gather_object(everyone, mine, group=mpu.get_pipeline_model_parallel_group())
    pieces = [(stage, piece) for stage, held in enumerate(everyone) for piece in held]
    return sorted(pieces, key=lambda item: _order(item[1].name))


def _order(name: str) -> tuple[int, int]:
    """The embedding, the layers by number, the final norm and the output layer; within one, as the model has them."""
    if name.startswith("embedding."):
        return (0, 0)
    if name.startswith("decoder.layers."):
        return (1, int(name.split(".")[2]))
    return (2, 0)


def global_name(model: Any, local_name: str) -> str:
    """The parameter's name with its layer's number in the whole model; layers count from 0 in every chunk."""
    head, found, rest = local_name.partition("decoder.layers.")
    if not found:
        return local_name
    index, _, tail = rest.partition(".")
    return f"{head}decoder.layers.{model.decoder.layers[int(index)].layer_number - 1}.{tail}"


def _parameter(model: Any, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def _gather_tensor_ranks(param: Tensor | None, piece: _Piece) -> list[Tensor]:
    size = mpu.get_tensor_model_parallel_world_size()
    if param is None or piece.partition_dim is None or size == 1:
        return [] if param is None else [param]
    shards = [torch.empty_like(param) for _ in range(size)]
    dist.all_gather(shards, param.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return shards


def _share_with_stages(converted: list[tuple[str, Tensor]], owner: int) -> list[tuple[str, Tensor]]:
    """What the owning stage has, on all stages."""
    group: Any = mpu.get_pipeline_model_parallel_group()
    source = dist.get_process_group_ranks(group)[owner]
    device = torch.device(torch.cuda.current_device())
    heads: list[Any] = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted]]
    dist.broadcast_object_list(heads, src=source, group=group, device=device)
    if not converted:
        converted = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in heads[0]]
    else:
        converted = [(name, tensor.contiguous()) for name, tensor in converted]
    for _, tensor in converted:
        dist.broadcast(tensor, src=source, group=group)
    return converted


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _finish(writer: HfWriter, part: Path, target: Path, source: Path, dtype: torch.dtype) -> None:
    writer.finish()
    copy_description(source, part, dtype)
    replace_folder(part, target)
