"""Whether a teacher speaks the student's tokens, and how the student's texts become the teacher's where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gvpo.config.hf_shape import read_shape
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import load_tokenizer
from megatron_gvpo.train.hf import eos_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def difference(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """'' where every id means the same to both, else what differs, in words. Compared by content: sizes and names may agree."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if ours == theirs:
        return ""
    texts = {id_: text for text, id_ in theirs.items()}
    differing = sorted((id_, text) for text, id_ in ours.items() if texts.get(id_) != text)
    if not differing:
        return f"the teacher has {len(theirs) - len(ours)} more entries than the student's {len(ours)}"
    id_, text = differing[0]
    return f"{len(differing)} of {len(ours)} entries differ; the first is id {id_}: {text!r} and {texts.get(id_)!r}"


def check_same_tokens(student: PreTrainedTokenizerBase, student_vocab: int, folder: str, *, align: bool) -> int:
    """The number of ids that student and teacher share, where every shared id means the same to both.

    student_vocab: rows of the student's head. DataError, with both sizes, for heads of different sizes, unless `align`; and for a
    tokenizer of other content.
    """
    teacher_vocab = read_shape(folder).vocab
    if teacher_vocab != student_vocab and not align:
        raise DataError(
            f"{folder}: the teacher's vocabulary has {teacher_vocab} entries and the student's {student_vocab}: set "
            "teacher.align_vocabulary: true to compare the ids that both have, or take a teacher of the same family"
        )
    what = difference(student, load_tokenizer(folder))
    if what:
        raise DataError(
            f"{folder}: the teacher has another tokenizer than the student ({what}): only objective gvpo_opd with "
            "teacher.signal: sequence can use it"
        )
    return min(teacher_vocab, student_vocab)


class Translator:
    """The student's responses in the tokens of a teacher with another tokenizer.

    A response is the text it decodes to, encoded anew; where the student ended it, the teacher's own end token follows. The
    prompt is the problem under the teacher's own chat template (see `Controller`), so it is not translated here.
    """

    def __init__(self, folder: str) -> None:
        self._tokenizer = load_tokenizer(folder)
        found = eos_ids(Path(folder))
        if not found and self._tokenizer.eos_token_id is None:
            raise DataError(f"{folder}: neither its config nor its tokenizer names an end token")
        own = self._tokenizer.eos_token_id
        self._end = int(own) if isinstance(own, int) else found[0]

    def response(self, text: str, ended: bool) -> list[int]:
        """Ids of the response's text, with the end token where the student `ended` it."""
        ids = [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]
        return [*ids, self._end] if ended else ids
