"""A module that changes after it was wrapped: noticed, and taken over by refresh(). Replicas compared."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import RankError, run_ranks


def _net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3))


def _freeze(net):
    net[0].weight.requires_grad_(False)


def _add(net):
    net.append(nn.Linear(3, 2))


CHANGES = {
    "unfreeze": (lambda net: net[0].weight.requires_grad_(True), r"'0.weight' requires a gradient now"),
    "replace": (lambda net: net.register_module("2", nn.Linear(4, 3)), r"'2.weight' is new\n  '2.bias' is new"),
    "replace_parameter": (
        lambda net: net[2].register_parameter("weight", nn.Parameter(torch.randn(3, 4))),
        r"'2.weight' is new",
    ),
    "add": (_add, r"'4.weight' is new"),
    "cast": (nn.Module.double, r"The gradient of parameter '\S+' is dense Double on cpu.* minddp.refresh\(ddp\)"),
}


def _step(net, ddp, rank, iteration):
    """One step; whether the gradients are what averaging by hand gives."""
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    x = torch.randn(6, 4, generator=generator).to(net[0].weight.dtype)
    ddp(x).square().sum().backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    with ddp.no_sync():
        ddp(x).square().sum().backward()
    for name, p in net.named_parameters():
        assert (p.grad is not None) == (name in found) == p.requires_grad, name
        if p.grad is not None:
            dist.all_reduce(p.grad)
            torch.testing.assert_close(found[name], p.grad / dist.get_world_size(), msg=name)
    net.zero_grad()


def _change(rank, world_size, kind, kwargs, refresh):
    torch.manual_seed(rank)
    net = _net()
    if kind == "unfreeze":
        _freeze(net)
    ddp = minddp.DistributedDataParallel(net, **kwargs)
    for iteration in range(2):
        _step(net, ddp, rank, iteration)
    ddp(torch.randn(6, 4)).sum().backward()  # sends what no_sync has noted
    net.zero_grad()
    (_freeze if kind == "freeze" else CHANGES[kind][0])(net)
    if refresh:
        minddp.refresh(ddp)
        minddp.check_replicas(ddp, buffers=True)
    elif kind != "freeze":
        _steps_on(net, ddp, rank)
    for iteration in range(3):
        _step(net, ddp, rank, iteration)
    return len(ddp.reducer.names)


def _steps_on(net, ddp, rank):
    """With an optimizer that knows the new parameters."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.arange(24, dtype=net[2].weight.dtype).view(6, 4) * (rank + 1)
    for _ in range(2):  # where all parameters have gradients still, the step tells; else the next forward
        ddp(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", CHANGES)
def test_a_step_after_a_change_is_refused(kind):
    with pytest.raises(RankError) as raised:
        run_ranks(_change, 2, kind, {}, False)
    assert sorted(raised.value.failures) == [0, 1]
    raised.match(CHANGES[kind][1])


@pytest.mark.parametrize("kwargs", [{}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}])
@pytest.mark.parametrize(("kind", "count"), [("freeze", 5), *zip(CHANGES, [6, 6, 6, 8, 6], strict=True)])
def test_refresh_takes_the_change_over(kind, count, kwargs):
    assert run_ranks(_change, 2, kind, kwargs, True) == [count] * 2


def test_freezing_is_no_change_where_unused_parameters_are_fine():
    assert run_ranks(_change, 2, "freeze", {"find_unused_parameters": True}, False) == [6, 6]


@on_ranks(2)
def test_what_is_built_elsewhere_is_no_change_and_hooks_stay(rank, world_size):
    """Modules that are built meanwhile are no change; nor is a hook's state lost by refresh."""
    net = _net()
    ddp = minddp.DistributedDataParallel(net)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    for iteration in range(2):
        nn.Linear(3, 3)
        _step(net, ddp, rank, iteration)
    _add(net)
    minddp.refresh(ddp)
    before = len(seen)
    _step(net, ddp, rank, 5)
    assert len(seen) > before


@on_ranks(2)
def test_refresh_of_modules_that_differ_raises_on_every_rank(rank, world_size):
    net = _net()
    ddp = minddp.DistributedDataParallel(net)
    if rank == 1:
        _add(net)
    with pytest.raises(RuntimeError, match="the number of parameters differs"):
        minddp.refresh(ddp)


@on_ranks(1)
def test_a_cast_shows_within_as_many_forwards_as_there_are_parameters(rank, world_size):
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(5)))
    ddp = minddp.DistributedDataParallel(net)
    net[3].half()
    look = ddp._minddp_observers.get("guards").changes.look  # at one parameter after each forward
    found = {change.text for _ in range(5) for change in look() or ()}
    assert found == {"'3.weight' was torch.float32 on cpu, is torch.float16 on cpu"}


# ---- replicas


def _drift(rank, world_size, what):
    net = _net()
    ddp = minddp.DistributedDataParallel(net)
    minddp.check_replicas(ddp, buffers=True)
    with torch.no_grad():
        if what == "weight" and rank == 1:
            net[0].weight[2, 3] += 1e-6
        if what == "sign" and rank == 1:
            net[2].bias[:] = 0.0
        elif what == "sign":
            net[2].bias[:] = -0.0
        if what == "nan":
            net[0].bias[:] = float("nan")
        if what == "buffer":
            net[3].running_mean += rank
        if what == "shape" and rank == 2:
            net[0].weight.data = net[0].weight.data.reshape(2, 8)
        if what == "extra" and rank == 0:
            net.append(nn.Linear(1, 1))
    minddp.check_replicas(ddp, buffers=what == "buffer")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weight", r"differ in 1 of 6 tensors:\n  '0.weight': ranks 0, 2 \| rank 1\n"),
        ("sign", r"'2.bias': ranks 0, 2 \| rank 1\n"),
        ("buffer", r"differ in 1 of 9 tensors:\n  '3.running_mean': rank 0 \| rank 1 \| rank 2\n"),
        ("shape", r"'0.weight': ranks 0, 1 \| rank 2\n"),
        ("extra", r"'4.weight': rank 0 \| ranks 1, 2 lack it\n  '4.bias': rank 0 \| ranks 1, 2 lack it\n"),
    ],
)
def test_replicas_that_differ_are_named_on_every_rank(what, message):
    with pytest.raises(RankError, match=message) as raised:
        run_ranks(_drift, 3, what)
    assert sorted(raised.value.failures) == [0, 1, 2]


def test_replicas_that_are_alike_even_in_their_nans():
    run_ranks(_drift, 2, "nan")


@on_ranks(2)
def test_a_long_list_is_cut(rank, world_size):
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(15)))
    ddp = minddp.DistributedDataParallel(net)
    with torch.no_grad():
        for p in net.parameters():
            p += rank
    message = r"differ in 30 of 30 tensors:(\n  '\d+\.\w+': rank 0 \| rank 1){20}\n  and 10 more\n"
    with pytest.raises(RuntimeError, match=message):
        minddp.check_replicas(ddp)


def _drifts(rank, world_size, every, noticed_at):
    """Rank 1's weights are edited before the third of six forwards, which is noticed before the ``noticed_at``-th."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = minddp.DistributedDataParallel(net, check_replicas_every=every)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for forward in range(1, 7):
        if forward == 3 and rank == 1:
            net[0].weight.data[0, 0] += 1e-3
        optimizer.zero_grad()
        with ddp.no_sync():  # not counted
            ddp(torch.randn(3, 2)).sum().backward()
        drifted = forward == noticed_at
        expected = pytest.raises(RuntimeError, match=r"'0.weight': rank 0 \| rank 1") if drifted else nullcontext()
        with expected:
            ddp(torch.randn(3, 2)).sum().backward()
        if drifted:
            with pytest.raises(ValueError, match="0 to 1, got 2"):
                minddp.repair_replicas(ddp, 2)
            minddp.repair_replicas(ddp, 1)
            minddp.check_replicas(ddp, buffers=True)
            continue
        optimizer.step()
    return net[0].weight.detach()


@pytest.mark.parametrize(("every", "noticed_at"), [(1, 3), (4, 4), (None, None)])
def test_replicas_are_compared_now_and_then(every, noticed_at):
    weight, other = run_ranks(_drifts, 2, every, noticed_at)
    assert torch.equal(weight, other) == (every is not None)


@on_ranks(1)
def test_a_bad_number_of_iterations_is_named(rank, world_size):
    for value, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="check_replicas_every must be"):
            minddp.DistributedDataParallel(nn.Linear(1, 1), check_replicas_every=value)


def _insert(ddp, net):
    """ModuleList.insert registers nothing."""
    net.layers.insert(0, nn.Linear(4, 4))


def _convert(ddp, net):
    """With new parameters in the places of the old ones."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def _cast_and_back(ddp, net):
    """One layer alone, whose parameters have lost their place in autograd's graph."""
    net.layers[1].double().float()


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _unseen(rank, world_size, change, raises, before=2, mode=None):
    """Where a gradient that never comes is no error."""
    torch.manual_seed(0)
    net = _Layers()
    ddp = minddp.DistributedDataParallel(net, **(mode or {"find_unused_parameters": True}))
    x = torch.full((2, 4), rank + 1.0)
    for _ in range(before):
        ddp(x).sum().backward()
    change(ddp, net)
    net.zero_grad()
    if raises:
        with pytest.raises(RuntimeError, match=r"the module has changed since .*:\n  'layers.0.weight' is new"):
            for _ in range(len(list(net.parameters())) + 1):
                ddp(x).sum().backward()
                torch.optim.SGD(net.parameters(), 0.1).step()
        return True
    ddp(x).sum().backward()
    return all_alike(*(p.grad for p in net.parameters()))


@pytest.mark.parametrize(("change", "raises"), [(_insert, True), (_convert, True), (_cast_and_back, False)])
def test_changes_that_register_nothing(change, raises):
    assert run_ranks(_unseen, 2, change, raises) == [True, True]


def test_a_static_graph_does_not_take_a_lost_hook_for_an_unused_parameter():
    assert run_ranks(_unseen, 2, _cast_and_back, False, 0, {"static_graph": True}) == [True, True]


class _Named(nn.Module):
    def __init__(self, order, frozen="", buffers=False):
        super().__init__()
        for name in order:
            tensor = torch.ones(3)
            if buffers:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, nn.Parameter(tensor, requires_grad=name != frozen))
        self.last = nn.Linear(3, 3)


@on_ranks(2)
def test_models_of_one_shape_in_another_order(rank, world_size):
    """Of one shape, and of the same names, in other places: a rank's would be averaged with another one's."""
    order = "ab" if rank else "ba"
    for net in (_Named(order), _Named("ab", "ab"[rank]), _Named(order, buffers=True)):
        with pytest.raises(RuntimeError, match=r"models differ at (parameter|buffer) 0 \('[ab]' on rank 0\)"):
            minddp.DistributedDataParallel(net)
    minddp.DistributedDataParallel(_Named("xy" if rank else "ab"))  # names of the rank's own do no harm


def _refresh(ddp):
    minddp.refresh(ddp)


def _builtin_hook(ddp):
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


@pytest.mark.parametrize("remake", [_refresh, _builtin_hook])
@on_ranks(2)
def test_a_reducer_goes_on_where_the_one_before_ended(rank, world_size, remake):
    """What is known of gradients outlives the reducer: local ones, and results."""
    torch.manual_seed(0)
    ddp = minddp.DistributedDataParallel(nn.Linear(2, 1))
    ddp.module(torch.full((1, 2), rank + 1.0)).sum().backward()
    remake(ddp)
    with pytest.raises(RuntimeError, match="would use gradients that were never averaged"):
        torch.optim.SGD(ddp.parameters(), 0.1).step()

    summed = minddp.DistributedDataParallel(nn.Linear(1, 1, bias=False), reduction="sum")
    summed(torch.ones(1, 1)).sum().backward()
    remake(summed)
    with pytest.raises(RuntimeError, match="holds the result of an earlier"):
        summed(torch.ones(1, 1)).sum().backward()
