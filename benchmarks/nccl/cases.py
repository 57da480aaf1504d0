"""Same program, same numbers: what `many.py cases` runs on each rank, with torch's class and with minddp's.

A case returns whether it holds, and a note. Two ranks agree with torch's class to the bit where both add the same two
numbers; more ranks, and other arithmetic, to the tolerance that the case names. ``device_cases.py`` adds the cases
that need a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from here import CUDA, DEVICE, RANK, WORLD
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp

Case = Callable[[], tuple[bool, str]]
Tensors = Sequence[torch.Tensor | None]
CASES: dict[str, Case] = {}
ROUNDING = 0.0 if WORLD == 2 else 3e-6  # of sums of float32 in another order
SMALL = {"bucket_cap_mb": 0.6}  # several buckets


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# ---- what cases share


def net(width: int = 256, depth: int = 8, seed: int = 0, out: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, out)).to(DEVICE)


def batches(count: int = 4, width: int = 256, rows: int = 32, seed: int = 100) -> list[torch.Tensor]:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(seed + RANK)
    return [torch.randn(rows, width, generator=generator).to(DEVICE) for _ in range(count)]


def wrap(which: str, module: nn.Module, **options: Any) -> Any:
    ids = {"device_ids": [DEVICE.index]} if CUDA else {}
    return (TorchDDP if which == "torch" else minddp.DistributedDataParallel)(module, **ids, **options)


def plain(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy on the CPU, in float64."""
    return None if tensor is None else tensor.detach().double().cpu().clone()


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [plain(p.grad) for p in module.parameters()]


def parameters(module: nn.Module) -> list[torch.Tensor | None]:
    return [plain(p) for p in module.parameters()]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def train(
    which: str,
    options: dict[str, Any],
    make: Callable[[], nn.Module] = net,
    steps: int = 4,
    prepare: Callable[[Any], None] = lambda model: None,
    data: list[torch.Tensor] | None = None,
    micro: int = 1,
    kept: int = 12,
) -> Tensors:
    """The gradients of the last ``kept`` steps, each of ``micro`` backwards, then the parameters."""
    model = wrap(which, make(), **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = batches(steps * micro) if data is None else data
    found: list[torch.Tensor | None] = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(micro):
            with model.no_sync() if number < micro - 1 else contextlib.nullcontext():
                mean_square(model(data[step * micro + number])).backward()
        if step >= steps - kept:
            found += gradients(model)
        optimizer.step()
    return found + parameters(model)


def by_hand(module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor | None]:
    """The mean gradients, by an all-reduce for each parameter."""
    module.zero_grad()
    mean_square(module(batch)).backward()
    for p in module.parameters():
        dist.all_reduce(p.grad.div_(WORLD))
    return gradients(module)


def apart(found: Tensors, wanted: Tensors) -> tuple[bool, float]:
    """Whether they are equal to the bit, and the largest difference beside the tensor's largest value."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    far, same = 0.0, True
    for a, b in zip(found, wanted):
        if a is None or b is None:
            if a is not b:
                return False, float("inf")
            continue
        a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
        same &= torch.equal(a, b)
        far = max(far, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return same, far


def alike(tensors: Tensors) -> bool:
    """Whether all ranks hold the same bits."""
    mine = torch.cat([tensor.double().flatten() for tensor in tensors if tensor is not None]).to(DEVICE)
    top, low = mine.clone(), mine.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    return torch.equal(top, low)


def beside(found: Tensors, wanted: Tensors, limit: float = ROUNDING) -> tuple[bool, str]:
    """What a case returns that compares with torch's class."""
    same, far = apart(found, wanted)
    return same or far <= limit, "same bits" if same else f"apart {far:.1e}"


def both(options: dict[str, Any] | None = None, limit: float = ROUNDING, **how: Any) -> tuple[bool, str]:
    """The same program with both classes; all ranks of minddp's must also hold the same bits."""
    wanted = train("torch", SMALL | (options or {}), **how)
    found = train("minddp", SMALL | (options or {}), **how)
    ok, note = beside(found, wanted, limit)
    ranks = alike(found)
    return ok and ranks, f"{note}, ranks {'alike' if ranks else 'DIFFER'}"


# ---- training


@case
def default() -> tuple[bool, str]:
    steps = 200 if CUDA else 40
    ok, note = both({"bucket_cap_mb": 1.2}, limit=0.0 if WORLD == 2 else 1e-4, steps=steps)
    batch = batches(1)[0]
    model = wrap("minddp", net(), **SMALL)
    mean_square(model(batch)).backward()
    near, hand = beside(gradients(model), by_hand(net(), batch), limit=1e-6)
    return ok and near, f"{steps} steps, {note}; beside all-reduces by hand {hand}"


@case
def big_buckets() -> tuple[bool, str]:
    return both({"bucket_cap_mb": 25})


@case
def views() -> tuple[bool, str]:
    return both({"gradient_as_bucket_view": True}, steps=12)


class Branches(nn.Module):
    """Goes left or right by turns, on each rank the other way; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.left, self.right, self.never = (nn.Linear(256, 256) for _ in range(4))
        self.last, self.calls = nn.Linear(256, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x).tanh()
        x = (self.left if (self.calls + RANK) % 2 else self.right)(x).tanh()
        return self.last(x)


class LeftBranch(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.left(self.first(x).tanh()).tanh())


@case
def find_unused() -> tuple[bool, str]:
    return both({"find_unused_parameters": True}, make=lambda: Branches().to(DEVICE), steps=12)


@case
def find_unused_views() -> tuple[bool, str]:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    return both(options, make=lambda: Branches().to(DEVICE), steps=12)


@case
def static_graph() -> tuple[bool, str]:
    return both({"static_graph": True}, make=lambda: LeftBranch().to(DEVICE), steps=12)


@case
def no_sync() -> tuple[bool, str]:
    return both(micro=3)


@case
def no_sync_views() -> tuple[bool, str]:
    return both({"gradient_as_bucket_view": True}, micro=3)


@case
def join() -> tuple[bool, str]:
    def run(which: str) -> Tensors:
        model = wrap(which, net(), **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join():
            for x in batches(3 + 2 * RANK):
                optimizer.zero_grad()
                mean_square(model(x)).backward()
                optimizer.step()
        return parameters(model)

    wanted, found = run("torch"), run("minddp")
    ok, note = beside(found, wanted, limit=1e-5)
    return ok and alike(found), note


@case
def weighted() -> tuple[bool, str]:
    """Uneven batches: the gradient of the mean over all ranks' rows."""
    rows = 8 + 8 * RANK
    x = batches(1, rows=rows)[0]
    model = wrap("minddp", net(), **SMALL, reduction="weighted")
    minddp.add_weight(model, rows)
    model(x).square().sum().backward()
    module = net()
    module(x).square().sum().backward()
    for p in module.parameters():
        dist.all_reduce(p.grad)
    total = sum(8 + 8 * rank for rank in range(WORLD))
    wanted = [plain(p.grad) / total for p in module.parameters()]
    found = gradients(model)
    ok, note = beside(found, wanted, limit=1e-5)
    return ok and alike(found), f"beside the whole batch {note}"


@case
def summed() -> tuple[bool, str]:
    total = train("minddp", {**SMALL, "reduction": "sum"}, steps=1)
    mean = train("minddp", SMALL, steps=1)
    count = len(list(net().parameters()))
    ok, note = beside(total[:count], [None if g is None else g * WORLD for g in mean[:count]], limit=1e-5)
    return ok, f"beside the mean times ranks {note}"


# ---- communication hooks


def hooked(hook: Any, state: Callable[[], Any] = lambda: None) -> Callable[[Any], None]:
    return lambda model: model.register_comm_hook(state(), hook)


@case
def bf16_hook() -> tuple[bool, str]:  # torch's class takes it with NCCL only
    return both(prepare=hooked(default_hooks.bf16_compress_hook), limit=0.0 if WORLD == 2 else 2e-2)


@case
def fp16_hook() -> tuple[bool, str]:
    return both(prepare=hooked(default_hooks.fp16_compress_hook), limit=0.0 if WORLD == 2 else 2e-3)


@case
def builtin_fp16_hook() -> tuple[bool, str]:
    """Small gradients are subnormal in float16, and rounded once or twice."""

    def prepare(model: Any) -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    return both(prepare=prepare, limit=3e-2)


@case
def powersgd_hook() -> tuple[bool, str]:
    def state() -> Any:
        torch.manual_seed(5)
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    # Over Gloo torch's class mixes up the collectives of several buckets.
    options = {} if CUDA else {"bucket_cap_mb": 25}
    return both(options, prepare=hooked(powerSGD_hook.powerSGD_hook, state), steps=6, limit=1e-3)


@case
def own_hook() -> tuple[bool, str]:
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].mul(2.0))

    return both(prepare=hooked(hook))


@case
def noop_hook() -> tuple[bool, str]:
    """Nothing is sent: gradients stay local."""

    def hook(state, bucket):
        future = torch.futures.Future(devices=[DEVICE] if CUDA else None)
        future.set_result(bucket.buffer().mul(2.0))
        return future

    wanted = train("torch", SMALL, prepare=hooked(hook))
    return beside(train("minddp", SMALL, prepare=hooked(hook)), wanted, limit=0.0)


# ---- gradients in fewer bytes, and in one order


class Given(nn.Module):
    """Its gradients are given, so that they are the same on every device."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(64, 300), (17,), (129, 65), (1000,), (3, 5, 7), (256, 256)]
        self.p = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.given = [
            [torch.randn(shape, generator=generator) * 10.0 ** (i - 2) for i, shape in enumerate(shapes)]
            for _ in range(4)
        ]

    def forward(self, step: int) -> torch.Tensor:
        products = [(p * given.to(p.device)).sum() for p, given in zip(self.p, self.given[step])]
        return torch.stack(products).sum()


def given_gradients(device: torch.device, group: Any, **options: Any) -> Tensors:
    ids = {"device_ids": [device.index]} if device.type == "cuda" else {}
    module = Given(7 + RANK).to(device)
    model = minddp.DistributedDataParallel(module, process_group=group, **ids, **options)
    found: list[torch.Tensor | None] = []
    for step in range(4):
        model.zero_grad()
        model(step).backward()
        found += gradients(model)
    return found


def sent(limit: float, **options: Any) -> tuple[bool, str]:
    """Within ``limit`` of the plain mean; on a device with the bits that the CPU has over Gloo."""
    found = given_gradients(DEVICE, None, **SMALL, **options)
    ranks = alike(found)
    ok, note = beside(found, given_gradients(DEVICE, None, **SMALL), limit)
    note = f"beside the plain mean {note}, ranks {'alike' if ranks else 'DIFFER'}"
    if CUDA:
        gloo = dist.new_group(backend="gloo")
        on_cpu = given_gradients(torch.device("cpu"), gloo, **SMALL, **options)
        equal, bits = beside(found, on_cpu, limit=0.0)
        ok, note = ok and equal, f"{note}, beside the CPU {bits}"
    return ok and ranks, note


@case
def wire_int8() -> tuple[bool, str]:
    return sent(0.05, wire="int8")


@case
def wire_int8_views() -> tuple[bool, str]:
    return sent(0.05, wire="int8", gradient_as_bucket_view=True)


@case
def wire_bf16() -> tuple[bool, str]:
    return sent(0.02, wire="bf16")


@case
def wire_fp16() -> tuple[bool, str]:
    return sent(0.02, wire="fp16")


@case
def ordered() -> tuple[bool, str]:
    return sent(1e-6, ordered=True)


@case
def ordered_any_plan() -> tuple[bool, str]:
    """The plan of buckets changes no bit."""
    plans = [given_gradients(DEVICE, None, ordered=True, bucket_cap_mb=cap) for cap in (0.05, 0.6, 25)]
    far = [apart(plan, plans[0]) for plan in plans]
    return all(same for same, _ in far), f"three plans, apart {[d for _, d in far]}"


# ---- modules and dtypes


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


@case
def sync_batchnorm() -> tuple[bool, str]:
    """Batches of other sizes on each rank, beside BatchNorm over the whole batch. torch's runs on GPUs only."""

    def state(module: nn.Module, x: torch.Tensor, factor: float) -> Tensors:
        for _ in range(3):
            module.zero_grad()
            module(x).square().sum().mul(factor).backward()
        return gradients(module) + [plain(b) for b in module.buffers()]

    pieces = [torch.empty(4 + 2 * rank, 3, 12, 12, device=DEVICE) for rank in range(WORLD)]
    pieces[RANK].copy_(torch.randn(pieces[RANK].shape, generator=torch.Generator().manual_seed(50 + RANK)))
    for rank, piece in enumerate(pieces):
        dist.broadcast(piece, rank)
    wanted = state(Norm().to(DEVICE), torch.cat(pieces), 1.0)
    notes, far = [], 0.0
    for which in ("torch", "minddp") if CUDA else ("minddp",):
        convert = nn.SyncBatchNorm if which == "torch" else minddp
        model = wrap(which, convert.convert_sync_batchnorm(Norm().to(DEVICE)))
        found = state(model, pieces[RANK], float(WORLD))
        # The gradient of the convolution's bias is zero but for rounding.
        far = max(float((a - b).abs().max()) / max(float(b.abs().max()), 0.1) for a, b in zip(found, wanted))
        notes.append(f"{which} {far:.1e}")
    return far < 1e-3, f"beside the whole batch: {', '.join(notes)}"


class Mixed(nn.Module):
    """Parameters of three dtypes, in turn."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        kinds = (torch.float32, torch.bfloat16, torch.float64) * 2
        self.layers = nn.ModuleList([nn.Linear(256, 256, dtype=kind) for kind in kinds])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


@case
def mixed_dtypes() -> tuple[bool, str]:
    return both(make=lambda: Mixed().to(DEVICE), limit=0.0 if WORLD == 2 else 2e-2)


@case
def two_wrappers() -> tuple[bool, str]:
    def run(which: str) -> Tensors:
        first, second = wrap(which, net(seed=1, out=256), **SMALL), wrap(which, net(seed=2), **SMALL)
        found: list[torch.Tensor | None] = []
        for x in batches(3):
            first.zero_grad()
            second.zero_grad()
            mean_square(second(first(x))).backward()
            found += gradients(first) + gradients(second)
        return found

    return beside(run("minddp"), run("torch"))


@case
def new_group() -> tuple[bool, str]:
    """A group is aborted while the other ranks wait in it; the ranks train on in a new one as torch's class would."""
    group = dist.new_group()
    model = wrap("minddp", net(), **SMALL, process_group=group)
    data = batches(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in data[:2]:
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        optimizer.step()
    module = model.module
    optimizer.zero_grad()
    if RANK > 0:  # their all-reduces wait for rank 0, which does not come
        dist.all_reduce(torch.ones(4, device=DEVICE), group=group, async_op=True)
    del model
    group._get_backend(DEVICE).abort()
    dist.barrier()
    second = dist.new_group()
    found = train("minddp", {**SMALL, "process_group": second}, make=lambda: module, data=data[2:])
    wanted = train("torch", SMALL, data=data, steps=6, kept=4)
    ok, note = beside(found, wanted)
    return ok and alike(found), note


@case
def lazy_memory() -> tuple[bool, str]:
    return beside(train("minddp", {**SMALL, "lazy_bucket_allocation": True}), train("torch", SMALL))


@case
def retain_graph() -> tuple[bool, str]:
    def run(which: str) -> Tensors:
        model = wrap(which, net(), **SMALL)
        found: list[torch.Tensor | None] = []
        for x in batches(3):
            model.zero_grad()
            mean_square(model(x)).backward(retain_graph=True)
            found += gradients(model)
        return found

    return beside(run("minddp"), run("torch"))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.body, self.reentrant = net(out=256), reentrant
        torch.manual_seed(1)
        self.head = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.detach().requires_grad_()
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@case
def checkpoints() -> tuple[bool, str]:
    outcomes = {kind: both(make=lambda kind=kind: Checkpointed(kind).to(DEVICE)) for kind in (False, True)}
    notes = [f"reentrant={kind}: {note}" for kind, (_, note) in outcomes.items()]
    return all(ok for ok, _ in outcomes.values()), "; ".join(notes)


@case
def autocast_scaler() -> tuple[bool, str]:
    """On a GPU one step's loss is infinite on rank 0: all ranks leave that step out, and halve their scale."""

    def run(which: str) -> tuple[Tensors, list[float]]:
        model = wrap(which, net(), **SMALL)
        optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.01), []
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, enabled=CUDA)
        for step, x in enumerate(batches(5)):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype=torch.float16 if CUDA else torch.bfloat16):
                loss = mean_square(model(x))
            scaler.scale(loss * (float("inf") if CUDA and step == 2 and RANK == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters(model), scales

    (wanted, their_scales), (found, scales) = run("torch"), run("minddp")
    ok, note = beside(found, wanted, limit=1e-4)
    return ok and scales == their_scales and alike(found), f"{note}, scales {scales}"


def owned(
    first: type[torch.optim.Optimizer], scales: bool = False, width: int = 256, **settings: Any
) -> tuple[bool, str]:
    """``minddp.Owned`` beside the plain optimizers, both with minddp's class: the same bits, and shares of states."""

    def run(owns: bool) -> tuple[Tensors, int]:
        model = wrap("minddp", net(width), **SMALL)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        entries: list[Any] = [(matrices, first, settings), (others, torch.optim.AdamW, {"lr": 0.01})]
        plain = [kind(params, **more) for params, kind, more in entries]
        optimizers = [minddp.Owned(model, entries)] if owns else plain
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, enabled=scales)
        for step, x in enumerate(batches(5, width)):
            model.zero_grad()
            factor = float("inf") if scales and step == 2 and RANK == 0 else 1.0
            scaler.scale(mean_square(model(x)) * factor).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return parameters(model), sum(len(optimizer.state) for optimizer in optimizers)

    (wanted, all_states), (found, states) = run(False), run(True)
    ok, note = beside(found, wanted, limit=0.0)
    return ok and alike(found) and states < all_states, f"{note}, {states} of {all_states} states"


@case
def owned_adamw() -> tuple[bool, str]:
    return owned(torch.optim.AdamW, lr=0.01, fused=CUDA or None)


@case
def owned_muon() -> tuple[bool, str]:
    # It multiplies in bfloat16: a CPU without instructions for that takes 0.3 s for each matrix of 256 by 256.
    return owned(torch.optim.Muon, width=256 if CUDA else 64, lr=0.02)


@case
def owned_scaler() -> tuple[bool, str]:
    return owned(torch.optim.AdamW, scales=True, lr=0.01)


@case
def mixed_precision() -> tuple[bool, str]:
    """torch's class takes it on GPUs only."""
    from torch.nn.parallel.distributed import _MixedPrecision

    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options, data = {**SMALL, "mixed_precision": config}, [x.bfloat16() for x in batches(4)]
    found = train("minddp", options, data=data)
    ok, note = beside(found, train("torch", options, data=data), limit=2e-2) if CUDA else (True, "ranks alike")
    return ok and alike(found), note


@case
def bf16_model() -> tuple[bool, str]:
    data = [x.bfloat16() for x in batches(4)]
    return both(make=lambda: net().bfloat16(), data=data, limit=0.0 if WORLD == 2 else 2e-2)


@case
def bf16_reduced_in_fp32() -> tuple[bool, str]:
    how: dict[str, Any] = {"make": lambda: net().bfloat16(), "data": [x.bfloat16() for x in batches(4)]}
    found = train("minddp", {**SMALL, "reduce_dtype": torch.float32}, **how)
    ok, note = beside(found, train("torch", SMALL, **how), limit=3e-2)
    return ok and alike(found), note


@case
def sparse() -> tuple[bool, str]:
    def make(is_sparse: bool) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(200, 16, sparse=is_sparse), nn.Flatten(), nn.Linear(64, 4)).to(DEVICE)

    generator = torch.Generator().manual_seed(9 + RANK)
    data = [torch.randint(0, 200, (8, 4), generator=generator).to(DEVICE) for _ in range(3)]
    found = train("minddp", {}, make=lambda: make(True), data=data, steps=3)
    ok, note = beside(found, train("torch", {}, make=lambda: make(False), data=data, steps=3), limit=1e-5)
    return ok, f"beside dense ones {note}"


@case
def buffers() -> tuple[bool, str]:
    """Other parameters and buffers on each rank at the beginning: rank 0's count."""

    def make() -> nn.Module:
        torch.manual_seed(11 + RANK)
        return nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(DEVICE)

    return both(make=make)


@case
def functional() -> tuple[bool, str]:
    from minddp import functional as collectives

    x = (torch.arange(WORLD * 2, dtype=torch.float, device=DEVICE) + RANK).requires_grad_()
    total = WORLD * (WORLD + 1) / 2
    of_rank = [float(i // 2 + 1) for i in range(WORLD * 2)]
    outputs = {
        "all_reduce": (collectives.all_reduce(x, "sum"), total),
        "all_gather": (collectives.all_gather(x), total),
        "reduce_scatter": (collectives.reduce_scatter(x), of_rank),
        "all_to_all": (collectives.all_to_all(x), of_rank),
        "broadcast": (collectives.broadcast(x, 0), total if RANK == 0 else 0.0),
    }
    wrong = []
    for name, (output, wanted) in outputs.items():
        (gradient,) = torch.autograd.grad((output * (RANK + 1.0)).sum(), x)
        if not torch.allclose(gradient, torch.as_tensor(wanted, dtype=torch.float, device=DEVICE)):
            wrong.append(f"{name}: {gradient.tolist()}")
    return not wrong, "; ".join(wrong) or f"gradients of {len(outputs)} collectives"


@case
def mismatch() -> tuple[bool, str]:
    """Ranks with other shapes: an error on all of them, and the group can be used afterwards."""
    try:
        wrap("minddp", nn.Linear(8, 8 + RANK).to(DEVICE))
    except RuntimeError as error:
        x = torch.ones(1, device=DEVICE)
        dist.all_reduce(x)
        return float(x) == WORLD, str(error).splitlines()[0][:120]
    return False, "no error"
