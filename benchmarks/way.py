"""How many files and functions of a library one reader has to enter: constructing a wrapper, and a steady forward.

    python benchmarks/way.py

Two ranks on this machine train a small net for a few steps: with torch's class, with minddp's core and its surface
alone (MINDDP_PLAIN=1), and with all default companions. Counted by ``sys.setprofile``, on rank 0: files and functions
of the library that are entered (comprehensions count, too), and how often the file changes from one call to the next.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import distributed as torchs

KINDS = ("torch", "plain", "default")


def entered(act: Callable[[], Any], roots: list[str]) -> tuple[int, int, int]:
    """(files, functions, changes of file) while ``act`` runs."""
    calls: list[tuple[str, int]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(tuple(roots)):
            calls.append((code.co_filename, code.co_firstlineno))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    changes = sum(one[0] != other[0] for one, other in itertools.pairwise(calls))
    return len({file for file, _ in calls}), len(set(calls)), changes


def rank_main(rank: int, kind: str, store: str) -> None:
    os.environ["MINDDP_PLAIN"] = str(int(kind == "plain"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if kind == "torch":
        wrapper: Any = torchs.DistributedDataParallel
        folder = Path(torch.__file__).parent / "distributed"
        roots = [torchs.__file__, str(folder / "utils.py"), str(folder / "algorithms")]
    else:
        import minddp

        wrapper, roots = minddp.DistributedDataParallel, [str(Path(minddp.__file__).parent) + os.sep]
    made: list[Any] = []

    def construct() -> None:
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        made.append(wrapper(net))

    construct()  # what is imported at the first time does not count
    constructor = entered(construct, roots)
    ddp = made[-1]
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    forward = constructor
    for _ in range(4):
        optimizer.zero_grad()
        outputs: list[Any] = []
        forward = entered(lambda outputs=outputs: outputs.append(ddp(torch.randn(2, 8))), roots)
        outputs[0].sum().backward()
        optimizer.step()
    if rank == 0:
        for what, (files, functions, changes) in (("constructor", constructor), ("forward", forward)):
            print(f"| {kind} | {what} | {files} | {functions} | {changes} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    print("| class | call | files | functions | changes of file |\n|---|---|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (kind, os.path.join(folder, "store")), 2)


if __name__ == "__main__":
    main()
