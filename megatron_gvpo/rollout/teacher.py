"""A served teacher: log-probs of the student's own tokens under another model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.errors import RequestRefused
from megatron_gvpo.rollout.pool import ServerPool


class ServedTeacher:
    """Scores responses on the teacher's servers, token by token, at temperature 1.

    A server's input log-probs are at temperature 1 whatever the request says, so a student at another temperature is refused:
    log-probs at two temperatures must not meet in one objective (tempered ones need the whole vocabulary).
    """

    def __init__(self, pool: ServerPool, *, temperature: float, batch: int = 8) -> None:
        if temperature != 1.0:
            raise RequestRefused(
                f"a served teacher scores at temperature 1, the student samples at {temperature:g}: "
                "set rollout.temperature to 1, or teacher.where to colocated"
            )
        self._pool = pool
        self._batch = batch

    async def score(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Per sample, one log-prob per response token. Position t is predicted from the token before it, as the student's is."""
        groups = [samples[i : i + self._batch] for i in range(0, len(samples), self._batch)]
        scored = await asyncio.gather(*(self._score(group) for group in groups))
        return [row for group in scored for row in group]

    async def _score(self, samples: Sequence[Sample]) -> list[list[float]]:
        todo = [s for s in samples if s.response_ids]
        if not todo:
            return [[] for _ in samples]
        sequences = [[*s.prompt_ids, *s.response_ids] for s in todo]
        starts = [len(s.prompt_ids) for s in todo]
        labels = [f"a sample of group {s.group}" for s in todo]

        async def ask(client: ServerClient) -> list[list[float]]:
            return await client.score(sequences, starts, labels)

        rows = iter(await self._pool.on_some_server(len(todo), ask))
        return [next(rows) if s.response_ids else [] for s in samples]
