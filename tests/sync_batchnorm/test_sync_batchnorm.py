"""SyncBatchNorm on real ranks equals BatchNorm over the concatenated batch."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from minddp.functional.sync_batchnorm import SyncBatchNorm, batch_norm_reference, convert_sync_batchnorm
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks

CHANNELS = 5
TAILS = {"1d": (), "1d sequence": (4,), "2d": (3, 4), "3d": (2, 3, 2)}
OPTIONS = {
    "default": {},
    "momentum=None": {"momentum": None},
    "affine=False": {"affine": False},
    "untracked": {"track_running_stats": False},
    "bias=False": {"bias": False},
}
SPLITS = {"even": (4, 4, 4), "uneven": (1, 6, 3), "empty": (0, 5, 2), "one each": (1, 1, 1)}
NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def share(whole, sizes, rank, world_size):
    """Rank's part of the whole batch, along dimension 0."""
    return whole.split([*sizes[:world_size], len(whole) - sum(sizes[:world_size])])[rank]


def batch(rows, tail, dtype=torch.float32, layout=torch.contiguous_format, offset=0.0, device="cpu"):
    x = (torch.randn(rows, CHANNELS, *tail) * 2 + 1 + offset).to(device, dtype)
    return x.to(memory_format=layout) if layout != torch.contiguous_format else x


def summed(x):
    if x is None:
        return None
    total = x.clone()
    dist.all_reduce(total)
    return total


def plain_batch_norm(options, tail, dtype=torch.float32):
    """torch's layer for one process. `bias` is not an argument of every supported torch."""
    options = dict(options)
    bias = options.pop("bias", True)
    cls = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    layer = cls(CHANNELS, dtype=dtype, **options)
    if not bias:
        layer.register_parameter("bias", None)
    return layer


def compare_with_whole_batch(rank, world_size, device, tail, options, sizes, dtype, layout, tolerance):
    """Two training steps and an evaluation, beside BatchNorm on the whole batch."""
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    plain = plain_batch_norm(options, tail, statistics).to(device)
    if plain.affine:
        nn.init.normal_(plain.weight)
    layer = SyncBatchNorm(CHANNELS, dtype=statistics, device=device, **options)
    layer.load_state_dict(plain.state_dict())
    rows = sum(sizes[:world_size])

    def close(name, ours, truth):
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")

    for step in range(2):
        whole = batch(rows, tail, dtype, layout, step, device).requires_grad_()
        cotangent = batch(rows, tail, dtype, layout, device=device)
        local = share(whole.detach(), sizes, rank, world_size).clone(memory_format=torch.preserve_format)
        local.requires_grad_()
        for module in (plain, layer):
            module.zero_grad()
        expected = plain(whole)
        expected.backward(cotangent)
        y = layer(local)
        y.backward(share(cotangent, sizes, rank, world_size))
        assert y.dtype == dtype
        assert local.grad.dtype == dtype
        if layout != torch.contiguous_format and len(local) > 1:
            assert y.is_contiguous(memory_format=layout)
            assert local.grad.is_contiguous(memory_format=layout)
        close("output", y, share(expected, sizes, rank, world_size))
        close("input gradient", local.grad, share(whole.grad, sizes, rank, world_size))
        for name, parameter in plain.named_parameters():
            ours = layer.get_parameter(name).grad
            assert ours.dtype == statistics
            values = whole.numel() // CHANNELS  # a sum over so many: its rounding grows with them
            close(f"{name} gradient", summed(ours) / values, parameter.grad / values)
        for name, buffer in plain.named_buffers():
            close(name, layer.get_buffer(name), buffer)
    evaluated = batch(3, tail, dtype, layout, device=device)
    close("eval", layer.eval()(evaluated), plain.eval()(evaluated))


def cases():
    """(shape, options, split, dtype, memory format, tolerance); the 2-d layer gets every combination."""
    contiguous = torch.contiguous_format
    for options, split in itertools.product(OPTIONS, SPLITS):
        yield "2d", options, split, torch.float32, contiguous, 1e-5
    for shape, split in itertools.product(("1d", "1d sequence", "3d"), SPLITS):
        yield shape, "default", split, torch.float32, contiguous, 1e-5
    for split in SPLITS:
        yield "2d", "default", split, torch.float32, torch.channels_last, 1e-5
        yield "3d", "default", split, torch.float32, torch.channels_last_3d, 1e-5
    for options, split in itertools.product(("default", "affine=False"), ("uneven", "empty")):
        yield "2d", options, split, torch.float64, contiguous, 1e-12
        yield "2d", options, split, torch.float16, contiguous, 4e-3
        yield "2d", options, split, torch.bfloat16, torch.channels_last, 3e-2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@on_ranks(2, 3)
def test_equals_batch_norm_over_the_whole_batch(rank, world_size, device):
    count = 0
    for shape, options, split, *rest in cases():
        try:
            setting = TAILS[shape], OPTIONS[options], SPLITS[split]
            compare_with_whole_batch(rank, world_size, device, *setting, *rest)
        except AssertionError as error:
            raise AssertionError(f"{shape}, {options}, {split}, {rest}: {error}") from None
        count += 1
    assert count == len(list(cases()))


# Replicated -> local and back, so that a numerical derivative may move one element of the whole batch on
# all ranks at once. Each is the other's derivative.


class Enter(Function):
    """A replicated value enters the ranks' own computations: their gradients add up."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return Leave.apply(grad)


class Leave(Function):
    """The ranks' own values are summed to a replicated one."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return Enter.apply(grad)


def gradients_across_ranks(rank, world_size, sizes):
    rows = sum(sizes)
    start = sum(sizes[:rank])

    def over_all_ranks(normalize):
        def function(whole, weight, bias):
            local = Enter.apply(whole)[start : start + sizes[rank]]
            y = normalize(local, Enter.apply(weight), Enter.apply(bias))
            after = rows - start - sizes[rank]
            return Leave.apply(F.pad(y, [0, 0] * (y.dim() - 1) + [start, after]))

        return function

    layer = SyncBatchNorm(2, affine=False, track_running_stats=False, dtype=torch.float64)

    def fast(x, weight, bias):
        layer.weight, layer.bias = None, None
        layer._parameters.update(weight=weight, bias=bias)
        return layer(x)

    def reference(x, weight, bias):
        return batch_norm_reference(x, weight, bias, 1e-5, dist.group.WORLD)[0]

    inputs = [
        torch.randn(rows, 2, 2, dtype=torch.float64),
        torch.randn(2, dtype=torch.float64),
        torch.randn(2, dtype=torch.float64),
    ]
    inputs = [value.requires_grad_() for value in inputs]
    passed = []
    for normalize in (fast, reference):
        function = over_all_ranks(normalize)
        passed.append(torch.autograd.gradcheck(function, inputs))
        passed.append(torch.autograd.gradgradcheck(function, inputs))
    return all(passed)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0), pytest.param((1, 1, 2), marks=pytest.mark.all)])
def test_first_and_second_derivatives_are_exact(sizes):
    assert all(run_ranks(gradients_across_ranks, len(sizes), sizes))


@on_ranks(2)
def test_statistics_are_stable_far_from_zero(rank, world_size):
    """float32 values near 10,000 with a deviation of 1: E[x^2] - E[x]^2 would have no digit right.

    What is left is the rounding of the ranks' means, 5e-4, times their distance from the common one.
    """
    torch.manual_seed(1)
    whole = 1e4 + torch.randn(64 * world_size, CHANNELS, 8)
    layer = SyncBatchNorm(CHANNELS, momentum=None)
    layer(whole.chunk(world_size)[rank])
    truth = whole.double().var((0, 2))
    assert (layer.running_var.double() / truth - 1).abs().max() < 1e-4


@on_ranks(2)
def test_odd_places(rank, world_size):
    """Batches of nobody, no_grad, frozen parameters, an input that needs no gradient, half buffers."""
    group = dist.new_group(list(range(world_size)))
    layer = SyncBatchNorm(CHANNELS, process_group=group)
    before = {name: value.clone() for name, value in layer.named_buffers()}
    y = layer(torch.empty(0, CHANNELS, 2, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, CHANNELS, 2)
    assert torch.equal(layer.running_mean, before["running_mean"])
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer.weight.grad.count_nonzero() == 0

    with torch.no_grad():
        assert not layer(torch.randn(2, CHANNELS)).requires_grad
    layer.zero_grad()
    layer(torch.randn(2, CHANNELS)).sum().backward()  # no collective going back, and none is missing
    assert layer.bias.grad.eq(2).all()
    layer.requires_grad_(False)
    x = torch.randn(2, CHANNELS, requires_grad=True)
    layer(x).square().sum().backward()
    assert layer.weight.grad is not None  # from before; frozen ones get nothing new
    assert x.grad.isfinite().all()

    half = SyncBatchNorm(CHANNELS).half()
    z = half(torch.randn(3, CHANNELS, dtype=torch.float16, requires_grad=True))
    z.float().sum().backward()
    assert half.weight.grad.dtype == half.running_mean.dtype == torch.float16

    view = torch.randn(4, 3, CHANNELS, requires_grad=True).transpose(1, 2)  # not contiguous
    full = SyncBatchNorm(CHANNELS)(view)
    plain, _ = batch_norm_reference(view, None, None, 1e-5, dist.group.WORLD)
    torch.testing.assert_close(full, plain)


@on_ranks(3)
def test_synchronizes_within_its_group_only(rank, world_size):
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    layer = SyncBatchNorm(1, process_group=groups[min(rank, 1)])
    layer(torch.tensor([[float(rank)], [rank + 2.0]]))
    assert layer.running_mean.item() * 10 == pytest.approx(2.5 if rank else 1.0)
    outside = pytest.raises(ValueError, match="is not in the layer's process_group")
    with outside if rank else contextlib.nullcontext():
        SyncBatchNorm(1, process_group=groups[0])(torch.ones(2, 1))


class Operators(TorchDispatchMode):
    """What is called, with which arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.name(), args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2, 3)
def test_a_step_asks_nothing_of_cuda_that_it_refuses(rank, world_size, dtype):
    """CUDA's backward asserts the saved statistics, and a graph captures no copy from or to the host."""
    layer = SyncBatchNorm(4)
    x = torch.randn(3, 4, 2, 2, dtype=dtype, requires_grad=True)
    layer(x).float().square().sum().backward()  # compares the ranks, once
    with Operators() as operators:
        layer(x).float().square().sum().backward()
    names = [name for name, _ in operators.calls]
    ((_, backward),) = [call for call in operators.calls if call[0] == "aten::native_batch_norm_backward"]
    of_running_and_saved = backward[3:7]  # mean and variance, and mean and deviation
    assert all(argument is not None for argument in of_running_and_saved)
    copies = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::_local_scalar_dense", "aten::item"}
    assert not copies.intersection(names)
    collectives = [name for name in names if name.startswith("c10d::")]
    assert collectives == ["c10d::_allgather_base_", "c10d::allreduce_"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@on_ranks(2)
def test_compiles_with_a_graph_break(rank, world_size):
    torch.manual_seed(0)
    plain = convert_sync_batchnorm(Block())
    x = torch.randn(4, 1, 6, 6)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    whole = torch.compile(plain, backend=backend)
    truth = plain(x)
    truth.sum().backward()
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    y = whole(x)
    y.sum().backward()
    torch.testing.assert_close(y, truth)
    for ours, right in zip(plain.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, right)
    assert len(graphs) == 2  # what comes before the layer, and what after it
    assert not any("batch_norm" in code for code in graphs)
    with pytest.raises(Exception, match=r"(?i)graph break|torch\.compiler\.disable|fullgraph"):
        torch.compile(plain, backend="eager", fullgraph=True)(x)


def message_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing raised"


@on_ranks(2)
def test_every_rank_raises(rank, world_size):
    """What each mistake says on this rank."""
    dtype = torch.float64 if rank else torch.float32
    single = torch.randn(1 if rank == 1 else 0, 3)
    channels, dtype, single = [
        message_of(lambda: SyncBatchNorm(3 + rank)(torch.randn(2, 3 + rank))),
        message_of(lambda: SyncBatchNorm(3, dtype=dtype)(torch.randn(2, 3, dtype=dtype))),
        message_of(lambda: SyncBatchNorm(3)(single)),
    ]
    assert "rank 0: 3 channels, float32 statistics, rank 1: 4 channels, float32 statistics" in channels
    assert "rank 0: 3 channels, float32 statistics, rank 1: 3 channels, float64 statistics" in dtype
    assert "expected more than one value per channel in the group's batch" in single
    in_python = type("InPython", (dist.ProcessGroup,), {})
    without_hash = type("WithoutHash", (in_python,), {"__hash__": None})
    for group in (in_python(rank, world_size), without_hash(rank, world_size)):
        for make, layer in ((SyncBatchNorm, 3), (convert_sync_batchnorm, nn.Identity())):
            with pytest.raises(TypeError, match=f"no table of process_group, a {type(group).__name__} of the"):
                make(layer, process_group=group)
