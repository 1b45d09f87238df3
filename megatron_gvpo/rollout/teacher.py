"""A served teacher: what another model says of the student's own tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.errors import RequestRefused
from megatron_gvpo.rollout.pool import ServerPool
from megatron_gvpo.rollout.teacher_cache import ScoreCache
from megatron_gvpo.rollout.teacher_hedge import Hedge
from megatron_gvpo.rollout.teacher_wire import Scored, is_compact, read_teacher, teacher_body

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Text:
    """Token ids to be scored behind a prompt, in the teacher's own tokens. label: what an error calls them."""

    label: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


class ServedTeacher:
    """Scores responses on the teacher's servers, token by token, at temperature 1.

    A server's input log-probs are at temperature 1 whatever the request says, so a student at another temperature is refused:
    log-probs at two temperatures must not meet in one objective (tempered ones need the whole vocabulary).

    top_k: likeliest ids per token beside the log-prob of the token itself; 0: none. batch: responses per request. hedge_after_s:
    see `Hedge`. cache: scores of earlier runs. teacher_ids: see `read_teacher`.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        temperature: float,
        top_k: int = 0,
        batch: int = 8,
        hedge_after_s: float | None = 0.0,
        cache: ScoreCache | None = None,
        teacher_ids: int = 0,
    ) -> None:
        if temperature != 1.0:
            raise RequestRefused(
                f"a served teacher scores at temperature 1, the student samples at {temperature:g}: "
                "set rollout.temperature to 1, or teacher.where to colocated"
            )
        self._pool = pool
        self._top_k = top_k
        self._batch = batch
        self._hedge = Hedge(pool, hedge_after_s)
        self._cache = cache
        self._teacher_ids = teacher_ids
        self.tokens = 0
        self.from_cache = 0

    @property
    def second_requests(self) -> int:
        """Requests that also went to a second server so far."""
        return self._hedge.second_requests

    async def check(self) -> None:
        """Let every server answer as the run will ask it. ServerError for one that does not give the scores."""
        text = Text("the probe before training", [0], [0, 0])
        await asyncio.gather(*(self._check(client, text) for client in self._pool.clients))

    async def _check(self, client: ServerClient, text: Text) -> None:
        compact: list[bool] = []

        def read(answer: Any, *args: Any) -> list[Scored]:
            found = read_teacher(answer, *args)
            compact.append(not self._top_k or is_compact(answer))
            return found

        await self._ask(client, [text], read)
        if not compact[0]:
            log.warning(
                "%s sends top-%d log-probs as JSON lists, several times larger and slower to read than the binary form of newer "
                "servers",
                client.name,
                self._top_k,
            )

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Per sample, of every response token. Position t is predicted from the token before it, as the student's is."""
        return await self.score_texts([Text(f"a sample of group {s.group}", s.prompt_ids, s.response_ids) for s in samples])

    async def score_texts(self, texts: Sequence[Text]) -> list[Scored]:
        """The same for given ids. A text without a response has no score."""
        known = self._known(texts)
        todo = [i for i, text in enumerate(texts) if text.response_ids and i not in known]
        batches = [todo[i : i + self._batch] for i in range(0, len(todo), self._batch)]
        tasks = [asyncio.ensure_future(self._request([texts[i] for i in batch])) for batch in batches]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # at the first failure nobody waits for the others any more
        found = dict(known)
        for batch, answer in zip(batches, answers, strict=True):
            found.update(zip(batch, answer, strict=True))
        self.tokens += sum(len(text.response_ids) for text in texts)
        if self._cache is not None and todo:
            self._cache.put([(texts[i].prompt_ids, texts[i].response_ids, found[i]) for i in todo])
        return [found.get(i, Scored([])) for i in range(len(texts))]

    def _known(self, texts: Sequence[Text]) -> dict[int, Scored]:
        if self._cache is None:
            return {}
        known = {i: found for i, t in enumerate(texts) if (found := self._cache.get(t.prompt_ids, t.response_ids)) is not None}
        self.from_cache += sum(len(texts[i].response_ids) for i in known)
        return known

    async def _request(self, texts: Sequence[Text]) -> list[Scored]:
        async def ask(client: ServerClient) -> list[Scored]:
            return await self._ask(client, texts, read_teacher)

        return await self._hedge.ask(len(texts), ask)

    async def _ask(self, client: ServerClient, texts: Sequence[Text], read: Any) -> list[Scored]:
        sequences = [[*text.prompt_ids, *text.response_ids] for text in texts]
        starts = [len(text.prompt_ids) for text in texts]
        labels = [text.label for text in texts]
        body = teacher_body(sequences, starts, self._top_k, client.limits, labels)
        args = (sequences, starts, client.limits, labels, self._top_k, self._teacher_ids)
        return await client.ask_scores(body, labels[0], read, *args)
