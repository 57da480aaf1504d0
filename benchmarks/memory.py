"""How many bytes do gradients and buckets take, for each byte of parameters?

Each variant trains a few steps in processes of its own, on two ranks. Counted is resident anonymous
memory (pages that really exist, from /proc/self/smaps_rollup on Linux; the CUDA allocator's count with
--engine nccl):

    peak     the most at any moment of one more step: activations, gradients and buckets (resident memory)
    steady   after the last step, gradients alive as the optimizer finds them
    zeroed   after zero_grad(set_to_none=True) on top of that: what stays between steps
    released as zeroed, after minddp.release_buckets(ddp) (minddp only)

each less what the same process held before wrapping (the model after a local step, without gradients;
the variant has wrapped a small model and the engine has reduced as many bytes before, so that imported
code and the engine's own buffers are not counted), divided by the parameters' bytes. A model without
communication has 1.0 steady (its gradients) and 0.0 zeroed; what a variant has above that is "extra".

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import overhead
from harness import BenchmarkError, Ranks

STEPS = 4
# glibc keeps freed blocks below a threshold that it raises by itself; fixed, so that free means free
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "65536",
}  # fmt: skip


def measure(rank: int, world_size: int, model: str, variant: str, engine: str) -> dict[str, float]:
    """Bytes above the model itself, per parameter byte, at each of the three moments."""
    import models
    import variants

    device = harness.rank_device(engine, rank)
    work = models.workload(model, device, rank)
    local = variants.make_step("local", work, device)
    local()
    local.zero_grad()
    _use_variant(variant, device)
    _use_engine(work.nbytes(), device)
    held = _memory_counter(device)
    most = _peak_meter(device)
    most()
    before, before_resident = held(), most()
    step = variants.make_step(variant, work, device)
    for _ in range(STEPS):
        step()
    found = {"steady": held() - before}
    step.zero_grad()
    found["zeroed"] = held() - before
    most()
    step()
    found["peak"] = most() - before_resident
    step.zero_grad()
    if variant.startswith("minddp"):
        import minddp

        minddp.release_buckets(step.wrapped)
        found["released"] = held() - before
    return {moment: nbytes / work.nbytes() for moment, nbytes in found.items()}


def _use_variant(variant: str, device: Any) -> None:
    """Two steps of a small model: afterwards the modules that the variant imports are there."""
    import models
    import variants

    step = variants.make_step(variant, models.workload("many-small", device), device)
    step()
    step()


def _use_engine(nbytes: int, device: Any) -> None:
    """An allreduce of ``nbytes``, twice, side by side: afterwards the engine has what it keeps."""
    import torch
    import torch.distributed as dist

    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(2)]
    for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
        work.wait()


def _memory_counter(device: Any) -> Callable[[], int]:
    """A function that returns the bytes that this process holds on ``device`` now."""
    import torch

    def on_cpu() -> int:
        gc.collect()
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
        raise BenchmarkError("this kernel does not report resident memory in /proc/self/smaps_rollup")

    def on_cuda() -> int:
        gc.collect()
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)

    return on_cuda if device.type == "cuda" else on_cpu


def _peak_meter(device: Any) -> Callable[[], int]:
    """A function that returns the most bytes that this process has held on ``device`` since its last call."""
    import torch

    def on_cpu() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        most = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak, down to what is resident now
        return most

    def on_cuda() -> int:
        torch.cuda.synchronize(device)
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most

    return on_cuda if device.type == "cuda" else on_cpu


def print_table(results: dict[str, dict[str, float]], model: str, baseline: str) -> None:
    from rich.console import Console
    from rich.table import Table

    local = results.get("local", {"steady": 1.0})["steady"]
    title = f"{model}: bytes per parameter byte, two ranks (the larger)"
    table = Table(title=title, title_justify="left", min_width=72)
    base = results.get(baseline, {}).get("peak")
    for heading in ("variant", "peak", f"/ {baseline}'s", "steady", "extra", "zeroed", "released"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, row in results.items():
        ratio = row["peak"] / base if base else None
        cells = [row["peak"], ratio, row["steady"], row["steady"] - local, row["zeroed"], row.get("released")]
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in cells))
    Console(width=100).print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--model", default="mlp67", help="see benchmarks/models.py")
    parser.add_argument("--variants", type=lambda text: text.split(","), help="default: all that this torch has")
    parser.add_argument("--baseline", default="torch", help="the variant that peaks are compared with")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", default="gloo", choices=harness.ENGINES)
    parser.add_argument("--output", type=Path, default=harness.OUTPUT / "memory.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    from rich.progress import track

    arguments = parse(argv)
    arguments.variants = arguments.variants or ["local", *overhead.default_variants()]
    results = {}
    with harness.environment(ENVIRONMENT):
        for variant in track(arguments.variants, description="memory", transient=True):
            with Ranks(arguments.ranks, arguments.engine) as ranks:  # new processes for each variant
                found = ranks.run(measure, arguments.model, variant, arguments.engine)
            results[variant] = {moment: max(each[moment] for each in found) for moment in found[0]}
    print_table(results, arguments.model, arguments.baseline)
    result = {"benchmark": "memory", "model": arguments.model, "bytes_per_parameter_byte": results}
    harness.write_json(arguments.output, {"command": harness.command(), "machine": harness.machine(), **result})
    print(f"written: {arguments.output}")
    return 0


if __name__ == "__main__":
    harness.run_main(main)
