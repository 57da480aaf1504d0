"""What the benchmarks share: rank processes on a chosen engine and link, statistics, result files.

A benchmark's parent process holds a :class:`Ranks` and calls module-level functions on all ranks. The
processes live as long as the ``Ranks`` (so models stay built between calls), the process group as long
as one call. Measurements are taken in rounds that visit every variant once, in an order that changes
from round to round, so that slow minutes of a shared machine fall on all variants alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import provenance  # noqa: E402
from links import Endpoint, LinkError, ShapedNetwork, enter  # noqa: E402
from provenance import RESULTS, ROOT  # noqa: E402
from result_json import as_json  # noqa: E402

from tests.ranks_pool import RankError, RankPool  # noqa: E402

__all__ = [
    "ENGINES", "OUTPUT", "RESULTS", "BenchmarkError", "Ranks", "Spread", "command", "digits", "environment",
    "machine", "names", "numbers", "parser", "prepare_engine", "rank_device", "read_json", "rounds", "run_main",
    "spread", "write_json", "write_text",
]  # fmt: skip

ENGINES = ("gloo", "nccl", "shm")
# Where results go: all_results.py puts those in RESULTS that the pages show.
OUTPUT = Path(os.environ.get("MINDDP_RESULTS", ROOT / "build" / "results"))
# For glibc in the ranks: keep freed memory. By default large blocks go back to the kernel, and come again page by
# page: some 30 ms for 64 MB in one step, nothing in the next, as the heap happens to lie.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


class BenchmarkError(RuntimeError):
    """The benchmark cannot run as asked; the text says why and what to do."""


# ---- ranks


class Ranks:
    """``world_size`` processes; ``link`` (a tc rate such as ``"1gbit"``) joins them by shaped interfaces.

    Use as a context manager. ``run(fn, *args)`` calls ``fn(rank, world_size, *args)`` on every rank
    inside a new default process group on ``engine`` and returns the results in rank order.
    """

    def __init__(self, world_size: int, engine: str = "gloo", link: str | None = None, threads: int = 1):
        if link is not None and engine == "shm":
            raise BenchmarkError("engine shm does not use the network: leave --link out")
        if link is not None and world_size < 2:
            raise BenchmarkError("--link joins at least 2 ranks: add --ranks 2")
        prepare_engine(engine, world_size)
        self.engine = engine
        self.world_size = world_size
        self.link = link
        self._pool = RankPool(world_size, threads)
        self._network = ShapedNetwork(link, world_size) if link is not None else None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Ranks:
        with contextlib.ExitStack() as stack:
            if self._network is not None:
                stack.enter_context(self._network)
            stack.callback(self._pool.close)
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minddp-bench-"))
            self._stack = stack.pop_all()
        self._calls = 0
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def limit(self, rank: int, rate: str) -> None:
        """From now on ``rank``'s link carries at most ``rate``; three ranks or more, joined by ``link``."""
        if self._network is None:
            raise BenchmarkError("without --link there is no link to limit")
        self._network.limit(rank, rate)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 900.0) -> list[Any]:
        """The ranks' results; a rank that raises, or ``timeout`` seconds, raises ``RankError``."""
        self._calls += 1
        endpoints = None
        if self._network is not None:
            endpoints = [self._network.endpoint(rank) for rank in range(self.world_size)]
        store = os.path.join(self._folder, f"store{self._calls}")
        call = (self.engine, store, endpoints, fn, args)
        with environment({name: value for name, value in KEEP_MEMORY.items() if name not in os.environ}):
            return self._pool.run(_in_group, *call, timeout=timeout, backend=None)


_entered: str | None = None  # the namespace that this process has moved into


def _in_group(
    rank: int,
    world_size: int,
    engine: str,
    store_path: str,
    endpoints: Sequence[Endpoint] | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Runs on a rank: moves to its namespace once, then calls ``fn`` in a new process group."""
    global _entered
    import torch.distributed as dist

    if endpoints is not None and _entered is None:
        enter(endpoints[rank].namespace)
        _entered = endpoints[rank].namespace
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = endpoints[rank].interface
    prepare_engine(engine, world_size)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group(engine, store=store, rank=rank, world_size=world_size)
    try:
        return fn(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes started inside the block."""
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def prepare_engine(engine: str, world_size: int) -> None:
    """Registers or checks ``engine`` in this process; raises :class:`BenchmarkError` if it is not there."""
    import torch
    import torch.distributed as dist

    if engine not in ENGINES:
        raise BenchmarkError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    if engine == "nccl":
        if not dist.is_nccl_available() or torch.cuda.device_count() < world_size:
            raise BenchmarkError(
                f"engine nccl needs a torch with NCCL and one GPU a rank: "
                f"{torch.cuda.device_count()} GPUs here for {world_size} ranks"
            )
    if engine == "shm":
        try:
            import minddp.shm  # noqa: F401  (registers the backend)
        except ImportError as error:
            raise BenchmarkError(f"engine shm is not built here: {error}") from None


def rank_device(engine: str, rank: int) -> Any:
    """The ``torch.device`` on which ``rank`` computes with ``engine``."""
    import torch

    return torch.device("cuda", rank) if engine == "nccl" else torch.device("cpu")


# ---- statistics


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of ``count`` samples, in the samples' unit."""

    median: float
    low: float
    high: float
    count: int

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        """``median [quartiles]`` after multiplying by ``scale``."""
        median, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} [{low}, {high}]"

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def spread(samples: Iterable[float]) -> Spread:
    """The samples' :class:`Spread`; at least one sample."""
    values = sorted(samples)
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def rounds(variants: Sequence[Any], count: int, seed: int = 0) -> list[list[Any]]:
    """``count`` orders of all variants, each shuffled anew: the same on every rank for the same seed."""
    generator = random.Random(seed)
    return [generator.sample(list(variants), len(variants)) for _ in range(count)]


# ---- result files


def version() -> str:
    """minddp's, and the commit, in a clone."""
    import minddp

    return f"{minddp.__version__} {provenance.commit()}".strip()


def machine() -> dict[str, Any]:
    """What the measurement ran on: processor, cores, versions, load."""
    import torch

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    facts = {
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "minddp": version(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def digits() -> tuple[Any, Any]:
    """Tutorial 01's handwritten digits: 64 pixels of 0 to 1 each, and which digit it is."""
    import numpy as np
    import torch

    file = Path(__file__).resolve().parents[1] / "tutorials" / "digits.csv.gz"
    numbers = torch.from_numpy(np.loadtxt(file, delimiter=","))
    return numbers[:, :64].float() / 16, numbers[:, 64].long()


def write_text(path: Path, text: str) -> None:
    """Writes the whole file or nothing: readers never see half of it.

    Raises:
        BenchmarkError: a result of a changed tree would go to ``benchmarks/results``.
    """
    _check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _check(path: Path) -> None:
    if why := provenance.why_not(path):
        raise BenchmarkError(why)


def write_json(path: Path, value: Any) -> None:
    """``value`` as JSON, whole or not at all."""
    write_text(path, as_json(value) + "\n")


def read_json(path: Path) -> Any:
    """The JSON in ``path``; :class:`BenchmarkError` when the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchmarkError(f"{path} is not a result file: {error}") from None


# ---- command line


class Parser(argparse.ArgumentParser):
    """It refuses ``--output`` at once where :func:`write_text` would do so after the measurement."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        options, rest = super().parse_known_args(*args, **kwargs)
        for path in (getattr(options, name, None) for name in ("output", "out")):
            if isinstance(path, Path):
                _check(path)
        return options, rest


def parser(description: str | None) -> Parser:
    """A parser that shows a module's docstring as it is written."""
    return Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def command() -> str:
    """This process's command as a reader would type it: without paths of this machine."""
    script = Path(sys.argv[0])
    package = script.parent.name == "minddp"
    words = ["python", "-m", f"minddp.{script.stem}"] if package else ["python", f"benchmarks/{script.name}"]
    arguments = iter(sys.argv[1:])
    for word in arguments:
        if word == "--output":
            next(arguments, None)
        elif not word.startswith("--output="):
            words.append(word)
    return shlex.join(words)


def names(text: str) -> list[str]:
    """``"a,b"`` as a list; the type of an argument."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """``"1,2"`` as a list; the type of an argument."""
    return [int(name) for name in names(text)]


def run_main(main: Callable[[], int | None]) -> None:
    """Runs a script's ``main``: expected errors end it with one line on stderr, Ctrl-C with 130."""
    try:
        sys.exit(main())
    except (BenchmarkError, LinkError) as error:
        sys.exit(f"error: {error}")
    except RankError as error:
        sys.exit(f"error: measuring failed on rank(s) {sorted(error.failures)}\n{error}")
    except KeyboardInterrupt:
        sys.exit(130)
