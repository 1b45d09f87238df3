"""Scores responses with a time limit for each that holds, and counts whatever goes wrong: no reward of 0 is unexplained."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, Literal

from megatron_gvpo.config.schema import RewardSection
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import Prompt
from megatron_gvpo.data.reward_functions import missing_field, reward_function

Problem = Literal["unparsed", "timeout", "error", "died"]

_START_LIMIT_S = 120.0  # to import a reward function's module, on a busy machine
_HOPELESS = 8  # failures without one success: the function is broken, and training on zeros would hide it
_NAMED_PER_BATCH = 3  # problems named in the log, per kind and batch; all are counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """A response's reward. problem: why it is 0 without having been judged.

    unparsed: it holds no answer of the form that reward.extract asks for (the model's fault, and common early in training);
    timeout: the reward function took too long; error: it raised; died: its process crashed.
    """

    reward: float
    problem: Problem | None = None
    detail: str = ""


def count_problems(scores: Sequence[Score]) -> dict[Problem, int]:
    """How many responses of a batch had each problem; those that none had are absent."""
    return dict(Counter(score.problem for score in scores if score.problem is not None))


class Scorer:
    """Runs the reward function of the config. Use as a context manager: its processes end with it.

    `exact` runs in this process unless `reward.workers` asks for others. Everything else runs in `reward.workers` processes,
    at least one: a process is what can be stopped in the middle of any code.
    """

    def __init__(self, reward: RewardSection) -> None:
        self._reward = reward
        self._direct = reward_function("exact", reward.extract) if reward.name == "exact" and not reward.workers else None
        self._local = threading.local()
        self._workers: list[_Worker] = []
        self._closed = False
        self._lock = threading.Lock()
        # A worker dies with the thread that started it, so each belongs to a thread that lives as long as the pool.
        self._threads = None if self._direct else ThreadPoolExecutor(max(reward.workers, 1), thread_name_prefix="reward")
        if self._threads is not None:
            try:
                self._threads.submit(self._worker).result()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """DataError where a prompt lacks what the reward function needs; worth a call before anything is started."""
        for prompt in prompts:
            missing = missing_field(self._reward.name, prompt.answer, prompt.meta)
            if missing:
                raise DataError(f"prompt {prompt.id} lacks {missing}; reward.name is {self._reward.name}")

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Score]:
        """The scores of `texts`, responses to `prompts`, in their order.

        A response whose function fails or exceeds `reward.timeout_s` gets 0 and its problem, and the first few are logged.
        DataError where it fails on the first 8 responses of the batch that are done: then it is broken.
        """
        jobs = [(text, prompt.answer, prompt.meta) for prompt, text in zip(prompts, texts, strict=True)]
        scores = self._direct_scores(jobs) if self._threads is None else self._worker_scores(self._threads, jobs)
        named: Counter[Problem] = Counter()
        for prompt, score in zip(prompts, scores, strict=True):
            if score.problem in (None, "unparsed"):
                continue
            named[score.problem] += 1
            if named[score.problem] <= _NAMED_PER_BATCH:
                _log.warning("reward 0 for a response to %s: %s: %s", prompt.id, score.problem, score.detail)
        return scores

    def _direct_scores(self, jobs: Sequence[_Job]) -> list[Score]:
        assert self._direct is not None
        return [_judged(self._direct(*job)) for job in jobs]

    def _worker_scores(self, threads: ThreadPoolExecutor, jobs: Sequence[_Job]) -> list[Score]:
        futures = [threads.submit(self._one, job) for job in jobs]
        failures = successes = 0
        for future in as_completed(futures):
            score = future.result()
            failed = score.problem not in (None, "unparsed")
            failures, successes = failures + failed, successes + (not failed)
            if failures >= _HOPELESS and not successes:
                for other in futures:
                    other.cancel()
                raise DataError(
                    f"reward.name: {self._reward.name} fails on every response so far ({failures} of {failures}); "
                    f"the last: {score.problem}: {score.detail}"
                )
        return [future.result() for future in futures]

    def _one(self, job: _Job) -> Score:
        return self._worker().score(job, self._reward.timeout_s)

    def _worker(self) -> _Worker:
        """This thread's process, started anew where the last one is gone."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.alive:
            worker = _Worker(self._reward)
            self._local.worker = worker
            with self._lock:
                self._workers = [w for w in self._workers if w.alive] + [worker]
                if self._closed:
                    worker.stop()
        worker.wait_ready()
        return worker


_Job = tuple[str, Any, Mapping[str, Any]]


class _Worker:
    """One process that runs the reward function, and the pipe to it."""

    def __init__(self, reward: RewardSection) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "megatron_gvpo.data.reward_worker", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._name = reward.name
        self._ready = False
        self._pipe.send((reward.name, reward.extract))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the function is imported. DataError where it cannot be."""
        if self._ready:
            return
        kind, text = self._answer(_START_LIMIT_S)
        if kind != "ready":
            self.stop()
            raise DataError(text if kind == "refused" else f"reward.name: {self._name}: its process does not start: {text}")
        self._ready = True

    def score(self, job: _Job, limit_s: float) -> Score:
        """The score of one response; the process is gone afterwards unless it answered."""
        try:
            self._pipe.send(job)
        except OSError:
            return Score(0.0, "died", self._last_words())
        kind, value = self._answer(limit_s)
        if kind == "ok":
            return _judged(value)
        if kind != "error":
            self.stop()
        return Score(0.0, kind, value)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _answer(self, limit_s: float) -> tuple[Any, Any]:
        try:
            if not self._pipe.poll(limit_s):
                return "timeout", f"no answer within {limit_s:g} s"
            return self._pipe.recv()
        except (EOFError, OSError):
            return "died", self._last_words()

    def _last_words(self) -> str:
        try:
            status = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "its process closed the pipe"
        return f"its process ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"


def _judged(value: float | None) -> Score:
    return Score(0.0, "unparsed") if value is None else Score(value)
