"""One rank of `many.py`: runs cases, a profile, or the end of a rank, and writes a line of JSON for each answer."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from here import CUDA, DEVICE, GROUP_SECONDS, RANK, WORLD, begin, synchronize


def collectives() -> tuple[bool, str]:
    """What the classes send, without them: numbers, and milliseconds by size. Needs no minddp."""
    ones = torch.full((4,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(ones)
    ok = bool((ones == WORLD * (WORLD + 1) / 2).all())
    times = []
    for numel in (1, 1 << 18, 25 << 18):
        x = torch.ones(numel, device=DEVICE)
        dist.all_reduce(x)
        synchronize()
        began = time.perf_counter()
        for _ in range(4):
            dist.all_reduce(x)
        synchronize()
        times.append(f"{numel * 4} B {(time.perf_counter() - began) / 4 * 1e3:.2f} ms")
        ok &= float(x[0]) == float(WORLD) ** 5
    sent = torch.arange(WORLD * 3, device=DEVICE, dtype=torch.float) + 100 * RANK
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    ok &= got.view(WORLD, 3)[:, 0].tolist() == [100.0 * rank + 3 * RANK for rank in range(WORLD)]
    gathered = torch.empty(WORLD, device=DEVICE)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(RANK), device=DEVICE))
    ok &= gathered.tolist() == list(range(WORLD))
    engine = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if CUDA else "Gloo"
    return ok, f"torch {torch.__version__}, {engine}; all-reduce {', '.join(times)}"


def run_cases(names: list[str], line: Callable[..., None]) -> None:
    for name in names:
        line(begins=name)
        began = time.perf_counter()
        try:
            if name == "collectives":
                ok, note = collectives()
            else:
                # They need minddp, which may be being built while NCCL is asked for the way.
                import cases
                import device_cases  # noqa: F401 - adds its cases

                ok, note = cases.CASES[name]()
            synchronize()
        except Exception as error:
            ok, note = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            traceback.print_exc()
        line(case=name, ok=bool(ok), note=note, seconds=round(time.perf_counter() - began, 2))
        sys.stdout.flush()


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["cases", "profile", "ends"])
    parser.add_argument("--cases", default="")
    parser.add_argument("--how", default="")
    parser.add_argument("--which", default="")
    parser.add_argument("--answers", required=True)
    options = parser.parse_args()

    def line(**values: object) -> None:
        with open(options.answers, "a") as file:
            file.write(json.dumps(values) + "\n")

    def write(note: str) -> None:
        line(note=note)

    if options.what == "ends":
        import ends

        begin(GROUP_SECONDS.get(options.how, 22.0))
        ends.run(write, options.how, options.which)
        return
    begin(60)
    if options.what == "profile":
        import device_cases

        device_cases.profile(write)
    else:
        run_cases(options.cases.split(","), line)
    synchronize()
    dist.barrier()
    if CUDA:  # destroy_process_group() may wait for ever after a capture (pytorch/pytorch#115388)
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
