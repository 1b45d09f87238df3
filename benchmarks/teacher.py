"""What a teacher's signals cost, by payload, on a real SGLang server, and what hedging saves with one slow server in three.

    python benchmarks/teacher.py --model examples/chain_sum/teacher --json benchmarks/results/teacher_cpu.json [--run RUN_DIR ...]

Payloads: log-probs of the sampled tokens, and the likeliest ids as JSON lists or in the binary form; each in batches, and one
request at a time. Time is from the request to arrays in memory, the best of `--rounds`. Hedging is measured on a stand-in for
slow servers that waits and answers, since only the waiting is of interest. With --run, the share of step time that the teacher
took in that run is added, from its metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import ServersSection
from megatron_gvpo.rollout.client import ServerClient
from megatron_gvpo.rollout.pool import ServerPool
from megatron_gvpo.rollout.server import running_servers
from megatron_gvpo.rollout.teacher_hedge import Hedge
from megatron_gvpo.rollout.teacher_wire import Scored, read_teacher, teacher_body

_FLAGS = ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64")


@dataclass(frozen=True)
class Result:
    payload: str
    requests: str
    seconds: float
    tokens_per_s: float
    bytes_per_token: float


@dataclass(frozen=True)
class Work:
    """`count` sequences of `prompt` + `response` random ids."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @classmethod
    def random(cls, vocab: int, count: int, prompt: int, response: int) -> Work:
        rng = random.Random(0)
        ids = [[rng.randrange(vocab) for _ in range(prompt + response)] for _ in range(count)]
        return cls([row[:prompt] for row in ids], [row[prompt:] for row in ids])

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.responses)


async def score(client: ServerClient, work: Work, top_k: int, binary: bool, batch: int, at_once: int) -> list[Scored]:
    """All of the work, `batch` sequences a request, `at_once` requests under way."""
    gate = asyncio.Semaphore(at_once)

    async def one(rows: range) -> list[Scored]:
        sequences = [[*work.prompts[i], *work.responses[i]] for i in rows]
        starts, labels = [len(work.prompts[i]) for i in rows], [f"sequence {i}" for i in rows]
        body = teacher_body(sequences, starts, top_k, client.limits, labels)
        if not binary:
            body = {key: value for key, value in body.items() if key not in _FLAGS}
        async with gate:
            return await client.ask_scores(body, labels[0], read_teacher, sequences, starts, client.limits, labels, top_k)

    count = len(work.prompts)
    found = await asyncio.gather(*(one(range(i, min(i + batch, count))) for i in range(0, count, batch)))
    return [row for rows in found for row in rows]


async def payloads(client: ServerClient, work: Work, top_k: int, batch: int, rounds: int) -> list[Result]:
    """Every payload, batched and one at a time, the rounds of all taking turns, so that the machine's mood is shared."""
    cases = [
        ("sampled", 0, False),
        (f"top-{top_k} as JSON", top_k, False),
        (f"top-{top_k} binary", top_k, True),
    ]
    ways = [(f"{batch} a request, 8 under way", batch, 8), ("one at a time", 1, 1)]
    best: dict[tuple[str, str], Result] = {}
    await score(client, work, top_k, True, batch, 8)  # warm
    for _ in range(rounds):
        for payload, k, binary in cases:
            for way, size, at_once in ways:
                before, begin = client.bytes_received, time.perf_counter()
                await score(client, work, k, binary, size, at_once)
                seconds = time.perf_counter() - begin
                received = (client.bytes_received - before) / work.tokens
                result = Result(payload, way, seconds, work.tokens / seconds, received)
                if (payload, way) not in best or seconds < best[payload, way].seconds:
                    best[payload, way] = result
    return list(best.values())


class _StandIn:
    """A client that takes `seconds` for a request."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds


async def hedging(requests: int, quick_s: float, slow_s: float) -> dict[str, float]:
    """99th percentile of a request's time over three servers of which one is slow, without and with the default hedge."""

    async def ask(client: Any) -> None:
        await asyncio.sleep(client.seconds * random.uniform(0.8, 1.2))

    found = {}
    for name, after_s in (("without", 0.0), ("with", None)):
        servers: Any = [_StandIn("a", quick_s), _StandIn("b", quick_s), _StandIn("c", slow_s)]
        hedge = Hedge(ServerPool(servers, 4), after_s)
        times: list[float] = []

        async def timed(hedge: Hedge, times: list[float]) -> None:
            begin = time.perf_counter()
            await hedge.ask(1, ask)
            times.append(time.perf_counter() - begin)

        for _ in range(requests // 6):
            await asyncio.gather(*(timed(hedge, times) for _ in range(6)))
        found[f"p99_s_{name}"] = statistics.quantiles(times, n=100)[98]
        found[f"median_s_{name}"] = statistics.median(times)
        found[f"second_requests_{name}"] = float(hedge.second_requests)
    return found


def share_of_step(run: Path) -> float:
    """The part of all steps' time that the run waited for its teacher, or ran it."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("step", 0) > 0]
    return sum(row.get("time/teacher", 0.0) for row in steps) / sum(row["time/step"] for row in steps)


async def measure(client: ServerClient, options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    async with client:
        await client.probe()
        work = Work.random(vocab, options.sequences, options.prompt, options.response)
        results = await payloads(client, work, options.top_k, options.batch, options.rounds)
    return {
        "payloads": [asdict(result) for result in results],
        "hedging": await hedging(300, 0.02, 0.4),
        "share_of_step": {str(run): share_of_step(run) for run in options.run},
        "settings": {key: str(value) for key, value in vars(options).items() if key not in ("run", "json")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=192)
    parser.add_argument("--top-k", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", type=Path, nargs="*", default=[], help="run directories whose step times are read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    length, vocab = options.prompt + options.response, read_shape(options.model).vocab
    servers = ServersSection(device=options.device, dtype="float32" if options.device == "cpu" else "bfloat16")
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as logs,
        running_servers(options.model, servers, run_dir=logs, max_length=length, name="teacher") as endpoints,
    ):
        client = ServerClient(endpoints[0], vocab_size=vocab, max_length=length + 1)
        found = asyncio.run(measure(client, options, vocab))
    for row in found["payloads"]:
        numbers = f"{row['tokens_per_s']:10.0f} tokens/s {row['bytes_per_token']:10.1f} bytes/token {row['seconds']:8.3f} s"
        print(f"{row['payload']:18} {row['requests']:32} {numbers}")
    print(json.dumps({"hedging": found["hedging"], "share_of_step": found["share_of_step"]}, indent=2))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
