"""One rank of a small CPU run, measured: what its parts really allocate. Runs in processes of their own (tests.ranks)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import Config


@dataclass(frozen=True)
class Case:
    """A model (values of config.json), sections of a config, and the micro-batch: sequences, positions, trained ones of each."""

    name: str
    model: dict[str, Any]
    sections: dict[str, dict[str, Any]]
    world: int = 1
    sequences: int = 2
    positions: int = 256
    trained: int = 160

    def config(self, folder: Path) -> Config:
        (folder / "config.json").write_text(json.dumps(self.model))
        sections = {key: dict(values) for key, values in self.sections.items()}
        sections["model"] = {"path": str(folder), "max_length": self.positions, **sections.get("model", {})}
        sections["train"] = {"device": "cpu", "micro_batch_tokens": self.sequences * self.positions}
        sections["rollout"] = {"prompts_per_step": 64, "max_new_tokens": self.trained}
        sections.setdefault("parallel", {})["gpus_per_node"] = self.world
        return Config(**sections)


def measure_rank(rank: int, world: int, case: Case, folder: str) -> dict[str, int]:
    """Bytes by part: of one forward and backward pass of one micro-batch, and an optimizer step.

    activations: alive after the forward pass. backward: at most during the backward pass, without what the head left for it.
    """
    from megatron_gvpo.mcore.head import use_hidden_state_head
    from megatron_gvpo.mcore.model import build_model, output_shard
    from megatron_gvpo.mcore.optimizer import apply_gradients, gradient_norm, make_training, zero_gradients
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.mcore.weights import init_random
    from tests.launch.allocations import Allocations

    config = case.config(Path(folder))
    ranks = start(config.parallel, config.train, config.precision)
    chunks = build_model(config.model, config.parallel, config.precision, ranks)
    init_random(chunks, 0)
    for chunk in chunks:
        use_hidden_state_head(chunk)
    found = {"weights": storage_bytes(p for c in chunks for p in c.parameters())}
    dtype = next(chunks[0].parameters()).dtype
    training = make_training(chunks, config.optimizer, config.precision, 10, dtype)
    buffers = [b for c in training.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    found["gradients"] = storage_bytes(b.grad_data for b in buffers)
    zero_gradients(training)
    shard = output_shard(chunks[-1], ranks)
    found |= _pass(training, shard, config, case, Allocations())
    gradient_norm(training)
    apply_gradients(training)
    found["optimizer"] = optimizer_bytes(training.optimizer, {p.untyped_storage().data_ptr() for p in _held(chunks, buffers)})
    shutdown()
    return found


def _pass(training: Any, shard: Any, config: Config, case: Case, watch: Any) -> dict[str, int]:
    import torch

    from megatron_gvpo.logprobs import linear_score_loss
    from megatron_gvpo.mcore.head import head_of

    torch.manual_seed(0)
    vocab = shard.size
    tokens = torch.randint(0, vocab, (case.sequences, case.positions))
    places = torch.arange(case.positions).expand(case.sequences, -1)
    targets = torch.full((case.positions, case.sequences), -1)
    targets[-case.trained :] = torch.randint(0, vocab, (case.trained, case.sequences))
    model = training.chunks[0]
    # Cosines and sines of the positions are kept by Megatron-Core, whatever the micro-batch.
    with torch.no_grad():
        model(tokens, places, None)
    with watch:
        output = model(tokens, places, None)
        activations = watch.live
        rows = output.transpose(0, 1).reshape(-1, output.size(-1))
        layer = head_of(model)
        watch.reset_peak()
        before = watch.live
        loss = linear_score_loss(
            rows,
            layer.head_weight,
            targets.flatten(),
            torch.ones(targets.numel()),
            shard,
            sequence_parallel=config.parallel.sequence,
        ).loss
        head = watch.peak - before
        kept = watch.live - before
        watch.reset_peak()
        loss.backward()
        backward = watch.peak - kept
    model.finish_grad_sync()
    return {"activations": activations, "logprobs": head, "backward": backward}


def storage_bytes(tensors: Any) -> int:
    """Bytes of distinct storages."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values())


def _held(chunks: Any, buffers: Any) -> list[Any]:
    return [*(p for c in chunks for p in c.parameters()), *(b.grad_data for b in buffers)]


def optimizer_bytes(optimizer: Any, known: set[int]) -> int:
    """Adam's moments and master weights of every (chained) optimizer, without the model's own weights and gradients."""
    import torch

    tensors = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for state in inner.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim()]
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
    return storage_bytes(t for t in tensors if t.untyped_storage().data_ptr() not in known)
