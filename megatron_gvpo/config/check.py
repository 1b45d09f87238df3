"""Contradictions between sections, found without torch, without Megatron and before any GPU is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_gvpo.config import check_files, check_layout, check_run, check_servers, check_signals
from megatron_gvpo.config.facts import Facts, Problem, gather_facts
from megatron_gvpo.config.schema import Config
from megatron_gvpo.config.source import Source


@dataclass(frozen=True)
class Finding:
    """One problem of a run's config. `line` is finished for stderr and points at the key to blame."""

    severity: Literal["error", "warning"]
    line: str


def check_config(config: Config, source: Source, *, files: bool = True) -> list[Finding]:
    """Every contradiction in `config`, in the order of the file.

    `files=False` is for a run that is only planned: neither whether its files exist nor whether its model can be built matters.
    """
    facts, problems = gather_facts(config, files=files)
    problems += list(_problems(facts))
    if files:
        problems += [*check_layout.unbuildable(facts), *check_files.problems(facts)]
    placed = []
    for problem in problems:
        path = source.culprit(tuple(key.split(".")) for key in problem.keys)
        prefix = "" if problem.severity == "error" else "warning: "
        placed.append((source.place(path), Finding(problem.severity, source.line(path, prefix + problem.why))))
    return [finding for _, finding in sorted(placed, key=lambda item: item[0])]


def _problems(facts: Facts) -> list[Problem]:
    rooms = (check_layout, check_signals, check_run, check_servers)
    return [problem for room in rooms for problem in room.problems(facts)]
