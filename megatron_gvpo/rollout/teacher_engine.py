"""The synchronous face of served teachers, for the train loop: one for every domain, at work while the caller is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_gvpo.config.schema import TeacherSection
from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.loop import LoopThread
from megatron_gvpo.rollout.pool import ServerPool
from megatron_gvpo.rollout.server import Endpoint
from megatron_gvpo.rollout.teacher import ServedTeacher, Text
from megatron_gvpo.rollout.teacher_cache import ScoreCache
from megatron_gvpo.rollout.teacher_wire import Scored


@dataclass(frozen=True)
class TeacherServers:
    """One teacher's running servers. vocab_size: ids it may be asked for. max_length: tokens of prompt and response together.

    weights: digest of its weights, for the cache; empty where nobody knows them, and then nothing is remembered. teacher_ids: ids
    of its own head, where they are more than `vocab_size`.
    """

    endpoints: Sequence[Endpoint]
    vocab_size: int
    max_length: int
    weights: str = ""
    teacher_ids: int = 0


def model_path_of(endpoint: Endpoint, timeout_s: float) -> str:
    """The folder that a running server says it serves. ServerError when it is down or refuses the key."""

    async def ask() -> str:
        async with ServerClient(endpoint, vocab_size=1, max_length=2, timeout_s=timeout_s) as client:
            return (await client.probe()).model_path

    loop = LoopThread()
    try:
        return loop.run(ask())
    finally:
        loop.close()


class TeacherEngine:
    """Scores from running teacher servers.

        with TeacherEngine({"": servers, "code": others}, config.teacher, temperature=1.0) as engine:
            future = engine.submit("code", texts)
            ...
            scores = future.result()

    Every server is probed at the start, and asked for scores as the run will ask: ServerError names one that is down, refuses
    the key, or does not give them. RequestRefused for a temperature other than 1.
    """

    def __init__(self, teachers: Mapping[str, TeacherServers], section: TeacherSection, *, temperature: float) -> None:
        self._loop = LoopThread()
        self._pools: list[ServerPool] = []
        self._clients: list[ServerClient] = []
        self._caches: list[ScoreCache] = []
        self._teachers: dict[str, ServedTeacher] = {}
        try:
            for domain, servers in teachers.items():
                self._teachers[domain] = self._open(servers, section, temperature)
        except BaseException:
            self.close()
            raise

    def submit(self, domain: str, texts: Sequence[Text]) -> Future[list[Scored]]:
        """Start scoring with the domain's teacher, or the one under ""; returns at once. KeyError where neither is there."""
        teacher = self._teachers[domain if domain in self._teachers else ""]
        return self._loop.submit(teacher.score_texts(texts))

    def counts(self) -> dict[str, float]:
        """Totals since the start: tokens scored, those of them `from_cache`, second_requests, bytes received."""
        teachers = self._teachers.values()
        return {
            "tokens": float(sum(t.tokens for t in teachers)),
            "from_cache": float(sum(t.from_cache for t in teachers)),
            "second_requests": float(sum(t.second_requests for t in teachers)),
            "bytes": float(sum(client.bytes_received for client in self._clients)),
        }

    def _open(self, servers: TeacherServers, section: TeacherSection, temperature: float) -> ServedTeacher:
        clients = [
            ServerClient(
                endpoint,
                vocab_size=servers.vocab_size,
                # A whole response is scored as if it were a prompt, behind which the client keeps room for one token.
                max_length=servers.max_length + 1,
                timeout_s=section.request_timeout_s,
                retries=section.retries,
                connections=section.servers.concurrency,
            )
            for endpoint in servers.endpoints
        ]
        pool = ServerPool(clients, section.servers.concurrency)
        self._pools.append(pool)
        self._clients += clients
        top_k = section.top_k if section.signal == "topk" else 0
        cache = None
        if section.cache and servers.weights:
            cache = ScoreCache(section.cache, weights=servers.weights, top_k=top_k, temperature=temperature)
            self._caches.append(cache)
        teacher = ServedTeacher(
            pool,
            temperature=temperature,
            top_k=top_k,
            batch=section.batch,
            hedge_after_s=section.hedge_after_s,
            cache=cache,
            teacher_ids=servers.teacher_ids,
        )
        self._loop.run(pool.probe())
        self._loop.run(teacher.check())
        return teacher

    def close(self) -> None:
        for pool in self._pools:
            self._loop.run(pool.close())
        self._loop.close()
        for cache in self._caches:
            cache.close()

    def __enter__(self) -> TeacherEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
