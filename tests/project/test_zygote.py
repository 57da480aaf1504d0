"""The zygote: a forked rank finds what a spawned one would, and nothing of the zygote's."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from tests import zygote

HERE = Path(__file__).resolve().parents[2]


def _look(pipe: Any) -> None:
    print("from a rank", file=sys.stderr, flush=True)
    pipe.send(
        {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "torch": "torch" in sys.modules,
            "hash": hash("minddp"),
            "random": random.random(),
            "threads": zygote._threads(),
            "native": threading.main_thread().native_id == threading.get_native_id(),
            "sockets": [link for link in map(_link, Path("/proc/self/fd").iterdir()) if "socket" in link],
            "pipe": os.fstat(pipe.fileno()).st_ino,
        }
    )


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _stay(pipe: Any) -> None:
    pipe.send("here")
    time.sleep(60)


def _raise(pipe: Any) -> None:
    raise ValueError("as any program")


def _started(target: Any, rank: int = 0) -> tuple[zygote.Rank, Any]:
    ours, theirs = Pipe()
    return zygote.start_rank(target, (), rank, theirs), ours


def test_a_rank_is_as_a_new_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINDDP_TEST_OF_ZYGOTE", "set later")
    monkeypatch.chdir(tmp_path)
    ranks = [_started(_look, rank) for rank in (0, 1, 0)]
    seen = [pipe.recv() for _, pipe in ranks]
    for rank, _ in ranks:
        rank.join(10)
        assert rank.exitcode == 0 and not rank.is_alive()
    for one in seen:
        assert {**os.environ, **one["environment"]} == one["environment"]
        assert one["folder"] == str(tmp_path) and one["torch"]
        assert set(sys.path) <= {*one["path"], ""}
        assert len(one["threads"]) == 1 and one["native"]
        assert one["sockets"] == [f"socket:[{one['pipe']}]"], "it has the pipe, and none of the zygote's"
    assert seen[0]["hash"] == seen[2]["hash"] != seen[1]["hash"], "sets have another order on the next rank"
    assert len({one["random"] for one in seen}) == 3
    assert capfd.readouterr().err.count("from a rank") == 3


def test_its_end_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    rank, pipe = _started(_stay)
    assert pipe.recv() == "here" and rank.is_alive()
    rank.join(0.05)
    assert rank.exitcode is None
    rank.kill()
    rank.join(10)
    assert rank.exitcode == -signal.SIGKILL
    rank, _ = _started(_raise)
    rank.join(10)
    assert rank.exitcode == 1 and "ValueError: as any program" in capfd.readouterr().err


_PROGRAM = """
import pickle, sys, torch
def local(): pass
assert __name__ == "__main__" and pickle.loads(pickle.dumps(local)) is local
print(sys.argv, flush=True)
print("x" * 200_000, file=sys.stderr)
if len(sys.argv) > 2:
    import time
    time.sleep(60)
sys.exit(3)
"""


def test_a_program_is_as_of_the_command_line() -> None:
    program = zygote.Program(_PROGRAM, "one")
    out, told = program.communicate(20)
    told = told.partition("nanobind: leaked")[0]  # Triton's, at its end, with a CUDA torch
    assert (out, told) == ("['-c', 'one']\n", "x" * 200_000 + "\n")
    assert program.returncode == program.poll() == 3
    program = zygote.Program(_PROGRAM, "one", "two", rank=1)
    try:
        assert program.stdout.readline() == "['-c', 'one', 'two']\n"
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.05)
        assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        program.communicate(20)
    finally:
        program.kill()
    assert program.returncode == -signal.SIGTERM


_USER = """
import sys, time
from multiprocessing import Pipe
from tests import zygote
from tests.project.test_zygote import _stay
zygote.SERVERS = 1
ours, theirs = Pipe()
rank = zygote.start_rank(_stay, (), 0, theirs)
ours.recv()
print(rank.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.timeout(60)
def test_nothing_outlives_a_killed_user(tmp_path: Path) -> None:
    """Neither the rank, which sleeps, nor the zygote, which was this user's alone."""
    environment = {**os.environ, zygote.FOLDER: str(tmp_path), "PYTHONPATH": str(HERE)}
    user = subprocess.Popen([sys.executable, "-c", _USER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert user.stdout is not None
        rank = int(user.stdout.readline())
    finally:
        user.kill()
        user.wait()
    end = time.monotonic() + 30
    while Path(f"/proc/{rank}").exists() or _listens(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.05)


def _listens(folder: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(folder / "0.socket"))
    except OSError:
        return False
    return True


def test_threads_share_what_keeps_the_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread that let the first one's go would end them while they are asked for ranks."""
    zygote.start_zygotes()
    lease, leased = zygote._lease, []

    def slow(folder: Path) -> Any:
        time.sleep(0.05)
        leased.append(lease(folder))
        return leased[-1]

    monkeypatch.setattr(zygote, "_lease", slow)
    monkeypatch.setattr(zygote, "_leases", {})
    threads = [threading.Thread(target=zygote.start_zygotes) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leased) == 1


def test_starts_as_users_do_them_are_listed() -> None:
    """By their folder, or by their file."""
    start = ".".join(("sys", "executable"))
    starters = {str(path.relative_to(HERE)) for path in (HERE / "tests").rglob("*.py") if start in path.read_text()}
    listed = {path for path in starters for place in zygote.REAL_STARTS if path == place or place in _folders(path)}
    assert starters - listed == {"tests/zygote.py"}
    for place in zygote.REAL_STARTS:
        assert any(path == place or place in _folders(path) for path in starters), f"{place} starts nothing any more"


def _folders(path: str) -> set[str]:
    return {str(parent) for parent in Path(path).parents}
