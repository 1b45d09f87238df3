"""Prompts: rows of a source, put into the chat template, tokenised, and filtered where they leave no room for a response."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.config.schema import DataSection
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.sources import Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1024  # prompts tokenised at a time


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sampled from.

    text: exactly what was tokenised, chat template included. max_new_tokens: tokens of a response at most, so that prompt and
    response fit the context. domain: where the problem comes from, for metrics. meta: the source's other fields.
    """

    id: str
    text: str
    token_ids: list[int]
    max_new_tokens: int
    answer: Any = None
    domain: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSets:
    """Training and held-out prompts, disjoint by text. left_out: how many prompts were filtered, by reason."""

    train: list[Prompt]
    heldout: list[Prompt]
    left_out: dict[str, int]


def load_prompt_sets(
    data: DataSection, tokenizer: PreTrainedTokenizerBase, *, max_length: int, max_new_tokens: int, train: bool = True
) -> PromptSets:
    """Read, tokenise and filter the prompts of `data.train` (unless not `train`) and `data.eval`, the same on every rank.

    max_length: tokens of prompt and response together. Prompts of that length or longer are left out and counted
    (`data.filter_long`), else refused; so are training prompts that are held out too. DataError for what cannot be read, and
    where a source is left without a prompt.
    """
    load = _Loader(data, tokenizer, max_length, max_new_tokens)
    heldout = list(itertools.islice(load.prompts(data.eval, heldout=True), data.eval_size)) if data.eval else []
    if data.eval and not heldout:
        raise DataError(load.nothing_left(data.eval))
    chosen: list[Prompt] = []
    if train and data.train:
        held = {prompt.text.strip() for prompt in heldout}
        for prompt in load.prompts(data.train, heldout=False):
            if prompt.text.strip() in held:
                load.left_out["train_in_heldout"] += 1
            else:
                chosen.append(prompt)
        if not chosen:
            raise DataError(load.nothing_left(data.train))
    return PromptSets(chosen, heldout, {reason: count for reason, count in load.left_out.items() if count})


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder; nothing is fetched and no code of the folder is run. DataError if it is none."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise DataError(f"{path}: no such folder; model.path (or model.tokenizer) is a Hugging Face folder with a tokenizer")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: holds no tokenizer that loads: {str(error).splitlines()[0]}") from error


class _Loader:
    """Turns rows into prompts, and counts what it leaves out."""

    def __init__(self, data: DataSection, tokenizer: PreTrainedTokenizerBase, max_length: int, max_new_tokens: int) -> None:
        self.data = data
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        self.left_out = {"train_too_long": 0, "heldout_too_long": 0, "train_in_heldout": 0}
        if data.chat_template and not getattr(tokenizer, "chat_template", None):
            raise DataError("data.chat_template is true, and the tokenizer has no chat template: set it to false")

    def prompts(self, source: str, *, heldout: bool) -> Iterator[Prompt]:
        """The prompts of a source that leave room for a response, in its order."""
        rows = read_rows(source, self.data, heldout=heldout)
        reason = "heldout_too_long" if heldout else "train_too_long"
        places: dict[str, str] = {}  # by id: two prompts of one id would be taken for one group
        while batch := list(itertools.islice(rows, _BATCH)):
            for row, (text, ids) in zip(batch, self._encode(batch), strict=True):
                if places.setdefault(row.id, row.where) != row.where:
                    raise DataError(f"{row.where}: the id {row.id!r} is taken by {places[row.id]}")
                room = self.max_length - len(ids)
                if not ids:
                    raise DataError(f"{row.where}: the prompt is empty once tokenised: nothing predicts the first token")
                if room < 1 and not self.data.filter_long:
                    raise DataError(
                        f"{row.where}: the prompt has {len(ids)} tokens, and model.max_length is {self.max_length}: "
                        "raise it, or set data.filter_long"
                    )
                if room < 1:
                    self.left_out[reason] += 1
                    continue
                yield Prompt(row.id, text, ids, min(self.max_new_tokens, room), row.answer, row.domain, row.meta)

    def nothing_left(self, source: str) -> str:
        """Why a source gave no prompt."""
        lost = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)
        if not lost:
            return f"{source}: holds no prompt"
        return (
            f"{source}: no prompt is left ({lost}); model.max_length is {self.max_length}, data.eval_size {self.data.eval_size}"
        )

    def _encode(self, rows: Sequence[Row]) -> Iterable[tuple[str, list[int]]]:
        """(text, ids) of each row. A chat template writes the special tokens itself; elsewhere the tokenizer adds its own."""
        chats = [not isinstance(row.prompt, str) or self.data.chat_template for row in rows]
        texts = [self._chat(row) if chat else row.prompt for row, chat in zip(rows, chats, strict=True)]
        plain = self._ids([text for text, chat in zip(texts, chats, strict=True) if not chat], special=True)
        chat_ids = self._ids([text for text, chat in zip(texts, chats, strict=True) if chat], special=False)
        return [(text, next(chat_ids if chat else plain)) for text, chat in zip(texts, chats, strict=True)]

    def _ids(self, texts: list[str], *, special: bool) -> Iterator[list[int]]:
        if not texts:
            return iter(())
        return iter(self.tokenizer(texts, add_special_tokens=special)["input_ids"])

    def _chat(self, row: Row) -> str:
        from jinja2 import TemplateError

        messages = _messages(row, self.data.system_prompt)
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(f"{row.where}: the prompt is a list of messages, and the tokenizer has no chat template")
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise DataError(f"{row.where}: the tokenizer's chat template refuses the messages: {error}") from None
        return str(text)


def _messages(row: Row, system_prompt: str) -> list[dict[str, Any]]:
    """The messages of a row, checked; the system prompt goes first unless the row has its own."""
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{row.where}: the prompt must be a text or a list of messages, not {type(row.prompt).__name__}")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{row.where}: a message must be an object with role and content")
    if system_prompt and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages
