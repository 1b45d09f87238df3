"""An event loop in a thread of its own, so that the synchronous train loop can use the async client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_CANCEL_S = 10.0


class LoopThread:
    """Runs coroutines for synchronous callers. What waits is the coroutine, and it brings its own time limits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # daemon: an interpreter that ends without `close` must not wait for requests in flight
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-loop", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it and return at once."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Start it and wait for its value; an interrupt (Ctrl-C, a signal handler that raises) cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items of an async generator; it keeps working while the caller is busy with one of them."""

        async def following() -> T:
            return await items.__anext__()

        async def close() -> None:
            # An interrupted step of the generator is still being cancelled; until that is over it cannot be closed.
            limit = asyncio.get_running_loop().time() + _CANCEL_S
            while getattr(items, "ag_running", False) and asyncio.get_running_loop().time() < limit:
                await asyncio.sleep(0.01)
            if hasattr(items, "aclose"):
                await items.aclose()  # type: ignore[attr-defined]

        try:
            while True:
                try:
                    item = self.run(following())
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self._loop.is_closed():  # a generator that is collected later than its loop
                self.run(close())

    def close(self) -> None:
        """Cancel what still runs, stop the loop and wait for its thread."""
        self.run(_finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()


async def _finish() -> None:
    """End all other tasks and generators, and let sockets that are being closed say goodbye: a transport that outlives its loop
    raises in the garbage collector, at some later place that has nothing to do with it."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.sleep(0.01)
