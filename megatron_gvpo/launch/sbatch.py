"""`megatron-gvpo sbatch`: the SLURM script of a run, readable and complete; the template lies beside this file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from megatron_gvpo.config import Config

# Past this many seconds after the first rank has ended, the ranks that have not are ended by srun.
WAIT_S = 600


def render_sbatch(config: Config, config_file: str | Path, overrides: Sequence[str] = ()) -> str:
    """A job script that trains `config_file` with `overrides` on `parallel.nodes` x `parallel.gpus_per_node` ranks."""
    launch = config.launch
    sets = [word for override in overrides for word in ("--set", override)]
    train = ["megatron-gvpo", "train", str(config_file), *sets]
    setup = [*(f"module load {shlex.quote(module)}" for module in launch.modules), *launch.setup]
    srun = [f"--container-image={launch.container}"] if launch.container else []
    template = Path(__file__).with_name("run.sbatch.template").read_text(encoding="utf-8")
    size = f"{config.parallel.nodes} node(s) of {config.parallel.gpus_per_node} ranks"
    return Template(template).substitute(
        title=f"{config_file}: {config.objective.name} on {size}",
        command=shlex.join(["megatron-gvpo", "sbatch", str(config_file), *sets]),
        name=f"{Path(config_file).stem}.sbatch",
        options="\n".join(f"#SBATCH {option}" for option in _options(config)),
        grace=launch.grace_s,
        wait=WAIT_S,
        setup="".join(f"{line}\n" for line in setup),
        srun="".join(f"{shlex.quote(option)} " for option in (*srun, *launch.srun)),
        program=shlex.join([*_environment(config), *train]),
    )


def _options(config: Config) -> list[str]:
    launch, parallel = config.launch, config.parallel
    options = [
        f"--job-name={launch.job_name}",
        f"--nodes={parallel.nodes}",
        f"--ntasks-per-node={parallel.gpus_per_node}",
        *([f"--gpus-per-node={parallel.gpus_per_node}"] if config.train.device == "cuda" else []),
        f"--time={launch.time}",
        f"--signal=B:USR1@{launch.grace_s}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    for key in ("partition", "account"):
        if value := getattr(launch, key):
            options.append(f"--{key}={value}")
    return options + launch.sbatch


def _environment(config: Config) -> list[str]:
    """The variables as words of `env`, which reach every rank whatever the site's srun exports by default."""
    return ["env", *(f"{name}={value}" for name, value in config.launch.env.items())] if config.launch.env else []
