"""New weights from trainer ranks into a real SGLang server, over a process group that holds both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.rollout.server import Endpoint
from tests.mcore.tiny import build, make_hf, sections
from tests.ranks import RankError, run_ranks
from tests.servers import MAX_LENGTH, VOCAB, TestServer, reference_logprobs

PROMPT, RESPONSE = [5, 17, 40], [8, 3, 99, 61]


def _push(rank: int, world: int, path: str, endpoint: Endpoint, layout: dict[str, Any]) -> Any:
    """Send the model at `path` to the server; rank 0 gives back what was pushed and the name in its group."""
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.mcore.transport import Receiver, WeightGroup, own_address, push_weights
    from megatron_gvpo.rollout.engine import RolloutEngine

    parallel, train, precision = sections(world, **layout)
    ranks = start(parallel, train, precision)
    chunks = build(path, ranks, parallel)
    if rank == 0:
        rollout = RolloutSection(sync_timeout_s=60)
        with RolloutEngine([endpoint], rollout, vocab_size=VOCAB, max_length=MAX_LENGTH) as engine:
            control = engine.weights
            group = WeightGroup.listen(own_address("127.0.0.1"), control.world_size, f"trainer-{world}", "gloo", 60.0)
            group.join(control.init_group(group.address, group.port, backend="gloo", name=group.name))

            def announce(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Any:
                return control.update_bucket(names, dtypes, shapes, load_format="flattened_bucket")

            with control.update(f"from {world} ranks"):
                pushed = push_weights(chunks, Receiver(group, announce), bucket_bytes=40_000)
            control.destroy_group().wait()
            group.close()
        found = (pushed.tensors, pushed.buckets, pushed.bytes, group.address)
    else:
        found = push_weights(chunks, None, bucket_bytes=40_000)
    shutdown()
    return found


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "pipeline": 2}], ids=["one rank", "tp2pp2"])
def test_weights_pushed_by_the_trainer_are_what_the_server_then_runs(layout: dict[str, int], sglang_server: TestServer) -> None:
    """The server's log-probs are the pushed model's (case 36's second half, from Megatron's side), after several buckets.

    Does not cover NCCL, nor servers on another machine.
    """
    world = layout.get("tensor", 1) * layout.get("pipeline", 1)
    model = sglang_server.models.second
    found = run_ranks(_push, world, str(model), sglang_server.endpoint, layout, init=False)
    tensors, buckets, size, address = found[0]
    expected = sum(f.numel() * 4 for f in _tensors(model).values())
    assert (tensors, size, address) == (len(_tensors(model)), expected, "127.0.0.1")
    assert buckets > 3
    body = {
        "input_ids": PROMPT + RESPONSE,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(PROMPT) - 1,
    }
    with sglang_server.http() as http:
        meta = http.post("/generate", json=body).raise_for_status().json()["meta_info"]
    served = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    assert served == pytest.approx(reference_logprobs(model, PROMPT, RESPONSE, 1.0), abs=1e-4)
    assert meta["weight_version"] == f"from {world} ranks"


def _tensors(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


class _FailedCalls:
    """A server that refused: what `Pending` looks like then."""

    def failed(self) -> bool:
        return True

    def wait(self) -> None:
        raise ConnectionError("server-3 refused")


class _DeadGroup:
    """A group whose server is gone by the second bucket."""

    def __init__(self) -> None:
        self.sent = 0

    def broadcast(self, tensor: torch.Tensor, calls: Any) -> None:
        self.sent += 1
        if self.sent == 2:
            calls.wait()


class _GoodUntilLooked(_FailedCalls):
    def __init__(self, group: _DeadGroup) -> None:
        self._group = group

    def wait(self) -> None:
        if self._group.sent >= 2:
            raise ConnectionError("server-3 went away")


def _fails(rank: int, world: int, path: str) -> str:
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.mcore.transport import Receiver, TransportError, push_weights

    parallel, train, precision = sections(world, tensor=2)
    ranks = start(parallel, train, precision)
    chunks = build(path, ranks, parallel)
    dead: Any = _DeadGroup()
    receiver = Receiver(dead, lambda names, dtypes, shapes: _GoodUntilLooked(dead)) if rank == 0 else None
    try:
        push_weights(chunks, receiver, bucket_bytes=20_000)
    except (ConnectionError, TransportError) as error:
        shutdown()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_server_lost_midway_is_an_error_on_every_rank_not_a_hang(tmp_path: Path) -> None:
    """Rank 0 sees the server's error; the others, who are in the export's collectives, leave them and hear the same words."""
    first, second = run_ranks(_fails, 2, str(make_hf(tmp_path, "llama")), init=False)
    assert first == "ConnectionError: server-3 went away"
    assert second == "TransportError: rank 0 could not send the weights: server-3 went away"


def _nobody_joins(rank: int, world: int) -> float:
    from megatron_gvpo.mcore.transport import WeightGroup

    started = time.monotonic()
    group = WeightGroup.listen("127.0.0.1", 2, "lonely", "gloo", 50.0)
    try:
        group.join(_FailedCalls())
    except ConnectionError:
        return time.monotonic() - started
    return -1.0


def test_a_server_that_refuses_to_join_is_named_at_once() -> None:
    """The refusal comes over HTTP, so nobody waits out the group's own limit of 50 s."""
    (waited,) = run_ranks(_nobody_joins, 1, init=False, timeout=45)
    assert 0.0 <= waited < 40.0


def _late(rank: int, world: int) -> None:
    from megatron_gvpo.mcore.transport import WeightGroup

    class _Unhurried(_FailedCalls):
        def failed(self) -> bool:
            return False

        def wait(self) -> None:
            return None

    WeightGroup.listen("127.0.0.1", 2, "late", "gloo", 2.0).join(_Unhurried())


def test_a_server_that_never_joins_ends_the_wait_at_the_limit() -> None:
    """Where HTTP said yes and nobody comes, the error names the group and where it waited."""
    with pytest.raises(RankError, match=r"TimeoutError: the weight group late at 127.0.0.1:\d+ did not come together within 2 s"):
        run_ranks(_late, 1, init=False, timeout=60)
