"""Every complete group on disk before it is trained on: what was generated before a crash is trained after it, once.

    RUN/journal/step_000007.jsonl       one line a group, in the order in which they were complete, and one a group's scores

A server's sampling cannot be repeated, so this is what makes a run repeatable: a run that is resumed draws the same prompts as
before, takes the groups that it finds here, and asks the servers for the others only. The files of steps that no checkpoint will
ever be resumed before are removed; what was trained on stays in `RUN/samples`.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gvpo.data.errors import DataError
from megatron_gvpo.data.rewards import Score
from megatron_gvpo.data.samples import Sample, sample_from_record, sample_to_record

log = logging.getLogger(__name__)


class JournalError(RuntimeError):
    """The journal cannot be written."""


class Journal:
    """The journal of a run; belongs to rank 0.

    recipe: a digest of everything that decides what is generated; entries of another recipe are not used.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder = folder
        self._recipe = recipe

    def page(self, step: int) -> Page:
        """The entries of one step, with what an earlier process wrote there."""
        return Page(self._path(step), self._recipe)

    def prune(self, step: int) -> None:
        """Remove the files of `step` and of all before it: the oldest checkpoint that may be resumed is that of `step`."""
        for path in self._folder.glob("step_*.jsonl"):
            if path.name <= self._path(step).name:
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08d}.jsonl"


class Page:
    """One step's groups and scores, by the group's name. Each entry is on the disk when the call that adds it returns."""

    def __init__(self, path: Path, recipe: str) -> None:
        self._path = path
        self._recipe = recipe
        self._groups: dict[str, list[Sample]] = {}
        self._scores: dict[str, list[Score]] = {}
        self._file: int | None = None
        if path.exists():
            self._read()

    def __len__(self) -> int:
        return len(self._groups)

    def group(self, name: str, prompt_ids: Sequence[int], count: int) -> list[Sample] | None:
        """The group's samples as they were generated, or None where it was not, or was for another prompt or size."""
        found = self._groups.get(name)
        if found is None or len(found) != count or found[0].prompt_ids != list(prompt_ids):
            return None
        return found

    def scores(self, name: str) -> list[Score] | None:
        return self._scores.get(name)

    def add_group(self, name: str, samples: Sequence[Sample]) -> None:
        self._write([{"group": name, "samples": [sample_to_record(sample) for sample in samples]}])

    def add_scores(self, scores: dict[str, list[Score]]) -> None:
        self._write([{"scores": name, "values": [_spelled(score) for score in found]} for name, found in scores.items()])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, entries: list[dict[str, Any]]) -> None:
        lines = []
        for entry in entries:
            text = json.dumps({"recipe": self._recipe, **entry}, allow_nan=False)
            lines.append(f"{zlib.crc32(text.encode()):08x} {text}\n")
        try:
            if self._file is None:
                self._file = self._open()
            data = "".join(lines).encode()
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise JournalError(
                f"{self._path}: the journal cannot be written: {error.strerror}; free space there, then --resume"
            ) from error

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # else the file's name may be lost with the machine, whatever is synced in it
        finally:
            os.close(folder)
        return file

    def _read(self) -> None:
        """Take over the whole entries. A last one that was cut is cut off, so that the next one starts on a line of its own."""
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            log.warning("%s: the last entry was being written when the run ended: its group is drawn again", self._path)
            with self._path.open("r+b") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
        others = 0
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            where = f"{self._path}:{number}"
            try:
                entry = _checked(line)
                if entry["recipe"] != self._recipe:
                    others += 1
                elif "group" in entry:
                    self._groups[entry["group"]] = [sample_from_record(record, where) for record in entry["samples"]]
                else:
                    self._scores[entry["scores"]] = [Score(*values) for values in entry["values"]]
            except (ValueError, KeyError, TypeError, DataError) as error:
                log.warning("%s is damaged and passed over, its group is drawn again: %s", where, error)
        if others:
            log.warning("%s: %d entries were made with other settings and are not used", self._path, others)


def _checked(line: bytes) -> dict[str, Any]:
    crc, _, text = line.partition(b" ")
    if f"{zlib.crc32(text):08x}".encode() != crc:
        raise ValueError("its checksum does not fit")
    return json.loads(text)


def _spelled(score: Score) -> list[Any]:
    return [score.reward, score.problem, score.detail]
