"""Whole steps on a GPU, NCCL at world size 1: late collectives, launches, waits, memory, graphs, GradScaler.

``tests/lab/streams`` holds the same order of streams on a device that is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import minddp
from tests.ranks_pool import run_ranks

pytestmark = pytest.mark.cuda

THROUGH_NCCL = {"MINDDP_ALWAYS_REDUCE": "1"}  # also where there is one rank
MIXED = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb_list": [0.05] * 2},
    "small views": {"bucket_cap_mb_list": [0.05] * 2, "gradient_as_bucket_view": True},
}
SLEEP = 20_000_000  # cycles: some 10 ms


def make_model() -> nn.Module:
    """Gradients of about 1 in every layer: none is hidden by a tolerance."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layer = nn.Linear(96, 96)
        nn.init.orthogonal_(layer.weight)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(96, 8)).cuda()


def inputs(count: int = 5) -> list[Tensor]:
    """On the GPU already: a copy from pageable memory would wait for whatever a test delays."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(16, 96, generator=generator).cuda() for _ in range(count)]
    torch.cuda.synchronize()
    return made


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def worst(found: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, as a share of the gradient that it is in."""
    assert len(found) == len(want)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, want))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


# ---- late collectives


def late_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Waits for the bucket on a side stream, sleeps there, triples, and completes there."""
    side: torch.cuda.Stream = state
    side.wait_stream(torch.cuda.current_stream())
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[bucket.buffer().device])
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        future.set_result(bucket.buffer().mul_(3))
    return future


def late(rank: int, world_size: int) -> dict[str, float]:
    answers = {}
    for name, options in MODES.items():
        plain, model = make_model(), minddp.DistributedDataParallel(make_model(), device_ids=[0], **options)
        model.register_comm_hook(torch.cuda.Stream(), late_hook)
        far = 0.0
        for x in inputs():
            step(model, x)
            found = gradients(model)
            step(plain, x)
            far = max(far, worst(found, [3 * g for g in gradients(plain)]))
        answers[name] = far
    return answers


def test_late_hooks_triple_exactly() -> None:
    for name, far in run_ranks(late, 1, backend="nccl", env=THROUGH_NCCL)[0].items():
        assert far < 1e-5, name


# ---- memory


def memory_after_zero_grad(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Bytes allocated after ``zero_grad`` beyond parameters and buckets: after the 2nd and after the 6th step."""
    answers = {}
    for name in ("default", "views"):
        model = minddp.DistributedDataParallel(make_model(), device_ids=[0], **MODES[name])
        seen = []
        for x in inputs(6):
            step(model, x)
            model.zero_grad()
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
        answers[name] = (seen[1], seen[5])
    return answers


def test_memory_does_not_grow_after_zero_grad() -> None:
    for name, (early, later) in run_ranks(memory_after_zero_grad, 1, backend="nccl", env=THROUGH_NCCL)[0].items():
        assert later <= early, name


# ---- profiles

PROFILED: dict[str, dict[str, Any]] = {**MODES, "mixed precision": {"mixed_precision": MIXED}, "hook": {}}


def profiles(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    """Of one step each: our kernels, buckets, waits of the host, copies from pageable memory."""
    answers = {}
    for name, options in PROFILED.items():
        model = minddp.DistributedDataParallel(make_model(), device_ids=[0], **options)
        if name == "hook":
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        x = inputs(1)[0]
        for _ in range(3):
            step(model, x)
        with waiting_is_an_error():
            step(model, x)
        with torch.profiler.profile() as profile:
            with torch.profiler.record_function("the step"):
                step(model, x)
        events = profile.events()
        whole = next(event.time_range for event in events if event.name == "the step")
        # The profiler waits for the device when it ends. Kernels run later than the calls that launch them.
        names = Counter(
            event.name
            for event in events
            if not event.name.startswith("cuda") or whole.start <= event.time_range.start <= whole.end
        )
        torch.cuda.synchronize()
        answers[name] = {
            "ours": sum(n for event, n in names.items() if "scaled_copy_kernel" in event),
            "buckets": len(model.reducer.buckets()),
            "waits": names["cudaStreamSynchronize"] + names["cudaDeviceSynchronize"] + names["cudaEventSynchronize"],
            "pageable": sum(n for event, n in names.items() if "Memcpy HtoD (Pageable" in event),
        }
    return answers


def test_step_profile() -> None:
    for name, seen in run_ranks(profiles, 1, backend="nccl", env=THROUGH_NCCL)[0].items():
        assert seen["waits"] == 0, (name, seen)
        assert seen["pageable"] == 0, (name, seen)
        passes = 1 if "views" in name else 2
        assert seen["ours"] <= passes * seen["buckets"], (name, seen)
        assert seen["ours"] > 0, (name, seen)


# ---- graphs


def captured(rank: int, world_size: int) -> dict[str, float]:
    """torch's recipe for DDP in a graph: 11 steps on a side stream, then capture; ten replays. Worst differences."""
    answers = {}
    for name in ("default", "views", "small buckets"):
        plain = make_model()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = minddp.DistributedDataParallel(make_model(), device_ids=[0], **MODES[name])
            x = inputs(1)[0]
            for _ in range(11):
                step(model, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        with torch.cuda.graph(graph):
            model(x).square().sum().backward()
        far = 0.0
        for batch in inputs(10):
            x.copy_(batch)
            graph.replay()
            step(plain, batch)
            far = max(far, worst(gradients(model), gradients(plain)))
        answers[name] = far
    return answers


def test_captured_steps_replay() -> None:
    environment = {**THROUGH_NCCL, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    for name, far in run_ranks(captured, 1, backend="nccl", env=environment)[0].items():
        assert far < 1e-4, name


# ---- GradScaler


def scaled(rank: int, world_size: int) -> tuple[float, list[float]]:
    """Trained with autocast and a scaler, an overflow on the way: how far from the bare module, and the scales."""

    def train(wrap: Callable[[nn.Module], nn.Module]) -> tuple[list[Tensor], list[float]]:
        model = wrap(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler, scales = torch.amp.GradScaler("cuda", init_scale=2.0**10), []
        for i, x in enumerate(inputs()):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().sum() * (float("inf") if i == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p.detach().clone() for p in model.parameters()], scales

    found, scales = train(lambda module: minddp.DistributedDataParallel(module, device_ids=[0]))
    want, same_scales = train(lambda module: module)
    assert scales == same_scales
    return worst(found, want), scales


def test_grad_scaler_skips_the_same_steps() -> None:
    far, scales = run_ranks(scaled, 1, backend="nccl", env=THROUGH_NCCL)[0]
    assert far < 1e-3
    assert scales[2] < scales[1]
