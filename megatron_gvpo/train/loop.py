"""The synchronous loop: rollouts, optimizer steps, new weights to the servers, metrics; again.

Every rank runs it. What only rank 0 knows reaches the others through the `Exchange`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.samples import Sample, write_samples
from megatron_gvpo.report.names import SAMPLES_DIR
from megatron_gvpo.train.clock import StepClock
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.learn import Learned, Learner
from megatron_gvpo.train.parity import logprob_difference, trainer_logprobs
from megatron_gvpo.train.signals import StopNow, StopRequest

log = logging.getLogger(__name__)


class SampleSource(Protocol):
    """Rank 0's source of samples: live rollouts (`Controller`) or recorded ones (`Replay`)."""

    def rollout(self, step: int, clock: StepClock) -> tuple[list[Sample], dict[str, float]]: ...
    def evaluate(self) -> tuple[dict[str, float], list[Sample]]: ...


@dataclass
class Hooks:
    """What the loop does not do itself. All collective; `push_weights` and `save` run on every rank.

    write_row: rank 0's metrics sink. push_weights(version): the current weights to the servers. save(step, state, needed): a
    checkpoint with the loop's own `state`; one that is needed is the last thing that this process does with the run.
    settle(wait): look after a checkpoint that is written in the background; the step of the newest that is whole, -1 for none.
    """

    write_row: Callable[[int, dict[str, float]], None]
    push_weights: Callable[[str], None]
    save: Callable[[int, dict[str, Any], bool], None]
    settle: Callable[[bool], int]


class Loop:
    """Steps `first_step` to `train.steps` (counted from 1) of a run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        exchange: Exchange,
        learner: Learner,
        source: SampleSource | None,
        stop: StopRequest,
        hooks: Hooks,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.exchange = exchange
        self.learner = learner
        self.source = source
        self.stop = stop
        self.hooks = hooks
        self.bad_in_a_row = 0
        self.bad_steps = 0
        self.evaluation_due = False

    def state_dict(self) -> dict[str, Any]:
        """What the loop itself remembers, as JSON values."""
        return {"bad_in_a_row": self.bad_in_a_row, "bad_steps": self.bad_steps, "evaluation_due": self.evaluation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad_in_a_row = int(state.get("bad_in_a_row", 0))
        self.bad_steps = int(state.get("bad_steps", 0))
        self.evaluation_due = bool(state.get("evaluation_due", False))

    def run(self, first_step: int, stop_after: int | None = None) -> bool:
        """True when the run is done, False when it was saved because it was asked to stop.

        stop_after: leave after this step, as if a signal had come then.
        """
        train, every = self.config.train, self.config.checkpoint.every
        started = time.perf_counter()
        carried = 0.0  # a checkpoint's time is in the next row: the row of a saved step must not come after the save
        try:
            if first_step == 1 or self.evaluation_due:
                self._evaluation_row(first_step - 1)
        except StopNow as request:
            return self._leave(first_step - 1, request)
        for step in range(first_step, train.steps + 1):
            clock = StepClock()
            clock.carry("checkpoint", carried)
            try:
                samples, row = self.exchange.from_controller(partial(self._bring, step, clock), interruptible=True)
            except StopNow as request:
                return self._leave(step - 1, request)
            row.update(self._learn(step, samples, clock))
            request = self._publish(step, row, clock)
            leaving = request is not None or self.exchange.any(self.stop.came) or step == stop_after
            self.hooks.write_row(step, {**row, **clock.metrics()})
            carried = 0.0
            self.hooks.settle(False)
            if leaving and step < train.steps:
                return self._leave(step, request)
            if step == train.steps or (every and step % every == 0):
                begin = time.perf_counter()
                self._save(step, needed=step == train.steps)
                carried = time.perf_counter() - begin
            if request is not None:  # in the last evaluation
                return self._leave(step, request)
        self._summary(time.perf_counter() - started)
        return True

    def _leave(self, step: int, request: StopNow | None) -> bool:
        """Save the end of `step`, unless it is saved."""
        if self.hooks.settle(True) != step:
            self._save(step, needed=True)
        why = str(request) if request else self.stop.name or "--stop-after"
        log.warning("saved after step %d of %d because of %s", step, self.config.train.steps, why)
        return False

    def _save(self, step: int, *, needed: bool) -> None:
        self.hooks.save(step, self.state_dict(), needed)

    def _publish(self, step: int, row: dict[str, float], clock: StepClock) -> StopNow | None:
        """New weights to the servers, and an evaluation where one is due; the request to leave that ended it, if one did."""
        train = self.config.train
        self.evaluation_due = step == train.steps or bool(train.eval_every and step % train.eval_every == 0)
        try:
            with clock.part("sync"):
                self.hooks.push_weights(str(step))
            if self.evaluation_due:
                with clock.part("eval"):
                    row.update(self._evaluate())
        except StopNow as request:
            return request
        self.evaluation_due = False
        return None

    def _learn(self, step: int, samples: Sequence[Sample], clock: StepClock) -> dict[str, float]:
        learned = self.learner.learn(samples, step, clock)
        self._count_bad(step, learned, samples)
        return self._row(samples, learned)

    def _bring(self, step: int, clock: StepClock) -> tuple[list[Sample], dict[str, float]]:
        """Rank 0: the step's samples, written to the run directory before anything is trained on them."""
        assert self.source is not None
        samples, row = self.source.rollout(step, clock)
        if self.config.log.dump_samples:
            write_samples(self.run_dir / SAMPLES_DIR / f"step_{step:06d}.jsonl", samples)
        return samples, row

    def _row(self, samples: Sequence[Sample], learned: Learned) -> dict[str, float]:
        responses = [len(s.response_ids) for s in samples]
        row: dict[str, float] = {
            "tokens/prompt": float(sum(len(s.prompt_ids) for s in samples)),
            "tokens/response": float(sum(responses)),
            "response/length": sum(responses) / max(len(responses), 1),
            "response/cut": sum(s.finish_reason == "length" for s in samples) / max(len(samples), 1),
            **{f"drop/{reason}": float(count) for reason, count in learned.dropped.items()},
            **learned.metrics,
        }
        if learned.results:
            last = learned.results[-1]
            row.update({"loss": last.loss, "grad_norm": last.grad_norm, "lr": last.lr})
            row.update({f"objective/{name}": value for name, value in last.metrics.items()})
        if learned.batch is not None and "rollout_logprobs" in learned.batch.sequences.sums:
            tokens = learned.batch.tokens
            row.update(logprob_difference(learned.first_logprobs_T, tokens.signal("rollout_logprobs"), self.learner.engine.comm))
            mean = row["logprob_diff/mean"]
            if mean > self.config.rollout.logprob_alarm:
                log.warning(
                    "trainer and server log-probs differ by %.3g nats on average, above rollout.logprob_alarm = %.3g",
                    mean,
                    self.config.rollout.logprob_alarm,
                )
        return row

    def _count_bad(self, step: int, learned: Learned, samples: Sequence[Sample]) -> None:
        """Steps that updated nothing are counted; too many in a row end the run, with the batch that did it kept."""
        refused = [r for r in learned.results if not r.accepted and r.why_not]
        if not learned.results or (refused and "norm" not in refused[0].why_not):
            log.warning("step %d trained on nothing: every sample was dropped or masked", step)
        nonfinite = [r for r in refused if "norm" in r.why_not]
        if not nonfinite:
            self.bad_in_a_row = 0
            return
        self.bad_in_a_row += 1
        self.bad_steps += 1
        kept = self.run_dir / f"nonfinite_step_{step:06d}.jsonl"
        if self.exchange.is_controller:
            write_samples(kept, samples)
        log.warning("step %d was skipped: %s; its batch is in %s (train --replay)", step, nonfinite[0].why_not, kept)
        limit = self.config.train.max_bad_steps
        if self.bad_in_a_row >= limit:
            raise RuntimeError(
                f"{limit} steps in a row had a gradient that is not finite (train.max_bad_steps): stopped at step {step}; "
                f"the last batch is in {kept}"
            )

    def _evaluation_row(self, step: int) -> None:
        clock = StepClock()
        with clock.part("eval"):
            row = self._evaluate()
        self.evaluation_due = False
        if row:
            self.hooks.write_row(step, {**row, **clock.metrics()})

    def _evaluate(self) -> dict[str, float]:
        """Held-out accuracy, and trainer against server log-probs on what was drawn for it, with the weights as they are."""

        def evaluate() -> tuple[dict[str, float], list[Sample]]:
            assert self.source is not None
            metrics, samples = self.source.evaluate()
            return metrics, samples[:64]

        metrics, samples = self.exchange.from_controller(evaluate, interruptible=True)
        if samples:
            found_T, tokens = trainer_logprobs(self.learner, samples)
            differences = logprob_difference(found_T, tokens.signal("rollout_logprobs"), self.learner.engine.comm)
            metrics.update({name.replace("logprob_diff", "eval/logprob_diff"): value for name, value in differences.items()})
        return metrics

    def _summary(self, seconds: float) -> None:
        if self.exchange.is_controller:
            summary: dict[str, Any] = {"train_seconds": seconds, "steps": self.config.train.steps, "skipped": self.bad_steps}
            summary["torch"] = torch.__version__
            (self.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
