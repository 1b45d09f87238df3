"""`megatron-gvpo train`: start the ranks, or be one of them."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_gvpo.config.schema import Config
from megatron_gvpo.launch.local import is_rank, rank_of, run_local_ranks
from megatron_gvpo.report.names import CONFIG_FILE, METRICS_FILE, SAMPLES_DIR
from megatron_gvpo.train.signals import StopRequest

CHECKPOINTS_DIR = "checkpoints"
JOURNAL_DIR = "journal"


class RunDirError(ValueError):
    """The run directory holds a run already, or none to resume."""

    exit_code = 2


def run_dir_of(config: Config, config_path: Path) -> Path:
    """`log.dir` with {name} (the config file's) and {seed} filled in."""
    return Path(config.log.dir.replace("{name}", config_path.stem).replace("{seed}", str(config.train.seed)))


def train(
    config: Config,
    config_path: Path,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    fresh: bool = False,
    replay: Path | None = None,
    stop_after: int | None = None,
    accept_changes: bool = False,
) -> int:
    """Run the config and return the exit code: 0 done, 85 saved on a signal, 2 wrong input, 1 anything else.

    Under torchrun or srun this process is one rank; else it starts `parallel.gpus_per_node` ranks on this machine and waits for
    them. resume: go on from the run directory's newest checkpoint. fresh: empty the run directory first.
    """
    run_dir = run_dir_of(config, config_path)
    if not is_rank(os.environ):
        prepare(run_dir, config, resume=resume, fresh=fresh)  # mistakes show at once, before any rank is started
        command = [sys.executable, "-m", "megatron_gvpo.cli", "train", str(config_path)]
        for setting in overrides:
            command += ["--set", setting]
        command += ["--resume"] if resume else []
        command += ["--accept-changes"] if accept_changes else []
        command += ["--replay", str(replay)] if replay else []
        command += ["--stop-after", str(stop_after)] if stop_after is not None else []
        return run_local_ranks(command, config.parallel.world_size, {}, run_dir / "logs")
    stop = StopRequest()
    stop.install()  # importing torch takes seconds, and a signal that comes then must not kill
    quiet_libraries()
    from megatron_gvpo.train.rank import Options, run_rank

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = Options(resume=resume, accept_changes=accept_changes, fresh=fresh, replay=replay, stop_after=stop_after)
    code = run_rank(config, run_dir, options, stop)
    if code == 0 and config.log.report and rank_of(os.environ) == 0:
        _report(run_dir)
    return code


def quiet_libraries() -> None:
    """Warnings of libraries that say what this project knows: missing GPU packages on a CPU, and calls that will change."""
    for message in (
        "Transformer Engine",
        "Apex is not installed",
        "Please use DTensor",
        "Tensor that is not a leaf",
        "full scope is deprecated",
    ):
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.|megatron\.")


def prepare(run_dir: Path, config: Config, *, resume: bool, fresh: bool) -> None:
    """An empty run directory, or the one to resume; the config, with what --set changed, is kept beside what it made."""
    if fresh and resume:
        raise RunDirError("--fresh and --resume contradict each other: give one")
    traces = (METRICS_FILE, CHECKPOINTS_DIR, JOURNAL_DIR)
    found = [name for name in traces if (run_dir / name).exists()]
    if found and not (resume or fresh):
        raise RunDirError(
            f"{run_dir}: holds a run already ({found[0]}): give --resume to go on, --fresh to delete it, or another log.dir"
        )
    try:
        if fresh and run_dir.exists():
            shutil.rmtree(run_dir)
        (run_dir / SAMPLES_DIR).mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG_FILE).write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False))
    except OSError as error:
        raise RunDirError(f"{run_dir}: cannot be written (log.dir): {error.strerror}") from error


def _report(run_dir: Path) -> None:
    from megatron_gvpo.report.run_report import write_report

    print(f"report: {write_report(run_dir)}", file=sys.stderr)
