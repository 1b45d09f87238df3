"""One rank of a run, from its start to its exit code."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.startup import shutdown, start
from megatron_gvpo.mcore.weights import save_hf
from megatron_gvpo.report.sinks import RunLog
from megatron_gvpo.train.build import Built, build
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.hf import eos_ids
from megatron_gvpo.train.learn import Learner
from megatron_gvpo.train.loop import Hooks, Loop
from megatron_gvpo.train.replay import Replay
from megatron_gvpo.train.saves import Saves
from megatron_gvpo.train.signals import EXIT_REQUEUE, StopRequest
from megatron_gvpo.train.sync import NoServers, WeightPush, weight_push

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What the command line adds to the config.

    resume: go on from the newest checkpoint of the run directory. replay: a run directory or samples file in place of servers.
    stop_after: save and leave (exit 85) after this step.
    """

    resume: bool = False
    replay: Path | None = None
    stop_after: int | None = None


def run_rank(config: Config, run_dir: Path, options: Options) -> int:
    """The exit code: 0 done, 85 saved because it was asked to stop."""
    stop = StopRequest()
    stop.install()
    ranks = start(config.parallel, config.train, config.precision)
    try:
        with ExitStack() as stack:
            exchange = Exchange(config)
            built = build(config, ranks)
            return _run(config, run_dir, options, stack, exchange, built, stop)
    finally:
        shutdown()


def _run(
    config: Config, run_dir: Path, options: Options, stack: ExitStack, exchange: Exchange, built: Built, stop: StopRequest
) -> int:
    source = exchange.local(lambda: _source(config, run_dir, options, stack))
    controller = source if isinstance(source, Controller) else None
    saves = Saves(config, run_dir, exchange, built, controller)
    done_steps = saves.resume() if options.resume else 0
    push: WeightPush = NoServers()
    if options.replay is None:
        push = weight_push(config, run_dir, built, exchange, controller)
    stack.callback(push.close)
    run_log = None
    if exchange.is_controller:
        resume_step = done_steps if options.resume else None
        run_log = stack.enter_context(RunLog(run_dir, config, resume_step=resume_step))
    hooks = Hooks(
        write_row=lambda step, row: run_log.write(step, row) if run_log else None,
        push_weights=push.push,
        save=saves.save,
    )
    learner = Learner(config, built.engine, built.objective, built.reference)
    loop = Loop(config, run_dir, exchange, learner, source, stop, hooks)
    # The servers may hold other weights than the trainer: those of the folder, while the trainer resumes, or half an update.
    push.push(str(done_steps))
    if not loop.run(done_steps + 1, options.stop_after):
        return EXIT_REQUEUE
    if config.checkpoint.export:
        save_hf(built.chunks, run_dir / "hf", config.model.path)
    return 0


def _source(config: Config, run_dir: Path, options: Options, stack: ExitStack) -> Controller | Replay:
    if options.replay is not None:
        return Replay(options.replay)
    shape = read_shape(config.model.path)
    return stack.enter_context(Controller(config, run_dir, vocab_size=shape.vocab, eos_ids=eos_ids(Path(config.model.path))))
