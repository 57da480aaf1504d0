"""install(), uninstall() and ``python -m minddp.run``: who gets which class, and what the program sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import minddp
from minddp.cli.install import _STARTUP, _torch_class, install, uninstall
from tests.forked import run_module
from tests.ranks_pool import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


@pytest.fixture
def user_module() -> Iterator[types.ModuleType]:
    """A module of a program that has imported torch's class by name, twice."""
    module = types.ModuleType("a_users_module")
    exec("from torch.nn.parallel import DistributedDataParallel\nDDP = DistributedDataParallel", module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_every_name_gets_ours_and_then_torchs_again(user_module: types.ModuleType) -> None:
    assert user_module.DDP is _torch_class
    install()
    try:
        for held in (
            torch.nn.parallel.DistributedDataParallel,
            torch.nn.parallel.distributed.DistributedDataParallel,
            user_module.DistributedDataParallel,
            user_module.DDP,
        ):
            assert held is minddp.DistributedDataParallel
    finally:
        uninstall()
    assert torch.nn.parallel.DistributedDataParallel is _torch_class
    assert torch.nn.parallel.distributed.DistributedDataParallel is _torch_class
    assert user_module.DistributedDataParallel is user_module.DDP is _torch_class
    assert minddp.DistributedDataParallel is not _torch_class


def test_twice_is_once(user_module: types.ModuleType) -> None:
    install()
    install()
    uninstall()
    assert user_module.DDP is torch.nn.parallel.DistributedDataParallel is _torch_class
    uninstall()
    assert torch.nn.parallel.DistributedDataParallel is _torch_class


def test_modules_of_torch_imported_in_between_get_torchs_back(installed: None) -> None:
    name = "torch.distributed.algorithms._late_import_of_this_test"
    late = types.ModuleType(name)
    exec("from torch.nn.parallel import DistributedDataParallel", late.__dict__)
    sys.modules[name] = late
    try:
        assert late.DistributedDataParallel is minddp.DistributedDataParallel
        uninstall()
        assert late.DistributedDataParallel is _torch_class
    finally:
        del sys.modules[name]


def test_a_name_that_the_program_took_since_is_left_alone(user_module: types.ModuleType) -> None:
    install()
    user_module.DDP = "mine now"
    uninstall()
    assert user_module.DDP == "mine now"


def test_isinstance_with_torchs_class_and_with_the_installed_one(installed: None) -> None:
    assert issubclass(minddp.DistributedDataParallel, _torch_class)
    assert issubclass(minddp.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("before, others", [(None, None), ("", None), ("/a:/b", "/a:/b"), ("/a::/b", "/a::/b")])
def test_pythons_that_are_started_are_reached_until_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, before: str | None, others: str | None
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    for _ in range(2):
        install()
        assert os.environ["PYTHONPATH"] == _STARTUP + (f":{others}" if others else "")
    uninstall()
    assert os.environ.get("PYTHONPATH") == others


SHOW = """
import json, sys
from torch.nn.parallel import DistributedDataParallel
import torch
def show(place):
    by_attribute = torch.nn.parallel.DistributedDataParallel
    print(json.dumps([place, DistributedDataParallel.__module__, by_attribute.__module__]))
"""
SCRIPT = """
import multiprocessing, subprocess, sys
import beside
def child():
    beside.show("child")
if __name__ == "__main__":
    beside.show("main")
    print(beside.json.dumps(sys.argv))
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    subprocess.run([sys.executable, "-m", *torchrun, sys.path[0] + "/rank.py"], check=True)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode or 7)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with ``script.py``, the module ``beside`` that it imports, and ``rank.py``, which torchrun starts."""
    (tmp_path / "rank.py").write_text("import beside\nbeside.show('rank')\n")
    (tmp_path / "beside.py").write_text(SHOW)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def lines(ended: subprocess.CompletedProcess[str]) -> list[Any]:
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_run_script_sees_its_own_arguments_folder_and_children(program: Path) -> None:
    script = str(program / "script.py")
    ended = run_python("-m", "minddp.run", script, "--lr", "3", "-m")
    assert ended.returncode == 7, ended.stderr
    ours = "minddp.ddp"
    assert lines(ended) == [
        ["main", ours, ours], [script, "--lr", "3", "-m"], ["rank", ours, ours], ["child", ours, ours]
    ]  # fmt: skip


def test_run_says_what_is_wrong() -> None:
    absent = run_module("minddp.run", "no_such_script.py")
    assert absent.returncode == 1
    assert "there is no file 'no_such_script.py'" in absent.stderr
    for arguments in ([], ["-m"], ["--nproc", "2"]):
        ended = run_module("minddp.run", *arguments)
        assert ended.returncode == 2, arguments
        assert "usage: minddp run" in ended.stderr


# ---- torch's own code that constructs DDP by name, on real ranks: ``torch.distributed``'s ``replicate()``


def train_replicated(rank: int, world_size: int, installed: bool) -> tuple[str, list[float]]:
    """The module of the class that ``replicate`` constructed, and the weights after three steps."""
    from torch.distributed._composable.replicate import replicate

    if installed:
        install()
    try:
        torch.manual_seed(rank)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        replicate(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            net(torch.randn(3, 4, generator=generator)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        uninstall()
    weights = torch.cat([value.detach().flatten() for value in net.parameters()])
    return type(replicate.state(net)._ddp).__module__, weights.tolist()


def test_replicate_gets_the_installed_class() -> None:
    theirs = run_ranks(train_replicated, 2, False)
    ours = run_ranks(train_replicated, 2, True)
    assert {name for name, _ in theirs} == {"torch.nn.parallel.distributed"}
    assert {name for name, _ in ours} == {"minddp.ddp"}
    for _, weights in (*theirs, *ours):
        assert weights == pytest.approx(theirs[0][1], rel=1e-5)
