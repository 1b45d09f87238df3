"""Reads what wandb wrote offline, for tests: wandb has no public reader of its own files.

A `.wandb` file is a 7-byte header and then LevelDB's log format: blocks of 32 KiB that hold records of (crc, length, type,
data), where a record that crosses a block is cut into first, middle and last parts. Each record is a protobuf message.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_MAGIC, _HEADER = b":W&B", 7
_BLOCK = 32 * 1024
_RECORD = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


@dataclass
class WandbFile:
    """One offline segment of a run."""

    run_id: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def read_wandb(path: Path) -> WandbFile:
    """The run, config and history rows of a file; wandb's own keys (_step, _runtime, ...) stay in the rows."""
    found = WandbFile()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run_id, found.project = record.run.run_id, record.run.project
            found.config.update({u.key: json.loads(u.value_json) for u in record.run.config.update if u.key != "_wandb"})
        elif kind == "history":
            items = record.history.item
            found.history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "exit":
            found.finished = True
    return found


def _records(data: bytes) -> Iterator[bytes]:
    assert data[: len(_MAGIC)] == _MAGIC
    at, parts = _HEADER, b""
    while at + _RECORD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD.size:  # too small for a record: padding
            at += left
            continue
        _, length, kind = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        parts += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
