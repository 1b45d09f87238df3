"""`megatron-gvpo sbatch`: the SLURM script of a run, readable and complete; the template lies beside this file.

In the template, `$name` is filled in, `$$` is a dollar, and lines between `#if NAME` (perhaps `#else`) and `#end` stay where the
config asks for them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from megatron_gvpo.config import Config, ConfigError

# Past this many seconds after the first rank has ended, the ranks that have not are ended by srun.
WAIT_S = 600


def render_sbatch(config: Config, config_file: str | Path, overrides: Sequence[str] = ()) -> str:
    """A job script that trains `config_file` with `overrides` on `parallel.nodes` x `parallel.gpus_per_node` ranks.

    Further nodes serve where `rollout.servers.nodes` or `teacher.servers.nodes` say so. ConfigError for what cannot be a job.
    """
    _check(config, config_file)
    launch, parallel = config.launch, config.parallel
    students, teachers = config.rollout.servers.nodes, config.teacher.servers.nodes
    sets = [word for override in overrides for word in ("--set", override)]
    config_words = [str(config_file), *sets]
    setup = [*(f"module load {shlex.quote(module)}" for module in launch.modules), *launch.setup]
    srun = [*([f"--container-image={launch.container}"] if launch.container else []), *launch.srun]
    het, teacher_group = launch.heterogeneous, 1 + bool(students)
    text = _chosen(
        Path(__file__).with_name("run.sbatch.template").read_text(encoding="utf-8"),
        {
            "het": het,
            "students": students > 0,
            "teachers": teachers > 0,
            "servers": students + teachers > 0,
            "health": bool(launch.health),
            "array": bool(launch.array),
        },
    )
    size = f"{parallel.nodes} node(s) of {parallel.gpus_per_node} ranks"
    served = "".join(
        f", {count} {role} server node(s)" for role, count in (("student", students), ("teacher", teachers)) if count
    )
    return Template(text).substitute(
        title=f"{config_file}: {config.objective.name} on {size}{served}",
        command=shlex.join(["megatron-gvpo", "sbatch", *config_words]),
        name=f"{Path(config_file).stem}.sbatch",
        options="\n".join(f"#SBATCH {option}" for option in _options(config)),
        grace=launch.grace_s,
        setup="".join(f"{line}\n" for line in setup),
        srun="".join(f"{shlex.quote(option)} " for option in srun),
        env=_environment(config),
        health=shlex.quote("set -e\n" + "\n".join(launch.health)),
        spare=launch.spare_nodes,
        needed=parallel.nodes + students + teachers,
        trainer_nodes=parallel.nodes,
        student_nodes=students,
        teacher_nodes=teachers,
        first_teacher=parallel.nodes + students,
        teacher_group=teacher_group,
        trainer_group="--het-group=0 " if het else "",
        student_group="--het-group=1 " if het else "",
        teacher_srun=f"--het-group={teacher_group} " if het else "",
        ranks=parallel.world_size,
        per_node=parallel.gpus_per_node,
        wait=WAIT_S,
        serve=shlex.join(["megatron-gvpo", "serve", *config_words]),
        train=shlex.join(["megatron-gvpo", "train", *config_words]),
    )


def _check(config: Config, config_file: str | Path) -> None:
    launch = config.launch
    problems = []
    if launch.spare_nodes and not launch.health:
        problems.append("launch.spare_nodes: spare nodes replace those that fail launch.health, which is empty")
    if launch.heterogeneous and launch.health:
        problems.append("launch.health: nodes are checked in one allocation only; leave launch.heterogeneous out, or this")
    if launch.heterogeneous and launch.array:
        problems.append("launch.array: SLURM has no arrays of heterogeneous jobs; leave one out")
    if launch.heterogeneous and not (config.rollout.servers.nodes or config.teacher.servers.nodes):
        problems.append("launch.heterogeneous: there is one kind of node: set rollout.servers.nodes or teacher.servers.nodes")
    if launch.array and "{seed}" not in config.log.dir:
        problems.append("launch.array: every seed needs a run directory of its own: put {seed} into log.dir")
    if problems:
        raise ConfigError([f"{config_file}: {problem}" for problem in problems])


def _chosen(template: str, flags: Mapping[str, bool]) -> str:
    """The template's lines whose conditions hold."""
    lines: list[str] = []
    holds: list[bool] = []
    for line in template.splitlines(keepends=True):
        word = line.strip()
        if word.startswith("#if "):
            holds.append(flags[word.removeprefix("#if ")])
        elif word == "#else":
            holds[-1] = not holds[-1]
        elif word == "#end":
            holds.pop()
        elif all(holds):
            lines.append(line)
    return "".join(lines)


def _options(config: Config) -> list[str]:
    """What follows `#SBATCH`; the components of a heterogeneous job with `hetjob` between them."""
    launch, parallel = config.launch, config.parallel
    students, teachers = config.rollout.servers.nodes, config.teacher.servers.nodes
    nodes = parallel.nodes if launch.heterogeneous else parallel.nodes + students + teachers + launch.spare_nodes
    options = [
        f"--job-name={launch.job_name}",
        *_size(config, nodes, parallel.gpus_per_node),
        f"--time={launch.time}",
        f"--signal=B:USR1@{launch.grace_s}",
        "--requeue",
        "--open-mode=append",
        f"--output=%x-{'%A_%a' if launch.array else '%j'}.log",
        *([f"--array={launch.array}"] if launch.array else []),
        *_place(config),
    ]
    if launch.heterogeneous:
        for servers in (config.rollout.servers, config.teacher.servers):
            if servers.nodes:
                gpus = servers.count * servers.tensor
                size = [f"--nodes={servers.nodes}", "--ntasks-per-node=1"]
                size += [f"--gpus-per-node={gpus}"] if servers.device == "cuda" else []
                options += ["hetjob", *size, f"--time={launch.time}", *_place(config)]
    return options


def _size(config: Config, nodes: int, per_node: int) -> list[str]:
    gpus = [f"--gpus-per-node={per_node}"] if config.train.device == "cuda" else []
    return [f"--nodes={nodes}", f"--ntasks-per-node={per_node}", *gpus]


def _place(config: Config) -> list[str]:
    launch = config.launch
    named = [f"--{key}={value}" for key in ("partition", "account") if (value := getattr(launch, key))]
    return named + launch.sbatch


def _environment(config: Config) -> str:
    """The variables as words of `env`, which reach every rank and server whatever the site's srun exports by default."""
    env = config.launch.env
    return shlex.join(["env", *(f"{name}={value}" for name, value in env.items())]) + " " if env else ""
