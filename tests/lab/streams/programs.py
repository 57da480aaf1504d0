"""Programs whose gradients are made on several streams, for the fake device and, as the answer, for the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minddp
from minddp import messages
from minddp.wire import format as wire
from tests.reducer.late import LateGroup

from . import extension

ITERATIONS = 4


class Branches(nn.Module):
    """Two branches, the second on a stream of its own; gradients of both share buckets."""

    def __init__(self, device: str, joins: bool = True):
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.second = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.last = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3)
        self.joins = joins  # the side stream waits for what came before forward
        self.uses_spare = True
        self.side_first = False  # then its gradients come last
        self.side = torch.Stream(device) if device != "cpu" else None
        self.to(device)
        # autograd accumulates on the stream that a parameter was first used on, while anything remembers that.
        self.first_use: list[Tensor] = []
        if self.side is not None:
            torch.accelerator.synchronize()
            with self.side:
                self.first_use = [p.view_as(p) for p in self.second.parameters()]

    def forward(self, x: Tensor, side_x: Tensor) -> Tensor:
        if self.side_first:
            right = self._on_side(side_x)
            left = self.first(x)
        else:
            left = self.first(x)
            right = self._on_side(side_x)
        if self.side is not None:
            here = torch.accelerator.current_stream()
            here.wait_stream(self.side)
            right.record_stream(here)
        both = left + right
        out: Tensor = self.last(both)
        return out + self.spare(both) if self.uses_spare else out

    def _on_side(self, x: Tensor) -> Tensor:
        if self.side is None:
            return self.second(x)  # type: ignore[no-any-return]
        if self.joins:
            self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            x.record_stream(self.side)
            return self.second(x)  # type: ignore[no-any-return]


@dataclass
class Program:
    """What is trained, and how.

    Attributes:
        options: of the wrapper.
        zero: how gradients are emptied before an iteration; ``None``: they accumulate.
        steps: whether an optimizer steps.
        on_side: backward runs under a stream of the user's own.
        hook: a communication hook.
        joins: whether the side stream waits for what came before forward.
        spare_in: the iterations that use all parameters.
        side_first_in: those whose gradients come in another order than buckets were cut along.
        no_sync_in: those under ``no_sync``.
        release: buckets are given back after each iteration.
        join: all of it inside of ``join()``.
        delays: the second branch's gradients are reduced together, at the first one's.
        abort_in: the iterations before which another one is given up in the middle.
        reads: gradients are looked at after every iteration, or after the last alone.
        finalizes: the program ends each backward, by ``finalize_backward()``.
        optimizer: in the place of a plain step.
        scales: the loss is scaled, by a GradScaler, which leaves out the second step.
        backend: of the group.
    """

    options: dict[str, Any] = field(default_factory=dict)
    zero: bool | None = True
    steps: bool = True
    joins: bool = True
    on_side: bool = False
    hook: Callable[[Any, Any], Any] | None = None
    spare_in: tuple[int, ...] = tuple(range(ITERATIONS))
    side_first_in: tuple[int, ...] = (2, 3)
    no_sync_in: tuple[int, ...] = ()
    release: bool = False
    join: bool = False
    delays: bool = False
    abort_in: tuple[int, ...] = ()
    reads: bool = True
    finalizes: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    scales: bool = False
    backend: str = extension.NAME
    rounding: float = 1e-4  # on a device error feedback is coarser than on the CPU: a code may be the next one


def late_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Triples a bucket on a stream of its own, in a tensor of its own, as compressing hooks do."""
    buffer = bucket.buffer()
    if buffer.device.type == "cpu":
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer * 3)
        return done
    here, side = torch.accelerator.current_stream(), torch.Stream(buffer.device)
    side.wait_stream(here)
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
    with side:
        buffer.record_stream(side)
        future.set_result(buffer * 3)
    return future


def owned(first: type[torch.optim.Optimizer], **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """``minddp.Owned`` with ``first`` for the matrices, and AdamW for the rest."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        adamw = (others, torch.optim.AdamW, {"lr": 0.01, "foreach": False})  # the fake device has no foreach
        return minddp.Owned(model, [(matrices, first, settings), adamw])

    return make


OWNED = owned(torch.optim.AdamW, lr=0.01, foreach=False)
MIXED = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SMALL = {"bucket_cap_mb_list": [1e-4] * 2}  # several buckets of two or three gradients

PROGRAMS: dict[str, Program] = {
    "default": Program(SMALL),
    "one bucket": Program(),
    "each alone": Program({"bucket_cap_mb_list": [1e-6] * 2}),
    "views": Program({**SMALL, "gradient_as_bucket_view": True}),
    "views, alone": Program({"bucket_cap_mb_list": [1e-6] * 2, "gradient_as_bucket_view": True}),
    "views, accumulating": Program({**SMALL, "gradient_as_bucket_view": True}, zero=None, steps=False),
    "accumulating": Program(SMALL, zero=None, steps=False),
    "zeros": Program(SMALL, zero=False),
    "unused": Program({**SMALL, "find_unused_parameters": True}, spare_in=(0, 2)),
    "unused, views": Program(
        {**SMALL, "find_unused_parameters": True, "gradient_as_bucket_view": True}, spare_in=(0, 2)
    ),
    "unused, nothing is": Program({**SMALL, "find_unused_parameters": True}),
    "unused, skipped": Program(
        {**SMALL, "find_unused_parameters": True, "skip_all_reduce_unused_params": True}, spare_in=(0, 2)
    ),
    "unused, finalized by hand": Program({**SMALL, "find_unused_parameters": True}, spare_in=(0, 2), finalizes=True),
    "static": Program({**SMALL, "static_graph": True}, spare_in=()),
    "bfloat16 travels": Program({**SMALL, "reduce_dtype": torch.bfloat16}),
    "mixed precision": Program({**SMALL, "mixed_precision": MIXED}),
    "sum": Program({**SMALL, "reduction": "sum"}),
    "sum, no side": Program({**SMALL, "reduction": "sum"}, zero=False, steps=False, joins=False),
    "weighted": Program({**SMALL, "reduction": "weighted"}),
    "futures that order nothing": Program(SMALL, backend=extension.PLAIN),
    "futures that order nothing, unused": Program(
        {**SMALL, "find_unused_parameters": True}, spare_in=(0, 2), backend=extension.PLAIN
    ),
    "no_sync": Program(SMALL, zero=None, steps=False, no_sync_in=(0, 2)),
    "late hook": Program(SMALL, hook=late_hook),
    "late hook, views": Program({**SMALL, "gradient_as_bucket_view": True}, hook=late_hook),
    "on a stream of the user's": Program(SMALL, on_side=True),
    "side does not wait": Program(SMALL, steps=False, joins=False, reads=False),
    "ordered": Program({**SMALL, "ordered": True}),
    "ordered, views, unused": Program(
        {**SMALL, "ordered": True, "find_unused_parameters": True, "gradient_as_bucket_view": True}, spare_in=(0, 2)
    ),
    "ordered, futures that order nothing": Program({**SMALL, "ordered": True}, backend=extension.PLAIN),
    "ordered, given up": Program({**SMALL, "ordered": True}, abort_in=(2, 3)),
    "ordered, check_finite": Program({**SMALL, "ordered": True, "check_finite": "skip"}),
    "fp16 travels": Program({"wire": "fp16"}),
    "int8 travels": Program({**SMALL, "wire": minddp.Wire("int8", error_feedback=False)}),
    "int8 travels, feeds back": Program({**SMALL, "wire": "int8"}, rounding=2e-2),
    "int8 travels, unused": Program(
        {"wire": "int8", "find_unused_parameters": True}, spare_in=(0, 1), side_first_in=(1, 2, 3), rounding=2e-2
    ),
    "int8 travels, no_sync": Program({**SMALL, "wire": "int8"}, zero=None, steps=False, no_sync_in=(0, 2)),
    "check_finite": Program({**SMALL, "check_finite": "skip"}),
    "check_finite, futures that order nothing": Program({**SMALL, "check_finite": "skip"}, backend=extension.PLAIN),
    "join": Program(SMALL, join=True),
    "join, futures that order nothing": Program(SMALL, join=True, backend=extension.PLAIN),
    "delayed gradients": Program(SMALL, delays=True, side_first_in=()),
    "given up": Program(SMALL, abort_in=(2, 3)),
    "given up, side does not wait": Program(SMALL, steps=False, joins=False, reads=False, abort_in=(2, 3)),
    "given up, views": Program(
        {**SMALL, "gradient_as_bucket_view": True}, steps=False, joins=False, reads=False, abort_in=(1, 3)
    ),
    "given up, views, zeros": Program({**SMALL, "gradient_as_bucket_view": True}, zero=False, abort_in=(1, 3)),
    "given up, views, zeros, futures that order nothing": Program(
        {**SMALL, "gradient_as_bucket_view": True}, zero=False, abort_in=(1, 3), backend=extension.PLAIN
    ),
    "given up, views, zeros, late hook": Program(
        {**SMALL, "gradient_as_bucket_view": True}, zero=False, abort_in=(1, 3), hook=late_hook
    ),
    "given up, views, zeros, packed and held back": Program(
        {**SMALL, "gradient_as_bucket_view": True}, zero=False, abort_in=(1, 3), side_first_in=(0,)
    ),
    "given up, lazy": Program({**SMALL, "lazy_bucket_allocation": True}, abort_in=(1, 3)),
    "lazy": Program({**SMALL, "lazy_bucket_allocation": True}),
    "lazy, views": Program({**SMALL, "lazy_bucket_allocation": True, "gradient_as_bucket_view": True}),
    "buckets released": Program(SMALL, zero=None, steps=False, joins=False, release=True),
    "owned_adamw": Program(SMALL, optimizer=OWNED),
    "owned_adamw, futures that order nothing": Program(SMALL, optimizer=OWNED, backend=extension.PLAIN),
    # Products of bfloat16 matrices: a gradient that differs in its last bit may round otherwise.
    "owned_muon": Program(SMALL, optimizer=owned(torch.optim.Muon, lr=0.02), rounding=2e-2),
    "owned_scaler": Program(SMALL, optimizer=OWNED, scales=True),
}


@contextlib.contextmanager
def group(backend: str = extension.NAME) -> Iterator[None]:
    """The group of two ranks of which there is one, anew."""
    dist.init_process_group(backend, rank=0, world_size=2, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def ordered_on_the_cpu() -> Iterator[None]:
    """Ordered sums of CPU tensors take this group's backend for Gloo's."""
    with (
        mock.patch.object(wire, "_backend_name", return_value="gloo"),
        mock.patch.object(wire, "_companion", side_effect=lambda *_: extension.load().make_group(0, 2, True)),
    ):
        yield


def batches(device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(ITERATIONS, 2, 3, 5, generator=generator)
    return [(x.to(device), y.to(device)) for x, y in made]


def give_up(model: minddp.DistributedDataParallel, x: Tensor, side_x: Tensor) -> None:
    """An iteration that an exception ends when some buckets are on their way."""

    def fails(grad: Tensor) -> None:
        raise ValueError("in the middle")

    handle = model.module.first[0].bias.register_hook(fails)
    with contextlib.suppress(ValueError):
        model(x, side_x).square().mean().backward()
    handle.remove()
    minddp.abort_iteration(model)


def synchronize(device: str) -> None:
    """The host waits for all streams of ``device``."""
    if device == extension.NAME:
        extension.load().synchronize()
    elif device != "cpu":
        torch.accelerator.synchronize()


def train(
    program: Program, device: str, process_group: Any = None, after_backward: Callable[[int], None] = lambda i: None
) -> list[Tensor | None]:
    """Every gradient of every iteration, and the parameters at the end."""
    user = torch.Stream(device) if program.on_side and device != "cpu" else contextlib.nullcontext()
    seen: list[Tensor | None] = []
    with user:
        module = Branches(device, program.joins)
        options = dict(program.options)
        if program.delays:
            options["delay_all_reduce_named_params"] = list(module.second.named_parameters(prefix="second"))
            options["param_to_hook_all_reduce"] = module.first[0].weight
        model = minddp.DistributedDataParallel(module, process_group=process_group, **options)
        module.first_use.clear()
        if program.hook is not None:
            model.register_comm_hook(None, program.hook)
        model.require_manual_backward_finalization = program.finalizes
        optimizer = None if program.optimizer is None else program.optimizer(model)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, enabled=program.scales)
        inputs = batches(device)
        synchronize(device)
        joined = model.join(divide_by_initial_world_size=False) if program.join else contextlib.nullcontext()
        with joined:
            for i, (x, side_x) in enumerate(inputs):
                module.uses_spare = i in program.spare_in
                module.side_first = i in program.side_first_in
                if i in program.abort_in:
                    give_up(model, x, side_x)
                if program.zero is not None:
                    model.zero_grad(set_to_none=program.zero)
                if program.options.get("reduction") == "weighted":
                    minddp.add_weight(model, i + 1.0)
                with model.no_sync() if i in program.no_sync_in else contextlib.nullcontext():
                    infinite = program.scales and i == 1
                    loss = model(x, side_x).square().mean() * (float("inf") if infinite else 1.0)
                    scaler.scale(loss).backward()
                if program.finalizes:
                    model.finalize_backward()
                after_backward(i)
                if program.reads or i + 1 == ITERATIONS:
                    seen += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
                if optimizer is not None:
                    scaler.step(optimizer)
                    scaler.update()
                elif program.steps:
                    with torch.no_grad():
                        for p in module.parameters():
                            if p.grad is not None:
                                p.sub_(p.grad, alpha=0.1)
                if program.release:
                    minddp.release_buckets(model)
        seen += [p.detach().clone() for p in module.parameters()]
    synchronize(device)
    return [None if t is None else t.cpu() for t in seen]


def differences(found: list[Tensor | None], want: list[Tensor | None], rounding: float = 1e-4) -> list[str]:
    """Where the two are not the same to rounding."""
    wrong = []
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        if (a is None) != (b is None):
            wrong.append(f"{i}: {a} instead of {b}")
        elif (
            a is not None
            and b is not None
            and not torch.allclose(a, b, rtol=rounding, atol=rounding / 10, equal_nan=True)
        ):
            wrong.append(f"{i}: {float((a - b).abs().max())} apart")
    return wrong


def check(name: str, seeds: list[int]) -> list[str]:
    """Runs one program under each seed; what was wrong, with the seed."""
    device = extension.load()
    program = PROGRAMS[name]
    with group(program.backend), ordered_on_the_cpu():
        want = train(program, "cpu")
    wrong = []

    def joined(i: int) -> None:
        if "check_finite" in program.options:  # whose answer is waited for where it is used
            return
        wrong.extend(f"{name}, iteration {i}: the caller's stream is not after {text}" for text in device.unjoined())

    for seed in seeds:
        device.seed(seed)
        device.take_races()
        with group(program.backend):
            found = train(program, extension.NAME, after_backward=joined)
        texts = device.take_races() + differences(found, want, program.rounding)
        wrong += [f"{name}, order {seed}: {text}" for text in texts]
    return wrong


# join() asks torch for the group; groups in Python have no ordered sums; and from this one, of one rank alone, no
# other owner's values come.
LATE_PROGRAMS = [
    name
    for name, p in PROGRAMS.items()
    if not p.join and p.optimizer is None and not {"ordered", "wire"} & p.options.keys()
]


def check_late(names: list[str], device: str) -> list[str]:
    """The programs over a group in Python whose all-reduces end late; what was wrong, with the program."""
    wrong = []
    for seed, name in enumerate(names):
        program = PROGRAMS[name]
        futures_order = program.backend != extension.PLAIN
        want = train(program, "cpu", LateGroup("cpu"))
        if device == extension.NAME:
            extension.load().seed(seed)
            extension.load().take_races()
        # What Python waits for is watched as a group of torch's own is: waited for through its future.
        watched = mock.patch.object(messages, "_on_stall", return_value=lambda seconds, error: None)
        with watched if futures_order else contextlib.nullcontext():
            found = train(program, device, LateGroup(device, futures_order, blocks=futures_order))
        races = extension.load().take_races() if device == extension.NAME else []
        # A GPU and a CPU round products to bfloat16 each in its own way. A missing wait leaves half of a gradient.
        rounding = 3e-2 if device == "cuda" and "mixed_precision" in program.options else 1e-4
        wrong += [f"{name}: {text}" for text in races + differences(found, want, rounding)]
    return wrong
