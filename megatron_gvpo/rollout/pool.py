"""Several servers as one: whole groups go to the least-loaded server, and to another one when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.errors import BadAnswer, ServerError, TimeLimit, Transient
from megatron_gvpo.rollout.wire import Response, Sampling

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class PromptIds:
    """A prompt as token ids, and the name of its group (unique within one rollout batch)."""

    group: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Group:
    """A prompt's k responses, complete. index: the prompt's place in what was asked for. seconds: from sent to complete."""

    index: int
    samples: list[Sample]
    server: str
    seconds: float


class _Seat:
    """A server in the pool: its client, what is in flight there, and why it is out of use (empty: it is in use)."""

    def __init__(self, client: ServerClient, concurrency: int) -> None:
        self.client = client
        self.concurrency = concurrency
        self.in_flight = 0
        self.out_of_use = ""

    def takes(self, weight: int) -> bool:
        # A group larger than the limit is served when it is alone: it must not wait for ever.
        return not self.out_of_use and (self.in_flight == 0 or self.in_flight + weight <= self.concurrency)


class ServerPool:
    """Generates over one or more servers. All coroutines of one pool belong to one event loop.

    concurrency: responses in flight per server; a group of k counts k.
    """

    def __init__(self, clients: Sequence[ServerClient], concurrency: int = 256) -> None:
        if not clients:
            raise ServerError("server pool", "no server given: set servers.urls, or servers.launch to local")
        self._seats = [_Seat(client, concurrency) for client in clients]
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def clients(self) -> list[ServerClient]:
        """Those in use."""
        return [seat.client for seat in self._seats if not seat.out_of_use]

    @property
    def out_of_use(self) -> dict[str, str]:
        """Servers that are not used any more, and why."""
        return {seat.client.name: seat.out_of_use for seat in self._seats if seat.out_of_use}

    async def probe(self) -> None:
        """Probe every server; ServerError names the first that is not there, and all must hold the same model."""
        facts = await all_or_none([seat.client.probe() for seat in self._seats])
        for seat, fact in zip(self._seats, facts, strict=True):
            if fact.model_path != facts[0].model_path:
                why = f"serves {fact.model_path}, but {self._seats[0].client.name} serves {facts[0].model_path}"
                raise BadAnswer(seat.client.name, why)

    async def close(self) -> None:
        await asyncio.gather(*(seat.client.close() for seat in self._seats))

    def put_out_of_use(self, client: ServerClient, why: str) -> None:
        """Send nothing to this server any more. Belongs to the pool's event loop, as everything here."""
        for seat in self._seats:
            if seat.client is client and not seat.out_of_use:
                seat.out_of_use = why
                log.warning("%s is out of use: %s", client.name, why)
        self._wake()

    async def generate_groups(
        self, prompts: Sequence[PromptIds], count: int, sampling: Sampling, *, ahead: int | None = None
    ) -> AsyncIterator[Group]:
        """The complete groups of `count` responses, as they finish (not in the order of the prompts).

        Response ids are what the server sampled, never re-encoded; a stop token is part of the response, with mask 1; behind a
        response cut at its limit nothing is appended. Raises at the first request that fails for good, and cancels the rest.
        `ahead`: groups sent and not yet taken, at most (default: all).
        """
        waiting = iter(enumerate(prompts))
        running: set[asyncio.Task[Group]] = set()
        done: set[asyncio.Task[Group]] = set()
        limit = len(prompts) if ahead is None else max(1, ahead)
        try:
            while True:
                while len(running) < limit and (following := next(waiting, None)) is not None:
                    running.add(asyncio.ensure_future(self._group(*following, count, sampling)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            # Those done as well: of several that failed at once only the first one's error was looked at.
            await asyncio.gather(*running, *done, return_exceptions=True)

    async def _group(self, index: int, prompt: PromptIds, count: int, sampling: Sampling) -> Group:
        started = monotonic()
        label = f"group {prompt.group}"

        async def ask(client: ServerClient) -> tuple[str, list[Response]]:
            return client.name, await client.generate(prompt.ids, count, sampling, label)

        server, responses = await self.on_some_server(count, ask)
        return Group(index, [_sample(prompt, r) for r in responses], server, monotonic() - started)

    async def on_some_server(
        self, weight: int, ask: Callable[[ServerClient], Awaitable[T]], *, avoid: ServerClient | None = None
    ) -> T:
        """Do `ask` on the least-loaded server; on another one when that is dead or hangs. ServerError when none is left.

        avoid: a server that is not asked.
        """
        while True:
            seat = await self._take(weight, avoid)
            try:
                return await ask(seat.client)
            except Transient as error:  # the client's own tries are used up
                self.put_out_of_use(seat.client, error.why)
            except TimeLimit as error:
                if await seat.client.healthy():
                    # It works: the request itself takes too long, on any server.
                    raise TimeLimit(error.server, f"{error.why}, though it is well: raise request_timeout_s") from error
                self.put_out_of_use(seat.client, f"{error.why}, and its health check fails")
            finally:
                self._give_back(seat, weight)

    async def _take(self, weight: int, avoid: ServerClient | None = None) -> _Seat:
        while True:
            in_use = [seat for seat in self._seats if not seat.out_of_use and seat.client is not avoid]
            if not in_use:
                lost = "; ".join(f"{name}: {why}" for name, why in self.out_of_use.items())
                raise ServerError("no server is left", lost)
            free = [seat for seat in in_use if seat.takes(weight)]
            if free:
                seat = min(free, key=lambda s: s.in_flight / s.concurrency)
                seat.in_flight += weight
                return seat
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _give_back(self, seat: _Seat, weight: int) -> None:
        seat.in_flight -= weight
        self._wake()

    def _wake(self) -> None:
        # Without an await: a task that is being cancelled must wake the others too.
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()


async def all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All values, or the first error; then the rest is cancelled and over."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sample(prompt: PromptIds, response: Response) -> Sample:
    return Sample(
        group=prompt.group,
        prompt_ids=list(prompt.ids),
        response_ids=response.ids,
        mask=[1] * len(response.ids),
        rollout_logprobs=response.logprobs,
        finish_reason=response.finish_reason,
        weight_versions=response.weight_versions,
    )
