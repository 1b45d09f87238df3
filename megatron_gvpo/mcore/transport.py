"""New weights on their way to rollout servers, over a process group of their own: trainer rank 0 and the servers' ranks.

    group = WeightGroup.listen(own_address(server_host), world, name, backend, timeout_s)      # rank 0
    calls = <ask every server to join the group `name` at group.address, group.port>
    group.join(calls)
    push_weights(chunks, Receiver(group, announce), bucket_bytes)                                # every rank of the trainer

The control calls over HTTP are not made here; they come in as callables, whose value says whether they failed and can be waited
for. On the servers' side the group is SGLang's `init_weights_update_group`: a TCP store with the group's name as key prefix.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from megatron_gvpo.mcore.agreement import attempt, from_rank_0, words
from megatron_gvpo.mcore.weights import export_hf

_POLL_S = 0.002


class TransportError(RuntimeError):
    """The weights did not reach the servers; the same words on every rank of the trainer."""


class Calls(Protocol):
    """Calls to the servers that are under way while this side does its part."""

    def failed(self) -> bool:
        """Whether one has failed already."""
        ...

    def wait(self) -> None:
        """Wait for all, with a limit; raises what went wrong."""
        ...


Announce = Callable[[Sequence[str], Sequence[str], Sequence[Sequence[int]]], Calls]


def own_address(server_host: str) -> str:
    """This machine's address as `server_host` sees it (by the routing table; nothing is sent)."""
    family, kind, _, _, target = socket.getaddrinfo(server_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class WeightGroup:
    """Rank 0's side of the group. It listens at one address only, and only until the group is closed."""

    def __init__(
        self, address: str, port: int, store: c10d.Store, world: int, name: str, backend: str, timeout: timedelta
    ) -> None:
        self.address = address
        self.port = port
        self.world = world
        self.name = name
        self.backend = backend
        self._timeout = timeout
        self._store = c10d.PrefixStore(name, store)
        self._group: dist.ProcessGroup | None = None

    @classmethod
    def listen(cls, address: str, world: int, name: str, backend: str, timeout_s: float) -> WeightGroup:
        """Open the meeting point at a free port. world: this rank and every rank of every server. name: unused before."""
        timeout = timedelta(seconds=timeout_s)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            address,
            port,
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,  # they are asked to come only after this returns
            master_listen_fd=listener.detach(),
        )
        return cls(address, port, store, world, name, backend, timeout)

    def join(self, calls: Calls) -> None:
        """Wait until the servers are in; what a server's call raises, or TimeoutError, where one is not."""
        made: list[Any] = []
        thread = threading.Thread(target=self._connect, args=(made,), daemon=True, name=f"join-{self.name}")
        thread.start()
        deadline = time.monotonic() + self._timeout.total_seconds() + 5.0
        while thread.is_alive() and not calls.failed() and time.monotonic() < deadline:
            thread.join(0.05)
        calls.wait()
        thread.join(max(0.0, deadline - time.monotonic()))
        outcome = made[0] if made else TimeoutError("no answer")
        if isinstance(outcome, Exception):
            raise TimeoutError(
                f"the weight group {self.name} at {self.address}:{self.port} did not come together "
                f"within {self._timeout.total_seconds():.0f} s: {' '.join(str(outcome).split())}"
            ) from outcome
        self._group = outcome

    def _connect(self, made: list[Any]) -> None:
        # torch has no public way to make a group with ranks of another job; SGLang's side calls the same function.
        try:
            group, _ = c10d._new_process_group_helper(
                self.world,
                0,
                [],
                c10d.Backend(self.backend),
                self._store,
                group_name=self.name,  # pyright: ignore[reportArgumentType]
                timeout=self._timeout,
            )
        except (RuntimeError, ValueError) as error:
            made.append(error)
            return
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world)}  # pyright: ignore[reportArgumentType]
        made.append(group)

    def broadcast(self, tensor: Tensor, calls: Calls) -> None:
        """Send `tensor` to every server. What a server's call raises, or TimeoutError, where it does not get through."""
        if self._group is None:
            raise ValueError("join() comes before broadcast()")
        work: Any = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if calls.failed():
                calls.wait()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the weight group {self.name}: a broadcast took over {self._timeout.total_seconds():.0f} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave the group and stop listening; safe at any time, and after a failure."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        del self._store


@dataclass(frozen=True)
class Receiver:
    """What rank 0 sends to. announce(names, dtypes, shapes): tell the servers that one flattened bucket of these is coming."""

    group: WeightGroup
    announce: Announce


@dataclass(frozen=True)
class Pushed:
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0


def push_weights(chunks: Sequence[Any], receiver: Receiver | None, bucket_bytes: int, dtype: torch.dtype | None = None) -> Pushed:
    """Send the whole model in buckets of at most `bucket_bytes` (or one tensor). Collective over all ranks of the trainer.

    receiver: on rank 0 only. dtype: send in this one, else in the weights' own. After a failure rank 0 re-raises what happened
    and the other ranks raise TransportError with the same words; the servers then hold a part of the new weights.
    """
    error: Exception | None = None
    pushed: list[Pushed] = []
    tensors = export_hf(chunks, everywhere=False)
    if receiver is not None:
        error = attempt(lambda: pushed.append(_send(tensors, receiver, bucket_bytes, dtype)))
    for _ in tensors:  # what is left after a failure, and everything on the other ranks
        pass
    trouble = from_rank_0(words(error))
    if error is not None:
        raise error
    if trouble:
        raise TransportError(f"rank 0 could not send the weights: {trouble}")
    return pushed[0] if pushed else Pushed()


def _send(tensors: Iterator[tuple[str, Tensor]], receiver: Receiver, bucket_bytes: int, dtype: torch.dtype | None) -> Pushed:
    count = buckets = size = 0
    for bucket in _buckets(tensors, bucket_bytes, dtype):
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
        calls = receiver.announce(
            [name for name, _ in bucket],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
        )
        receiver.group.broadcast(flat, calls)
        calls.wait()
        count, buckets, size = count + len(bucket), buckets + 1, size + flat.numel()
    return Pushed(count, buckets, size)


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbours of one dtype: the receiver cuts the flat bucket by byte offsets, which have to be aligned."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        more = tensor.numel() * tensor.element_size()
        if bucket and (size + more > limit or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket
