"""The contract kit: our own family passes it, and for each of its checks there is an objective that it catches.

Why the wrong ones: a kit that cannot fail proves nothing. Not covered: whether the kit finds every mistake there can be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ConfigDict
from torch import Tensor

from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import BUILTIN_CONFIGS, ObjectiveConfig
from megatron_gvpo.objectives.base import Comm, LocalComm, Objective, Outputs, Prepared, TokenLoss
from megatron_gvpo.objectives.batch import Batch
from megatron_gvpo.objectives.contract import CHECKS, ContractError, Kit, check_contract, run_check
from megatron_gvpo.objectives.pytest_plugin import contract_test
from megatron_gvpo.objectives.registry import load_objective

_RATIO: list[dict[str, Any]] = [
    {},
    {"kl_coef": 0.1},
    {"kl_coef": 0.1, "kl_estimator": "k2", "tis": "token"},
    {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "tis": "sequence"},
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gvpo": [{}, {"reference": "rollout"}, {"reference": "frozen"}],
    "gvpo_opd": [{}, {"length_alpha": 1.0}, {"teacher_coef": 0.05}, {"teacher_coef": 0.05, "reference": "frozen"}],
    "opd": [
        *({"shape": s} for s in ("raw", "sign", "tanh", "clip", "group_constant", "permuted")),
        {"baseline": "kl"},
        {"tis": "token"},
        {"tis": "sequence"},
    ],
    "tv_opd": [{}, {"regulate": False}, {"tis": "token"}],
    "gkd": [{"divergence": d} for d in ("reverse_kl", "forward_kl", "jsd", "tv")],
    "grpo": _RATIO,
    "dr_grpo": _RATIO,
    "dapo": _RATIO,
    "gspo": _RATIO,
    "cispo": _RATIO,
    "rloo": [{}, {"tis": "token"}, {"tis": "sequence"}],
    "sft": [{}],
}
CASES = [(name, options) for name in BUILTIN_CONFIGS for options in OPTIONS[name]]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())))
def test_our_family_keeps_the_contract(name: str, options: dict[str, Any]) -> None:
    """Every built-in objective under every option that takes another path through its code."""
    names = check_contract(load_objective(name), options)
    assert len(names) >= len(CHECKS) - 2


test_one_line_is_enough = contract_test("gvpo", {"beta": 0.2})


class _Right(Objective[ObjectiveConfig]):
    """REINFORCE with a group mean: the wrong ones below differ from it in one thing each."""

    name = "right"

    @property
    def needs(self) -> Needs:
        return Needs(rewards=True, min_group_size=2, denominator="tokens", groups=True)

    def advantages_N(self, batch: Batch) -> Tensor:
        return batch.sequences.reward_N - batch.sequences.group_mean_N(batch.sequences.reward_N)

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(float(batch.total_tokens), -self.advantages_N(batch)[batch.tokens.sequence_T])


class _LaxConfig(ObjectiveConfig):
    model_config = ConfigDict(extra="allow", frozen=True)


class _AcceptsUnknownKeys(_Right):
    Config = _LaxConfig


class _OneRowASequence(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(float(batch.total_tokens), -self.advantages_N(batch))


class _LengthFromPositions(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(float(batch.total_tokens), 1.0 / (1 + batch.tokens.position_T.to(torch.float64)))


class _CountsTheInput(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        sequences = batch.sequences
        count = float(sequences.sample_N.max()) + 1 if len(sequences) else 0.0
        return Prepared(count, -self.advantages_N(batch)[batch.tokens.sequence_T])


class _NeverEmpty(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(max(float(batch.total_tokens), 1.0), -self.advantages_N(batch)[batch.tokens.sequence_T])


class _DividesByZero(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        scale = 1 / batch.total_tokens
        return Prepared(1.0, -self.advantages_N(batch)[batch.tokens.sequence_T] * scale)


class _NanForOne(_Right):
    @property
    def needs(self) -> Needs:
        return Needs(rewards=True, min_group_size=1, denominator="tokens", groups=True)

    def advantages_N(self, batch: Batch) -> Tensor:
        centre_N, k_N = super().advantages_N(batch), batch.sequences.group_size_N()
        var_N = batch.sequences.group_sum_G(centre_N.square())[batch.sequences.group_N] / (k_N - 1)
        return centre_N / (var_N.sqrt() + 1e-6)


class _GroupsByReshaping(_Right):
    def advantages_N(self, batch: Batch) -> Tensor:
        reward_N = batch.sequences.reward_N
        pairs = reward_N.view(-1, 2) if len(reward_N) % 2 == 0 else reward_N.view(-1, 1)
        return (pairs - pairs.mean(1, keepdim=True)).flatten()


class _NoBaseline(_Right):
    def advantages_N(self, batch: Batch) -> Tensor:
        return batch.sequences.reward_N


class _MeanOfMeans(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(1.0 if batch.total_tokens else 0.0)

    def loss(self, outputs: Outputs, prepared: Prepared, token_data: Mapping[str, Tensor]) -> TokenLoss:
        return TokenLoss(-outputs.logprobs_T / max(len(outputs.tokens), 1))


class _LocalDenominator(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(float(len(batch.tokens)), -self.advantages_N(batch)[batch.tokens.sequence_T])


class _CallsOnlyWithTokens(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        if len(batch.tokens):
            comm.sum(torch.ones(()))
        return super().prepare(batch, comm)


class _CountsCalls(_Right):
    calls = 0

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        self.calls += 1
        return Prepared(float(batch.total_tokens), -self.calls * self.advantages_N(batch)[batch.tokens.sequence_T])


class _WritesIntoTheBatch(_Right):
    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        batch.sequences.reward_N.mul_(2.0)
        return super().prepare(batch, comm)


class _WrongSlope(_Right):
    @property
    def needs(self) -> Needs:
        return Needs(rewards=True, current=True, min_group_size=2, denominator="tokens", groups=True)

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        lp_N = batch.sequences.sum_of("logprobs")
        return Prepared(float(batch.total_tokens), lp_N[batch.tokens.sequence_T], loss_sum=float(lp_N.square().sum()))


class _LearnsFromRejected(_Right):
    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self.steps = 0

    def prepare(self, batch: Batch, comm: Comm) -> Prepared:
        return Prepared(float(batch.total_tokens), -(1 + self.steps) * self.advantages_N(batch)[batch.tokens.sequence_T])

    def commit(self, prepared: Prepared, accepted: bool) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"steps"}:
            raise ValueError("it has other keys")
        self.steps = state["steps"]


class _ForgetsItsState(_LearnsFromRejected):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("it has keys")


class _LoadsAnything(_LearnsFromRejected):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state.get("steps", 0)


class _TensorState(_LearnsFromRejected):
    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps)}


WRONG: list[tuple[str, type[Objective[Any]], str]] = [
    ("declaration", _AcceptsUnknownKeys, "unknown keys"),
    ("shapes", _OneRowASequence, "shape"),
    ("masks", _LengthFromPositions, "masked tokens"),
    ("nan_at_masked", _LengthFromPositions, "NaN at masked places"),
    ("empty_responses", _CountsTheInput, "an empty response changes the loss"),
    ("nothing_to_train", _NeverEmpty, "denominator is 1.0"),
    ("nothing_to_train", _DividesByZero, "ZeroDivisionError"),
    ("groups_of_one", _NanForOne, "a group of one"),
    ("permutation", _GroupsByReshaping, "order of the samples"),
    ("reward_shift", _NoBaseline, "a constant added"),
    ("micro_batch_splits", _MeanOfMeans, "micro-batches"),
    ("rank_splits", _LocalDenominator, "a split of sequences over"),
    ("rank_splits", _CallsOnlyWithTokens, "different collectives"),
    ("purity", _CountsCalls, "called again"),
    ("purity", _WritesIntoTheBatch, "prepare()"),
    ("gradient", _WrongSlope, "slope"),
    ("rejected_step", _LearnsFromRejected, "not accepted"),
    ("state_round_trip", _ForgetsItsState, "after a resume"),
    ("state_round_trip", _LoadsAnything, "unknown keys"),
    ("state_round_trip", _TensorState, "JSON"),
]


def test_the_right_one_passes() -> None:
    """What the wrong ones are made from keeps the contract, so that each fails for its own fault."""
    assert len(check_contract(_Right)) == len(CHECKS)


def test_every_check_has_a_wrong_objective() -> None:
    """A check added to the kit without something that fails it is not known to work."""
    assert {name for name, _, _ in WRONG} == {c.name for c in CHECKS}


@pytest.mark.parametrize(("check", "wrong", "why"), WRONG, ids=lambda v: getattr(v, "__name__", v))
def test_a_wrong_objective_is_caught(check: str, wrong: type[Objective[Any]], why: str) -> None:
    """The check fails, and its one line names the objective, the check and the reason."""
    (chosen,) = [c for c in CHECKS if c.name == check]
    with pytest.raises(ContractError) as caught:
        run_check(chosen, Kit(wrong))
    text = str(caught.value)
    assert wrong.__name__ in text
    assert f"`{check}`" in text
    assert why in text
    assert "\n" not in text


def test_local_comm_orders_gathered_tokens() -> None:
    """`gather_tokens` of one process: by sequence and position, whatever the order of the table."""
    batch = Kit(_Right).world().batch(_Right(ObjectiveConfig()).needs)
    order = torch.randperm(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    shuffled = batch.tokens.select(order)
    values, sequence, position = LocalComm().gather_tokens(shuffled.position_T, shuffled)
    assert torch.equal(sequence, batch.tokens.sequence_T)
    assert torch.equal(position, batch.tokens.position_T)
    assert torch.equal(values, batch.tokens.position_T)


def test_the_command_line_runs_the_kit_on_a_strangers_objective(tmp_path: Path) -> None:
    """`pytest --objective module:Class`, no test file: one good and one bad objective, in a folder that knows nothing of us."""
    (tmp_path / "theirs.py").write_text(
        "from megatron_gvpo.objectives import Objective, Prepared\n"
        "from megatron_gvpo.config.needs import Needs\n"
        "import torch\n"
        "class Good(Objective):\n"
        "    name = 'good'\n"
        "    def prepare(self, batch, comm):\n"
        "        return Prepared(float(batch.total_tokens), -torch.ones(len(batch.tokens), dtype=torch.float64))\n"
        "class Bad(Good):\n"
        "    def prepare(self, batch, comm):\n"
        "        return Prepared(float(len(batch.tokens)), -torch.ones(len(batch.tokens), dtype=torch.float64))\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "megatron_gvpo.objectives.pytest_plugin", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        ask = [*command, *(f"--objective={name}" for name in names)]
        return subprocess.run(ask, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)

    both, absent = run("theirs:Good", "theirs:Bad"), run("theirs:Goood")
    assert both.returncode == 1
    assert "1 failed, 27 passed" in both.stdout, both.stdout
    assert "Bad breaks `rank_splits`: a split of sequences over 2 ranks" in both.stdout
    assert absent.returncode == 4
    assert "did you mean 'Good'?" in absent.stderr
