"""A run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_gvpo.config.load import load_config
from megatron_gvpo.config.schema import ParallelSection
from megatron_gvpo.launch.local import is_rank
from megatron_gvpo.report.names import CONFIG_FILE
from megatron_gvpo.train.main import CHECKPOINTS_DIR, RunDirError, quiet_libraries


def convert(run_dir: Path, out: Path) -> int:
    """Write the newest whole checkpoint of `run_dir` to `out`; returns the step that wrote it.

    Alone it needs the memory of one whole model; under srun or torchrun the run's own layout is used. RunDirError where the
    folder holds no run, ValueError where it holds no checkpoint.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise RunDirError(f"{run_dir}: holds no {CONFIG_FILE}: not a run directory")
    config = load_config(path)
    quiet_libraries()
    from megatron_gvpo.mcore.checkpoint import load_weights
    from megatron_gvpo.mcore.model import build_model
    from megatron_gvpo.mcore.startup import shutdown, start
    from megatron_gvpo.mcore.weights import save_hf

    parallel = config.parallel if is_rank(os.environ) else ParallelSection()
    ranks = start(parallel, config.train, config.precision)
    try:
        chunks = build_model(config.model, parallel, config.precision, ranks)
        step = load_weights(run_dir / CHECKPOINTS_DIR, chunks)
        save_hf(chunks, out, config.model.path)
    finally:
        shutdown()
    return step
