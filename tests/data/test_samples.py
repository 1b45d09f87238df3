"""The samples file: what is read, what is refused and with which words, and that writing loses nothing.

Not covered: what an objective does with the samples (tests of the objectives).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.samples import TOKEN_SIGNALS, Sample, iter_samples, read_samples, write_samples

GOOD: dict[str, Any] = {"group": "g0", "prompt_ids": [5, 6], "response_ids": [7, 8, 9]}


def _file(tmp_path: Path, *records: dict[str, Any] | str) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def _error(tmp_path: Path, *records: dict[str, Any] | str) -> str:
    with pytest.raises(DataError) as caught:
        read_samples(_file(tmp_path, *records))
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix(str(tmp_path / "samples.jsonl"))


def test_the_whole_format_is_read(tmp_path: Path) -> None:
    """Every key of the documented format arrives in its field: outside checks write such files by hand."""
    record = {
        **GOOD,
        "mask": [1, 1, 0],
        "reward": 1,
        "logprobs": [-1.0, -2, -3.0],
        "rollout_logprobs": [-1.5, -2.5, None],
        "old_logprobs": [-1.0, -2.0, -3.0],
        "ref_logprobs": [-1.0, -2.0, -3.0],
        "teacher_logprobs": [-0.5, -0.25, -3.0],
        "teacher_logprob": -12.3,
        "finish_reason": "length",
        "weight_versions": [["3", 0], ["4", 2]],
    }
    [sample] = read_samples(_file(tmp_path, record))
    assert (sample.group, sample.prompt_ids, sample.response_ids, sample.mask) == ("g0", [5, 6], [7, 8, 9], [1, 1, 0])
    assert sample.reward == 1.0
    assert sample.logprobs == [-1.0, -2.0, -3.0]
    assert sample.rollout_logprobs is not None
    assert sample.rollout_logprobs[:2] == [-1.5, -2.5]
    assert math.isnan(sample.rollout_logprobs[2])
    assert sample.teacher_logprobs == [-0.5, -0.25, -3.0]
    assert (sample.teacher_logprob, sample.finish_reason) == (-12.3, "length")
    assert sample.weight_versions == [("3", 0), ("4", 2)]
    assert len(sample) == 5


def test_defaults_and_the_plain_weight_version(tmp_path: Path) -> None:
    """Absent keys: an all-ones mask, absent signals, a response that stopped; `weight_version` is the older, plain form."""
    bare, plain = read_samples(_file(tmp_path, GOOD, "", {**GOOD, "weight_version": 3}))
    assert bare == Sample("g0", [5, 6], [7, 8, 9], [1, 1, 1])
    assert plain.weight_versions == [("3", 0)]


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    """`explain` names dropped lines by these numbers, so they must be those an editor shows."""
    assert [line for line, _ in iter_samples(_file(tmp_path, GOOD, "", GOOD))] == [1, 3]


def test_nan_is_fine_where_masked(tmp_path: Path) -> None:
    """Acceptance 11: servers and other tools leave NaN, null or Infinity at masked places, and these must not stop a replay."""
    line = '{"group": "g", "prompt_ids": [1], "response_ids": [2, 3, 4], "mask": [1, 0, 0], "logprobs": [-1.0, NaN, -Infinity]}'
    [sample] = read_samples(_file(tmp_path, line))
    assert sample.logprobs is not None
    assert sample.logprobs[0] == -1.0
    assert math.isnan(sample.logprobs[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": None}, ":1: group must be a name, not null"),
        ({"prompt_ids": [1, -2]}, ":1: prompt_ids[1] must be a token id (an integer from 0), not -2"),
        ({"response_ids": [1, 2.0, 3]}, ":1: response_ids[1] must be a token id (an integer from 0), not 2.0"),
        ({"response_ids": [True, 2, 3]}, ":1: response_ids[0] must be a token id (an integer from 0), not true"),
        ({"response_ids": "abc"}, ':1: response_ids must be a list of token ids, not "abc"'),
        ({"mask": [1, 1]}, ":1: mask holds 2 values, and the response has 3 tokens"),
        ({"mask": [1, 2, 0]}, ":1: mask[1] must be 0 or 1, not 2"),
        ({"logprobs": [-1.0, -2.0]}, ":1: logprobs holds 2 values, and the response has 3 tokens"),
        ({"logprobs": [-1.0, "x", -2.0]}, ':1: logprobs[1] must be a number, not "x"'),
        (
            {"logprobs": [-1.0, None, -2.0]},
            ":1: logprobs[1] is null, and the mask is 1 there: only masked places may hold no number",
        ),
        (
            {"old_logprobs": [-1.0, math.nan, -2.0]},
            ":1: old_logprobs[1] is NaN, and the mask is 1 there: only masked places may hold no number",
        ),
        ({"reward": math.nan}, ":1: reward must be a finite number, not NaN"),
        ({"reward": "1"}, ':1: reward must be a finite number, not "1"'),
        ({"teacher_logprob": True}, ":1: teacher_logprob must be a finite number, not true"),
        ({"finish_reason": "eos"}, ':1: finish_reason must be one of stop, length, abort, not "eos"'),
        ({"weight_version": "3", "weight_versions": [["3", 0]]}, ":1: give weight_version or weight_versions, not both"),
        ({"weight_versions": [["3", 1]]}, ":1: weight_versions[0] starts at token 1: the first one starts at 0"),
        (
            {"weight_versions": [["3", 0], ["4", 3]]},
            ":1: weight_versions[1] starts at token 3, out of order or beyond the response's 3 tokens",
        ),
        ({"weight_versions": ["3"]}, ':1: weight_versions[0] must be [version, first token], not "3"'),
        (
            {"old_logprob": [-1.0, -1.0, -1.0]},
            ":1: unknown key 'old_logprob'; did you mean 'old_logprobs'? (annotations belong under 'meta')",
        ),
        ({"meta": [1]}, ":1: meta must be an object, not [1]"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A list shifted by one or a misspelt signal would train on nonsense without a symptom; each is refused in one line."""
    assert _error(tmp_path, {**GOOD, **change}) == message


def test_what_is_no_sample_at_all(tmp_path: Path) -> None:
    """Broken files: cut JSON, a list, a key twice, bytes that are no text, no line, no file."""
    assert _error(tmp_path, GOOD, '{"group": "g0", ') == (
        ":2: not JSON: Expecting property name enclosed in double quotes at column 16"
    )
    assert _error(tmp_path, "[1, 2]") == ":1: expected a JSON object, found [1, 2]"
    assert _error(tmp_path, '{"group": "a", "group": "b"}') == ":1: the key 'group' stands there twice"
    assert _error(tmp_path, {"group": "a"}) == ":1: response_ids is missing"
    assert _error(tmp_path) == ": holds no sample; expected one JSON object a line"
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"bytes\.jsonl:2: not UTF-8 text"):
        read_samples(path)
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read: No such file"):
        read_samples(tmp_path / "absent.jsonl")


def test_annotations_are_kept(tmp_path: Path) -> None:
    """People annotate their data; a round trip through this file must not lose it."""
    path = _file(tmp_path, {**GOOD, "source": "human", "meta": {"rater": 3}})
    [sample] = read_samples(path)
    assert sample.meta == {"rater": 3, "source": "human"}
    write_samples(path, [sample])
    assert read_samples(path) == [sample]


_numbers = st.floats(-1e6, 0.0, allow_nan=False)


@st.composite
def _samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 6))
    ids = st.integers(0, 2**31)
    series = st.none() | st.lists(_numbers, min_size=length, max_size=length)
    return Sample(
        group=draw(st.text(min_size=1)),
        prompt_ids=draw(st.lists(ids, max_size=4)),
        response_ids=draw(st.lists(ids, min_size=length, max_size=length)),
        mask=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        reward=draw(st.none() | _numbers),
        teacher_logprob=draw(st.none() | _numbers),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        weight_versions=[("1", 0), ("2", 1)][: draw(st.integers(0, min(2, length)))],
        meta=draw(st.dictionaries(st.sampled_from(["source", "note"]), st.text())),
        **{name: draw(series) for name in TOKEN_SIGNALS},
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(_samples(), min_size=1, max_size=4))
def test_writing_loses_nothing(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> None:
    """Replayed rollouts must give the run that was dumped, so every float comes back bit for bit."""
    path = tmp_path_factory.getbasetemp() / "round_trip.jsonl"
    assert write_samples(path, samples) == len(samples)
    assert read_samples(path) == samples


def test_masked_nan_is_written_as_strict_json(tmp_path: Path) -> None:
    """`NaN` is no JSON: jq, JavaScript and pyarrow refuse the whole file over it. null is read everywhere."""
    sample = Sample("g", [1], [2, 3], [1, 0], logprobs=[-1.0, math.nan])
    path = tmp_path / "samples.jsonl"
    write_samples(path, [sample])
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["logprobs"] == [-1.0, None]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A crash in the middle of a dump must not leave half a file that a replay would take for a whole batch."""
    path = tmp_path / "samples.jsonl"
    good = Sample("g", [1], [2], [1], reward=1.0)
    write_samples(path, [good])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_samples(path, [good, replace(good, reward=math.nan)])
    assert read_samples(path) == [good]
    assert [p.name for p in tmp_path.iterdir()] == ["samples.jsonl"]
