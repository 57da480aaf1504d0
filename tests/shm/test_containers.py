"""Ranks as containers have them: a small /dev/shm, PID namespaces of their own, other users.

``"shm"`` works, or refuses on every rank with a way out; ``"auto"`` is Gloo then, and says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from tests.on_ranks import on_ranks

RANK = Path(__file__).with_name("container_rank.py")
ROOT = RANK.parents[2]
# It can read the files of this checkout, whosever they are; other processes' memory it cannot.
FILES = "+dac_override,+dac_read_search"
NOBODY = ["setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={FILES}", f"--ambient-caps={FILES}"]
TIMEOUT = 900.0


def _cannot_unshare() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return True
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return done.returncode != 0


needs_namespaces = pytest.mark.skipif(_cannot_unshare(), reason="needs root and namespaces")


def start(folder: Path, wrappers: list[list[str]]) -> list[dict[str, Any]]:
    """One process a rank, each below its wrapper; their answers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*wrapper, sys.executable, str(RANK), str(rank), str(len(wrappers)), str(folder)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, wrapper in enumerate(wrappers)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(wrappers), outputs
    return [json.loads(printed) for printed, _ in outputs]


def assert_gloo_and_a_warning(answers: list[dict[str, Any]]) -> None:
    assert [answer["transport"] for answer in answers] == ["ProcessGroupGloo"] * 2
    assert [len(answer["warnings"]) for answer in answers] == [1, 0]
    assert 'backend "auto" is Gloo here, since "shm" cannot be: shm: the ranks' in answers[0]["warnings"][0]
    assert answers[0]["gradient"] == answers[1]["gradient"]


@needs_namespaces
@pytest.mark.all
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """64 KiB, for 1.2 MB of gradients: nothing lies there."""
    # One namespace for both, as in one container.
    small = "mount -t tmpfs -o size=64k tmpfs /dev/shm && "
    ranks = [f"{sys.executable} {RANK} {rank} 2 {tmp_path} > {tmp_path}/answer{rank} &" for rank in range(2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    # A PID namespace, too, whose end is the ranks'.
    script = small + "{ " + " ".join(ranks) + " wait; }"
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    answers = [json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2)]
    assert [answer["/dev/shm"] for answer in answers] == [64 * 1024] * 2
    assert [answer["shm"] for answer in answers] == ["works"] * 2
    assert [answer["warnings"] for answer in answers] == [[], []]
    assert "ProcessGroupGloo" not in {answer["transport"] for answer in answers}
    assert answers[0]["gradient"] == answers[1]["gradient"]


@needs_namespaces
@pytest.mark.all
def test_pid_namespaces_of_their_own(tmp_path: Path) -> None:
    wrapper = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    answers = start(tmp_path, [wrapper, wrapper])
    for answer in answers:
        assert "must share one machine and one PID namespace (containers: --pid=host)" in answer["shm"]
        assert "has ranks 0; " in answer["shm"]
        assert "backend='gloo'" in answer["shm"]
    assert_gloo_and_a_warning(answers)


@needs_namespaces
@pytest.mark.all
def test_another_user(tmp_path: Path) -> None:
    answers = start(tmp_path, [[], NOBODY])
    for answer in answers:
        assert "they must run as the same user" in answer["shm"]
        assert "; rank 1: " in answer["shm"]
        assert "backend='gloo'" in answer["shm"]
    assert_gloo_and_a_warning(answers)


@on_ranks(2)
def test_auto_is_gloo_on_all_where_one_rank_cannot(rank: int, world_size: int) -> None:
    load = minddp.shm.load
    if rank == 1:
        minddp.shm.load = lambda: (_ for _ in ()).throw(ImportError("no extension here"))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = dist.new_group(backend="auto")
    finally:
        minddp.shm.load = load
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=group)
    assert total.item() == 3.0
    assert type(group._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
    told = [str(warning.message) for warning in caught if "auto" in str(warning.message)]
    assert len(told) == (rank == 0)
    assert all("rank 1 could not join the group: ImportError: no extension here" in text for text in told)


@on_ranks(2)
def test_auto_does_not_wait_twice_for_a_rank_that_never_comes(rank: int, world_size: int) -> None:
    if rank == 0:
        store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
        with pytest.raises(dist.DistBackendError, match="rank 1 did not come to join the group within 1000 ms"):
            minddp.shm._create_auto(store, 0, 2, timedelta(seconds=1))
    dist.barrier()
