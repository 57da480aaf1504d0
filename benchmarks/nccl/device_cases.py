"""The cases of `many.py` that need a GPU: streams, launches, waits of the host, graphs; and its profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cases import (
    SMALL,
    Tensors,
    alike,
    apart,
    batches,
    beside,
    by_hand,
    case,
    gradients,
    mean_square,
    net,
    parameters,
    plain,
    train,
    wrap,
)  # fmt: skip
from here import CUDA, DEVICE, RANK, WORLD, Write, synchronize
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import minddp

Options = dict[str, Any]
VIEWS: Options = {"gradient_as_bucket_view": True}
LATE = 30_000_000  # cycles: some 15 ms


def all_of(ways: dict[str, tuple[bool, str]]) -> tuple[bool, str]:
    """One outcome of several; the note names those that failed."""
    wrong = [f"{name}: {note}" for name, (ok, note) in ways.items() if not ok]
    return not wrong, "; ".join(wrong) or f"{len(ways)} ways"


def near(options: Options, exact: float = 3e-6) -> float:
    """How far from the mean a way of sending may be."""
    return 0.3 if "wire" in options else exact


# ---- streams


@case
def optimizer_in_backward() -> tuple[bool, str]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def run(which: str) -> Tensors:
        module = net()
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
        model = wrap(which, module, **SMALL)
        for x in batches(12):
            mean_square(model(x)).backward()
        return parameters(model)

    found = run("minddp")
    ok, note = beside(found, run("torch"), limit=1e-5)
    return ok and alike(found), note


def with_delays(which: str, options: Options, where: str) -> Tensors:
    """Each rank in turn is late on its stream, before its forward or in gradients' hooks. The host waits nowhere."""
    model = wrap(which, net(), **options)
    turn = [0]

    def doze(*_: Any) -> None:
        if turn[0] % WORLD == RANK:
            torch.cuda._sleep(LATE)

    if where == "backward":
        for p in list(model.parameters())[::5]:
            p.register_hook(doze)
    found = []
    for x in batches(4):
        turn[0] += 1
        model.zero_grad()
        if where == "forward":
            doze()
        mean_square(model(x)).backward()
        found += [p.grad.clone() for p in model.parameters()]
    synchronize()
    return [plain(gradient) for gradient in found]


@case
def late_rank() -> tuple[bool, str]:
    wanted = with_delays("torch", SMALL, "nowhere")
    ways = {}
    for where in ("forward", "backward"):
        for options in ({}, VIEWS, {"wire": "bf16"}, {"wire": "int8"}, {"ordered": True}):
            found = with_delays("minddp", {**SMALL, **options}, where)
            ways[f"{where} {options}"] = beside(found, wanted, near(options))
    return all_of(ways)


@case
def side_stream() -> tuple[bool, str]:
    """Wrapper, forward and backward on a stream of the program's; the optimizer on the default one."""

    def run(which: str, options: Options) -> Tensors:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = wrap(which, net(), **SMALL, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x in batches(6):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.zero_grad()
                torch.cuda._sleep(LATE // 6)
                mean_square(model(x)).backward()
            torch.cuda.current_stream().wait_stream(stream)
            optimizer.step()
        synchronize()
        return parameters(model)

    wanted = run("torch", {})
    ways = ({}, VIEWS, {"lazy_bucket_allocation": True}, {"ordered": True})
    return all_of({str(way): beside(run("minddp", way), wanted, near(way)) for way in ways})


class TwoStreams(nn.Module):
    """Half of it runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = net(seed=1, depth=4, out=256), net(seed=2, depth=4, out=256)
        torch.manual_seed(4)
        self.head, self.side = nn.Linear(256, 8).to(DEVICE), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(LATE // 10)
            left = self.left(x)
        x.record_stream(self.side)
        right = self.right(x)
        here.wait_stream(self.side)
        left.record_stream(here)
        return self.head(left + right)


@case
def two_streams() -> tuple[bool, str]:
    """Buckets with gradients of both streams."""
    wanted = train("torch", SMALL, make=TwoStreams, steps=6)
    ways = ({}, {"bucket_cap_mb": 25}, VIEWS, {"lazy_bucket_allocation": True}, {"wire": "int8"})
    found = {str(way): train("minddp", {**SMALL, **way}, make=TwoStreams, steps=6) for way in ways}
    return all_of({str(way): beside(found[str(way)], wanted, near(way)) for way in ways})


# ---- waits and launches


def trained(steps: int, which: str = "minddp", **options: Any) -> Callable[[], None]:
    """A step of a model that has made some."""
    model, x = wrap(which, net(), **{**SMALL, **options}), batches(1)[0]

    def step(set_to_none: bool = True) -> None:
        model.zero_grad(set_to_none)
        mean_square(model(x)).backward()

    for _ in range(steps):
        step()
    synchronize()
    return step


@case
def no_host_wait() -> tuple[bool, str]:
    """A step never waits for the device."""
    ways: dict[str, tuple[bool, str]] = {}
    for options in (
        *({}, VIEWS, {"find_unused_parameters": True}, {"static_graph": True}, {"wire": "bf16"}, {"wire": "int8"}),
        *({"ordered": True}, {"lazy_bucket_allocation": True}),
    ):
        step = trained(3, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
            ways[str(options)] = True, ""
        except RuntimeError as error:
            ways[str(options)] = False, str(error).splitlines()[0][:80]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return all_of(ways)


def profiled(step: Callable[..., None], *arguments: Any) -> Any:
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(*arguments)
        synchronize()
    return seen.events()


@case
def sum_zeroed() -> tuple[bool, str]:
    """How often the host waits where gradients are summed and zeroed in place: once at most."""
    step = trained(0, reduction="sum")
    for _ in range(3):
        step(False)
    synchronize()
    events = profiled(step, False)
    waits = sum(event.name in ("cudaStreamSynchronize", "cudaMemcpy") for event in events)
    return waits <= 1, f"{waits} waits for {len(list(net().parameters()))} parameters"


@case
def wire_launches() -> tuple[bool, str]:
    """What a bucket costs in launches, by the way in which it is sent."""
    notes = []
    ways: dict[str, Options] = {
        "plain": {}, "bf16": {"wire": "bf16"}, "int8": {"wire": "int8"}, "ordered": {"ordered": True},
    }  # fmt: skip
    for name, options in ways.items():
        events = on_device(profiled(trained(3, bucket_cap_mb=25, **options)))
        copies = sum("Memcpy DtoD" in event.name for event in events)
        notes.append(f"{name}: {len(events)} launches, {sum(map(is_nccl, events))} NCCL's, {copies} copies")
    return True, "; ".join(notes)


@case
def sync_batchnorm_launches() -> tuple[bool, str]:
    """Launches and time of a step of eight SyncBatchNorm layers, torch's beside minddp's."""
    notes = []
    for which in ("torch", "minddp"):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        convert = nn.SyncBatchNorm if which == "torch" else minddp
        module = nn.Sequential(nn.Conv2d(3, 16, 3), *layers).to(DEVICE)
        model, x = wrap(which, convert.convert_sync_batchnorm(module)), torch.randn(8, 3, 32, 32, device=DEVICE)

        def step(model: Any = model, x: torch.Tensor = x) -> None:
            model.zero_grad()
            mean_square(model(x)).backward()

        for _ in range(3):
            step()
        events = on_device(profiled(step))
        began = time.perf_counter()
        for _ in range(3):
            step()
        synchronize()
        milliseconds = (time.perf_counter() - began) / 3 * 1e3
        notes.append(f"{which}: {len(events)} launches, {sum(map(is_nccl, events))} NCCL's, {milliseconds:.1f} ms")
    return True, "; ".join(notes)


@case
def alignment() -> tuple[bool, str]:
    """NCCL copies 16 bytes at a time where all addresses are multiples of 16; otherwise an element, which is one byte
    for sends and receives. Shown by a send to oneself in a group of one rank."""
    mine, count = [dist.new_group([rank]) for rank in range(WORLD)][RANK], 64 << 20
    memory = torch.randint(0, 255, (2, count + 64), dtype=torch.uint8, device=DEVICE)
    times: dict[int, list[float]] = {}
    for offset in (0, 4, 2, 0, 4):
        sent, got = (row[offset : offset + count] for row in memory)
        for _ in range(3):
            dist.all_to_all_single(got, sent, group=mine)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            dist.all_to_all_single(got, sent, group=mine)
        last.record()
        synchronize()
        times.setdefault(offset, []).append(first.elapsed_time(last) / 10)
    best = {offset: min(values) for offset, values in times.items()}
    speeds = ", ".join(f"offset {offset}: {2 * count / ms / 1e6:.0f} GB/s" for offset, ms in best.items())
    same = torch.equal(memory[0, 4 : 4 + count], memory[1, 4 : 4 + count])
    return same, f"{speeds}; unaligned is {best[4] / best[0]:.1f} times slower"


# ---- graphs


@case
def capture() -> tuple[bool, str]:
    """torch's recipe for a step in a CUDA graph: 11 steps on a side stream, a capture, replays beside eager steps."""
    ways = {}
    for which, options in (("torch", {}), ("minddp", {}), ("minddp", VIEWS), ("minddp", {"ordered": True})):
        ok, note = captured(which, options)
        ways[f"{which} {options}"] = ok or which == "torch", note
    ok, note = all_of(ways)
    return ok, f"{note}; torch: {ways['torch {}'][1]}"


def captured(which: str, options: Options) -> tuple[bool, str]:
    stream, x = torch.cuda.Stream(), batches(1)[0]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = wrap(which, net(), **SMALL, **options)
        for _ in range(11):
            model.zero_grad()
            mean_square(model(x)).backward()
    torch.cuda.current_stream().wait_stream(stream)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    far = 0.0
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            mean_square(model(x)).backward()
        module = net()
        for batch in batches(5, seed=500):
            x.copy_(batch)
            graph.replay()
            wanted = by_hand(module, batch)
            far = max(far, apart(gradients(model), wanted)[1])
    except RuntimeError as error:
        return False, str(error).splitlines()[0][:120]
    return far < 1e-5, f"apart {far:.0e}"


# ---- the profile


def is_nccl(event: Any) -> bool:
    return bool(event.name.startswith(("ncclDev", "ncclKernel")))


def on_device(events: Any) -> list[Any]:
    """Kernels and copies; not the ranges that the program, c10d ("nccl:all_reduce") and the profiler name."""
    ranges = ("nccl:", "Distributed", "Profiler", "Optimizer", "minddp::")
    return [
        event
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        and event.time_range.end > event.time_range.start
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(ranges)
    ]


def overlap(events: Any) -> str:
    """What of one step's matrix products ran beside a kernel of NCCL's, in this process's own time."""
    kernels = on_device(events)
    nccl = [event.time_range for event in kernels if is_nccl(event)]
    words = ("gemm", "cutlass", "sm90")
    compute = [e.time_range for e in kernels if not is_nccl(e) and any(word in e.name.lower() for word in words)]
    if not nccl or not compute:
        return f"{len(nccl)} kernels of NCCL's, {len(compute)} matrix products"
    last = max(span.end for span in compute)
    shared = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in nccl for b in compute)
    early = sum(span.start < last for span in nccl)
    products, sends = (sum(span.end - span.start for span in spans) / 1e3 for spans in (compute, nccl))
    return (
        f"{len(kernels)} launches, {len(nccl)} NCCL's, of which {early} began before the last matrix product ended; "
        f"{shared / 1e3:.2f} ms of {products:.2f} ms of products ran beside NCCL's {sends:.2f} ms"
    )


def profile(write: Write) -> None:
    """Milliseconds of a step by class and way, medians of turns; then a trace of one step of each.

    Where ranks share a GPU, the driver gives it to them in turns: times say nothing of speed there.
    """
    width, depth, rows, turns = (1024, 12, 16384, 9) if CUDA else (128, 4, 32, 3)
    variants: dict[str, tuple[str, Options]] = {
        "torch": ("torch", {}), "torch-views": ("torch", VIEWS), "minddp": ("minddp", {}),
        "minddp-views": ("minddp", VIEWS), "minddp-int8": ("minddp", {"wire": "int8"}),
        "minddp-bf16": ("minddp", {"wire": "bf16"}),
    }  # fmt: skip
    x = batches(1, width=width, rows=rows)[0]
    models = {
        name: wrap(which, net(width, depth), bucket_cap_mb=8, **options)
        for name, (which, options) in variants.items()
    }

    def step(model: Any) -> None:
        model.zero_grad()
        mean_square(model(x)).backward()

    hosts: dict[str, list[float]] = {name: [] for name in models}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(turns):
        for name, model in models.items():
            synchronize()
            dist.barrier()
            began = time.perf_counter()
            step(model)
            hosts[name].append(time.perf_counter() - began)
            synchronize()
            times[name].append(time.perf_counter() - began)
    middle = {name: sorted(values[2:])[len(values[2:]) // 2] for name, values in times.items()}
    for name, value in middle.items():
        host = sorted(hosts[name][2:])[len(hosts[name][2:]) // 2]
        ratio = value / middle["torch"]
        write(f"step {name:13}{value * 1e3:9.2f} ms, {ratio:.2f} of torch's; the host's part {host * 1e3:.2f} ms")
    if CUDA:
        for name, model in models.items():
            dist.barrier()
            write(f"trace {name:13}{overlap(profiled(step, model))}")
