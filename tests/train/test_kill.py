"""kill -9 of the whole run at random moments: whatever is killed, `--resume` ends in the run that a replay of its record gives.

The rollouts come from a fake server and cannot be repeated, so every group that is lost shows. test_live does it with SGLang.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.data.samples import read_samples
from tests.rollout.fake_server import fake_servers
from tests.train.fakes import Sampler, servers
from tests.train.runs import config_of, rows_of
from tests.train.zygote import Zygote

STEPS, PROMPTS, GROUP, KILLS = 12, 3, 4, 10
# Signs of life from which the time to a kill is counted: a group came in, a step's batch is whole, a save began, a save ended.
SIGNS = (
    "run/journal/*.jsonl",
    "run/samples/step_*.jsonl",
    "run/samples/step_*.jsonl",
    "run/checkpoints/*.tmp",
    "run/checkpoints/latest",
)


@pytest.mark.heavy
@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_any_moment(tmp_path: Path, world: int) -> None:
    """Why: invariant 5. Ten kills a run, each a random while after a random sign of life: a group, a batch, a save that begins
    or ends. Not covered: a machine that loses power (what is synced is), and kills of a single rank."""
    draw = random.Random()
    seed = draw.randrange(10**6)
    draw.seed(seed)
    print(f"seed of the moments: {seed}")
    common: dict[str, Any] = {
        "train": {"steps": STEPS, "micro_batch_tokens": 64},
        "checkpoint": {"every": 2, "export": True},
        "parallel": {"gpus_per_node": world},
    }
    with fake_servers(1) as (fake,), Zygote() as zygote:
        Sampler(fake)
        live = config_of(tmp_path / "live", rollout=servers(fake, prompts_per_step=PROMPTS, group_size=GROUP), **common)
        moments: list[dict[str, Any]] = [{"kill_after": draw.uniform(0.1, 3.0)}]  # perhaps before the first step
        for _ in range(KILLS - 1):
            moments.append({"kill_when": draw.choice(SIGNS), "changes": draw.randint(1, 2), "kill_after": draw.uniform(0.0, 0.3)})
        killed = 0
        for number, moment in enumerate(moments):
            codes = zygote.run(live, world=world, resume=number > 0, **moment)
            print(moment, codes, _reached(live))
            assert set(codes) <= {None, 0}, zygote.log(live)
            killed += None in codes
        assert killed >= KILLS * 0.7  # the rest came too late, to a run that was done
        assert set(zygote.run(live, world=world, resume=True)) == {0}, zygote.log(live)
        record = tmp_path / "live" / "run"
        replayed = config_of(tmp_path / "replayed", **common)
        assert set(zygote.run(replayed, world=world, replay=record)) == {0}, zygote.log(replayed)

    prompts = []
    for step in range(1, STEPS + 1):
        samples = read_samples(record / "samples" / f"step_{step:06d}.jsonl")
        assert {s.weight_versions[0][0] for s in samples} == {str(step - 1)}  # sampled from the weights before this step
        prompts += [s.meta["prompt"] for s in samples[::GROUP]]
    assert len(set(prompts)) == len(prompts) == STEPS * PROMPTS
    assert prompts == _order(live, STEPS * PROMPTS)
    assert [_comparable(row) for row in rows_of(record)] == [_comparable(row) for row in rows_of(tmp_path / "replayed" / "run")]
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (record, tmp_path / "replayed" / "run")]
    assert weights[0] == weights[1]


def _reached(config: Path) -> str:
    run = config.parent / "run"
    steps, saves, parts = (len(list(run.glob(p))) for p in ("samples/step_*", "checkpoints/step_*[0-9]", "checkpoints/*.tmp"))
    return f"{steps} batches, {saves} checkpoints, {parts} unfinished ones"


def _comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("data/")}


def _order(config: Path, count: int) -> list[str]:
    """The prompts that a run which is never stopped would draw."""
    from megatron_gvpo.config.load import load_config
    from megatron_gvpo.data.prompts import load_prompt_sets, load_tokenizer
    from megatron_gvpo.data.stream import PromptStream

    found = load_config(config)
    sets = load_prompt_sets(found.data, load_tokenizer(found.model.path), max_length=32, max_new_tokens=8)
    return [prompt.id for prompt in PromptStream(sets.train, seed=0).next(count)]
