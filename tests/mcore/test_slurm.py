"""A rank's place in its job, from torchrun's and SLURM's variables (acceptance case 42)."""

from __future__ import annotations

import pytest

from megatron_gvpo.mcore.slurm import expand_nodes, find_place

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "12",
    "SLURM_JOB_NODELIST": "n[01-02,05]",
    "SLURM_JOB_ID": "4242",
}


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n[01-02,05]", ["n01", "n02", "n05"]),
        ("n07", ["n07"]),
        ("a,b", ["a", "b"]),
        ("gpu[098-101],login", ["gpu098", "gpu099", "gpu100", "gpu101", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("node[3]-ib", ["node3-ib"]),
    ],
)
def test_node_lists_expand_in_order_with_their_zeros(nodelist: str, names: list[str]) -> None:
    """Case 42: the first name is where rank 0 listens, so a lost zero or a wrong order hangs the whole job."""
    assert expand_nodes(nodelist) == names


@pytest.mark.parametrize("nodelist", ["", "n[1-2", "n1-2]", "n[2-1]", "n[a]", "n[1,]", "n 1"])
def test_what_is_no_node_list_is_refused_with_its_text(nodelist: str) -> None:
    """A guess would send the ranks to a host that is not there. Does not cover names of hosts that do not exist."""
    with pytest.raises(ValueError, match="SLURM node list"):
        expand_nodes(nodelist)


def test_slurm_variables_give_rank_world_and_address() -> None:
    """Case 42: PROCID is the global rank, LOCALID the one on the machine."""
    place = find_place(SLURM)
    assert (place.rank, place.world, place.local_rank, place.address, place.source) == (5, 12, 1, "n01", "slurm")
    assert 20000 <= place.port < 32768


def test_two_jobs_and_two_steps_do_not_share_a_port() -> None:
    """Two jobs may share a machine, and a second step may start while the first one's sockets still close."""
    ports = {find_place({**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port for job in "12" for step in "01"}
    assert len(ports) == 4


def test_a_step_smaller_than_its_allocation_counts_its_own_tasks() -> None:
    """`srun -n 2` inside an allocation of 12 runs two ranks, on the step's own nodes."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n05", "SLURM_PROCID": "1"}
    place = find_place({**SLURM, **step})
    assert (place.rank, place.world, place.address) == (1, 2, "n05")


def test_torchrun_wins_over_slurm_and_nothing_means_alone() -> None:
    """torchrun inside an sbatch script: its own ranks count, not the script's."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1234"}
    place = find_place({**SLURM, **torchrun})
    assert (place.rank, place.world, place.address, place.port, place.source) == (1, 2, "h", 1234, "torchrun")
    alone = find_place({})
    assert (alone.rank, alone.world, alone.source) == (0, 1, "single")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT not set"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, "no SLURM_JOB_NODELIST"),
        ({**SLURM, "SLURM_PROCID": "12"}, "rank 12 of 12"),
        ({**SLURM, "SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x'"),
    ],
)
def test_variables_that_make_no_sense_are_named(environ: dict[str, str], words: str) -> None:
    """One line that says which variable, before any rank waits for another."""
    with pytest.raises(ValueError, match=words):
        find_place(environ)
