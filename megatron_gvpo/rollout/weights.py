"""New weights for the servers: the control calls. The tensors themselves travel elsewhere (a folder, or torch.distributed).

    control = WeightControl(loop, pool, timeout_s)
    control.update_from_disk(folder, version="7")

or over a process group, in which the sender is rank 0 and the servers' ranks follow:

    joining = control.init_group(address, port, backend="gloo")       # starts the HTTP calls and returns
    group = ...                                                        # the sender joins as rank 0 of control.world_size
    joining.wait()
    with control.update(version="8"):                                  # generation is paused inside
        for bucket in buckets:
            loading = control.update_bucket(names, dtypes, shapes)     # returns at once
            ...                                                        # broadcast the tensors from rank 0, in this order
            loading.wait()

After an update every server has flushed its prefix cache and says that it holds the new version; anything else is an error that
names the server, and no server generates from weights of which nobody knows what they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.errors import BadAnswer, RequestRefused, RolloutError, ServerError, TimeLimit
from megatron_gvpo.rollout.loop import LoopThread
from megatron_gvpo.rollout.pool import ServerPool

# Time for a batch that was being computed when the pause came; only then does a flush succeed.
_FLUSH_S = 15.0
_CONTROL_S = 60.0


@dataclass(frozen=True)
class Pending:
    """HTTP calls under way, one per server, while the caller does its side (joins the group, broadcasts)."""

    calls: dict[str, Future[Any]]
    timeout_s: float

    def failed(self) -> bool:
        """Whether one has failed already: the sender need not wait out the time limit of its collective."""
        return any(call.done() and (call.cancelled() or call.exception() is not None) for call in self.calls.values())

    def done(self, seconds: float) -> bool:
        """Whether all have ended, well or not, within `seconds`."""
        return not wait_for(self.calls.values(), seconds).not_done

    def wait(self) -> None:
        """Wait for all; the first failure is raised and names its server."""
        deadline = monotonic() + self.timeout_s + 5.0  # each call has the limit itself; this one is for a loop that died
        for server, call in self.calls.items():
            try:
                call.result(max(0.0, deadline - monotonic()))
            except FutureTimeout as error:
                raise TimeLimit(server, f"a weight-update call did not end within {self.timeout_s:g} s") from error


class WeightControl:
    """Puts new weights on all servers of a pool. Synchronous; `timeout_s` is for one update call."""

    def __init__(self, loop: LoopThread, pool: ServerPool, timeout_s: float = 600.0) -> None:
        self._loop = loop
        self._pool = pool
        self._timeout_s = timeout_s
        self._group = ""
        self._members: list[ServerClient] = []

    # --- an update, whatever way the tensors go ---------------------------------------------------------------------------

    @contextmanager
    def update(self, version: str) -> Iterator[None]:
        """Pause every server, let the caller send buckets (`update_bucket`), then flush, verify `version`, and continue.

        Requests under way are put back (SGLang's `retract`) and go on with the new weights, their cache recomputed. When
        anything fails the servers stay paused and out of use, and the error is raised.
        """
        with self._paused(version):
            # Newer servers want loads in an update session (0.5.23 does); older ones do not know these calls.
            self._each("beginning the update", lambda c: c.control_if_there("/begin_weight_update", {}, self._timeout_s))
            yield
            self._each("ending the update", lambda c: c.control_if_there("/end_weight_update", {}, self._timeout_s))

    def update_from_disk(self, path: str | Path, version: str) -> None:
        """Load the Hugging Face folder `path` (which the servers' machines must see) on every server, as `version`."""
        body = {"model_path": str(Path(path).resolve()), "flush_cache": False, "abort_all_requests": False}
        with self._paused(version):
            self._each("loading from disk", lambda c: c.control("/update_weights_from_disk", body, self._timeout_s))

    @contextmanager
    def _paused(self, version: str) -> Iterator[None]:
        if not self._pool.clients:
            raise ServerError("weight update", f"no server is left: {self._pool.out_of_use}")
        try:
            self._each("pausing", lambda c: c.control("/pause_generation", {"mode": "retract"}, _CONTROL_S))
            yield
            self._each("finishing the update", lambda c: self._commit(c, version))
        except BaseException as error:
            self._loop.run(self._abandon(f"its weight update to version {version} failed ({_short(error)})"))
            raise
        self._each("continuing", lambda c: c.control("/continue_generation", {}, _CONTROL_S))

    async def _commit(self, client: ServerClient, version: str) -> None:
        # Said only now, so that a server never claims a version of which it holds a part. Both calls also exist in servers
        # without update sessions. abort_all_requests is true by default there.
        await client.control("/update_weight_version", {"new_version": version, "abort_all_requests": False}, _CONTROL_S)
        await self._flush(client)
        held = await client.weight_version()
        if held != version:
            raise BadAnswer(client.name, f"holds weight version {held!r} after the update to {version!r}")

    async def _flush(self, client: ServerClient) -> None:
        """Old keys and values with new weights would be a third model; a server that cannot flush is an error."""
        deadline = monotonic() + _FLUSH_S
        while True:
            try:
                await client.control("/flush_cache", {}, _CONTROL_S)
                return
            except BadAnswer:
                if monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _abandon(self, why: str) -> None:
        for client in self._pool.clients:
            self._pool.put_out_of_use(client, why)

    # --- over a process group ---------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks of the process group: the sender (rank 0) and every tensor-parallel rank of every server."""
        return 1 + sum(client.facts.tensor for client in self._pool.clients)

    @property
    def group_is_current(self) -> bool:
        """Whether the group holds exactly the servers in use; when not (none yet, or a server was lost), make a new one."""
        return bool(self._group) and self._members == self._pool.clients

    def init_group(self, master_address: str, master_port: int, *, backend: str, name: str) -> Pending:
        """Let every server join the group `name` at tcp://master_address:master_port, behind rank 0, which is the sender.

        RequestRefused for servers whose ranks SGLang cannot tell apart in one group (pipeline or data parallel ones).
        """
        for client in self._pool.clients:
            if client.facts.pipeline > 1 or client.facts.data > 1:
                raise RequestRefused(
                    f"{client.name}: weight_sync 'distributed' does not reach a pipeline- or data-parallel server; use 'disk'"
                )
        self._group, self._members = name, self._pool.clients
        world, offset, calls = self.world_size, 1, {}
        for client in self._members:
            body = {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": name,
                "backend": backend,
            }
            calls[client.name] = self._loop.submit(client.control("/init_weights_update_group", body, self._timeout_s))
            offset += client.facts.tensor
        return Pending(calls, self._timeout_s)

    def update_bucket(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, load_format: str | None = None
    ) -> Pending:
        """Let every server receive these tensors, broadcast from rank 0 one by one in this order, and load them.

        Inside `update` only. names: Hugging Face names. dtypes: torch names without `torch.` ("bfloat16"). load_format
        "flattened_bucket": one broadcast of one uint8 tensor with all of them, end to end.
        """
        if not self.group_is_current:
            raise ServerError("weight update", "the process group does not hold the servers in use: make a new one")
        body: dict[str, Any] = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": self._group,
            "flush_cache": False,  # once, when all buckets are in
            "abort_all_requests": False,
        }
        if load_format is not None:
            body["load_format"] = load_format
        path, limit = "/update_weights_from_distributed", self._timeout_s
        calls = {c.name: self._loop.submit(c.control(path, body, limit)) for c in self._members}
        return Pending(calls, limit)

    def destroy_group(self) -> Pending:
        """Let the servers leave the group (those still in use); harmless without one."""
        members = [client for client in self._members if client in self._pool.clients]
        body = {"group_name": self._group}
        calls = {c.name: self._loop.submit(c.control("/destroy_weights_update_group", body, _CONTROL_S)) for c in members}
        self._group, self._members = "", []
        return Pending(calls, _CONTROL_S)

    def _each(self, doing: str, call: Callable[[ServerClient], Awaitable[Any]]) -> None:
        """Do it on all servers at once; one error that names every server it failed on."""

        async def all_of_them() -> None:
            clients = self._pool.clients
            results = await asyncio.gather(*(call(c) for c in clients), return_exceptions=True)
            failures = [r for r in results if isinstance(r, BaseException)]
            for failure in failures:
                if not isinstance(failure, ServerError):
                    raise failure
            if failures:
                first = failures[0]
                assert isinstance(first, ServerError)
                others = "".join(f"; {failure}" for failure in failures[1:])
                raise ServerError(first.server, f"{doing}: {first.why}{others}") from first

        self._loop.run(all_of_them())


def _short(error: BaseException) -> str:
    return str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
