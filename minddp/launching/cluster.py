"""The variables that torch.distributed reads, from those of other starters of processes: SLURM's, Open MPI's.

``init_process_group`` without arguments wants RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and scripts read
LOCAL_RANK. torchrun sets them; ``srun`` and ``mpirun`` set their own, which say the same, but for where rank 0
listens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

__all__ = ["STARTERS", "ClusterError", "first_host", "from_mpi", "from_slurm"]

DEFAULT_PORT = 29500
# Below what Linux gives out by itself (32768 and above), so that nobody holds it by chance.
_FIRST_PORT, _PORTS = 15000, 17000


class ClusterError(Exception):
    """The variables do not say which rank this is; the text says what to change."""


def from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """torch.distributed's variables, from those that ``srun`` gives each task.

    Rank 0 is on the first node of the list; the port follows from the job's and the step's number. MASTER_ADDR and
    MASTER_PORT that are set already stay.

    Raises:
        ClusterError: a variable is missing or is no number, or this is no task of srun.
    """
    _refuse_torchrun(environment, "--slurm")
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        raise ClusterError("this is SLURM's batch script, not a task: write `srun minddp run --slurm ...` in it")
    rank = _number(environment, "SLURM_PROCID", "srun")
    size = _number(environment, "SLURM_NTASKS", "srun")
    local = _number(environment, "SLURM_LOCALID", "srun")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodes:
        raise ClusterError("SLURM_NODELIST is not set: start this by srun")
    job = [environment[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environment]
    return _variables(
        environment,
        rank=rank,
        size=size,
        local=local,
        node=environment.get("SLURM_NODEID"),
        address=first_host(nodes),
        port=_port("/".join(job)),
    )


def from_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """torch.distributed's variables, from those that Open MPI's ``mpirun`` gives each process.

    They do not say where rank 0 is: with several machines MASTER_ADDR must be given.

    Raises:
        ClusterError: a variable is missing or is no number, or MASTER_ADDR is needed.
    """
    _refuse_torchrun(environment, "--mpi")
    rank = _number(environment, "OMPI_COMM_WORLD_RANK", "mpirun")
    size = _number(environment, "OMPI_COMM_WORLD_SIZE", "mpirun")
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun")
    local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun")
    if local_size < size and "MASTER_ADDR" not in environment:
        raise ClusterError(
            f"{local_size} of {size} ranks are on this machine, and Open MPI does not say where rank 0 is: "
            "mpirun -x MASTER_ADDR=<rank 0's machine> ..."
        )
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    return _variables(environment, rank=rank, size=size, local=local, address="127.0.0.1", port=_port(job)) | {
        "LOCAL_WORLD_SIZE": str(local_size)
    }


STARTERS: dict[str, Callable[[Mapping[str, str]], dict[str, str]]] = {"--slurm": from_slurm, "--mpi": from_mpi}
"""Options of ``minddp run``."""


def first_host(nodes: str) -> str:
    """The first host of SLURM's list: ``node[08-10,12],gpu1`` names node08 first."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodes)
    if first is None:
        raise ClusterError(f"SLURM_NODELIST is {nodes!r}: no list of hosts")
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def _variables(
    environment: Mapping[str, str],
    *,
    rank: int,
    size: int,
    local: int,
    address: str,
    port: int,
    node: str | None = None,
) -> dict[str, str]:
    if not 0 <= rank < size:
        raise ClusterError(f"the environment says rank {rank} of {size}")
    chosen = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": environment.get("MASTER_ADDR", address),
        "MASTER_PORT": environment.get("MASTER_PORT", str(port)),
    }
    return chosen if node is None else chosen | {"GROUP_RANK": node}


def _port(job: str) -> int:
    """The same on all ranks of a job, and seldom another job's."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS if job else DEFAULT_PORT


def _number(environment: Mapping[str, str], name: str, starter: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ClusterError(f"{name} is not set: start this by {starter}")
    try:
        return int(text)
    except ValueError:
        raise ClusterError(f"{name} is {text!r}, which is no number") from None


def _refuse_torchrun(environment: Mapping[str, str], option: str) -> None:
    if "TORCHELASTIC_RUN_ID" in environment:
        raise ClusterError(f"torchrun has given this process its rank already: leave {option} out")
