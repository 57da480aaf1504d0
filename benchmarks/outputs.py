"""How does backward's time grow with the number of forward's outputs?

A module returns its outputs by the thousand, as detection heads do. Two backwards are timed, in processor time:

unused    with ``find_unused_parameters``, where forward joins all outputs in one node
no_sync   a second backward through the same outputs, under ``no_sync()``

Printed are the least seconds of each class, their ratio, and the exponent of a power law fitted to the numbers of
outputs: 1 is proportional.

    python benchmarks/outputs.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from harness import Ranks

NUMBERS = (200, 1200, 4800, 9600)


def seconds_of_backward(ddp: Any, again: bool) -> float:
    import torch

    outputs = ddp(torch.ones(2, 4))
    loss = torch.stack([a + b[0] for a, _, b in outputs] + [c for _, c, _ in outputs]).square().mean()
    if again:
        loss.backward(retain_graph=True)
    with ddp.no_sync() if again else contextlib.nullcontext():
        begin = time.process_time()
        loss.backward()
        return time.process_time() - begin


def measure(rank: int, world_size: int, rounds: int, again: bool) -> list[list[float]]:
    """For each of NUMBERS: the least seconds of torch's class and of minddp's."""
    import torch

    import minddp

    class Many(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, number)

        def forward(self, x: torch.Tensor) -> Any:
            return [(t, t * 2, [t * 3]) for t in self.layer(x).mean(0).unbind()]

    found = []
    for number in NUMBERS:
        classes = torch.nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel
        ddps = [each(Many(number // 3), find_unused_parameters=not again) for each in classes]
        found.append([min(seconds_of_backward(ddp, again) for _ in range(rounds)) for ddp in ddps])
    return found


def exponent(seconds: list[float]) -> float:
    import numpy as np

    return float(np.polyfit(np.log(NUMBERS), np.log(seconds), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name, again in (("unused", False), ("no_sync", True)):
        with Ranks(1) as ranks:
            times = ranks.run(measure, rounds, again)[0]
        for number, (theirs, ours) in zip(NUMBERS, times):
            print(f"{name:8} {number:6} outputs: {theirs:8.4f} s  {ours:8.4f} s  {ours / theirs:6.2f}")
        theirs, ours = (exponent(list(seconds)) for seconds in zip(*times))
        print(f"{name:8} exponent:       {theirs:8.2f}    {ours:8.2f}")


if __name__ == "__main__":
    main()
