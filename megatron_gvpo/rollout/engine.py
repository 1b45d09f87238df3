"""The synchronous face of the rollout side, for the train loop: servers in use, groups, scores, and new weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_gvpo.config.schema import RolloutSection
from megatron_gvpo.data.samples import Sample
from megatron_gvpo.rollout.client import ServerClient, ServerFacts
from megatron_gvpo.rollout.loop import LoopThread
from megatron_gvpo.rollout.pool import Group, PromptIds, ServerPool
from megatron_gvpo.rollout.server import Endpoint
from megatron_gvpo.rollout.teacher import ServedTeacher
from megatron_gvpo.rollout.weights import WeightControl
from megatron_gvpo.rollout.wire import Sampling


class RolloutEngine:
    """Groups from running servers, and new weights to them.

        with running_servers(path, config.rollout.servers, run_dir=..., max_length=...) as endpoints:
            with RolloutEngine(endpoints, config.rollout, vocab_size=..., max_length=...) as engine:
                sampling = Sampling.from_config(config.rollout, eos_ids)
                for group in engine.generate_groups(prompts, config.rollout.group_size, sampling): ...
                engine.weights.update_from_disk(folder, version="1")

    Every server is probed at the start: ServerError names one that is down, refuses the key or serves another model.
    """

    def __init__(self, endpoints: Sequence[Endpoint], rollout: RolloutSection, *, vocab_size: int, max_length: int) -> None:
        clients = [
            ServerClient(
                endpoint,
                vocab_size=vocab_size,
                max_length=max_length,
                timeout_s=rollout.request_timeout_s,
                retries=rollout.retries,
                connections=rollout.servers.concurrency,
            )
            for endpoint in endpoints
        ]
        self.pool = ServerPool(clients, rollout.servers.concurrency)
        self._loop = LoopThread()
        try:
            self._loop.run(self.pool.probe())
        except BaseException:
            self.close()
            raise
        self.weights = WeightControl(self._loop, self.pool, rollout.sync_timeout_s)

    @property
    def facts(self) -> list[ServerFacts]:
        """What each server in use says about itself."""
        return [client.facts for client in self.pool.clients]

    def generate_groups(
        self, prompts: Sequence[PromptIds], count: int, sampling: Sampling, *, ahead: int | None = None
    ) -> Iterator[Group]:
        """See `ServerPool.generate_groups`; generation goes on while the caller works on a group."""
        return self._loop.iterate(self.pool.generate_groups(prompts, count, sampling, ahead=ahead))

    def score(self, samples: Sequence[Sample], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of each sample's response tokens under these servers' model; see `ServedTeacher`."""
        scored = self._loop.run(ServedTeacher(self.pool, temperature=temperature).score(samples))
        return [score.logprobs for score in scored]

    def close(self) -> None:
        self._loop.run(self.pool.close())
        self._loop.close()

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
