"""One rank of a run, from its start to its exit code."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.config.schema import Config
from megatron_gvpo.mcore.startup import shutdown, start
from megatron_gvpo.mcore.weights import save_hf
from megatron_gvpo.report.sinks import RunLog
from megatron_gvpo.train.build import Built, build
from megatron_gvpo.train.controller import Controller
from megatron_gvpo.train.exchange import Exchange
from megatron_gvpo.train.hf import eos_ids
from megatron_gvpo.train.journal import Journal
from megatron_gvpo.train.learn import Learner
from megatron_gvpo.train.loop import Hooks, Loop
from megatron_gvpo.train.main import JOURNAL_DIR, prepare
from megatron_gvpo.train.memory import Memory
from megatron_gvpo.train.memory_limit import memory_limit
from megatron_gvpo.train.peers import Peers
from megatron_gvpo.train.recipe import digest
from megatron_gvpo.train.replay import Replay
from megatron_gvpo.train.saves import Resumed, Saves
from megatron_gvpo.train.signals import EXIT_REQUEUE, StopNow, StopRequest
from megatron_gvpo.train.sync import NoServers, WeightPush, weight_push

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What the command line adds to the config.

    resume: go on from the newest checkpoint of the run directory. accept_changes: also where the data, the tokenizer or the
    objective is another one. fresh: empty the run directory first. replay: a run directory or samples file in place of servers.
    stop_after: save and leave (exit 85) after this step.
    """

    resume: bool = False
    accept_changes: bool = False
    fresh: bool = False
    replay: Path | None = None
    stop_after: int | None = None


def run_rank(config: Config, run_dir: Path, options: Options, stop: StopRequest | None = None) -> int:
    """The exit code: 0 done, 85 saved because it was asked to stop. stop: one whose signals are taken already."""
    started = time.monotonic()
    if stop is None:
        stop = StopRequest()
        stop.install()
    ranks = start(config.parallel, config.train, config.precision)
    train = config.train
    peers = Peers(stop, silence_s=train.peer_timeout_s, deadline_s=train.deadline_s, started=started)
    try:
        with ExitStack() as stack:
            exchange = Exchange(config, stop)
            exchange.local(lambda: prepare(run_dir, config, resume=options.resume, fresh=options.fresh))
            built = build(config, ranks)
            code = _run(config, run_dir, options, stack, exchange, built)
            exchange.barrier()  # nobody leaves while another one may still fail
        return code
    except torch.OutOfMemoryError as error:
        full = memory_limit(error, config, peers.rank)
        peers.failed(str(full))
        raise full from error
    except StopNow as request:
        log.warning("left before the first step because of %s", request)
        return EXIT_REQUEUE
    except BaseException as error:
        if lost := peers.lost(error):
            raise lost from error
        peers.failed(" ".join(f"{type(error).__name__}: {error}".split()))
        raise
    finally:
        shutdown()
        peers.close()


def _run(config: Config, run_dir: Path, options: Options, stack: ExitStack, exchange: Exchange, built: Built) -> int:
    saves = Saves(config, run_dir, exchange, built)
    resumed = Resumed()
    if options.resume:
        resumed = saves.resume(accept_changes=options.accept_changes, live=options.replay is None)
    if exchange.is_controller and options.replay is None:
        journal = Journal(run_dir / JOURNAL_DIR, digest(config))
        saves.memory = Memory(journal, resumed.position, options.accept_changes)
    source = exchange.local(lambda: _source(config, run_dir, options, saves.memory, stack), interruptible=True)
    controller = source if isinstance(source, Controller) else None
    push: WeightPush = NoServers()
    if options.replay is None:
        push = weight_push(config, run_dir, built, exchange, controller)
    stack.callback(push.close)
    run_log = None
    if exchange.is_controller:
        resume_step = resumed.steps if options.resume else None
        run_log = stack.enter_context(RunLog(run_dir, config, resume_step=resume_step))
    hooks = Hooks(
        write_row=lambda step, row: run_log.write(step, row) if run_log else None,
        push_weights=push.push,
        save=lambda step, state, needed: saves.save(step, state, needed=needed),
        settle=lambda wait: saves.settle(wait=wait),
    )
    learner = Learner(config, built.engine, built.objective, built.reference, built.teacher)
    loop = Loop(config, run_dir, exchange, learner, source, exchange.stop, hooks)
    loop.load_state_dict(resumed.loop)
    # The servers may hold other weights than the trainer: those of the folder, while the trainer resumes, or half an update.
    push.push(str(resumed.steps))
    if not loop.run(resumed.steps + 1, options.stop_after):
        return EXIT_REQUEUE
    if config.checkpoint.export:
        save_hf(built.chunks, run_dir / "hf", config.model.path)
    return 0


def _source(config: Config, run_dir: Path, options: Options, memory: Memory | None, stack: ExitStack) -> Controller | Replay:
    if options.replay is not None:
        return Replay(options.replay)
    vocab, ends = read_shape(config.model.path).vocab, eos_ids(Path(config.model.path))
    return stack.enter_context(Controller(config, run_dir, vocab_size=vocab, eos_ids=ends, memory=memory))
