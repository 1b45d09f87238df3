"""Saving and resuming through Megatron's distributed checkpointing: model, optimizer, schedule, random state, and our own JSON.

A checkpoint may be loaded at another layout (tensor, pipeline, virtual pipeline, data parallel) than the one that wrote it.
Everything here is collective over all ranks of the trainer.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from megatron_gvpo.mcore import adam_state, checkpoint_files
from megatron_gvpo.mcore.agreement import attempt, from_all, from_rank_0, words
from megatron_gvpo.mcore.errors import SetupError
from megatron_gvpo.mcore.model import ModelFacts, facts_of, unwrapped
from megatron_gvpo.mcore.optimizer import Training

log = logging.getLogger(__name__)


def save_checkpoint(
    root: str | Path, step: int, training: Training, extra: dict[str, Any], *, keep: int = 0, keep_every: int = 0
) -> Path:
    """Write the checkpoint of `step` under `root`; it counts only when every rank has written all of its share.

    extra: JSON values, rank 0's count. keep: how many of the newest stay (0: all); keep_every: those whose step it divides stay
    too. OSError on every rank, with the rank that failed, where it could not be written; older checkpoints are untouched then.
    """
    return begin_save(root, step, training, extra, keep=keep, keep_every=keep_every, background=False).finish()


class Saving:
    """A checkpoint that is being written. `done` is this rank's view; `finish` is collective."""

    def __init__(self, root: Path, step: int, request: Any, buckets: Any, commit: Callable[[dict[str, str]], None]) -> None:
        self.step = step
        self._path = root / checkpoint_files.step_name(step)
        self._part = root / f"{checkpoint_files.step_name(step)}.tmp"
        self._request = request
        self._commit = commit
        self._error: Exception | None = None
        self._bytes = sum(tensor.nbytes for _, _, (_, tensors) in buckets for _, tensor in tensors)
        self._hashes: dict[str, str] = {}
        self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank's share is on the disk, or could not be brought there."""
        return not self._thread.is_alive()

    def finish(self) -> Path:
        """Wait for this rank's share, and make it a checkpoint when every rank has come here. OSError as `save_checkpoint`."""
        self._thread.join()
        trouble = from_all(words(self._error))
        error = self._error
        if not trouble:
            error = attempt(self._finalize)
            trouble = from_all(words(error))
        if not trouble:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, self._hashes)
            hashes = {name: value for found in gathered for name, value in found.items()}
            error = attempt(lambda: self._commit(hashes)) if dist.get_rank() == 0 else None
            trouble = from_rank_0(words(error))
        if trouble:
            if dist.get_rank() == 0:
                shutil.rmtree(self._part, ignore_errors=True)  # a full disk is the likeliest reason
            raise OSError(f"the checkpoint of step {self.step} could not be written: {trouble}") from error
        return self._path

    def _finalize(self) -> None:
        """Megatron's end of a save, on all ranks: it hears of every rank's failure, and writes what holds the files together."""
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except TorchCheckpointException as error:  # no Exception, and no one-line text
            failed = next(iter(error.failures.values()))[0] if error.failures else error
            raise OSError(f"{self._short_of_space()}{words(failed) if isinstance(failed, Exception) else failed}") from error

    def _short_of_space(self) -> str:
        """Torch's writer does not tell a full disk from a bug."""
        free = shutil.disk_usage(self._part).free
        return f"No space left on device ({free / 2**20:.1f} MiB free): " if free < self._bytes else ""

    def _write(self, buckets: Any) -> None:
        self._error = attempt(lambda: self._write_and_hash(buckets))

    def _write_and_hash(self, buckets: Any) -> None:
        request = self._request
        if request.async_fn is not None:
            rank, _, results = request.async_fn_args
            request.async_fn(rank, buckets, results, **request.async_fn_kwargs)
        own = sorted(self._part.glob(f"__{dist.get_rank()}_*"))
        self._hashes = {path.name: checkpoint_files.sha256(path) for path in own}


def begin_save(
    root: str | Path,
    step: int,
    training: Training,
    extra: dict[str, Any],
    *,
    keep: int = 0,
    keep_every: int = 0,
    background: bool = True,
) -> Saving:
    """Begin the checkpoint of `step`: everything is copied, and files are written while training goes on. One at a time.

    Collective, as is `Saving.finish`, without which there is no checkpoint; arguments and errors are those of `save_checkpoint`.
    background: False where nothing is trained before `finish`, which saves the copy.
    """
    root = Path(root)
    part = root / f"{checkpoint_files.step_name(step)}.tmp"
    error = attempt(lambda: checkpoint_files.begin(root, step)) if dist.get_rank() == 0 else None
    trouble = from_rank_0(words(error))
    if not trouble:
        trouble = from_all("" if part.is_dir() else f"{part} cannot be seen: checkpoints need a folder that all machines share")
    requests: list[Any] = []
    if not trouble:
        error = attempt(lambda: requests.append(_request(part, training, background)))
        trouble = from_all(words(error))
    if trouble:
        raise OSError(f"the checkpoint of step {step} could not be written: {trouble}") from error
    state = {
        "step": step,
        "layout": _layout(),
        "model": _model_facts(training.chunks),
        "optimizer": _kind(training.optimizer),
        "extra": extra,
    }

    def commit(hashes: dict[str, str]) -> None:
        checkpoint_files.commit(root, part, step, state, hashes)
        if keep:
            checkpoint_files.prune(root, keep, keep_every)

    request, buckets = requests[0]
    return Saving(root, step, request, buckets, commit)


def load_checkpoint(root: str | Path, training: Training) -> dict[str, Any] | None:
    """Go on from the newest whole checkpoint under `root`: its `extra`; None where there is none.

    A damaged newest one is passed over with a warning. Random states come back at the layout that saved them only. ValueError
    on every rank, in one line, for a checkpoint of another model or optimizer, or one that cannot be read.
    """
    path = newest(root)
    if path is None:
        return None
    state = checkpoint_files.read_state(path)
    _check_model(state, path, training.chunks)
    if state["optimizer"] != _kind(training.optimizer):
        raise SetupError(
            f"{path} was written by a {state['optimizer']}, this run has a {_kind(training.optimizer)}: "
            "set optimizer.distributed and precision.params as they were"
        )
    same_layout = state["layout"] == _layout()
    if not same_layout and dist.get_rank() == 0:
        log.info("%s was written at another layout: random states start from the run's seed", path)
    _load(path, lambda: _read(path, training, same_layout))
    return state["extra"]


def load_weights(root: str | Path, chunks: Sequence[Any]) -> int:
    """Only the weights of the newest whole checkpoint under `root`; the step that wrote it. ValueError where there is none."""
    path = newest(root)
    if path is None:
        raise SetupError(f"{root} holds no checkpoint")
    state = checkpoint_files.read_state(path)
    _check_model(state, path, chunks)

    def read() -> None:
        request = _model_request(chunks)
        _fill(chunks, _strategy_load(request, path))

    _load(path, read)
    return int(state["step"])


def newest(root: str | Path) -> Path | None:
    """The newest whole checkpoint, the same on every rank. Collective: the ranks share the reading of large files."""
    damaged: dict[str, str] = {}
    while True:
        seen = _found(Path(root), damaged)
        path = seen.path
        if path is not None:
            damage = _damage(path)
            if damage:
                damaged[path.name] = damage
                continue
        if dist.get_rank() == 0:
            for warning in seen.warnings:
                log.warning("%s", warning)
        return path


def _found(root: Path, damaged: dict[str, str]) -> checkpoint_files.Found:
    """What rank 0 finds, on every rank."""
    found: list[Any] = []
    error = attempt(lambda: found.append(checkpoint_files.find(root, damaged))) if dist.get_rank() == 0 else None
    trouble = from_rank_0(words(error))
    if trouble:
        raise SetupError(f"{root} cannot be read: {trouble}") from error
    box = found or [None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint's large files; each rank reads a part of them."""
    names = checkpoint_files.large_files(path)[dist.get_rank() :: dist.get_world_size()]
    found: list[str] = []
    error = attempt(lambda: found.append(checkpoint_files.changed(path, names)))
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, words(error) or found[0])
    return next((damage for damage in heard if damage), "")


def _load(path: Path, read: Callable[[], None]) -> None:
    error = attempt(read)
    trouble = from_all(words(error))
    if trouble:
        raise SetupError(f"{path} cannot be loaded: {trouble}") from error


def _request(part: Path, training: Training, background: bool) -> tuple[Any, Any]:
    """Megatron's request to write this rank's share, and the share, as CPU tensors that nobody else changes if `background`."""
    adam_state.materialise(training.optimizer)
    _write_in_process()
    model = _model_request(training.chunks)
    content: dict[str, Any] = {
        **model,
        "optimizer": training.optimizer.sharded_state_dict(model, is_loading=False, metadata=_metadata()),
        "scheduler": training.scheduler.state_dict(),
        "random": _random_request(_random_state()),
    }
    strategy: Any = get_default_save_sharded_strategy()
    group: Any = mpu.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        strategy = FullyParallelSaveStrategyWrapper(strategy, group)
    request: Any = dist_checkpointing.save(content, str(part), strategy, async_sharded_save=True)
    if request.async_fn is None:
        return request, []
    buckets = request.async_fn_args[1] if request.preload_fn is None else request.preload_fn()
    return request, _copied(buckets) if background else buckets


def _copied(buckets: Any) -> Any:
    """On a CPU, staging a tensor to the CPU copies nothing: what the next step changes would be written."""
    return [(file, key, (data, [(item, tensor.clone()) for item, tensor in tensors])) for file, key, (data, tensors) in buckets]


def _read(path: Path, training: Training, same_layout: bool) -> None:
    optimizer, scheduler = training.optimizer, training.scheduler
    request = _model_request(training.chunks)
    with adam_state.loading(optimizer):
        adam_state.materialise(optimizer)
        request["optimizer"] = optimizer.sharded_state_dict(dict(request), is_loading=True, metadata=_metadata())
        if same_layout:
            request["random"] = _random_request(None)
        loaded = _strategy_load(request, path)
        _fill(training.chunks, loaded)
        adam_state.complete(loaded["optimizer"])
        optimizer.load_state_dict(loaded["optimizer"])
    scheduler.num_steps = 0  # loading adds the stored count to it
    scheduler.load_state_dict(loaded["scheduler"])
    if same_layout:
        _set_random_state(loaded["random"])


def _strategy_load(request: dict[str, Any], path: Path) -> dict[str, Any]:
    strategy: Any = get_default_load_sharded_strategy(str(path))
    group: Any = mpu.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    loaded: Any = dist_checkpointing.load(request, str(path), strategy)
    return loaded


def _fill(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    for number, chunk in enumerate(chunks):
        unwrapped(chunk).load_state_dict(loaded[f"model{number}"])
        _clear_padding(chunk)


def _model_request(chunks: Sequence[Any]) -> dict[str, Any]:
    return {f"model{i}": unwrapped(chunk).sharded_state_dict(metadata=_metadata()) for i, chunk in enumerate(chunks)}


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        # The one format that loads at any tensor and pipeline layout; the default cannot be loaded by these versions at all.
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _write_in_process() -> None:
    """Let Megatron's writer use threads, and a plain queue between functions of one process.

    By default it starts a manager process, which imports the whole program again and outlives a killed trainer, and forks
    writers from a process full of threads, for whose death it would wait for ever.
    """
    filesystem_async._results_queue = queue.Queue()
    writer: Any = filesystem_async.FileSystemWriterAsync
    if hasattr(writer, "write_preloaded_data_multiproc"):
        writer.write_preloaded_data_multiproc = staticmethod(_write_buckets)


def _write_buckets(transform_list: Any, use_msc: bool, rank: int, write_buckets: list[Any], global_results_queue: Any) -> None:
    """In place of the forking function of megatron-core 0.16 (later versions use threads themselves)."""
    write: Any = filesystem_async.FileSystemWriterAsync.write_preloaded_data
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    with ThreadPoolExecutor(max(len(write_buckets), 1)) as pool:
        for number, bucket in enumerate(write_buckets):
            count.put(number)
            pool.submit(write, transform_list, number, bucket, results, count, use_fsync=True, use_msc=use_msc)
    collected: dict[int, Any] = dict(results.get_nowait() for _ in write_buckets)
    failed = next((value for value in collected.values() if isinstance(value, Exception)), None)
    global_results_queue.put(collected if failed is None else failed)


def _random_request(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random_state", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _random_state() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": _tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["tracker"])


def _tracker() -> Any:
    return get_cuda_rng_tracker()


def _clear_padding(chunk: Any) -> None:
    """Rows past the vocabulary are zero: at another layout there may be more of them than the checkpoint holds."""
    facts, model = facts_of(chunk), unwrapped(chunk)
    embedding: Any = getattr(model, "embedding", None)
    head: Any = getattr(model, "output_layer", None)
    for weight in (None if embedding is None else embedding.word_embeddings.weight, None if head is None else head.weight):
        if weight is not None:
            start = mpu.get_tensor_model_parallel_rank() * weight.size(0)
            with torch.no_grad():
                weight[max(facts.shape.vocab - start, 0) :] = 0


def _layout() -> dict[str, int]:
    return {
        "world": dist.get_world_size(),
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "context": mpu.get_context_parallel_world_size(),
        "expert": mpu.get_expert_model_parallel_world_size(),
    }


def _model_facts(chunks: Sequence[Any]) -> dict[str, Any]:
    facts: ModelFacts = facts_of(chunks[0])
    return {**dataclasses.asdict(facts.shape), "dtype": str(next(unwrapped(chunks[0]).parameters()).dtype)}


def _kind(optimizer: Any) -> str:
    """Whether the optimizer's state is sharded over data-parallel ranks: the two are stored in different ways."""
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return type(inner[0]).__name__


def _check_model(state: dict[str, Any], path: Path, chunks: Sequence[Any]) -> None:
    ours, theirs = _model_facts(chunks), state["model"]
    different = [f"{key} {theirs.get(key)}, here {value}" for key, value in ours.items() if theirs.get(key) != value]
    if different:
        raise SetupError(f"{path} holds another model: {'; '.join(different)}")
