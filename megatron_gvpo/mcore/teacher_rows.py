"""What a teacher says of one micro-batch's head rows, and the handle through which an objective asks for divergences from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_gvpo.logprobs import HiddenTeacher, Teacher, TopKTeacher


@dataclass(frozen=True)
class RowTeacher:
    """One teacher of a micro-batch. teacher: its R rows, in the order of the head rows. active_R: bool, those it speaks for.

    ids: how many ids student and teacher share; both distributions are over these.
    """

    teacher: Teacher
    active_R: Tensor
    ids: int

    def to(self, device: torch.device) -> RowTeacher:
        if isinstance(self.teacher, TopKTeacher):
            teacher: Teacher = TopKTeacher(self.teacher.ids.to(device), self.teacher.logprobs.to(device))
        elif isinstance(self.teacher, HiddenTeacher):
            teacher = HiddenTeacher(self.teacher.hidden.to(device), self.teacher.weight.to(device), self.teacher.bias)
        else:
            teacher = self.teacher
        return RowTeacher(teacher, self.active_R.to(device), self.ids)


@dataclass(frozen=True)
class RowDivergences:
    """The objectives' `Divergences` at one micro-batch's T trained tokens.

    rows_T: the head row of each token. ask(kind, beta, row teacher) -> [R], 0 at rows that are not active.
    """

    teachers: Sequence[RowTeacher]
    rows_T: Tensor
    ask: Callable[[str, float, RowTeacher], Tensor]

    def divergence(self, kind: str, *, beta: float = 0.5) -> Tensor:
        """[T], differentiable; each token is compared with the teacher that speaks for it."""
        found_R = self.ask(kind, beta, self.teachers[0])
        for teacher in self.teachers[1:]:
            found_R = found_R + self.ask(kind, beta, teacher)
        return found_R[self.rows_T]
