"""What ``gpu_check.py`` measures, one part a process; it may be run by itself.

    python benchmarks/gpu_measure.py many-small --device cuda --output answer.json

build        the extension, with CUDA, in place; nothing where the one there is of the same sources and torch
many-small, resnet50-224, gpt2-1024, layers-7b
             at world size 1: launches of a step beyond the local one (torch.profiler; on a CPU ATen calls), the
             device's time of a step (events), the host's until it has enqueued it, and the peak of memory; of
             many-small also step(DDP) - step(local): the reducer and the collectives of one rank
traces       a step of each of three variants, as Chrome traces in --folder
bandwidth    packing and unpacking, as a share of a plain copy of as many bytes
blocks       the same with wire="int8", beside packing without it
wire         GPT-2's step with wire="bf16" and "int8", beside without, at world size 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # minddp as built in place
VARIANTS = ["torch", "torch-views", "minddp", "minddp-views"]
WIRES = ["minddp", "minddp-bf16", "minddp-int8"]
OURS = "scaled_copy_kernel"
BUCKET_BYTES = 25 << 20
SETS = 8  # of source and destination, in turn: together they fit into no cache
RECORD = ROOT / "minddp" / "_build.json"
TRACED = ["torch", "minddp", "minddp-views"]
SEGMENTS = {"one segment": 1, "400 segments": 400, "5,000 segments": 5000}


# ---- build


def build(device: str) -> dict[str, Any]:
    """Builds the extension where it is not current; on a GPU machine a build without CUDA is an error."""
    if not is_current(device):
        environment = os.environ | ({"MINDDP_CUDA": "1"} if device == "cuda" else {})
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
        RECORD.write_text(json.dumps({**json.loads(RECORD.read_text()), "sources": sources()}, indent=1) + "\n")
    return {"config": json.loads(RECORD.read_text())}


def is_current(device: str) -> bool:
    """Whether the extension is there, of these sources, for this torch and this device. By what the files hold, since
    those of a copy are all new."""
    import torch

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (ROOT / "minddp" / f"_C{suffix}").exists() or not RECORD.exists():
        return False
    record = json.loads(RECORD.read_text())
    found = (record.get("sources"), record.get("torch"), bool(record.get("cuda")) or device != "cuda")
    return found == (sources(), torch.__version__, True)


def sources() -> str:
    """Of what the extension is made."""
    digest = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# ---- on the rank


def count_launches(rank: int, world_size: int, model: str, engine: str) -> dict[str, dict[str, Any]]:
    """For each variant: launches of one step, those of our kernel, and how many buckets there are."""
    import harness
    import models
    import overhead
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
            "names": dict(names.most_common(12)),
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


def device_costs(
    rank: int, world_size: int, model: str, engine: str, rounds: int, variants: list[str] = VARIANTS
) -> dict[str, dict[str, float]]:
    """For each variant, medians over ``rounds`` steps: seconds of the device and of the host's enqueueing (on a CPU
    the same), and the peak of allocated bytes (on a CPU 0)."""
    import harness
    import models
    import torch
    import variants as steps

    device = harness.rank_device(engine, rank)
    on_gpu = device.type == "cuda"
    costs: dict[str, dict[str, float]] = {}
    for variant in ["local", *variants]:
        step = steps.make_step(variant, models.workload(model, device, rank), device)
        for _ in range(3):
            step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        samples = [_one_step(step, on_gpu) for _ in range(rounds)]
        costs[variant] = {
            "device": statistics.median(seconds for seconds, _ in samples),
            "enqueue": statistics.median(seconds for _, seconds in samples),
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        }
        del step
        if on_gpu:
            torch.cuda.empty_cache()
    return costs


def _one_step(step: Callable[[], Any], on_gpu: bool) -> tuple[float, float]:
    """Seconds of the device, and of the host until it has enqueued the step."""
    import torch

    if not on_gpu:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin,) * 2
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first.record()
    step()
    last.record()
    enqueued = time.perf_counter() - begin
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3, enqueued


def write_traces(rank: int, world_size: int, model: str, engine: str, folder: str) -> list[str]:
    """A step of each variant in ``trace-<variant>.json.gz``, to be opened at ui.perfetto.dev."""
    import harness
    import models
    import torch
    import variants as steps
    from torch.profiler import ProfilerActivity, profile

    device = harness.rank_device(engine, rank)
    written = []
    for variant in TRACED:
        step = steps.make_step(variant, models.workload(model, device, rank), device)
        for _ in range(3):
            step()
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as seen:
            step()
            if gpu:
                torch.cuda.synchronize()
        path = Path(folder) / f"trace-{variant}.json.gz"
        seen.export_chrome_trace(str(path))
        written.append(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        del step
    return written


# ---- bandwidth


def bandwidth(device: str) -> dict[str, Any]:
    """Bytes per second of packing 25 MiB (a destination of another dtype: unpacking), beside ``copy_`` of as many."""
    import torch

    rows = []
    for source_type, target_type, scale in [
        (torch.float32, torch.float32, 1.0),
        (torch.float32, torch.float32, 0.5),
        (torch.bfloat16, torch.bfloat16, 0.5),
        (torch.float32, torch.bfloat16, 0.5),
        (torch.bfloat16, torch.float32, 0.5),
    ]:
        numel = BUCKET_BYTES // 4
        sources = [torch.randn(numel, device=device).to(source_type) for _ in range(SETS)]
        targets = [torch.empty(numel, dtype=target_type, device=device) for _ in range(SETS)]
        moved = numel * (source_type.itemsize + target_type.itemsize)
        like = [torch.empty(2, moved // 2, dtype=torch.uint8, device=device) for _ in range(SETS)]
        calls: dict[str, list[Callable[[], None]]] = {"copy": [lambda a=a, b=b: a.copy_(b) for a, b in like]}
        for name, count in SEGMENTS.items():
            calls[name] = [_pack_call(a, b, scale, count) for a, b in zip(sources, targets, strict=True)]
        seconds = _interleaved_seconds(calls, device)
        for name in SEGMENTS:
            rows.append(
                {
                    "from": str(source_type), "to": str(target_type), "scale": scale, "segments": name,
                    "bytes_per_second": moved / seconds[name], "of_copy": seconds["copy"] / seconds[name],
                }
            )  # fmt: skip
    lines = ["packing 25 MiB                                  GB/s   of a copy"]
    for row in rows:
        what = f"{row['from'][6:]} to {row['to'][6:]} x {row['scale']:g}, {row['segments']}"
        lines.append(f"{what:44}{row['bytes_per_second'] / 1e9:8.1f}{row['of_copy']:10.2f}")
    return {"rows": rows, "table": lines}


def blocks(device: str) -> dict[str, Any]:
    """Seconds of a bucket of 25 MiB as 8-bit codes (``wire="int8"``), beside packing it without."""
    import torch

    from minddp import _extension

    extension = _extension.load()
    numel = BUCKET_BYTES // 4
    count = -(-numel // 256)
    gradients = [torch.randn(numel, device=device) for _ in range(SETS)]
    buffers = [torch.empty(numel, device=device) for _ in range(SETS)]
    lost = [torch.zeros(count * 260, dtype=torch.uint8, device=device) for _ in range(SETS)]
    codes = [torch.zeros(2, count * 260, dtype=torch.uint8, device=device) for _ in range(SETS)]
    for gradient, pair in zip(gradients, codes, strict=True):
        for piece in pair:
            extension.quantize(gradient, 0.5, None, piece)
    calls: dict[str, list[Callable[[], None]]] = {
        "packing without": [_pack_call(g, b, 0.5, 1) for g, b in zip(gradients, buffers, strict=True)],
        "packing": [lambda g=g, c=c: extension.quantize(g, 0.5, None, c[0]) for g, c in zip(gradients, codes)],
        "packing, error feedback": [
            lambda g=g, c=c, e=e: extension.quantize(g, 0.5, e, c[0]) for g, c, e in zip(gradients, codes, lost)
        ],
        "sum of two": [lambda c=c: extension.add_quantized(list(c), None) for c in codes],
        "sum of two, error feedback": [
            lambda c=c, e=e: extension.add_quantized(list(c), e) for c, e in zip(codes, lost)
        ],
        "unpacking": [lambda b=b, c=c: extension.dequantize(c[0], 1.0, b) for b, c in zip(buffers, codes)],
    }
    seconds = _interleaved_seconds(calls, device)
    lines = ['25 MiB with wire="int8"               us   of packing without']
    for name, value in seconds.items():
        lines.append(f"{name:30}{value * 1e6:10.1f}{value / seconds['packing without']:10.2f}")
    return {"seconds": seconds, "table": lines}


def _pack_call(source: Any, target: Any, scale: float, count: int) -> Callable[[], None]:
    from minddp import _extension

    extension = _extension.load()
    size = -(-source.numel() // count)
    pieces, targets = list(source.split(size)), list(target.split(size))
    return lambda: extension.scaled_copy(pieces, targets, source.dtype, scale)


def _interleaved_seconds(calls: dict[str, list[Callable[[], None]]], device: str) -> dict[str, float]:
    """Medians over rounds of one call, each set in its turn. On a GPU a captured graph is timed: its time alone.

    A graph launches the kernel of 5,000 segments in several pieces; see csrc/copy/cuda/scaled_copy.cu.
    """
    import harness

    timer = _graph_timer if device == "cuda" else _host_timer
    timed = {name: timer(each) for name, each in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for order in harness.rounds(list(calls), 15 if device == "cuda" else 5):
        for name in order:
            samples[name].append(timed[name]())
    return {name: statistics.median(values) for name, values in samples.items()}


def _host_timer(calls: list[Callable[[], None]]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) / len(calls)

    return measure


def _graph_timer(calls: list[Callable[[], None]]) -> Callable[[], float]:
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / len(calls)

    return measure


# ---- the whole


def measure_model(model: str, device: str, rounds: int) -> dict[str, Any]:
    """Launches and overhead of every variant on one model, at world size 1."""
    import harness
    import overhead

    with harness.Ranks(1, "nccl" if device == "cuda" else "gloo") as ranks:
        launches = ranks.run(count_launches, model, ranks.engine, timeout=100)[0]
        answer = ranks.run(overhead.measure_rounds, model, VARIANTS, rounds, 3, ranks.engine, timeout=150)[0]
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
    entry = {"model": model, "launches": launches, "local": local, "overhead": rows}
    return {**entry, "table": model_lines(entry)}


def measure_wire(device: str, rounds: int) -> dict[str, Any]:
    """What GPT-2's step costs the device and the host as its gradients travel in fewer bytes, at world size 1."""
    import harness

    model = "gpt2-1024" if device == "cuda" else "many-small"
    with harness.Ranks(1, "nccl" if device == "cuda" else "gloo") as ranks:
        costs = ranks.run(device_costs, model, ranks.engine, rounds, WIRES, timeout=150)[0]
    row = "{:14}{:>12}{:>12}{:>10}".format
    lines = [f"{model}, a step:", row("", "device ms", "enqueue ms", "peak MB")]
    for variant, cost in costs.items():
        device_ms, enqueue, peak = cost["device"] * 1e3, cost["enqueue"] * 1e3, cost["peak_bytes"] / 1e6
        lines.append(row(variant, f"{device_ms:.3f}", f"{enqueue:.3f}", f"{peak:.0f}"))
    return {"model": model, "costs": costs, "table": lines}


def measure_device(model: str, device: str, rounds: int) -> dict[str, Any]:
    """Launches, and what a step costs the device and the host, of every variant on one model, at world size 1."""
    import harness

    with harness.Ranks(1, "nccl" if device == "cuda" else "gloo") as ranks:
        launches = ranks.run(count_launches, model, ranks.engine, timeout=150)[0]
        costs = ranks.run(device_costs, model, ranks.engine, rounds, timeout=150)[0]
    return {"model": model, "launches": launches, "costs": costs, "table": cost_lines(model, launches, costs)}


def cost_lines(model: str, launches: dict[str, Any], costs: dict[str, dict[str, float]]) -> list[str]:
    """One model's table."""
    row = "{:14}{:>12}{:>12}{:>12}{:>10}".format
    lines = [f"{model}, a step:", row("", "device ms", "enqueue ms", "peak MB", "launches")]
    for variant, cost in costs.items():
        device, enqueue, peak = cost["device"] * 1e3, cost["enqueue"] * 1e3, cost["peak_bytes"] / 1e6
        lines.append(row(variant, f"{device:.3f}", f"{enqueue:.3f}", f"{peak:.0f}", launches[variant]["launches"]))
    return lines


def traces(device: str, folder: Path) -> dict[str, Any]:
    """Of GPT-2; on a CPU of what is small."""
    import harness

    model = "gpt2-1024" if device == "cuda" else "many-small"
    with harness.Ranks(1, "nccl" if device == "cuda" else "gloo") as ranks:
        written = ranks.run(write_traces, model, ranks.engine, str(folder.resolve()), timeout=150)[0]
    return {"model": model, "table": written}


def model_lines(entry: dict[str, Any]) -> list[str]:
    """One model's table."""
    import harness

    counts = entry["launches"]
    local = counts["local"]["launches"]
    lines = [f"{entry['model']}: local step {entry['local']['median'] * 1e3:.3f} ms, {local} launches"]
    row = "{:14}{:>26}{:>10}{:>10}{:>6}{:>9}".format
    lines.append(row("", "added ms [quartiles]", "of torch", "launches", "ours", "buckets"))
    for variant, values in entry["overhead"].items():
        count = counts[variant]
        added = harness.Spread(**values["added"]).show(1e3, 3)
        ratio = "" if values["ratio"] is None else f"{values['ratio'][1]:.2f}"
        more = f"+{count['launches'] - local}"
        lines.append(row(variant, added, ratio, more, count["ours"], count["buckets"]))
    return lines


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parts = ["build", "traces", "bandwidth", "blocks", "wire", "many-small", "resnet50-224", "gpt2-1024", "layers-7b"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--rounds", type=int, help="of the overhead (default: 20 on a GPU, 5 on a CPU)")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--folder", type=Path, default=Path(), help="where traces go")
    arguments = parser.parse_args(argv)
    # One rank alone goes through the process group, as it does in torch's class.
    os.environ.setdefault("MINDDP_ALWAYS_REDUCE", "1")
    device = arguments.device
    if arguments.part == "build":
        result = build(device)
    elif arguments.part == "bandwidth":
        result = bandwidth(device)
    elif arguments.part == "blocks":
        result = blocks(device)
    elif arguments.part == "wire":
        result = measure_wire(device, arguments.rounds or (20 if device == "cuda" else 5))
    elif arguments.part == "traces":
        result = traces(device, arguments.folder)
    else:
        rounds = arguments.rounds or (20 if device == "cuda" else 5)
        result = measure_device(arguments.part, device, rounds)
        if arguments.part == "many-small":
            result["beside"] = measure_model(arguments.part, device, rounds)
            result["table"] += result["beside"].pop("table")
    if arguments.part != "build":
        import harness

        result["machine"] = harness.machine()
    print(*result.get("table", []), sep="\n")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
