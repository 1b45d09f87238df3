"""Prompts: every source gives the same kind of thing, tokenised once and right, and what is left out is counted.

Not covered: the servers' own limit on the context (tests of rollout).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from megatron_gvpo.config.schema import DataSection
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.prompts import PromptSets, load_prompt_sets, load_tokenizer


def _jsonl(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def _load(tokenizer: PreTrainedTokenizerBase, max_length: int = 100, max_new_tokens: int = 20, **data: Any) -> PromptSets:
    return load_prompt_sets(DataSection(**data), tokenizer, max_length=max_length, max_new_tokens=max_new_tokens)


def _error(tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        _load(tokenizer, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_text_from_jsonl(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Text is tokenised as the tokenizer would for its own model (here with <bos>); other fields are kept for the reward."""
    source = _jsonl(tmp_path / "train.jsonl", {"prompt": "1 + 2 =", "answer": "3", "question": "?"}, {"prompt": "a", "id": 7})
    one, two = _load(tokenizer, train=source).train
    assert (one.id, one.text, one.answer, one.meta) == ("train:1", "1 + 2 =", "3", {"question": "?"})
    assert one.token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(one.token_ids, skip_special_tokens=True) == "1 + 2 ="
    assert (two.id, two.answer, two.max_new_tokens) == ("7", None, 20)


def test_the_chat_template_writes_the_only_special_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A second <bos> from the tokenizer on top of the template's is a classic: the model never saw that, and gets worse."""
    messages = [{"role": "user", "content": "hi"}]
    source = _jsonl(tmp_path / "t.jsonl", {"prompt": "hi"}, {"prompt": messages})
    text, chat = _load(tokenizer, train=source, chat_template=True, system_prompt="be brief").train
    assert text.text == chat.text == "<bos>system:be brief\n<bos>user:hi\nassistant:"
    assert text.token_ids == chat.token_ids == tokenizer.encode(text.text, add_special_tokens=False)
    assert text.token_ids.count(0) == 2


def test_parquet_with_nested_answers(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The common form of public RL data: messages in one column, the answer inside another."""
    rows = [
        {"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"ground_truth": str(i)}, "data_source": "math"}
        for i in range(3)
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = _load(tokenizer, train=str(path), answer_key="reward_model.ground_truth").train
    assert [p.answer for p in loaded] == ["0", "1", "2"]
    assert [p.text for p in loaded] == [f"<bos>user:q{i}\nassistant:" for i in range(3)]
    assert {p.domain for p in loaded} == {"math"}


def test_reasoning_gym_items_held_out_are_never_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    """reasoning-gym draws item i with seed + i, so near seeds share items, and small tasks repeat them anyway. One-digit sums
    are so few that most training draws are held-out ones: they are gone, and counted."""
    args: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {"train": "reasoning_gym:chain_sum", "eval": "reasoning_gym:chain_sum", "task_args": args}
    sets = _load(tokenizer, size=500, eval_size=80, **task)
    held = [p.text for p in sets.heldout]
    assert len(held) == len(set(held)) == 80
    assert not {p.text for p in sets.train} & set(held)
    assert len(sets.train) + sets.left_out["train_in_heldout"] == 500
    assert sets == _load(tokenizer, size=500, eval_size=80, **task)
    entry = sets.train[0]
    assert entry.domain == "chain_sum"
    assert entry.meta["metadata"]["source_dataset"] == "chain_sum"


def test_held_out_items_of_a_file_leave_the_training_set(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The same for files, and across sources; only `eval_size` items are held out, the first ones."""
    train = _jsonl(tmp_path / "train.jsonl", *({"prompt": f"p{i}"} for i in range(6)))
    heldout = _jsonl(tmp_path / "heldout.jsonl", *({"prompt": f"p{i} "} for i in (1, 3, 5)))
    sets = _load(tokenizer, train=train, eval=heldout, eval_size=2)
    assert [p.text for p in sets.heldout] == ["p1 ", "p3 "]
    assert [p.text for p in sets.train] == ["p0", "p2", "p4", "p5"]
    assert sets.left_out == {"train_in_heldout": 2}


def test_prompts_as_long_as_the_context(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Acceptance 34: they are left out with a count, the response never passes the context, and none left is an error."""
    source = _jsonl(tmp_path / "t.jsonl", *({"prompt": "x" * n} for n in (3, 8, 9, 30)))  # tokens: one more, for <bos>
    sets = _load(tokenizer, max_length=10, max_new_tokens=4, train=source)
    assert [(len(p.token_ids), p.max_new_tokens) for p in sets.train] == [(4, 4), (9, 1)]
    assert sets.left_out == {"train_too_long": 2}
    assert _error(tokenizer, max_length=4, train=source) == (
        f"{source}: no prompt is left (4 train_too_long); model.max_length is 4, data.eval_size 400"
    )
    assert _error(tokenizer, max_length=10, train=source, filter_long=False) == (
        f"{source}:3: the prompt has 10 tokens, and model.max_length is 10: raise it, or set data.filter_long"
    )


def test_wrong_sources_are_refused_in_one_line(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Each before anything is started, with the line and what to do."""
    path = tmp_path / "t.jsonl"
    where = str(path)
    assert _error(tokenizer, train=_jsonl(path, {"question": "a", "answer": "b"})) == (
        f"{where}:1: no field 'prompt' (data.prompt_key); the row has: question, answer"
    )
    assert _error(tokenizer, train=_jsonl(path, {"prompt": "a"}, {"prompt": 5})) == (
        f"{where}:2: the prompt must be a text or a list of messages, not int"
    )
    assert _error(tokenizer, train=_jsonl(path, {"prompt": [{"role": "robot", "content": "a"}]})) == (
        f"{where}:1: the tokenizer's chat template refuses the messages: unknown role robot"
    )
    assert _error(tokenizer, train=_jsonl(path, {"prompt": [{"text": "a"}]})) == (
        f"{where}:1: a message must be an object with role and content"
    )
    assert _error(tokenizer, train=_jsonl(path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})) == (
        f"{where}:2: the id 'x' is taken by {where}:1"
    )
    assert _error(tokenizer, train=_jsonl(path)) == f"{where}: holds no prompt"
    assert _error(tokenizer, train="data.csv") == (
        "data.csv: unknown form of data; expected FILE.jsonl, FILE.parquet or reasoning_gym:TASK"
    )
    (tmp_path / "bad.parquet").write_text("no parquet")
    assert "bad.parquet: not a readable parquet file: Parquet magic bytes not found" in _error(
        tokenizer, train=str(tmp_path / "bad.parquet")
    )
    assert _error(tokenizer, train=str(tmp_path / "none.parquet")).startswith(f"{tmp_path}/none.parquet: cannot be read: ")
    assert _error(tokenizer, train="reasoning_gym:chain_sums") == (
        "reasoning_gym:chain_sums: reasoning-gym has no such task; did you mean 'chain_sum'?"
    )
    assert _error(tokenizer, train="reasoning_gym:chain_sum", task_args={"terms": 2}).startswith(
        "reasoning_gym:chain_sum: data.task_args are refused: ChainSumConfig.__init__() got an unexpected keyword argument"
    )
    assert "may not set seed" in _error(tokenizer, train="reasoning_gym:chain_sum", task_args={"seed": 2})


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    """Both would end in a long traceback of another library, or in a try to download."""
    with pytest.raises(DataError, match=r"absent: no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"holds no tokenizer that loads"):
        load_tokenizer(tmp_path)
