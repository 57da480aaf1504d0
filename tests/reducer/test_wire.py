"""wire= and ordered=: what travels, what is summed in which order, and what rounding has lost."""

from __future__ import annotations

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import minddp
from minddp import Wire
from tests.on_ranks import on_ranks
from tests.ranks_pool import RankError, run_ranks

SHAPES = {"wide": (9, 300), "square": (32, 48), "vector": (700,), "small": (3, 2)}


class Given(nn.Module):
    """Its gradients are what each forward is given, by parameter."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(p * gradients[name]).sum() for name, p in self.named_parameters()]).sum()


def gradients(rank: int, iteration: int = 0, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    # Of magnitudes that differ from rank to rank, so that the order of additions shows.
    return {name: torch.randn(shape, generator=generator) * 10.0**rank for name, shape in shapes.items()}


def averages(ddp: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.grad.clone() for name, p in ddp.named_parameters()}


# --- the readable versions ---


def in_order(everyone: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    total = everyone[0].to(torch.float32)
    for other in everyone[1:]:
        total = total + other.to(torch.float32)
    return total.to(dtype)


def quantized(x: Tensor) -> Tensor:
    """What 8-bit codes leave of float32: blocks of 256 with one scale, rounded to nearest, ties to even."""
    padded = torch.cat([x.flatten(), torch.zeros(-x.numel() % 256)]).view(-1, 256)
    largest = padded.abs().amax(dim=1, keepdim=True)
    codes = torch.round(padded * torch.where(largest < 1e-30, 0.0, torch.tensor(127.0) / largest))
    return (codes * (largest / 127)).flatten()[: x.numel()].view(x.shape)


def in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same with error feedback, of whole blocks: 16 bits; the upper eight travel, the lower eight stay."""
    blocks = x.view(-1, 256)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    fixed = torch.round(blocks * (torch.tensor(127.0) / largest) * 256)
    upper = torch.floor((fixed + 128) / 256)
    return (upper * (largest / 127)).view(x.shape), ((fixed - 256 * upper) * (largest / 127 / 256)).view(x.shape)


def value_of(state: tuple[tuple[int, ...], tuple[int, ...], Tensor]) -> Tensor:
    """What a parameter's part of ``wire_state()`` stands for."""
    blocks = state[2].view(-1, 260)
    return blocks[:, :256].view(torch.int8) * blocks[:, 256:].contiguous().view(torch.float32)


def expected(wire: str | None, name: str, world_size: int) -> Tensor:
    everyone = [gradients(rank)[name] * (1 / world_size) for rank in range(world_size)]
    if wire is None or len(SHAPES[name]) < 2:
        return in_order(everyone)
    if wire == "int8":
        return quantized(in_order([quantized(x) for x in everyone]))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    return in_order([x.to(dtype) for x in everyone], dtype).float()


# --- which bits ---

PLANS: dict[str, dict[str, Any]] = {
    "one bucket a gradient": {"bucket_cap_mb_list": [1e-6] * 2},
    "default": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 2e-3},
    "lazy": {"lazy_bucket_allocation": True, "bucket_cap_mb_list": [1e-3, 1]},
}


def _bits(rank: int, world_size: int, wire: str | None) -> list[str]:
    wrong = []
    for plan, options in PLANS.items():
        ddp = minddp.DistributedDataParallel(
            Given(), wire=wire and Wire(wire, error_feedback=False), ordered=True, **options
        )
        for iteration in range(3):  # the buckets are cut anew after the first
            ddp.zero_grad()
            ddp(gradients(rank)).backward()
            for name, found in averages(ddp).items():
                if not torch.equal(found, expected(wire, name, world_size)):
                    wrong.append(f"{plan}, iteration {iteration}: {name}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_each_rank_has_the_bits_of_the_readable_version(backend: str, world_size: int) -> None:
    """Whatever the plan and the transport are."""
    for wire in (None, "bf16", "fp16", "int8"):
        assert run_ranks(_bits, world_size, wire, backend=backend) == [[]] * world_size, wire


@on_ranks(3)
def test_a_large_bucket_goes_in_chunks(rank: int, world_size: int) -> None:
    """More than one chunk of the transport's, and numbers of elements that ranks cannot share evenly."""
    shapes = {"large": (1031, 1031), "other": (1025, 1027)}
    same = []
    for options in ({"ordered": True}, {"wire": Wire("int8", error_feedback=False)}):
        ddp = minddp.DistributedDataParallel(Given(shapes), bucket_cap_mb=100, **options)
        ddp(gradients(rank, shapes=shapes)).backward()
        for name, found in averages(ddp).items():
            everyone = [gradients(r, shapes=shapes)[name] * (1 / world_size) for r in range(world_size)]
            quantizes = "wire" in options
            total = in_order([quantized(x) if quantizes else x for x in everyone])
            same.append(torch.equal(found, quantized(total) if quantizes else total))
    assert all(same)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
@on_ranks(2)
def test_what_is_not_finite_arrives_as_such_and_leaves_the_rest(rank: int, world_size: int, wire: str) -> None:
    """Rank 0 has what is not finite, in one block of one parameter."""
    shapes = {"weight": (4, 256)}
    given = torch.full((4, 256), 0.5)
    if rank == 0:
        given[1, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    ddp = minddp.DistributedDataParallel(Given(shapes), wire=wire)
    ddp({"weight": given}).backward()
    grad = averages(ddp)["weight"]
    residual = value_of(*minddp.wire_state(ddp).values()) if wire == "int8" else torch.zeros(1)
    plus, minus, nan = grad[1, :3].tolist()
    assert (plus, minus) == (float("inf"), -float("inf")) and nan != nan
    assert (grad.flatten()[259:] - 0.5).abs().max().item() < 0.005
    assert residual.isfinite().all()


@pytest.mark.parametrize(
    "options, values",
    [
        ({}, (1e-3, 3e5)),
        ({"reduction": "sum", "check_finite": "raise"}, (4e4, 4e4)),
        ({"reduction": "sum"}, (3e5, -3e5)),  # infinities of both signs: NaN
    ],
    ids=["cast", "sum", "both signs"],
)
@on_ranks(2)
def test_an_overflow_of_fp16_is_named(
    rank: int, world_size: int, options: dict[str, Any], values: tuple[float, float]
) -> None:
    """Once, on each rank: of what a rank sends, and of a sum of what each rank could send."""
    ddp = minddp.DistributedDataParallel(Given({"other": (2, 2), "weight": (4, 256)}), wire="fp16", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for large in (1.0, values[rank], values[rank]):
            ddp.zero_grad()
            ddp({"other": torch.ones(2, 2), "weight": torch.full((4, 256), large)}).backward()
    said = [str(w.message) for w in caught if "float16" in str(w.message)]
    assert len(said) == 1 and "'weight' is not finite" in said[0]


# --- error feedback ---


def _drift(rank: int, world_size: int, wire: Wire, steps: int) -> float:
    """How far the sum of what was received is from the sum of the averages, in steps of a code."""
    ddp = minddp.DistributedDataParallel(Given(), wire=wire)
    received, exact = torch.zeros(32, 48), torch.zeros(32, 48)
    mine = {name: g / 10.0**rank for name, g in gradients(rank).items()}
    for iteration in range(steps):
        if iteration == steps // 2:  # a new plan keeps it
            ddp._minddp_averager.set_buckets([[i] for i in reversed(range(4))])
        ddp.zero_grad()
        ddp(mine).backward()
        received += averages(ddp)["square"]
        total = mine["square"].clone()
        dist.all_reduce(total)
        exact += total / world_size
    return float((received - exact).abs().max() / (exact.abs().max() / steps / 127))


@pytest.mark.parametrize("world_size", [2, 3])
def test_error_feedback_loses_nothing_over_time(world_size: int) -> None:
    for drift in run_ranks(_drift, world_size, Wire("int8"), 40):
        assert drift < 3
    for drift in run_ranks(_drift, world_size, Wire("int8", error_feedback=False), 40):
        assert drift > 10


DISCARDS = ["check skips", "check skips, bias", "given up", "given up before it is summed", "a scaler skips"]


@pytest.mark.parametrize("how", DISCARDS)
@on_ranks(2)
def test_what_is_lost_of_a_discarded_gradient_does_not_come_back(rank: int, world_size: int, how: str) -> None:
    """Huge gradients that nobody uses; then the parameters' largest after each step with gradients of 1."""
    model = Given({"bias": (3,), "weight": (2, 256)})  # the weight's gradient comes first
    ddp = minddp.DistributedDataParallel(model, wire="int8", check_finite="skip" if "check" in how else False)
    optimizer, seen = torch.optim.SGD(ddp.parameters(), 1.0), []
    bad = _discarded_in(how)
    for iteration in range(bad + 3):
        given = {"weight": torch.ones(2, 256), "bias": torch.ones(3)}
        if iteration == bad:
            given["weight"] = torch.linspace(1e9, 2e9 + 1e9 * rank, 512).view(2, 256).clone()
            if "before" not in how:
                (given["bias"] if "bias" in how else given["weight"][0])[0] = float("inf")  # one block keeps its loss
            elif rank == 1:
                time.sleep(0.3)  # rank 0 has given up before this one sends
        optimizer.zero_grad()
        handle = model.bias.register_hook(_raise) if "given up" in how and iteration == bad else None
        with pytest.raises(ZeroDivisionError) if handle else contextlib.nullcontext():
            ddp(given).backward()
        if handle:
            handle.remove()
            minddp.abort_iteration(ddp)
        elif iteration != bad or "check" in how:
            optimizer.step()
        seen.append(float(model.weight.abs().max()))
    steps = [1, 2, 3, 4]
    steps.insert(_discarded_in(how), _discarded_in(how))
    assert seen == pytest.approx(steps[: len(seen)], abs=0.02)


def _discarded_in(how: str) -> int:
    return 2 if "before" in how else 1  # before the second forward ranks meet


@on_ranks(2)
def test_beside_other_arguments(rank: int, world_size: int) -> None:
    """Beside what also says what travels; under other default dtypes and devices; with a plan made without."""
    low = minddp.DistributedDataParallel(Given(dtype=torch.bfloat16), ordered=True, reduce_dtype=torch.float32)
    mixed = torch.nn.parallel.distributed._MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    cast = minddp.DistributedDataParallel(Given(), ordered=True, mixed_precision=mixed)
    net = Given()
    plain = minddp.DistributedDataParallel(Given(), bucket_plan=None)
    plan = minddp.bucket_plan(plain)
    torch.set_default_dtype(torch.float64)
    try:
        pinned = minddp.DistributedDataParallel(net, wire="int8", bucket_plan=plan)
        pinned(gradients(rank)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for ddp, travels in ((low, torch.float32), (cast, torch.bfloat16)):
        assert {kind[-1] for kind in ddp._minddp_averager.kinds} == {travels}
    state = minddp.wire_state(pinned)
    net.requires_grad_(False).wide.requires_grad_()
    minddp.refresh(pinned)
    minddp.load_wire_state(pinned, state)
    assert all(value_of(state[name]).numel() == -(-math.prod(SHAPES[name]) // 256) * 256 for name in state)


class Again(nn.Module):
    """A gradient that comes in two contributions: from a reentrant checkpoint, and from around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 256))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        x = torch.ones((), requires_grad=True)
        inside = torch.utils.checkpoint.checkpoint(lambda x: (self.weight * one * x).sum(), x, use_reentrant=True)
        return inside + (self.weight * other).sum()


@on_ranks(2)
def test_a_gradient_that_grows_is_encoded_once(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(Again(), wire="int8")
    shapes = {"one": (8, 256), "other": (8, 256)}
    lost, same = [torch.zeros(8, 256) for _ in range(world_size)], []
    given = [gradients(r, shapes=shapes) for r in range(world_size)]
    for _ in range(3):
        ddp.zero_grad()
        ddp(**given[rank]).backward()
        sent = [(g["other"] + g["one"]) * (1 / world_size) + loss for g, loss in zip(given, lost)]
        received, lost = (list(halves) for halves in zip(*map(in_halves, sent)))
        total = in_order(received)
        off = total - quantized(total)
        for r in range(world_size):  # rank r has summed the r-th part of the blocks
            part = slice(r * 8 // world_size, (r + 1) * 8 // world_size)
            lost[r][part] = quantized(lost[r][part] + off[part])
        kept = value_of(minddp.wire_state(ddp)["weight"])
        same += [torch.equal(averages(ddp)["weight"], quantized(total)), torch.equal(kept, lost[rank])]
    assert all(same)


@on_ranks(2)
def test_error_feedback_can_be_saved(rank: int, world_size: int) -> None:
    """A wrapper that is made anew goes on with the same bits."""

    def step(ddp: nn.Module, iteration: int) -> dict[str, Tensor]:
        ddp.zero_grad()
        ddp(gradients(rank, iteration)).backward()
        return averages(ddp)

    ddp = minddp.DistributedDataParallel(Given(), wire="int8")
    for iteration in range(3):
        step(ddp, iteration)
    state = minddp.wire_state(ddp)
    assert sorted(state) == ["small", "square", "wide"]
    other = minddp.DistributedDataParallel(Given(), wire="int8")
    step(other, 0)
    minddp.load_wire_state(other, state)
    for wrong in (None, [*state]):
        with pytest.raises(TypeError, match=r"load_wire_state: state must be what minddp.wire_state\(ddp\) returned"):
            minddp.load_wire_state(other, wrong)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="'small'"):
        minddp.load_wire_state(other, {name: state[name] for name in ("wide", "square")})
    for wrong in (state["wide"], ((2, 2), *state["small"][1:])):
        with pytest.raises(ValueError, match=r"'small' has Layout\(.* there and Layout\(shape=\(3, 2\)"):
            minddp.load_wire_state(other, state | {"small": wrong})
    *layout, blocks = state["wide"]  # not the first
    far, negative = blocks.clone(), blocks.clone()
    far[-4:], negative[-4:] = 255, torch.tensor([0, 0, 0, 128], dtype=torch.uint8)  # a NaN, and -0
    broken = [(*layout, wrong) for wrong in (far, negative, blocks.to("meta"), blocks.float(), blocks[:260])]
    for wrong in (torch.zeros(3, 2), None, blocks, *broken):
        zeros = {name: (*kept[:2], torch.zeros_like(kept[2])) for name, kept in state.items()}
        with pytest.raises(ValueError, match="parameter 'wide'"):
            minddp.load_wire_state(other, zeros | {"wide": wrong})  # type: ignore[dict-item]
    assert all(torch.equal(kept[2], state[name][2]) for name, kept in minddp.wire_state(other).items())
    want, found = step(ddp, 3), step(other, 3)
    assert all(torch.equal(want[name], found[name]) for name in want)


@on_ranks(2)
def test_feedback_in_another_memory_format_begins_anew(rank: int, world_size: int) -> None:
    """The buckets are cut anew after the first step, when the gradients lie in another order than at the start."""
    ddp = minddp.DistributedDataParallel(Given({"w": (6, 4, 3, 3)}), wire="int8")
    given = {"w": gradients(rank, shapes={"w": (6, 4, 3, 3)})["w"]}
    with torch.no_grad():
        ddp.module.w.set_(ddp.module.w.to(memory_format=torch.channels_last))
    found = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(given).backward()
        _, strides, _ = minddp.wire_state(ddp)["w"]
        found.append(strides == ddp.module.w.grad.stride())
    ddp._minddp_averager.set_buckets([[0]])
    _, strides, blocks = minddp.wire_state(ddp)["w"]
    assert found[1] and strides == ddp.module.w.grad.stride() and blocks.any()


# --- with everything else ---


class Net(nn.Module):
    def __init__(self, branches: bool = False, norm: bool = True):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(40, 30)
        self.norm = minddp.SyncBatchNorm(30) if norm else nn.Identity()
        self.branches = branches

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.branches:
            return self.norm(self.b(x) if rank == 0 else self.c(x))
        return self.norm(self.b(x) + self.c(x))


@on_ranks(2)
def test_what_no_rank_uses_keeps_its_feedback(rank: int, world_size: int) -> None:
    """No rank uses a parameter whose `.grad` is an earlier one, and another on each rank."""
    ddp = minddp.DistributedDataParallel(Net(branches=True), wire="int8", find_unused_parameters=True)
    x, spare = torch.randn(6, 12), ddp.module.c.weight
    ddp(x, 1).square().sum().backward()
    spare.grad = torch.randn(spare.shape, generator=torch.Generator().manual_seed(rank))
    kept, before = minddp.wire_state(ddp)["c.weight"][2], spare.grad.clone()
    for _ in range(2):
        ddp.module.a.zero_grad()
        ddp(x, 0).square().sum().backward()
    after = minddp.wire_state(ddp)["c.weight"][2]
    assert torch.equal(kept, after) and torch.equal(before, spare.grad) and kept.any()


def _plain(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    ddp(x, rank).square().mean().backward()


def _accumulates(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    with ddp.no_sync():
        _plain(ddp, x, rank, iteration)
    _plain(ddp, x * 0.5, rank, iteration)


def _twice(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    """Its gradients come twice in one backward of two forwards."""
    (ddp(x, rank).square().mean() + ddp(x + 1, rank).mean()).backward()


def _weighted(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    minddp.add_weight(ddp, 1.0 + rank)
    _plain(ddp, x, rank, iteration)


def _by_hand(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    ddp.require_manual_backward_finalization = True
    _plain(ddp, x, rank, iteration)
    ddp.finalize_backward()


def _given_up(ddp: Any, x: Tensor, rank: int, iteration: int) -> None:
    if iteration == 1:
        handle = ddp.module.a.weight.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            _plain(ddp, x, rank, iteration)
        handle.remove()
        minddp.abort_iteration(ddp)
        ddp.zero_grad()
    _plain(ddp, x, rank, iteration)


def _raise(grad: Tensor) -> Tensor:
    raise ZeroDivisionError


Step = Callable[[Any, Tensor, int, int], None]
USES: dict[str, tuple[dict[str, Any], Step]] = {
    "default": ({}, _plain),
    "no_sync": ({}, _accumulates),
    "twice": ({}, _twice),
    "unused": ({"find_unused_parameters": True}, _plain),
    "static": ({"static_graph": True}, _twice),
    "views": ({"gradient_as_bucket_view": True}, _accumulates),
    "lazy": ({"lazy_bucket_allocation": True}, _plain),
    "weighted": ({"reduction": "weighted"}, _weighted),
    "sum": ({"reduction": "sum"}, _plain),
    "finite": ({"check_finite": "skip"}, _plain),
    "by hand": ({}, _by_hand),
    "given up": ({}, _given_up),
    "uneven inputs": ({}, _plain),
}


def _train(rank: int, name: str, wire: dict[str, Any]) -> list[Tensor]:
    (options, step), joins = USES[name], name == "uneven inputs"
    ddp = minddp.DistributedDataParallel(Net(name == "unused", not joins), bucket_cap_mb=2e-3, **options, **wire)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join() if joins else contextlib.nullcontext():
        for iteration in range(4 - rank * joins):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * iteration + rank))
            optimizer.zero_grad()
            step(ddp, x, rank, iteration)
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@on_ranks(2)
def test_with_every_mode_of_the_reducer(rank: int, world_size: int) -> None:
    """Two ranks' sums in order are the all-reduce's own, bit for bit; all ranks end alike."""
    wrong = []
    for name in USES:
        want = _train(rank, name, {})
        for wire, most in (({"ordered": True}, 0.0), ({"wire": "bf16"}, 5e-3), ({"wire": "int8"}, 2e-2)):
            found = _train(rank, name, wire)
            off = max(float((a - b).abs().max()) for a, b in zip(found, want))
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, [p.tolist() for p in found])
            if off > most or any(other != everyone[0] for other in everyone):
                wrong.append(f"{name}, {wire}: off by {off}")
    assert not wrong


# --- what is refused ---


class Shy(nn.Parameter):
    """It answers what autograd's functions ask, and refuses the rest."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.dim, Tensor.is_floating_point, Tensor.stride, Tensor.numel, torch.empty_like):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@on_ranks(2)
def test_a_parameter_that_refuses_functions_travels_like_another(rank: int, world_size: int) -> None:
    for wire in ("bf16", "fp16", "int8"):
        found = []
        for kind in (nn.Parameter, Shy):
            module = Given()
            module.square = kind(module.square.detach())
            ddp = minddp.DistributedDataParallel(module, wire=wire)
            for iteration in range(2):
                ddp({name: 1e-3 * g for name, g in gradients(rank, iteration).items()}).backward()
            found.append(averages(ddp))
        assert all(torch.equal(found[0][name], found[1][name]) for name in SHAPES)


@on_ranks(2)
def test_what_makes_no_sense_is_refused(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel
    with pytest.raises(ValueError, match="wire must be 'bf16', 'fp16', 'int8' or None, got 'int4'"):
        ddp(Given(), wire="int4")
    with pytest.raises(TypeError, match="wire must be a str"):
        ddp(Given(), wire=torch.int8)
    for name, way in (("exact", "travel as they are"), ("stochastic", "error feedback"), ("seed", "at random")):
        with pytest.raises(TypeError, match=f"minddp.Wire no longer has the argument '{name}'.*{way}"):
            Wire("int8", **{name: None})
    with pytest.raises(ValueError, match="wire='int8' and reduce_dtype both say"):
        ddp(Given(), wire="int8", reduce_dtype=torch.float64)
    with pytest.raises(ValueError, match="'wide' is complex64|gradients travel.*|'wide'"):
        ddp(Given(dtype=torch.complex64), wire="bf16")
    with pytest.raises(ValueError, match="as many bytes as the gradient of 'wide', which is bfloat16"):
        ddp(Given(dtype=torch.bfloat16), wire="fp16")
    with pytest.raises(ValueError, match="wire"):
        ddp(Given(), wire=Wire("int8", error_feedback=rank == 1))
    with pytest.raises(ValueError, match="ordered"):
        ddp(Given(), ordered=rank == 1)
    with pytest.raises(TypeError, match=r"Wire\(error_feedback=\)"):
        Wire("int8", error_feedback="no")  # type: ignore[arg-type]
    delayed = Given()
    with pytest.raises(ValueError, match="wire='int8' does not go with delay_all_reduce_named_params"):
        named = [("small", delayed.small)]
        ddp(delayed, wire="int8", delay_all_reduce_named_params=named, param_to_hook_all_reduce=delayed.wide)
    wrapped = ddp(Given(), wire="int8")
    with pytest.raises(RuntimeError, match="leave those out, or the hook"):
        wrapped.register_comm_hook(None, lambda state, bucket: None)


@on_ranks(1)
def test_one_rank_sends_nothing(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(Given(), wire="int8")
    ddp(gradients(0)).backward()
    assert all(torch.equal(g, gradients(0)[name]) for name, g in averages(ddp).items())


def _dies(rank: int, world_size: int, wire: dict[str, Any]) -> str:
    ddp = minddp.DistributedDataParallel(Net(), bucket_cap_mb_list=[1e-6] * 2, **wire)
    _plain(ddp, torch.ones(6, 12), rank, 0)
    ddp.zero_grad()
    if rank == 1:
        ddp.module.a.bias.register_hook(lambda grad: os._exit(3))
    with pytest.raises(minddp.LostPeer, match=r"rank 1 .*") as raised:
        _plain(ddp, torch.ones(6, 12), rank, 1)
    return str(raised.value)


@pytest.mark.parametrize("wire", [{"ordered": True}, {"wire": "int8"}])
def test_a_rank_that_dies_is_named(wire: dict[str, Any]) -> None:
    """And the others can end."""
    with pytest.raises(RankError) as raised:
        run_ranks(_dies, 2, wire)
    assert set(raised.value.failures) == {1}
