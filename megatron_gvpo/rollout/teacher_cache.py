"""Scores that a teacher gave before, on disk: a second epoch over fixed answers, or a run once more, asks no server for them.

A score depends on the teacher's weights, the ids, the temperature and how many likeliest ids were asked for; the key is a digest
of all of these, so that nothing is ever taken from another teacher.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_gvpo.data.teacher_top import TeacherTop
from megatron_gvpo.rollout.teacher_wire import Scored

_FILE = "teacher_scores.sqlite"
_BLOCK = 1 << 16
_BLOCKS = 64


def weights_digest(folder: str | Path) -> str:
    """A digest of a Hugging Face folder's weights: config.json, and of every safetensors file its size and 64 KiB at 64 places.

    Not of every byte: that would read a 140 GB teacher at each start. Training changes every block of a weight file. '' for a
    folder without weights.
    """
    digest = hashlib.sha256()
    folder = Path(folder)
    if not any(folder.glob("*.safetensors")):
        return ""
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


class ScoreCache:
    """One teacher's scores in a folder that several teachers and runs may share, one process at a time writing.

    weights: the teacher's digest. top_k as asked for; temperature of the scores (a server's are at 1). Used from one thread.
    """

    def __init__(self, folder: str | Path, *, weights: str, top_k: int, temperature: float = 1.0) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._teacher = f"{weights} {top_k} {temperature!r} "
        self._top_k = top_k
        # Made here, used on the event loop's thread alone.
        self._db = sqlite3.connect(Path(folder) / _FILE, timeout=30.0, check_same_thread=False)
        self._db.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, logprobs BLOB, ids BLOB, tops BLOB)")
        self._db.commit()

    def get(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Scored | None:
        """What this teacher said of exactly these ids, or None."""
        key = self._key(prompt_ids, response_ids)
        row = self._db.execute("SELECT logprobs, ids, tops FROM scores WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        logprobs = np.frombuffer(row[0], "<f8").tolist()
        if not self._top_k:
            return Scored(logprobs)
        shape = (len(logprobs), self._top_k)
        return Scored(
            logprobs, TeacherTop(np.frombuffer(row[1], "<i4").reshape(shape), np.frombuffer(row[2], "<f4").reshape(shape))
        )

    def put(self, scored: Iterable[tuple[Sequence[int], Sequence[int], Scored]]) -> None:
        """Remember (prompt ids, response ids, score)."""
        rows = []
        for prompt_ids, response_ids, score in scored:
            ids = b"" if score.top is None else score.top.ids.astype("<i4").tobytes()
            tops = b"" if score.top is None else score.top.logprobs.astype("<f4").tobytes()
            rows.append((self._key(prompt_ids, response_ids), np.array(score.logprobs, "<f8").tobytes(), ids, tops))
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?)", rows)

    def close(self) -> None:
        self._db.close()

    def _key(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> bytes:
        text = self._teacher + json.dumps([list(prompt_ids), list(response_ids)])
        return hashlib.sha256(text.encode()).digest()
