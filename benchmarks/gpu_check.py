"""Does the CUDA half work, and what does it cost? One script for a machine with one GPU; under 8 minutes.

    make gpu-check                           # or: python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --cpu-half

Parts, each of which can fail without ending the others:

build        the extension, with CUDA, in place
tests        tests/cuda: kernels, NCCL at world size 1, Gloo with CUDA tensors at world size 2, graphs
launches     what a step launches beyond the local step (torch.profiler): kernels; on a CPU ATen calls
overhead     step(DDP) - step(local) at world size 1, where nothing is sent: the reducer alone
bandwidth    packing and unpacking, as a share of a plain copy of as many bytes

Without a GPU (or with ``--cpu-half``) the same parts run on the CPU with Gloo. Writes one JSON
(``benchmarks/results/gpu_check.json``; on a CPU only where ``--output`` says) and prints one table.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import overhead

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = ["torch", "torch-views", "minddp", "minddp-views"]
MODELS = {"cuda": ["many-small", "resnet50"], "cpu": ["many-small"]}
OURS = "scaled_copy_kernel"
BUCKET_BYTES = 25 << 20
SEGMENTS = {"one segment": 1, "400 segments": 400, "5,000 segments": 5000}


# ---- build and tests


def build(device: str) -> dict[str, Any]:
    """Builds the extension; on a GPU machine a build without CUDA is an error."""
    environment = os.environ | ({"MINDDP_CUDA": "1"} if device == "cuda" else {})
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    from minddp import _extension

    return {"config": _extension.build_record()}


def tests(device: str) -> dict[str, Any]:
    """Runs the tests that use a GPU; the closing line and what failed."""
    layers = "tests/sync_batchnorm/test_sync_batchnorm.py::test_equals_batch_norm_over_the_whole_batch"
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "tests/cuda", layers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return {"closing": (done.stdout.strip().splitlines() or ["no output"])[-1], "failed": failed}


# ---- on the rank


def count_launches(rank: int, world_size: int, model: str, engine: str) -> dict[str, dict[str, Any]]:
    """For each variant: launches of one step, those of our kernel, and how many buckets there are."""
    import models
    import torch
    import variants as steps
    from torch.profiler import ProfilerActivity, profile

    device = harness.rank_device(engine, rank)
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    counts: dict[str, dict[str, Any]] = {}
    for variant in ["local", *VARIANTS]:
        step = steps.make_step(variant, models.workload(model, device, rank), device)
        for _ in range(overhead.WARMUP):
            step()
        with profile(activities=[activity]) as seen:
            step()
        names = Counter(event.name for event in seen.events() if _is_launch(event, device))
        counts[variant] = {
            "launches": sum(names.values()),
            "ours": sum(count for name, count in names.items() if OURS in name),
            "buckets": len(step.bucket_bytes()) if variant != "local" else 0,
            "names": dict(names.most_common(40)),
        }
        del step
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return counts


def _is_launch(event: Any, device: Any) -> bool:
    if device.type == "cpu":
        return bool(event.name.startswith("aten::"))
    from torch.autograd import DeviceType

    return bool(event.device_type == DeviceType.CUDA and not event.name.startswith("ProfilerStep"))


# ---- bandwidth


def bandwidth(device: str) -> list[dict[str, Any]]:
    """Seconds and bytes per second of packing 25 MiB, beside ``copy_`` of the same bytes."""
    import torch

    rows = []
    for source_type, target_type, scale in [
        (torch.float32, torch.float32, 1.0),
        (torch.float32, torch.float32, 0.5),
        (torch.float32, torch.bfloat16, 0.5),
        (torch.bfloat16, torch.float32, 0.5),
    ]:
        numel = BUCKET_BYTES // 4
        source = torch.randn(numel, device=device).to(source_type)
        target = torch.empty(numel, dtype=target_type, device=device)
        moved = numel * (source_type.itemsize + target_type.itemsize)
        like = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        like_target = torch.empty_like(like)
        calls: dict[str, Callable[[], None]] = {"copy": lambda a=like_target, b=like: a.copy_(b)}
        for name, count in SEGMENTS.items():
            calls[name] = _pack_call(device, source, target, scale, count)
        seconds = _interleaved_seconds(calls, device)
        for name in SEGMENTS:
            rows.append(
                {
                    "from": str(source_type), "to": str(target_type), "scale": scale, "segments": name,
                    "bytes_per_second": moved / seconds[name], "of_copy": seconds["copy"] / seconds[name],
                }
            )  # fmt: skip
    return rows


def _pack_call(device: str, source: Any, target: Any, scale: float, count: int) -> Callable[[], None]:
    from minddp import _extension

    extension = _extension.load()
    size = -(-source.numel() // count)
    pieces, targets = list(source.split(size)), list(target.split(size))
    if device == "cuda":
        return lambda: extension.cuda_scaled_copy(pieces, targets, source.dtype, scale)

    def on_cpu() -> None:
        for piece, to in zip(pieces, targets, strict=True):
            extension.scaled_copy(piece, to, scale)

    return on_cpu


def _interleaved_seconds(calls: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    """Medians over rounds. On a GPU a captured graph of 10 calls is timed: the device's time alone.

    A graph launches the kernel of 5,000 segments in several pieces; see csrc/cuda/scaled_copy.cu.
    """
    timer = _graph_timer if device == "cuda" else _host_timer
    timed = {name: timer(call) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for order in harness.rounds(list(calls), 15 if device == "cuda" else 7):
        for name in order:
            samples[name].append(timed[name]())
    return {name: statistics.median(values) for name, values in samples.items()}


def _host_timer(call: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return measure


def _graph_timer(call: Callable[[], None], calls: int = 10) -> Callable[[], float]:
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / calls

    return measure


# ---- the whole


def measure_model(ranks: harness.Ranks, model: str, device: str, rounds: int) -> dict[str, Any]:
    """Launches and overhead of every variant on one model, at world size 1."""
    launches = ranks.run(count_launches, model, ranks.engine, timeout=200)[0]
    answer = ranks.run(overhead.measure_rounds, model, VARIANTS, rounds, 3, ranks.engine, timeout=200)[0]
    samples = answer[0]
    base = overhead.less(samples, "torch", "local")
    rows = {}
    for variant in VARIANTS:
        added = overhead.less(samples, variant, "local")
        rows[variant] = {
            "added": harness.spread(added).to_json(),
            "step": harness.spread(samples[variant]).to_json(),
            "ratio": overhead.ratio_interval(added, base),
        }
    local = harness.spread(samples["local"]).to_json()
    return {"model": model, "launches": launches, "local": local, "overhead": rows}


def measure_models(device: str, rounds: int) -> list[dict[str, Any]]:
    engine = "nccl" if device == "cuda" else "gloo"
    with harness.Ranks(1, engine) as ranks:
        return [measure_model(ranks, model, device, rounds) for model in MODELS[device]]


def attempt(result: dict[str, Any], name: str, part: Callable[[], Any]) -> None:
    """Stores what ``part`` returns, or the error that it ended with."""
    begin = time.monotonic()
    print(f"{name} …", flush=True)
    try:
        result[name] = part()
    except Exception as error:
        traceback.print_exc()
        result.setdefault("errors", {})[name] = f"{type(error).__name__}: {str(error)[-2000:]}"
    result.setdefault("seconds", {})[name] = round(time.monotonic() - begin, 1)


def model_lines(entry: dict[str, Any]) -> list[str]:
    """One model's part of the table."""
    counts = entry["launches"]
    local = counts["local"]["launches"]
    lines = ["", f"{entry['model']}: local step {entry['local']['median'] * 1e3:.3f} ms, {local} launches"]
    row = "  {:14}{:>26}{:>10}{:>10}{:>6}{:>9}".format
    lines.append(row("", "added ms [quartiles]", "of torch", "launches", "ours", "buckets"))
    for variant, values in entry["overhead"].items():
        count = counts[variant]
        added = harness.Spread(**values["added"]).show(1e3, 3)
        more = f"+{count['launches'] - local}"
        lines.append(row(variant, added, f"{values['ratio'][1]:.2f}", more, count["ours"], count["buckets"]))
    return lines


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"gpu-check on {result['machine'].get('gpu', 'the CPU')}"]
    if "tests" in result:
        lines += [f"tests/cuda: {result['tests']['closing']}", *result["tests"]["failed"]]
    for entry in result.get("models", []):
        lines += model_lines(entry)
    lines += ["", "packing 25 MiB                          GB/s   of a copy"] if "bandwidth" in result else []
    for row in result.get("bandwidth", []):
        what = f"{row['from'][6:]} to {row['to'][6:]} x {row['scale']:g}, {row['segments']}"
        lines.append(f"  {what:42}{row['bytes_per_second'] / 1e9:8.1f}{row['of_copy']:10.2f}")
    lines += [f"FAILED {name}: {text.splitlines()[-1]}" for name, text in result.get("errors", {}).items()]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--cpu-half", action="store_true", help="on the CPU, also where there is a GPU")
    parser.add_argument("--skip", nargs="*", default=[], choices=["build", "tests", "models", "bandwidth"])
    parser.add_argument("--rounds", type=int, help="of the overhead (default: 20 on a GPU, 5 on a CPU)")
    parser.add_argument("--output", type=Path, help="JSON file (default on a GPU: results/gpu_check.json)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    import torch

    arguments = parse(argv)
    device = "cuda" if torch.cuda.is_available() and not arguments.cpu_half else "cpu"
    rounds = arguments.rounds or (20 if device == "cuda" else 5)
    parts: dict[str, Callable[[], Any]] = {
        "build": lambda: build(device),
        "tests": lambda: tests(device),
        "models": lambda: measure_models(device, rounds),
        "bandwidth": lambda: bandwidth(device),
    }
    result: dict[str, Any] = {"benchmark": "gpu_check", "machine": harness.machine()}
    for name, part in parts.items():
        if name not in arguments.skip:
            attempt(result, name, part)
    print(table(result))
    output = arguments.output or (harness.RESULTS / "gpu_check.json" if device == "cuda" else None)
    if output is not None:
        harness.write_json(output, result)
        harness.write_text(output.with_suffix(".txt"), table(result) + "\n")
        print(f"written: {output} and .txt")
    failed = bool(result.get("errors")) or bool(result.get("tests", {}).get("failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    harness.run_main(main)
