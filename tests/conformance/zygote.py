"""A process that has paid for importing torch and PyTorch's tests, and forks once for each test.

Life cycle: ``__main__`` starts ``python -m tests.conformance.zygote IMPL MODULE WORLD_SIZE`` and writes one
JSON request a line; for each the zygote forks a *case* process, which forks the ranks, as PyTorch's
``MultiProcessTestCase`` wants it, and answers one JSON line. The zygote has one thread and runs no
tensor operation, so forking it is safe. The end of its standard input ends it.

When a case ends or its timeout is over, what is left of it and its ranks is killed, by process id;
ranks whose case process died are found too, because the zygote adopts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

from tests.conformance import cases

Answer = dict[str, Any]

MARK = "CONFORMANCE_CONSTRUCTED"
ROOM = tempfile.gettempdir()


def prepare_environment(world_size: int) -> None:
    """What PyTorch's runner sets before the tests are imported; read there at import time."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        INIT_METHOD="file://",  # only its beginning is read: tests then save and reload in mid-training
        MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1",  # also: no OpenMP pool may exist when this process forks
        TORCHINDUCTOR_COMPILE_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TENSORPIPE_HOSTNAME="127.0.0.1",
    )


def swap_in(impl: str) -> type:
    """Makes ``impl``'s class the one that everything imported later gets."""
    if impl == "minddp":
        import minddp
        from minddp.cli.install import install

        install()
        return minddp.DistributedDataParallel
    import torch

    if impl == "shm":
        put_shm_in_gloos_place()

    return torch.nn.parallel.DistributedDataParallel


def put_shm_in_gloos_place() -> None:
    """Process groups that ask for Gloo, and those that ask for nothing, get minddp's shared memory."""
    import torch.distributed as dist

    import minddp.shm

    minddp.shm.load()
    world = dist.distributed_c10d
    for name in ("init_process_group", "new_group"):
        original = getattr(world, name)

        def asks_for_shm(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            replaced = [value if value != "gloo" else "shm" for value in args]
            if kwargs.get("backend") == "gloo":
                kwargs["backend"] = "shm"
            return _original(*replaced, **kwargs)

        setattr(world, name, asks_for_shm)
        setattr(dist, name, asks_for_shm)


def count_constructions(ddp_class: type) -> None:
    """Every construction leaves the file named by the environment variable ``MARK``."""
    construct = ddp_class.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        Path(os.environ[MARK]).touch()
        construct(self, *args, **kwargs)  # type: ignore[misc]

    ddp_class.__init__ = counted


def case_class(module: str) -> type[unittest.TestCase]:
    """The TestCase that runs the tests of ``cases.MODULES[module]`` in forked ranks."""
    bases = cases.MODULES[module].bases(importlib.import_module(cases.import_name(module)))

    def set_up(self: Any) -> None:
        super(forked, self).setUp()
        import torch.multiprocessing

        self._start_processes(torch.multiprocessing.get_context("fork").Process)
        self.exit_codes = lambda processes=self.processes: [process.exitcode for process in processes]

    forked: Any = type("Forked", bases, {"setUp": set_up})
    return forked


def children_of(pid: int) -> list[int]:
    """The process ids of ``pid``'s children, and of theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children_of(child)]
    return found


def run_in_case(test_class: type[unittest.TestCase], name: str) -> Answer:
    """Runs one test in this (case) process; the ranks are its children."""
    result = unittest.TestResult()
    try:
        test = test_class(name)
        test.run(result)
    except BaseException as error:
        return {"outcome": "failed", "message": f"{type(error).__name__}: {error}"}
    for outcome, entries in (("failed", result.failures + result.errors), ("skipped", result.skipped)):
        if entries:
            return {"outcome": outcome, "message": entries[0][1]}
    died = [code for code in getattr(test, "exit_codes", list)() if code is not None and code < 0]
    if died:
        return {"outcome": "failed", "message": f"ranks died by signal: exit codes {died}"}
    return {"outcome": "passed", "message": ""}


def fork_case(test_class: type[unittest.TestCase], name: str, folder: Path) -> int:
    """Forks a case process, which leaves ``answer`` and ``output`` in ``folder``; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    with open(folder / "output", "w") as sink, open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    answer = run_in_case(test_class, name)
    (folder / "answer").write_text(json.dumps(answer))
    sys.stdout.flush()  # _exit does not
    os._exit(0)


def wait_for(pid: int, timeout: float) -> bool:
    """Whether the child ended within ``timeout`` seconds; it is not reaped yet."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


def adopt_orphans() -> None:
    """Ranks whose case process died become this process's children (prctl PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def end_children() -> None:
    """Kills, by process id, and reaps whatever a case left behind."""
    for process in children_of(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def run_case(test_class: type[unittest.TestCase], name: str, timeout: float) -> Answer:
    """Forks, runs and ends one test; the answer has outcome, message, seconds, constructed, output."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-", dir=ROOM) as room:
        folder = Path(room)
        os.environ[MARK] = f"{room}/constructed"
        tempfile.tempdir = room
        pid = fork_case(test_class, name, folder)
        ended = wait_for(pid, timeout)
        end_children()
        if (folder / "answer").exists():
            answer = json.loads((folder / "answer").read_text())
        else:
            message = "the case process died" if ended else f"did not end within {timeout:g} s"
            answer = {"outcome": "failed", "message": message}
        answer["seconds"] = round(time.monotonic() - began, 2)
        answer["constructed"] = Path(os.environ[MARK]).exists()
        answer["output"] = (folder / "output").read_text(errors="replace")[-20000:]
    return answer


def serve(test_class: type[unittest.TestCase]) -> None:
    """Answers requests ``{"name": …, "timeout": …}`` until standard input ends; no name: all names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        if request["name"] is None:
            answer = {"names": unittest.TestLoader().getTestCaseNames(test_class)}
        else:
            answer = run_case(test_class, request["name"], request["timeout"])
        print(json.dumps(answer), file=answers, flush=True)


def main(impl: str, module: str, world_size: int) -> None:
    prepare_environment(world_size)
    ddp_class = swap_in(impl)
    from tests.conformance import cpu_for_cuda

    cpu_for_cuda.open_gates()
    test_class = case_class(module)
    cpu_for_cuda.rebind(ddp_class)
    count_constructions(ddp_class)
    adopt_orphans()
    serve(test_class)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
