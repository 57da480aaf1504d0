"""What a server of :mod:`tests.forked` imports once, torch and PyTorch's tests, and one test in a process of its own.

The variables of :func:`environment` tell the server what to import. A test's process forks the ranks, as PyTorch's
``MultiProcessTestCase`` wants it; the server has one thread and runs no tensor operation, so forking it is safe.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed.rpc
import torch.multiprocessing

from tests.conformance import cases
from tests.ranks_pool import Process

Answer = dict[str, Any]

CHOSEN = "CONFORMANCE_CHOSEN"
MARK = "CONFORMANCE_CONSTRUCTED"


def environment(impl: str, module: str, world_size: int) -> dict[str, str]:
    """What is chosen, and what PyTorch's runner sets before the tests are imported; read there at import time."""
    return {
        CHOSEN: f"{impl} {module}",
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "INIT_METHOD": "file://",  # only its beginning is read: tests then save and reload in mid-training
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",  # also: no OpenMP pool may exist when the server forks
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TENSORPIPE_HOSTNAME": "127.0.0.1",
    }


def swap_in(impl: str) -> type:
    """Makes ``impl``'s class the one that everything imported later gets."""
    if impl == "minddp":
        import minddp
        from minddp.cli.install import install

        install()
        return minddp.DistributedDataParallel

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
        self._start_processes(torch.multiprocessing.get_context("fork").Process)
        self.exit_codes = lambda processes=self.processes: [process.exitcode for process in processes]

    def do_test_on_master(self: Any, *args: Any) -> None:
        # The test sends its trainers work as soon as its own group is made; a trainer may not be so far yet.
        for rank in sys.modules[cases.import_name(module)].TRAINER_RANKS:
            torch.distributed.rpc.rpc_sync(self.trainer_name(rank), wait_for_group)
        super(forked, self).do_test_on_master(*args)

    methods: dict[str, Any] = {"setUp": set_up}
    if hasattr(bases[0], "do_test_on_master"):
        methods["do_test_on_master"] = do_test_on_master
    forked: Any = type("Forked", bases, methods)
    return forked


def wait_for_group() -> None:
    """Returns when this process has its default process group; the test's own limit ends it otherwise."""
    while not torch.distributed.is_initialized():
        time.sleep(0.01)


def run_one(name: str) -> Answer:
    """Runs one test in this process; the ranks are its children."""
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


def run_case(start: Callable[..., Process], name: str | None, timeout: float | None) -> Answer:
    """A test's answer: outcome, message, seconds, constructed, output; without a name, the names of all tests.

    ``start(*args)`` starts ``answer(*args)`` in a process forked from one that has ``test_class``. What is left of it
    and its ranks at its end, or after ``timeout`` seconds, is killed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        room = Path(folder)
        process = start(name, room)
        process.join(timeout)
        ended = process.exitcode is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        message = "the case process died" if ended else f"did not end within {timeout:g} s"
        found: Answer = {"outcome": "failed", "message": message}
        if (room / "answer").exists():
            found = json.loads((room / "answer").read_text())
        return {
            **found,
            "seconds": round(time.monotonic() - began, 2),
            "constructed": (room / "constructed").exists(),
            "output": (room / "output").read_text(errors="replace")[-20000:] if (room / "output").exists() else "",
        }


def answer(name: str | None, room: Path, variables: dict[str, str] | None = None) -> None:
    """What a case's process does: it leaves its answer, and what it prints, in ``room``."""
    os.setsid()  # with its ranks it is ended as one group
    with (room / "output").open("w") as sink:
        for stream in (1, 2):
            os.dup2(sink.fileno(), stream)
    os.environ.update({**(variables or {}), MARK: str(room / "constructed")})
    tempfile.tempdir = str(room)
    names = unittest.TestLoader().getTestCaseNames
    (room / "answer").write_text(json.dumps({"names": names(test_class)} if name is None else run_one(name)))
    sys.stdout.flush()  # _exit does not
    os._exit(0)


if CHOSEN in os.environ:
    _impl, _module = os.environ[CHOSEN].split()
    _class = swap_in(_impl)
    from tests.conformance import cpu_for_cuda

    cpu_for_cuda.open_gates()
    test_class = case_class(_module)
    cpu_for_cuda.rebind(_class)
    count_constructions(_class)
