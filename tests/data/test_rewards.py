"""Rewards: what is right, what is not, and that a reward function that hangs or crashes is stopped, counted and named.

Not covered: whether a task's own scorer is fair (reasoning-gym's and math-verify's business).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.config.schema import RewardSection
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.extract import extract
from megatron_gvpo.data.prompts import Prompt
from megatron_gvpo.data.rewards import Score, Scorer, count_problems


def _prompt(answer: Any = None, **meta: Any) -> Prompt:
    return Prompt("p0", "", [1], 8, answer, meta=meta)


def _rewards(texts: list[str], prompt: Prompt, **reward: Any) -> list[Score]:
    with Scorer(RewardSection(**reward)) as scorer:
        scorer.check([prompt])
        return scorer.score([prompt] * len(texts), texts)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user's, found on PYTHONPATH by the processes that score."""
    (tmp_path / "my_rewards.py").write_text(
        "import os, re, signal\n"
        "def length(text, answer, meta):\n    print('chatter')\n    return len(text) * meta['scale']\n"
        "def odd(text, answer, meta):\n"
        "    if text == 'hang': re.match(r'(a+)+$', 'a' * 60 + 'b')  # never returns to Python\n"
        "    if text == 'raise': raise RuntimeError('no\\ngood')\n"
        "    if text == 'die': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if text == 'exit': raise SystemExit(3)\n"
        "    if text == 'nan': return float('nan')\n"
        "    if text == 'none': return None\n"
        "    return 1\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "text", "answer"),
    [
        ("all", "  a b\n", "a b"),
        ("last_number", "12 + 3 = 15.", "15"),
        ("last_number", "It costs $1,234.50 in all", "1234.50"),
        ("last_number", "3 - 10 = -7", "-7"),
        ("last_number", "12-34", "34"),
        ("last_number", "x2", "2"),
        ("last_number", "none at all", None),
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{3} and \boxed{cut", "3"),
        ("boxed", r"\boxed{cut", None),
        ("answer_tag", "<answer>1</answer> no: <answer> 2 </answer>", "2"),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "1</answer>", None),
    ],
)
def test_the_answer_in_a_response(mode: Any, text: str, answer: str | None) -> None:
    """The last answer counts, thousands separators do not, and half an answer is none."""
    assert extract(text, mode) == answer


def test_extraction_is_linear() -> None:
    """A model in trouble repeats itself for as long as it may; a quadratic search would stall the whole batch."""
    for mode in ("last_number", "boxed", "answer_tag"):
        extract(r"\boxed{" * 200_000 + "1," * 200_000 + "<answer>" * 200_000, mode)


def test_exact() -> None:
    """Character by character after extraction; the answer of the data set goes through the same extraction."""
    assert [s.reward for s in _rewards([" 12", "12", "012", "-12"], _prompt("12"))] == [1.0, 1.0, 0.0, 0.0]
    texts = ["so 1,234 it is", "1234", "no idea"]
    scores = _rewards(texts, _prompt("steps ... #### 1,234"), extract="last_number")
    assert scores == [Score(1.0), Score(1.0), Score(0.0, "unparsed")]
    assert count_problems(scores) == {"unparsed": 1}
    assert _rewards(["42"], _prompt(42)) == _rewards(["42"], _prompt("42"), workers=2) == [Score(1.0)]


def test_math_verify() -> None:
    """Equal mathematics, not equal text; `boxed` feeds it the inside alone."""
    texts = ["it is 0.5", "$\\frac{2}{4}$", "0.51", "nothing"]
    assert [s.reward for s in _rewards(texts, _prompt("1/2"), name="math_verify")] == [1.0, 1.0, 0.0, 0.0]
    texts = [r"$1+3x$, no: \boxed{3x+1}", r"\boxed{3x}", "3x+1"]
    assert [s.reward for s in _rewards(texts, _prompt("1+3x"), name="math_verify", extract="boxed")] == [1.0, 0.0, 0.0]


def test_reasoning_gym_gives_no_partial_credit() -> None:
    """Its scorers give up to 0.2 for the right answer inside other text: as a reward, that teaches to write everything."""
    prompt = _prompt("15", question="12 + 3 =", metadata={"source_dataset": "chain_sum"})
    assert [s.reward for s in _rewards(["15", "is it 15 or 16", "16"], prompt, name="reasoning_gym")] == [1.0, 0.0, 0.0]
    scores = _rewards(["is it 15", "16?"], prompt, name="reasoning_gym", extract="last_number")
    assert [s.reward for s in scores] == [1.0, 0.0]


@pytest.mark.usefixtures("functions")
def test_a_function_of_the_users(capfd: pytest.CaptureFixture[str]) -> None:
    """Any number is a reward; what the function prints stays out of stdout, where `--json` promises JSON alone."""
    assert _rewards(["ab", "abc"], _prompt(scale=0.5), name="my_rewards:length", workers=2) == [Score(1.0), Score(1.5)]
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("functions")
def test_what_goes_wrong_is_stopped_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """A regular expression that never ends does so in C, where no signal handler runs: only ending the process helps. A
    crash or a bad value costs that one response; the next ones are scored by a new process."""
    texts = ["fine", "hang", "fine", "raise", "die", "exit", "nan", "none", "fine"]
    scores = _rewards(texts, _prompt(), name="my_rewards:odd", timeout_s=1.0)
    assert [s.problem for s in scores] == [None, "timeout", None, "error", "died", "died", "error", "error", None]
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert scores[3].detail == "RuntimeError: no good"
    assert scores[4].detail == f"its process ended with signal {int(signal.SIGSEGV)}"
    assert scores[6].detail == "ValueError: the reward is nan"
    assert count_problems(scores) == {"timeout": 1, "error": 3, "died": 2}
    assert "reward 0 for a response to p0: timeout: no answer within 1 s" in caplog.text


@pytest.mark.usefixtures("functions")
def test_a_broken_function_ends_the_run() -> None:
    """One that fails on every response would otherwise train a model on rewards of 0 for hours."""
    with pytest.raises(DataError, match=r"my_rewards:length fails on every response so far \(8 of 8\).*KeyError: 'scale'"):
        _rewards(["a"] * 20, _prompt(), name="my_rewards:length")


@pytest.mark.usefixtures("functions")
def test_functions_that_do_not_load() -> None:
    """Named when the scorer is built, before any rollout."""
    for name, message in (
        ("my_rewards", "reward.name: 'my_rewards' is none of exact, math_verify, reasoning_gym, and no module:function"),
        ("absent_module:f", "reward.name: cannot import absent_module:f: No module named 'absent_module'"),
        ("my_rewards:absent", "reward.name: cannot import my_rewards:absent: module 'my_rewards' has no attribute 'absent'"),
        ("os:sep", "reward.name: os:sep is no function"),
        ("broken:f", "reward.name: broken:f fails while it is imported: ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(DataError) as caught:
            Scorer(RewardSection(name=name))
        assert str(caught.value) == message


def test_prompts_without_what_the_reward_needs() -> None:
    """Seen before anything is started, not as a reward of 0."""
    with pytest.raises(DataError, match=r"prompt p0 lacks a right answer \(data.answer_key\); reward.name is exact"):
        _rewards(["a"], _prompt())
    with pytest.raises(DataError, match=r"prompt p0 lacks its reasoning-gym task"):
        _rewards(["a"], _prompt("a"), name="reasoning_gym")


_HANGING_TRAINER = """
from megatron_gvpo.config.schema import RewardSection
from megatron_gvpo.data.prompts import Prompt
from megatron_gvpo.data.rewards import Scorer
scorer = Scorer(RewardSection(name="my_rewards:odd", timeout_s=600))
print(scorer._workers[0]._process.pid, flush=True)
scorer.score([Prompt("p", "", [1], 8)], ["hang"])
"""


@pytest.mark.usefixtures("functions")
def test_no_process_outlives_the_trainer() -> None:
    """A trainer killed by SIGKILL cleans nothing up, and the function hangs in C: the kernel has to end the worker."""
    trainer = subprocess.Popen([sys.executable, "-c", _HANGING_TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    time.sleep(0.5)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(timeout=30)
    trainer.stdout.close()
    deadline = time.monotonic() + 30
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
