"""A fake rollout server for whole runs: random responses, as unrepeatable as a real server's, and what was asked."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

from tests.rollout.fake_server import Answer, FakeServer

END = 1


class Sampler:
    """Answers /generate with fresh random responses. `asked`: how often each prompt was asked for, by its ids."""

    def __init__(self, fake: FakeServer) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.finished = 0
        self.gate = threading.Event()  # closed: requests wait, as on a stalled server
        self.gate.set()
        self.free = 10**9  # requests answered before the gate is looked at
        self._draw = random.SystemRandom()
        self._lock = threading.Lock()
        self._fake = fake
        fake.on("/generate", self._generate)

    def stall_after(self, requests: int) -> None:
        """Answer so many more requests, and let all later ones wait."""
        self.gate.clear()
        self.free = self.finished + requests

    def resume(self) -> None:
        self.free = 10**9
        self.gate.set()

    def _generate(self, body: dict[str, Any]) -> Answer:
        if not isinstance(body["input_ids"][0], int):
            raise ValueError("this fake answers one prompt a request")
        with self._lock:
            self.asked[tuple(body["input_ids"])] += 1
            turn = sum(self.asked.values())
        if turn > self.free:
            self.gate.wait(120.0)
        answers = [self._response() for _ in range(body["sampling_params"]["n"])]
        with self._lock:
            self.finished += 1
        return 200, answers

    def _response(self) -> dict[str, Any]:
        ids = [*(self._draw.randrange(8, 34) for _ in range(self._draw.randrange(1, 5))), END]
        version = self._fake.version
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": END},
                "output_token_logprobs": [[self._draw.uniform(-3.0, -0.1), token, None] for token in ids],
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                "cached_tokens": 0,
            },
        }


def servers(*fakes: FakeServer, **rollout: Any) -> dict[str, Any]:
    """The `rollout` section for a run on these servers, with short limits."""
    return {
        "weight_sync": "disk",
        "retries": 0,
        "request_timeout_s": 20.0,
        "sync_timeout_s": 20.0,
        "servers": {"launch": "none", "urls": [fake.endpoint.url for fake in fakes], "api_key": "key"},
        **rollout,
    }
