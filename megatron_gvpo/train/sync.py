"""The trainer's weights to the rollout servers, as one numbered version that all of them hold."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.transport import Calls, Receiver, WeightGroup, own_address, push_weights
from megatron_gvpo.mcore.weights import save_hf
from megatron_gvpo.rollout.weights import Pending, WeightControl
from megatron_gvpo.train.build import Built
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.signals import StopNow, StopRequest

_LOOK_S = 0.2


class WeightPush(Protocol):
    """Collective: every rank takes part in collecting the weights; rank 0 talks to the servers."""

    def push(self, version: str) -> None: ...
    def close(self) -> None: ...


class NoServers:
    """A replayed run has nobody to send weights to."""

    def push(self, version: str) -> None:
        return None

    def close(self) -> None:
        return None


class DiskPush:
    """A Hugging Face folder that the servers' machines see, overwritten for each version."""

    def __init__(self, config: Config, run_dir: Path, built: Built, exchange: Exchange, control: WeightControl | None) -> None:
        self._config = config
        self._folder = run_dir / "servers" / "weights"
        self._built = built
        self._exchange = exchange
        self._control = control

    def push(self, version: str) -> None:
        save_hf(self._built.chunks, self._folder, self._config.model.path)

        def update() -> None:
            assert self._control is not None
            self._control.update_from_disk(self._folder, version)

        self._exchange.from_controller(update, interruptible=True)

    def close(self) -> None:
        return None


class _Interrupted(RuntimeError):
    """A request to leave came while the servers were receiving."""


class _InterruptibleCalls:
    """Calls to the servers that a request to leave ends, as a failure that the sending code tells the other ranks of."""

    def __init__(self, pending: Pending, stop: StopRequest) -> None:
        self._pending = pending
        self._stop = stop

    def failed(self) -> bool:
        return self._stop.came or self._pending.failed()

    def wait(self) -> None:
        while not self._pending.done(_LOOK_S):
            if self._stop.came:
                raise _Interrupted(f"{self._stop.name} came during a weight update")
        self._pending.wait()


class GroupPush:
    """Buckets over a process group of rank 0 and the servers' ranks; a new group whenever the servers in use have changed."""

    def __init__(self, config: Config, built: Built, exchange: Exchange, controller: Controller | None) -> None:
        self._config = config
        self._built = built
        self._exchange = exchange
        self._controller = controller
        self._group: WeightGroup | None = None

    def push(self, version: str) -> None:
        update = self._exchange.local(partial(self._begin, version), interruptible=True)
        receiver = None
        if self._controller is not None and self._group is not None:
            receiver = Receiver(self._group, partial(self._announce, self._controller.engine.weights))
        with _finished(update, self._exchange):
            self._send(receiver)

    def _send(self, receiver: Receiver | None) -> None:
        trouble: Exception | None = None
        try:
            push_weights(self._built.chunks, receiver, self._config.rollout.bucket_mib * 2**20)
        except Exception as error:  # noqa: BLE001  raised again below, on all ranks together
            trouble = error
        if trouble is None:
            return
        # Where the sending fails it does so on every rank; only rank 0 knows whether somebody wants us to leave.
        if self._exchange.any(isinstance(trouble, _Interrupted)):
            raise StopNow(self._exchange.stop.name) from trouble
        raise trouble

    def _announce(self, control: WeightControl, names: Sequence[str], dtypes: Sequence[str], shapes: Any) -> Calls:
        pending = control.update_bucket(names, dtypes, shapes, load_format="flattened_bucket")
        return _InterruptibleCalls(pending, self._exchange.stop)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _begin(self, version: str) -> AbstractContextManager[None]:
        """Rank 0: a group with the servers in use, and their update begun."""
        assert self._controller is not None
        control = self._controller.engine.weights
        if not control.group_is_current:
            self.close()
            self._group = self._meet(control)
        update = control.update(version)
        update.__enter__()
        return update

    def _meet(self, control: WeightControl) -> WeightGroup:
        assert self._controller is not None
        hosts = [urlsplit(client.endpoint.url).hostname or "127.0.0.1" for client in self._controller.engine.pool.clients]
        # Servers on other machines cannot come to a loopback address; those on this one can come to any of its own.
        far = next((host for host in hosts if not host.startswith("127.") and host not in ("localhost", "::1")), hosts[0])
        backend = "gloo" if self._config.rollout.servers.device == "cpu" else "nccl"
        name = f"gvpo-{secrets.token_hex(6)}"
        timeout_s = self._config.rollout.sync_timeout_s
        group = WeightGroup.listen(own_address(far), control.world_size, name, backend, timeout_s)
        try:
            group.join(control.init_group(group.address, group.port, backend=backend, name=name))
        except BaseException:
            group.close()
            raise
        return group


@contextmanager
def _finished(update: AbstractContextManager[None] | None, exchange: Exchange) -> Iterator[None]:
    """End the update that rank 0 began: with the block's error where there is one, else on all ranks together."""
    try:
        yield
    except BaseException as error:
        if update is not None:
            update.__exit__(type(error), error, error.__traceback__)
        raise

    def end() -> None:
        assert update is not None
        update.__exit__(None, None, None)

    exchange.from_controller(end, interruptible=True)


def weight_push(config: Config, run_dir: Path, built: Built, exchange: Exchange, controller: Controller | None) -> WeightPush:
    """The way that `rollout.weight_sync` names."""
    if config.rollout.weight_sync == "disk":
        return DiskPush(config, run_dir, built, exchange, None if controller is None else controller.engine.weights)
    return GroupPush(config, built, exchange, controller)
