"""What the checks look at: the config, the shapes of the models it names, and what its objective needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_gvpo.config.hf_shape import ModelShape, ShapeError, read_shape
from megatron_gvpo.config.needs import Needs
from megatron_gvpo.config.objectives import ObjectiveConfig, objective_config
from megatron_gvpo.config.schema import Config, TeacherSource

PROMPT_FILES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq")
"""The endings by which the data room knows a file of prompts."""


@dataclass(frozen=True)
class Problem:
    """A contradiction. `keys` are dotted; the first one that the user wrote is blamed, else the first."""

    why: str
    keys: tuple[str, ...]
    severity: Literal["error", "warning"] = "error"


def wrong(why: str, *keys: str) -> Problem:
    return Problem(why, keys)


def doubtful(why: str, *keys: str) -> Problem:
    return Problem(why, keys, "warning")


@dataclass(frozen=True)
class Facts:
    """`shape` and `teacher_shape` are None where the folder is not named or cannot be read (reported elsewhere)."""

    config: Config
    objective: ObjectiveConfig
    needs: Needs
    shape: ModelShape | None
    teacher_shape: ModelShape | None

    @property
    def has_teacher(self) -> bool:
        teacher = self.config.teacher
        return bool(teacher.path or teacher.servers.urls or teacher.by_domain)

    @property
    def teachers(self) -> dict[str, TeacherSource]:
        """The named teachers by the config's key of their section."""
        teacher = self.config.teacher
        default: dict[str, TeacherSource] = {"teacher": teacher} if teacher.path or teacher.servers.urls else {}
        return default | {f"teacher.by_domain.{domain}": source for domain, source in teacher.by_domain.items()}

    @property
    def samples_per_step(self) -> int:
        return self.config.rollout.prompts_per_step * self.config.rollout.group_size


def gather_facts(config: Config, *, files: bool) -> tuple[Facts, list[Problem]]:
    """Read the models' config.json. A model folder that does not exist is a problem only where `files` are asked for."""
    problems: list[Problem] = []
    if not config.model.path:
        problems.append(wrong("is missing: name the Hugging Face folder of the model to train", "model.path"))
    shapes: list[ModelShape | None] = []
    for key, folder in (("model.path", config.model.path), ("teacher.path", config.teacher.path)):
        shape = None
        if folder and (files or Path(folder).exists()):
            try:
                shape = read_shape(folder)
            except ShapeError as error:
                problems.append(wrong(str(error), key))
        shapes.append(shape)
    objective = objective_config(config.objective.name, config.objective.options)
    return Facts(config, objective, objective.needs(), *shapes), problems


def installed(module: str) -> bool:
    """Whether a top-level module can be found, without importing it."""
    return importlib.util.find_spec(module.split(".")[0]) is not None
