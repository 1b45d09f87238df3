"""Where a process stands in its job, read from torchrun's or SLURM's variables. Pure: no torch, no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_gvpo.mcore.errors import SetupError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One rank's place: its global rank, how many there are, its rank on its machine, and where rank 0 listens."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    source: str  # "torchrun", "slurm" or "single"


def expand_nodes(nodelist: str) -> list[str]:
    """The host names of a SLURM node list, in its order: `n[01-02,05],gpu7` -> n01, n02, n05, gpu7.

    Several bracketed parts in one name multiply (`r[1-2]n[1-2]`); zeros in front are kept.
    ValueError for what is not such a list.
    """
    names: list[str] = []
    for item in _split(nodelist.strip()):
        names.extend(_expand(item, nodelist))
    if not names:
        raise SetupError(f"the SLURM node list {nodelist!r} names no host")
    return names


def _split(text: str) -> Iterator[str]:
    """Cut at the commas that stand outside brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        if letter == "[":
            depth += 1
        elif letter == "]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
        if depth not in (0, 1):
            raise SetupError(f"brackets do not match in the SLURM node list {text!r}")
    if depth:
        raise SetupError(f"brackets do not match in the SLURM node list {text!r}")
    if text[start:]:
        yield text[start:]


def _expand(item: str, nodelist: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", item)
    if match is None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", item):
            raise SetupError(f"{item!r} in the SLURM node list {nodelist!r} is no host name")
        return [item]
    head, ranges, tail = match.groups()
    numbers: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None or (bounds[2] is not None and int(bounds[2]) < int(bounds[1])):
            raise SetupError(f"{part!r} in the SLURM node list {nodelist!r} is no range")
        width = len(bounds[1])
        numbers.extend(str(n).zfill(width) for n in range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    ends = _expand(tail, nodelist) if tail else [""]
    return [head + number + end for number in numbers for end in ends]


def find_place(environ: Mapping[str, str]) -> Place:
    """This process's place. torchrun's variables win over SLURM's; with neither it is alone.

    SLURM: the first host of the step's (else the job's) node list is rank 0's; the port is MASTER_PORT, or one made from the
    job and step ids so that two jobs on one machine do not meet. ValueError where variables are missing or make no sense.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        missing = [name for name in _TORCHRUN if name not in environ]
        if missing:
            raise SetupError(f"{' and '.join(missing)} not set, though RANK or WORLD_SIZE is: start with torchrun, or unset both")
        place = Place(
            rank=_number(environ, "RANK"),
            world=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", _number(environ, "RANK")),
            address=environ["MASTER_ADDR"],
            port=_number(environ, "MASTER_PORT"),
            source="torchrun",
        )
    elif "SLURM_PROCID" in environ:
        place = _from_slurm(environ)
    else:
        return Place(0, 1, 0, "127.0.0.1", 0, "single")
    if not 0 <= place.rank < place.world:
        raise SetupError(f"{place.source} says rank {place.rank} of {place.world}: the rank must be below the number of ranks")
    return place


def _from_slurm(environ: Mapping[str, str]) -> Place:
    # The step's own variables first: `srun -n 2` inside an allocation of 16 tasks runs two ranks.
    world = _number(environ, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS")
    nodes = next((environ[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in environ), None)
    if nodes is None:
        raise SetupError("SLURM_PROCID is set, but no SLURM_JOB_NODELIST says where rank 0 runs: start with srun")
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
    return Place(
        rank=_number(environ, "SLURM_PROCID"),
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID"),
        address=environ.get("MASTER_ADDR") or expand_nodes(nodes)[0],
        # Below 32768, where Linux starts to hand out ports of its own accord.
        port=_number(environ, "MASTER_PORT", 20000 + (job * 7 + step) % 12000),
        source="slurm",
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise SetupError(f"{name} is not set: start with torchrun or srun")
        return default
    try:
        return int(text)
    except ValueError:
        raise SetupError(f"{name} is {text!r}, which is no whole number") from None
