"""What GUPO costs: the time of an optimizer step with it over one without, against the count of the head's products.

    python benchmarks/gupo.py --json benchmarks/results/gupo_cpu.json

Two models on one CPU rank: the demo's student, and four layers under a head of 32,768 x 512, which is most of that model. A step
is what a run does that recomputes its old log-probs: a pass without grad, the objective, forward, backward, optimizer. Methods
take turns for `--rounds` rounds, and the best round of each counts. Seconds are of CPU time of the one thread that works, so that
other programs on the machine matter little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent

# name: settings of the section `gupo`; None is the plain step
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "recomputed": {},
    "held": {"coefficients": "held"},
    "rows 1/16": {"rows": 1 / 16},
}


@dataclass(frozen=True)
class Case:
    """A model, and a batch of random tokens for it."""

    name: str
    config: dict[str, Any]  # the model's config.json
    groups: int
    group_size: int
    prompt: int  # tokens
    response: int


@dataclass(frozen=True)
class Result:
    """counted_ratio: by floating-point operations. products: of the head's size. uncertainty_error: largest relative one of any
    group against all rows."""

    case: str
    method: str
    seconds: float
    ratio: float
    products: float
    counted_ratio: float
    over_count: float
    uncertainty_error: float


def cases() -> list[Case]:
    student = json.loads((REPOSITORY / "examples/chain_sum/student/config.json").read_text())
    wide = {
        **student,
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    return [Case("demo", student, 32, 8, 12, 8), Case("32,768 x 512 head", wide, 8, 8, 8, 32)]


def step_products(case: Case) -> float:
    """Operations of a plain step, in products of the head's size over the trained tokens: a pass without grad, and one with."""
    c, tokens = case.config, case.groups * case.group_size * (case.prompt + case.response - 1)
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    attention = 2 * hidden * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    per_token = layers * (attention + 3 * hidden * c["intermediate_size"])
    # Scores and their product with the values, each of heads x head_dim x (prompt + response) multiply-adds a token.
    scores = layers * 2 * c["num_attention_heads"] * c["head_dim"] * (case.prompt + case.response)
    trained = case.groups * case.group_size * case.response
    return 4 * (1 + (per_token + scores) * tokens / (trained * c["vocab_size"] * hidden))


def measure_case(case: Case, rounds: int, folder: Path) -> list[Result]:
    import torch

    from megatron_gvpo.config.schema import Config, GupoSection
    from megatron_gvpo.data.microbatch import plan_micro_batches
    from megatron_gvpo.data.samples import Sample
    from megatron_gvpo.gupo.cost import head_products, memory_plan
    from megatron_gvpo.mcore.gupo_step import GroupWeigher
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.train.build import build

    (folder / "config.json").write_text(json.dumps(case.config))
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "init": "random"},
            "precision": {"params": "fp32"},
            "train": {"device": "cpu", "steps": 1000},
            "objective": {"name": "gvpo"},
            "optimizer": {"lr": 1e-9},
        }
    )
    ranks = start(config.parallel, config.train, config.precision)
    engine = build(config, ranks).engine
    rng, vocabulary = random.Random(0), case.config["vocab_size"]

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    samples = []
    for g in range(case.groups):
        prompt = ids(case.prompt)
        samples += [
            Sample(f"g{g}", prompt, ids(case.response), [1] * case.response, rng.gauss(0, 1)) for _ in range(case.group_size)
        ]
    kept = list(range(len(samples)))
    plan = plan_micro_batches([len(s) for s in samples], 1, max_tokens=4096, groups=[s.group for s in samples])
    share = engine.cut(samples, kept, plan)

    def step(weigher: GroupWeigher | None) -> Any:
        found = None if weigher is None else weigher.collect(share)
        logprobs_T = engine.logprobs(share) if found is None else found.logprobs_T
        batch, whole = engine.batch_of(samples, kept, share, {"logprobs": logprobs_T, "old_logprobs": logprobs_T})
        weights = None if weigher is None or found is None else weigher.weigh(found, batch, 1)
        engine.step(whole, batch, engine.objective.prepare(batch, engine.comm), weights and weights.multipliers_G)
        return weights

    seconds = dict.fromkeys(METHODS, float("inf"))
    uncertainty: dict[str, Any] = {}
    for _ in range(rounds):
        for name, options in METHODS.items():
            weigher = None if options is None else GroupWeigher(engine, GupoSection(enabled=True, **options), 0)
            started = time.process_time()
            weights = step(weigher)
            seconds[name] = min(seconds[name], time.process_time() - started)
            if weights is not None:
                uncertainty[name] = weights.uncertainty_G
    hidden, results = case.config["hidden_size"], []
    for name, options in METHODS.items():
        products, error = 0.0, 0.0
        if options is not None:
            gupo = GupoSection(enabled=True, **options)
            memory = memory_plan(gupo, vocabulary, vocabulary, hidden, weight_bytes=4)
            products = head_products(gupo, vocabulary, memory).total
            if options.get("rows", 1.0) < 1.0:
                error = float((uncertainty[name] / uncertainty["recomputed"] - 1).abs().max())
        counted = 1 + products / step_products(case)
        ratio = seconds[name] / seconds["plain"]
        results.append(Result(case.name, name, seconds[name], ratio, products, counted, ratio / counted, error))
    shutdown()
    torch.set_num_threads(1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that every method runs")
    parser.add_argument("--case", choices=[case.name for case in cases()], help="one model only")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results: list[Result] = []
    for case in cases():
        if arguments.case in (None, case.name):
            with tempfile.TemporaryDirectory() as folder:
                results += measure_case(case, arguments.rounds, Path(folder))
    print(f"{'model':<20} {'method':<12} {'s/step':>8} {'ratio':>7} {'products':>9} {'counted':>8} {'over':>6} {'u error':>8}")
    for r in results:
        print(
            f"{r.case:<20} {r.method:<12} {r.seconds:8.3f} {r.ratio:7.2f} {r.products:9.2f} {r.counted_ratio:8.2f} "
            f"{r.over_count:6.2f} {r.uncertainty_error:8.4f}"
        )
    if arguments.json:
        host = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"host": host, "results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
