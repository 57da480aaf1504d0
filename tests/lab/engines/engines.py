"""The engines: each runs train.py by the lines of docs/launching.md, and returns the report that it leaves.

A run has a folder of its own, with a copy of train.py in it; what an engine needs and the machine lacks is said by
its ``missing``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.lab.engines.page import blocks
from tests.lab.engines.processes import ROOT, EngineError, Processes
from tests.ranks_pool import free_port

sys.path.insert(0, str(ROOT / "benchmarks"))
from links import LinkError, ShapedNetwork

TORCH = "torch.nn.parallel.distributed.DistributedDataParallel"
MINDDP = "minddp.ddp.DistributedDataParallel"
RAY = ROOT / "build" / "engines" / "ray"
TIMEOUT = 240.0

Report = dict[str, Any]


def prepare(folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    return folder


def report(folder: Path, processes: Processes) -> Report:
    try:
        return json.loads((folder / "report.json").read_text())
    except FileNotFoundError:
        raise EngineError(f"no report was left\n{processes.logs()}") from None


def bash(lines: str) -> list[str]:
    return ["bash", "-euc", lines]


def one_command(folder: Path, command: list[str], **variables: str) -> Report:
    with Processes(prepare(folder)) as processes:
        processes.start("run", command, **variables)
        processes.wait(TIMEOUT)
        return report(folder, processes)


def reference(folder: Path, ranks: int) -> Report:
    """Torch's class, by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return one_command(folder, [*torchrun, "train.py"])


def by_torchrun(folder: Path) -> Report:
    return one_command(folder, bash(blocks("torchrun, one machine")[0]))


def by_slurm(folder: Path) -> Report:
    """``srun`` is played: two tasks with the variables that it would give them."""
    with Processes(prepare(folder)) as processes:
        played = 'srun() { "$@"; }; scontrol() { echo localhost; }; '
        for task in range(2):
            variables = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NTASKS": "2"}
            variables |= {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
            processes.start(f"task{task}", bash(played + blocks("SLURM")[0]), **variables)
        processes.wait(TIMEOUT)
        return report(folder, processes)


def by_kubeflow(folder: Path) -> Report:
    """Two pods of one rank each, told apart by their variables alone."""
    with Processes(prepare(folder)) as processes:
        port = str(free_port())
        for node in range(2):
            variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
            variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
            processes.start(f"pod{node}", bash(blocks("Kubernetes")[0]), **variables)
        processes.wait(TIMEOUT)
        return report(folder, processes)


def by_mpirun(folder: Path) -> Report:
    # A container has one slot and one user: its own words for that.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return one_command(
        folder, bash(blocks("mpirun")[0]), OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_btl="self,vader", **root
    )


# --- several machines --------------------------------------------------------------------------------------------


def _machines(folder: Path, *, nnodes: str, lost: str = "") -> Report:
    """Two namespaces with an agent and two ranks each. ``lost``: "for good", or "replaced"."""
    with ShapedNetwork("1gbit", 2) as network, Processes(prepare(folder)) as processes:

        def start(name: str, machine: int) -> None:
            end = network.endpoint(machine)
            command = ["ip", "netns", "exec", end.namespace, *bash(blocks("torchrun, several machines")[0])]
            processes.start(
                name,
                command,
                NNODES=nnodes,
                HEAD=network.endpoint(0).address,
                ADDRESS=end.address,
                GLOO_SOCKET_IFNAME=end.interface,
                SECONDS_A_STEP="0.5" if lost else "0",
                # Shorter than the 30 s that torchrun waits for latecomers, and the 15 s until it misses an agent.
                PET_RDZV_CONF=f"is_host={1 - machine},last_call_timeout=5,keep_alive_interval=1",
            )

        start("machine0", 0)
        start("machine1", 1)
        if lost:
            _wait_for_step(processes, 3)
            _lose_machine(network.endpoint(1).namespace)
        if lost == "replaced":
            start("successor", 1)
        processes.wait(TIMEOUT, but=("machine1",) if lost else ())
        return report(folder, processes)


def _wait_for_step(processes: Processes, step: int) -> None:
    checkpoint = processes.folder / "checkpoint.pt"

    def reached() -> bool:
        return checkpoint.exists() and torch.load(checkpoint)["step"] >= step

    processes.wait_until(f"step {step}", reached, 120)


def _lose_machine(namespace: str) -> None:
    """Kills every process of a namespace that the run itself has made."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    for pid in map(int, listed.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def by_two_machines(folder: Path) -> Report:
    return _machines(folder, nnodes="2")


def with_a_machine_lost(folder: Path) -> Report:
    return _machines(folder, nnodes="1:2", lost="for good")


def with_a_machine_replaced(folder: Path) -> Report:
    return _machines(folder, nnodes="2", lost="replaced")


# --- Ray -----------------------------------------------------------------------------------------------------------


def _by_ray(folder: Path, block: int) -> Report:
    """The page's program, in an environment that adds Ray to this one."""
    python = _ray_environment()
    prepare(folder)
    (folder / "ray_program.py").write_text(blocks("Ray Train")[block])
    # A short name: Ray's sockets lie there, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        with Processes(folder) as processes:
            processes.start(
                "run",
                [str(python), "ray_program.py"],
                PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]),
                RAY_USAGE_STATS_ENABLED="0",
                RAY_TMPDIR=sockets,
                HOME=str(folder),
            )
            processes.wait(TIMEOUT)
            return report(folder, processes)


def _ray_environment() -> Path:
    python = RAY / "bin" / "python"
    if not (RAY / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(RAY)], check=True, timeout=120)
        packages = next(RAY.glob("lib/python*/site-packages"))
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [str(python), "-m", "pip", "install", "-q", "ray[train]"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise EngineError(f"ray could not be installed:\n{done.stderr[-2000:]}")
        (RAY / ".installed").touch()
    return python


def by_ray_install(folder: Path) -> Report:
    return _by_ray(folder, 0)


def by_ray_own_wrapper(folder: Path) -> Report:
    return _by_ray(folder, 1)


def by_ray_shm(folder: Path) -> Report:
    return _by_ray(folder, 2)


# --- the matrix ----------------------------------------------------------------------------------------------------


def _always() -> None:
    return None


def _no_mpirun() -> str | None:
    return None if shutil.which("mpirun") else "mpirun is not installed (Debian: openmpi-bin)"


def _no_links() -> str | None:
    try:
        with ShapedNetwork("1gbit", 2):
            return None
    except LinkError as error:
        return str(error)


@dataclass(frozen=True)
class Engine:
    """One line of the table."""

    name: str
    run: Callable[[Path], Report]
    missing: Callable[[], str | None] = _always
    ranks: int = 2
    resumes: bool = False


ENGINES = [
    Engine("torchrun", by_torchrun),
    Engine("SLURM's variables", by_slurm),
    Engine("Kubeflow's PET_* variables", by_kubeflow),
    Engine("mpirun (Open MPI)", by_mpirun, _no_mpirun),
    Engine("torchrun, two machines", by_two_machines, _no_links, ranks=4),
    Engine("two machines, one lost", with_a_machine_lost, _no_links, resumes=True),
    Engine("two machines, one replaced", with_a_machine_replaced, _no_links, ranks=4, resumes=True),
    Engine("Ray Train, minddp.install()", by_ray_install),
    Engine("Ray Train, parallel_strategy=None", by_ray_own_wrapper),
    Engine('Ray Train, "shm"', by_ray_shm),
]
