"""One rank's side of the checkpoint tests: train a tiny model, save, load at another layout, train on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mcore.step_cases import samples
from tests.mcore.tiny import sections

STEPS_BEFORE = 2


@dataclass
class Trainee:
    """A model that can take optimizer steps on one fixed batch; supervised, so that the layout is all that differs."""

    chunks: list[Any]
    training: Any
    engine: Any
    objective: Any
    ranks: Any

    def step(self) -> tuple[float, float, float]:
        """(loss, gradient norm, learning rate) of one optimizer step."""
        from megatron_gvpo.data.microbatch import plan_micro_batches
        from megatron_gvpo.objectives.batch import kept_samples

        given = samples()
        kept, _ = kept_samples(given, 1)
        multiple = self.ranks.pipeline.size if self.ranks.virtual_pipeline else 1
        plan = plan_micro_batches([len(given[i]) for i in kept], self.ranks.data.size, max_samples=2, count_multiple=multiple)
        share = self.engine.cut(given, kept, plan)
        batch, whole = self.engine.batch_of(given, kept, share, {"logprobs": self.engine.logprobs(share)})
        result = self.engine.step(whole, batch, self.objective.prepare(batch, self.engine.comm))
        assert result.accepted, result.why_not
        return result.loss, result.grad_norm, result.lr

    def weights(self) -> dict[str, Any]:
        from megatron_gvpo.mcore.weights import export_hf

        return {name: tensor.clone() for name, tensor in export_hf(self.chunks)}


def trainee(path: str, world: int, layout: dict[str, Any], distributed: bool, seed: int = 0) -> Trainee:
    import torch

    from megatron_gvpo.config.schema import ModelSection, OptimizerSection
    from megatron_gvpo.mcore.batches import Layout
    from megatron_gvpo.mcore.forward import HeadSettings
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.model import build_model, output_shard
    from megatron_gvpo.mcore.optimizer import make_training
    from megatron_gvpo.mcore.startup import start
    from megatron_gvpo.mcore.step import Engine
    from megatron_gvpo.mcore.weights import init_random, load_hf
    from megatron_gvpo.objectives.registry import create_objective

    parallel, train, precision = sections(world, **layout)
    ranks = start(parallel, train.model_copy(update={"seed": seed}), precision)
    chunks = build_model(ModelSection(path=path), parallel, precision, ranks)
    if seed:
        init_random(chunks, seed)  # so that what is right after loading came from the checkpoint
    else:
        load_hf(chunks, path)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    optimizer = OptimizerSection(lr=1e-2, schedule="cosine", warmup_steps=1, weight_decay=0.1, distributed=distributed)
    training = make_training(chunks, optimizer, precision, 10, torch.float32)
    objective = create_objective("sft", {})
    virtual = ranks.virtual_pipeline is not None
    head = HeadSettings(output_shard(chunks[-1], ranks), 1.0, parallel.sequence and parallel.tensor > 1)
    engine = Engine(ranks, training, objective, head, Layout(pad_multiple=parallel.tensor, uniform=virtual))
    return Trainee(chunks, training, engine, objective, ranks)


def draws() -> list[Any]:
    """A number from every generator whose state a checkpoint keeps."""
    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(2).tolist()
    return [random.random(), np.random.rand(), torch.rand(2).tolist(), tracked]


def save_all(rank: int, world: int, path: str, root: str, cases: dict[str, tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    """For every case: two steps, a checkpoint, one more step; and the same last step again from the checkpoint."""
    from megatron_gvpo.mcore.checkpoint import load_checkpoint, save_checkpoint

    found: dict[str, Any] = {}
    for name, (layout, distributed) in cases.items():
        first = trainee(path, world, layout, distributed)
        for _ in range(STEPS_BEFORE):
            first.step()
        folder = Path(root) / name
        save_checkpoint(folder, STEPS_BEFORE, first.training, {"position": [STEPS_BEFORE, name]})
        drawn, third, weights = draws(), first.step(), first.weights()
        again = trainee(path, world, layout, distributed, seed=7)
        extra = load_checkpoint(folder, again.training)
        found[name] = {
            "step": third,
            "weights": weights if rank == 0 else None,
            "extra": extra,
            "same draws": draws() == drawn,
            "same step": again.step() == third,
            "same weights": all((weights[n] == t).all() for n, t in again.weights().items()),
        }
    return found


def load_all(rank: int, world: int, path: str, root: str, cases: dict[str, tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    """Load every checkpoint of `root` at every layout here, and take the next step."""
    from megatron_gvpo.mcore.checkpoint import load_checkpoint

    found: dict[str, Any] = {}
    for folder in sorted(Path(root).iterdir()):
        for name, (layout, distributed) in cases.items():
            if distributed != folder.name.endswith("sharded"):
                continue
            here = trainee(path, world, layout, distributed, seed=7)
            extra = load_checkpoint(folder, here.training)
            step, weights = here.step(), here.weights()
            found[f"{folder.name} -> {name}"] = {"extra": extra, "step": step, "weights": weights if rank == 0 else None}
    return found


def refuse_all(rank: int, world: int, path: str, other: str, root: str) -> list[str]:
    """What is said about an empty folder, another model, another optimizer, a failing rank, and a damaged newest one."""
    from megatron_gvpo.mcore import checkpoint
    from megatron_gvpo.mcore.checkpoint import load_checkpoint, load_weights, save_checkpoint

    said: list[str] = []

    def attempt(action: Any) -> None:
        try:
            said.append(str(action()))
        except (OSError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    folder = Path(root)
    here = trainee(path, world, {"tensor": world}, False)
    attempt(lambda: load_checkpoint(folder, here.training))
    # Before the first step there is no optimizer state yet.
    save_checkpoint(folder, 0, here.training, {"at": 0})
    untouched = here.weights()
    here.step()
    save_checkpoint(folder, 1, here.training, {"at": 1}, keep=2)
    attempt(lambda: load_checkpoint(folder, trainee(other, world, {"tensor": world}, False).training))
    here = trainee(path, world, {"tensor": world}, True, seed=7)
    attempt(lambda: load_checkpoint(folder, here.training))

    here = trainee(path, world, {"tensor": world}, False, seed=7)
    original = checkpoint._write

    def full_disk(part: Path, training: Any) -> None:
        original(part, training)
        if rank == world - 1:
            raise OSError("no space left on device")

    checkpoint._write = full_disk
    attempt(lambda: save_checkpoint(folder, 2, here.training, {"at": 2}))
    checkpoint._write = original

    if rank == 0:
        victim = max((folder / "step_00000001").glob("*.distcp"), key=lambda p: p.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:-100])
    attempt(lambda: load_checkpoint(folder, here.training))
    said.append(str(all((untouched[n] == t).all() for n, t in here.weights().items())))
    here.step()
    bare = trainee(path, world, {"tensor": world}, False, seed=9)
    attempt(lambda: load_weights(folder, bare.chunks))
    said.append(str(all((untouched[n] == t).all() for n, t in bare.weights().items())))
    return said
