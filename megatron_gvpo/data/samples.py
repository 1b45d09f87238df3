"""One sampled response and the samples file (JSON Lines): what `train` dumps, replays, explains and reports.

Reading is strict, because a list that is shifted by one or a signal under a misspelt name trains a model on nonsense without
any other symptom. Every error is a `DataError` that starts with FILE:LINE.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from megatron_gvpo.data.errors import DataError

if TYPE_CHECKING:
    from megatron_gvpo.data.teacher_top import TeacherTop

FinishReason = Literal["stop", "length", "abort"]

TOKEN_SIGNALS = ("logprobs", "rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs")


@dataclass
class Sample:
    """A prompt and one response to it. Every list is per response token; None is an absent signal.

    weight_versions: (version, first response token that it sampled), in order. teacher_top: the teacher's likeliest ids at
    every response token; large, so it stays in memory and is not written to samples files.
    """

    group: str
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    reward: float | None = None
    logprobs: list[float] | None = None
    old_logprobs: list[float] | None = None
    rollout_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    teacher_logprob: float | None = None
    finish_reason: FinishReason = "stop"
    weight_versions: list[tuple[str, int]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    teacher_top: TeacherTop | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


_KEYS = (
    *("group", "prompt_ids", "response_ids", "mask", "reward", *TOKEN_SIGNALS),
    *("teacher_logprob", "finish_reason", "weight_versions", "weight_version", "meta"),
)


def iter_samples(path: str | Path) -> Iterator[tuple[int, Sample]]:
    """(line number from 1, sample) of each line of a samples file, one line in memory at a time; blank lines are passed over.

    DataError, as `FILE:LINE: what is wrong`, for a line that is not a sample; `FILE: ...` for a file that cannot be read.
    """
    for line, text in iter_lines(path):
        where = f"{path}:{line}"
        yield line, sample_from_record(parse_object(text, where), where)


def read_samples(path: str | Path) -> list[Sample]:
    """All samples of a file, in its order. DataError as for `iter_samples`, and for a file without any sample."""
    samples = [sample for _, sample in iter_samples(path)]
    if not samples:
        raise DataError(f"{path}: holds no sample; expected one JSON object a line")
    return samples


def write_samples(path: str | Path, samples: Iterable[Sample]) -> int:
    """Write one line per sample and return how many. A reader sees the whole new file or the old one, never a part."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as out:
            for sample in samples:
                out.write(json.dumps(sample_to_record(sample), allow_nan=False) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def sample_to_record(sample: Sample) -> dict[str, Any]:
    """The JSON object of a sample: absent signals have no key, and a value that is not finite (at a masked place) is null."""
    record: dict[str, Any] = {
        "group": sample.group,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "mask": sample.mask,
    }
    if sample.reward is not None:
        record["reward"] = sample.reward
    for name in TOKEN_SIGNALS:
        values = getattr(sample, name)
        if values is not None:
            record[name] = [value if math.isfinite(value) else None for value in values]
    if sample.teacher_logprob is not None:
        record["teacher_logprob"] = sample.teacher_logprob
    record["finish_reason"] = sample.finish_reason
    if sample.weight_versions:
        record["weight_versions"] = [list(version) for version in sample.weight_versions]
    if sample.meta:
        record["meta"] = sample.meta
    return record


def sample_from_record(record: dict[str, Any], where: str) -> Sample:
    """A sample from its JSON object. `where` (FILE:LINE) starts the text of every DataError."""

    def wrong(what: str) -> DataError:
        return DataError(f"{where}: {what}")

    meta = _meta(record, wrong)
    for key in ("group", "response_ids"):
        if key not in record:
            raise wrong(f"{key} is missing")
    group = record["group"]
    if isinstance(group, bool) or not isinstance(group, str | int) or group == "":
        raise wrong(f"group must be a name, not {_show(group)}")
    response_ids = _ids(record["response_ids"], "response_ids", wrong)
    mask = _mask(record.get("mask"), len(response_ids), wrong)
    finish = record.get("finish_reason")
    if finish is not None and finish not in get_args(FinishReason):
        raise wrong(f"finish_reason must be one of {', '.join(get_args(FinishReason))}, not {_show(finish)}")
    signals: dict[str, Any] = {name: _signal(record.get(name), name, mask, wrong) for name in TOKEN_SIGNALS}
    return Sample(
        group=str(group),
        prompt_ids=_ids(record.get("prompt_ids", []), "prompt_ids", wrong),
        response_ids=response_ids,
        mask=mask,
        reward=_number(record.get("reward"), "reward", wrong),
        teacher_logprob=_number(record.get("teacher_logprob"), "teacher_logprob", wrong),
        finish_reason=finish or "stop",
        weight_versions=_versions(record, len(response_ids), wrong),
        meta=meta,
        **signals,
    )


def iter_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of the lines that are not blank. DataError where the file is no readable UTF-8 text."""
    line = 0
    try:
        with Path(path).open("rb") as file:
            for line, raw in enumerate(file, start=1):
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
                if text:
                    yield line, text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in one line of text. DataError for anything else, and for a key that stands there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise DataError(f"{where}: the key {twice!r} stands there twice")
        return found

    try:
        record = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{where}: JSON that is nested too deeply") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected a JSON object, found {_show(record)}")
    return record


_Wrong = Callable[[str], DataError]


def _meta(record: dict[str, Any], wrong: _Wrong) -> dict[str, Any]:
    """`meta` and all keys the format does not know: annotations are kept. A key that looks like a misspelt one is refused."""
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise wrong(f"meta must be an object, not {_show(meta)}")
    kept = dict(meta)
    for key, value in record.items():
        if key in _KEYS:
            continue
        close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)
        if close:
            raise wrong(f"unknown key {key!r}; did you mean {close[0]!r}? (annotations belong under 'meta')")
        kept[key] = value
    return kept


def _ids(value: Any, name: str, wrong: _Wrong) -> list[int]:
    if not isinstance(value, list):
        raise wrong(f"{name} must be a list of token ids, not {_show(value)}")
    for place, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise wrong(f"{name}[{place}] must be a token id (an integer from 0), not {_show(token)}")
    return value


def _mask(value: Any, length: int, wrong: _Wrong) -> list[int]:
    if value is None:
        return [1] * length
    _check_length(value, "mask", length, wrong)
    for place, entry in enumerate(value):
        if not isinstance(entry, int | float) or entry not in (0, 1):
            raise wrong(f"mask[{place}] must be 0 or 1, not {_show(entry)}")
    return [int(entry) for entry in value]


def _signal(value: Any, name: str, mask: list[int], wrong: _Wrong) -> list[float] | None:
    """Per-token numbers; null and NaN may stand only where the mask is 0, and are read as NaN."""
    if value is None:
        return None
    _check_length(value, name, len(mask), wrong)
    numbers: list[float] = []
    for place, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, float | int | None):
            raise wrong(f"{name}[{place}] must be a number, not {_show(entry)}")
        number = math.nan if entry is None else _as_float(entry)
        if mask[place] and not math.isfinite(number):
            raise wrong(f"{name}[{place}] is {_show(entry)}, and the mask is 1 there: only masked places may hold no number")
        numbers.append(number)
    return numbers


def _check_length(value: Any, name: str, length: int, wrong: _Wrong) -> None:
    if not isinstance(value, list):
        raise wrong(f"{name} must be a list, not {_show(value)}")
    if len(value) != length:
        raise wrong(f"{name} holds {len(value)} values, and the response has {length} tokens")


def _number(value: Any, name: str, wrong: _Wrong) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(_as_float(value)):
        raise wrong(f"{name} must be a finite number, not {_show(value)}")
    return float(value)


def _as_float(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON integers have no bound
        return math.inf


def _versions(record: dict[str, Any], length: int, wrong: _Wrong) -> list[tuple[str, int]]:
    """`weight_versions`, or a plain `weight_version` for the whole response."""
    plain, spans = record.get("weight_version"), record.get("weight_versions")
    if plain is not None and spans is not None:
        raise wrong("give weight_version or weight_versions, not both")
    if plain is not None:
        spans = [[plain, 0]]
    if spans is None:
        return []
    if not isinstance(spans, list):
        raise wrong(f"weight_versions must be a list of [version, first token], not {_show(spans)}")
    read: list[tuple[str, int]] = []
    for place, span in enumerate(spans):
        name = f"weight_versions[{place}]" if plain is None else "weight_version"
        if not isinstance(span, list) or len(span) != 2 or type(span[1]) is not int:
            raise wrong(f"{name} must be [version, first token], not {_show(span)}")
        version, first = span
        if isinstance(version, bool) or not isinstance(version, str | int):
            raise wrong(f"{name}: a version is a text, not {_show(version)}")
        if place == 0 and first != 0:
            raise wrong(f"{name} starts at token {first}: the first one starts at 0")
        if place and not read[-1][1] < first < length:
            raise wrong(f"{name} starts at token {first}, out of order or beyond the response's {length} tokens")
        read.append((str(version), first))
    return read


def _show(value: Any) -> str:
    """A value in an error's one line, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
