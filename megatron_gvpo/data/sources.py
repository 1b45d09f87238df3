"""Where problems come from: JSON Lines, parquet, and the tasks of reasoning-gym. Each gives rows; `prompts` tokenises them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gvpo.config.schema import DataSection
from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.samples import iter_lines, parse_object

TASK_PREFIX = "reasoning_gym:"

# Item i of a reasoning-gym dataset is drawn with seed + i, so two seeds closer than the size share items.
_TRAIN_SEED = 0
_HELDOUT_SEED = 1_000_000_007


@dataclass(frozen=True)
class Row:
    """One problem as its source gives it.

    prompt: a text, or a list of chat messages. where: FILE:LINE, for errors. meta: everything else that the row holds.
    """

    id: str
    where: str
    prompt: Any
    answer: Any
    domain: str
    meta: dict[str, Any]


def read_rows(source: str, data: DataSection, *, heldout: bool) -> Iterator[Row]:
    """The rows of FILE.jsonl, FILE.parquet or reasoning_gym:TASK, in their order, made as they are asked for.

    A reasoning-gym source ends after `data.size` items, or `data.eval_size` distinct ones where `heldout`; a file ends where it
    ends. DataError for a source that cannot be read, and for rows without a prompt.
    """
    if source.startswith(TASK_PREFIX):
        return _task_rows(source.removeprefix(TASK_PREFIX), data, heldout)
    suffix = Path(source).suffix
    if suffix in (".jsonl", ".json", ".ndjson"):
        records = ((f"{source}:{line}", line, parse_object(text, f"{source}:{line}")) for line, text in iter_lines(source))
    elif suffix in (".parquet", ".pq"):
        records = ((f"{source}: row {row}", row, record) for row, record in _parquet_records(source))
    else:
        raise DataError(f"{source}: unknown form of data; expected FILE.jsonl, FILE.parquet or {TASK_PREFIX}TASK")
    return (_row(source, where, number, record, data) for where, number, record in records)


def _row(source: str, where: str, number: int, record: dict[str, Any], data: DataSection) -> Row:
    prompt = _look_up(record, data.prompt_key)
    if prompt is None:
        raise DataError(f"{where}: no field {data.prompt_key!r} (data.prompt_key); the row has: {', '.join(record) or 'nothing'}")
    given = record.get("id")
    name = str(given) if isinstance(given, str | int) else f"{Path(source).stem}:{number}"
    domain = record.get("domain", record.get("data_source", ""))
    meta = {key: value for key, value in record.items() if key not in (data.prompt_key, data.answer_key)}
    return Row(name, where, prompt, _look_up(record, data.answer_key), str(domain or ""), meta)


def _look_up(record: dict[str, Any], key: str) -> Any:
    """A field by its name, or by a path such as reward_model.ground_truth; None where there is none."""
    if key in record:
        return record[key]
    found: Any = record
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _parquet_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    yield number, record
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _task_rows(task: str, data: DataSection, heldout: bool) -> Iterator[Row]:
    where = f"{TASK_PREFIX}{task}"
    # Small tasks draw the same item often; a few more draws than items give distinct ones.
    draws = 4 * data.eval_size if heldout else data.size
    dataset = _task(task, data.task_args, draws, _HELDOUT_SEED if heldout else _TRAIN_SEED)
    seen: set[str] = set()
    for index in range(draws):
        try:
            entry = dataset[index]
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"{where}: item {index} cannot be made with data.task_args {data.task_args}: {error}") from error
        question = str(entry["question"])
        if heldout and question in seen:
            continue
        seen.add(question)
        name = f"{task}:{'heldout' if heldout else 'train'}:{index}"
        meta = {"question": question, "metadata": entry["metadata"]}
        yield Row(name, f"{where}: item {index}", question, entry["answer"], task, meta)
        if heldout and len(seen) == data.eval_size:
            return


def _task(task: str, args: dict[str, Any], size: int, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{TASK_PREFIX}{task}: reasoning-gym has no such task{hint}")
    own = [key for key in ("size", "seed") if key in args]
    if own:
        raise DataError(f"{TASK_PREFIX}{task}: data.task_args may not set {own[0]}: use data.size; seeds are kept apart here")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (AssertionError, TypeError, ValueError) as error:
        config = DATASETS[task][1]
        known = ", ".join(k for k in getattr(config, "__dataclass_fields__", {}) if k not in ("size", "seed"))
        raise DataError(f"{TASK_PREFIX}{task}: data.task_args are refused: {error} (it knows: {known})") from None
