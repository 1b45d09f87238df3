"""The folders of a run's checkpoints: which one counts, whether it is whole, which ones go. No torch, no Megatron.

ROOT/step_00000010/      one checkpoint: Megatron's files, state.json, and last of all manifest.json: every file's size and hash
ROOT/step_00000020.tmp/  one that was being written when the run was killed; never read
ROOT/latest              the name of the newest whole one
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gvpo.mcore.errors import SetupError

log = logging.getLogger(__name__)

LATEST = "latest"
STATE = "state.json"
_MANIFEST = "manifest.json"
# Smaller files are hashed by whoever looks at a checkpoint; larger ones are shared out over the ranks.
_SMALL_BYTES = 1 << 20


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into."""
    part = root / f"{step_name(step)}.tmp"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def commit(root: Path, part: Path, step: int, state: dict[str, Any], hashes: Mapping[str, str] | None = None) -> Path:
    """Make a written folder a checkpoint, and then the latest one. Call when every rank has written its share.

    state: JSON values, read back by `read_state`. hashes: of files that are hashed already, by name. Each step is durable before
    the next, so a kill at any moment leaves the former latest one or this one.
    """
    _write(part / STATE, json.dumps(state, indent=2))
    files = sorted(path for path in part.rglob("*") if path.is_file())
    known, manifest = hashes or {}, {}
    for path in files:
        name = str(path.relative_to(part))
        manifest[name] = {"bytes": path.stat().st_size, "sha256": known.get(name) or sha256(path)}
    _write(part / _MANIFEST, json.dumps(manifest, indent=2))
    _sync(part)
    final = root / step_name(step)
    if final.exists():  # the same step again, after a resume from an older one
        shutil.rmtree(final)
    part.rename(final)
    pointer = root / f"{LATEST}.tmp"
    _write(pointer, final.name + "\n")
    pointer.replace(root / LATEST)
    _sync(root)
    return final


@dataclass(frozen=True)
class Found:
    """The checkpoint to load, and what was wrong with those that were passed over."""

    path: Path | None
    warnings: list[str]


def find(root: Path, damaged: Mapping[str, str] | None = None) -> Found:
    """The one that `latest` names, or, where it is damaged, the newest whole one; path None where there is none.

    damaged: what was found in large files, which `problem` does not read, by the folder's name.
    """
    folders = sorted(
        (path for path in root.glob("step_*") if path.is_dir() and re.fullmatch(r"step_\d+", path.name)),
        key=lambda path: int(path.name.removeprefix("step_")),
        reverse=True,
    )
    warnings: list[str] = []
    try:
        named = (root / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        named = ""  # nothing was saved yet
    except (OSError, ValueError) as error:
        named = ""
        warnings.append(f"{root / LATEST} cannot be read, and the newest whole checkpoint is taken: {error}")
    if named and root / named not in folders:
        warnings.append(f"{root / LATEST} names {named!r}, which is not there")
    elif named:
        # Newer ones than the pointer's are whole as well if their manifest says so, but they were never announced.
        folders = [path for path in folders if path.name <= named]
    for path in folders:
        damage = problem(path) or (damaged or {}).get(path.name, "")
        if not damage:
            return Found(path, warnings)
        warnings.append(f"{path} is damaged and passed over: {damage}")
    return Found(None, warnings)


def problem(path: Path) -> str:
    """What is wrong with a checkpoint's files, '' where they are what was written; of large ones only the size is compared."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            size, wanted = (path / name).stat().st_size, expected["bytes"]
            if size != wanted:
                return f"{name} has {size} bytes, not {wanted}"
            if size <= _SMALL_BYTES and sha256(path / name) != expected["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError:
        return f"it has no {_MANIFEST}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"its {_MANIFEST} cannot be read ({type(error).__name__})"
    return ""


def large_files(path: Path) -> list[str]:
    """Names of the files that `problem` compares by size only; the checkpoint has to be without problem."""
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    return sorted(name for name, facts in manifest.items() if facts["bytes"] > _SMALL_BYTES)


def changed(path: Path, names: Iterable[str]) -> str:
    """What is wrong with the contents of these files, '' where they are what was written."""
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    return next((f"{name} has changed" for name in names if sha256(path / name) != manifest[name]["sha256"]), "")


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """What `commit` was given. ValueError, naming the file, where it cannot be read."""
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path / STATE} cannot be read: {error}") from error


def prune(root: Path, keep: int, keep_every: int = 0) -> list[Path]:
    """Remove all but the newest `keep`, the latest, and those whose step `keep_every` divides; what was removed."""
    steps = sorted(int(m[1]) for path in root.iterdir() if (m := re.fullmatch(r"step_(\d+)", path.name)))
    try:
        latest = (root / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        latest = ""
    removed = []
    for step in steps[:-keep] if keep else steps:
        path = root / step_name(step)
        if path.name == latest or (keep_every and step % keep_every == 0):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make a folder's entries durable; file systems that cannot do it for folders refuse, and have no need to."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        log.debug("no fsync of %s: %s", folder, error)
    finally:
        os.close(handle)
