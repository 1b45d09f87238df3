"""A second server for a request that is slow: the first answer counts, the other request is given up."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.errors import ServerError
from megatron_gvpo.rollout.pool import ServerPool

T = TypeVar("T")

_MEDIANS = 3.0
_REMEMBERED = 64
_FEWEST = 4  # answers that a median is taken of
_LEAST_S = 0.05


class Hedge:
    """Asks a pool, and asks a second server of it when the first takes long.

    after_s: seconds from when a request was sent; None: three times the median of the last answers; 0: never. Only for requests
    whose answer is the same wherever and however often it is computed.
    """

    def __init__(self, pool: ServerPool, after_s: float | None) -> None:
        self._pool = pool
        self._after_s = after_s
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self.second_requests = 0

    async def ask(self, weight: int, ask: Callable[[ServerClient], Awaitable[T]]) -> T:
        """Like `ServerPool.on_some_server`."""
        sent: asyncio.Future[ServerClient] = asyncio.get_running_loop().create_future()

        async def first_ask(client: ServerClient) -> T:
            if not sent.done():
                sent.set_result(client)
            return await self._timed(client, ask)

        first = asyncio.create_task(self._pool.on_some_server(weight, first_ask))
        tasks = {first}
        try:
            # What waits for a free place is not slow.
            await asyncio.wait({first, sent}, return_when=asyncio.FIRST_COMPLETED)
            limit = self._limit()
            if limit is not None and not first.done():
                await asyncio.wait({first}, timeout=limit)
            if first.done() or limit is None or len(self._pool.clients) < 2:
                return await first
            self.second_requests += 1
            slow = sent.result()
            tasks.add(asyncio.create_task(self._pool.on_some_server(weight, lambda c: self._timed(c, ask), avoid=slow)))
            return await _first_answer(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _timed(self, client: ServerClient, ask: Callable[[ServerClient], Awaitable[T]]) -> T:
        begin = monotonic()
        answer = await ask(client)
        self._recent.append(monotonic() - begin)
        return answer

    def _limit(self) -> float | None:
        if self._after_s is not None:
            return self._after_s or None
        if len(self._recent) < _FEWEST:
            return None
        return max(_LEAST_S, _MEDIANS * statistics.median(self._recent))


async def _first_answer(tasks: set[asyncio.Task[T]]) -> T:
    """The first that succeeds; the last failure where none does."""
    waiting = set(tasks)
    failure: ServerError | None = None
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            try:
                return task.result()
            except ServerError as error:
                failure = error
    assert failure is not None
    raise failure
