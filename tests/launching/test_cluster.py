"""torch.distributed's variables from SLURM's and Open MPI's; whole runs by them are in tests/lab/engines."""

from __future__ import annotations

import pytest

from minddp.launching.cluster import ClusterError, first_host, from_mpi, from_slurm

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODELIST": "node[08-09]"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("localhost", "localhost"),
        ("gpu1,gpu2", "gpu1"),
        ("node[08-10,12],gpu1", "node08"),
        ("node[7,9]", "node7"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("a-b-[3-4].example", "a-b-3.example"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_slurms_variables_alone() -> None:
    found = from_slurm(SLURM)
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node08",
        "MASTER_PORT": "29500",
    }


def test_jobs_have_ports_of_their_own_that_all_ranks_know() -> None:
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"}
    ports = {from_slurm(SLURM | job | {"SLURM_PROCID": str(rank)})["MASTER_PORT"] for rank in range(4)}
    assert len(ports) == 1
    assert ports != {from_slurm(SLURM | job | {"SLURM_STEP_ID": "1"})["MASTER_PORT"]}
    assert 15000 <= int(ports.pop()) < 32768
    assert from_slurm(SLURM | job)["GROUP_RANK"] == "1"


def test_what_the_user_has_set_stays() -> None:
    given = {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234"}
    for found in (from_slurm(SLURM | given), from_mpi(MPI | given)):
        assert given.items() <= found.items()


def test_open_mpis_variables() -> None:
    found = from_mpi(MPI)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "2", "2")
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert found["MASTER_PORT"] != from_mpi(MPI | {"PMIX_NAMESPACE": "4711"})["MASTER_PORT"]


@pytest.mark.parametrize(
    "convert, changes, message",
    [
        (from_slurm, {"SLURM_PROCID": None}, "SLURM_PROCID is not set: start this by srun"),
        (from_slurm, {"SLURM_NODELIST": None}, "SLURM_NODELIST is not set"),
        (from_slurm, {"SLURM_NTASKS": "two"}, "SLURM_NTASKS is 'two', which is no number"),
        (from_slurm, {"SLURM_PROCID": "4"}, "rank 4 of 4"),
        (from_slurm, {"SLURM_NODELIST": "[]"}, "no list of hosts"),
        (from_slurm, {"SLURM_JOB_ID": "7"}, "srun minddp run --slurm"),
        (from_slurm, {"TORCHELASTIC_RUN_ID": "x"}, "leave --slurm out"),
        (from_mpi, {"TORCHELASTIC_RUN_ID": "x"}, "leave --mpi out"),
        (from_mpi, {"OMPI_COMM_WORLD_RANK": None}, "OMPI_COMM_WORLD_RANK is not set: start this by mpirun"),
        (from_mpi, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "mpirun -x MASTER_ADDR="),
    ],
)
def test_what_is_wrong_is_said(convert, changes: dict[str, str | None], message: str) -> None:
    variables = {**(SLURM if convert is from_slurm else MPI), **changes}
    with pytest.raises(ClusterError, match=message.replace("[", r"\[")):
        convert({name: value for name, value in variables.items() if value is not None})
