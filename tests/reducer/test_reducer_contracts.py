"""Promises of the reducer and of what stands around it, one a test.

What ordinary training shows is tested elsewhere. Here are the corners: what an iteration leaves behind, what a
replaced reducer still hears, who waits for whom.
"""

import contextlib
import functools
import math
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

import minddp
from minddp import DistributedDataParallel as DDP
from minddp.reductions.weights import Weights
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks
from tests.reducer.late import LateGroup

ALONE = {"bucket_cap_mb_list": [1e-6] * 2}  # every gradient has a bucket of its own


def _x(rank, step=0, width=4):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank))


def _mean(module, world_size, loss, divisor=None):
    """What averaging by hand gives: ``loss(rank)`` computed here for each rank, gradients added and divided."""
    parameters = list(module.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for rank in range(world_size):
        for total, grad in zip(sums, torch.autograd.grad(loss(rank), parameters, allow_unused=True)):
            if grad is not None:
                total += grad
    return [total / (divisor or world_size) for total in sums]


def _check(module, expected):
    for (name, p), want in zip(module.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want, msg=lambda text, name=name: f"{name}: {text}")


class Two(nn.Module):
    """Two layers side by side; ``which`` are used, in that order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, which=("left", "right")):
        return sum(getattr(self, name)(x).pow(2).sum() for name in which)


class Growing(nn.Module):
    """``shared`` gets one contribution for each reentrant checkpoint, before or after ``other`` gets its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.other, self.shared = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, uses, other_comes_last):
        x = x.clone().requires_grad_()
        x = self.other(x) if other_comes_last else x
        for _ in range(uses):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=True)
        return (x if other_comes_last else self.other(x)).pow(2).sum()


def _grow(ddp, rank, world_size, step, *how):
    ddp.zero_grad()
    expected = None
    if how[0]:
        ddp.module.zero_grad()
        sums = [torch.zeros_like(p) for p in ddp.module.parameters()]
        for theirs in range(world_size):
            with ddp.no_sync():
                ddp.module(_x(theirs, step), *how).backward()  # reentrant checkpoints know no autograd.grad
            for total, p in zip(sums, ddp.module.parameters()):
                total += p.grad
            ddp.zero_grad()
        expected = [total / world_size for total in sums]
    ddp(_x(rank, step), *how).backward()
    if expected is not None:
        _check(ddp.module, expected)


# ---- who waits for what


def _future_after(seconds, value):
    future = torch.futures.Future()
    threading.Timer(seconds, lambda: future.set_result(value)).start()
    return future


@on_ranks(2)
def test_backward_waits_for_futures_given_to_it(rank, world_size):
    ddp = DDP(Two())
    for _ in range(2):
        future = _future_after(0.5, torch.zeros(1))
        ddp.reducer.wait_after_backward(future)
        ddp(_x(rank)).backward()
        assert future.done()


@on_ranks(2)
def test_a_failed_collective_is_looked_into(rank, world_size):
    ddp = DDP(Two())
    looked = []

    def look(seconds, bucket, error):
        looked.append(bucket)

    def fails(done):
        raise ValueError("the hook's own error")

    ddp.register_comm_hook(None, lambda state, bucket: _future_after(0.0, bucket.buffer()).then(fails))
    ddp.reducer.set_callbacks(on_stall=look)
    with pytest.raises(RuntimeError, match="the hook's own error"):
        ddp(_x(rank)).backward()
    assert looked


def test_the_divisor_waits_for_its_sum():
    class Group:
        """Two ranks' weights are added when somebody waits."""

        def rank(self):
            return 0

        def allreduce(self, tensors, options):
            class Work(dist._Work):
                def wait(self, timeout):
                    tensors[0] += 3.0
                    return True

            return Work()

    weights = Weights(Group(), torch.device("cpu"))
    weights.add(1.0)
    weights.send()
    assert weights.post_scale() == 0.25


class LateMap(LateGroup):
    """The sum of used maps takes its time."""

    def allreduce(self, tensors, options=None):
        work = super().allreduce(tensors, options)
        if tensors[0].dtype is torch.int32:
            self.sum_of_maps = work._future = torch.futures.Future()
            threading.Timer(0.2, self.sum_of_maps.set_result, [tensors]).start()
        return work


def test_backward_waits_for_the_used_map():
    """Also where this rank does not need it: another may, and this process may end after its last backward."""
    group = LateMap("cpu")
    ddp = DDP(nn.Linear(2, 2), process_group=group, find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
        assert group.sum_of_maps.done()


# ---- how often a gradient comes


@on_ranks(2)
def test_a_later_arrival_is_learned(rank, world_size):
    ddp = DDP(Growing())
    _grow(ddp, rank, world_size, 0, 1, True)
    _grow(ddp, rank, world_size, 1, 2, True)  # the second one comes before the bucket is complete
    _grow(ddp, rank, world_size, 2, 2, False)  # and here last of all
    assert len(ddp.reducer.buckets()) == 1


@on_ranks(2)
def test_growth_after_the_launch_is_an_error(rank, world_size):
    ddp = DDP(Growing())
    for step in range(2):
        _grow(ddp, rank, world_size, step, 1, False)
    with pytest.raises(RuntimeError, match="with name shared.weight has been marked as ready twice"):
        ddp(_x(rank), 2, False).backward()


@on_ranks(2)
def test_an_absent_parameter_that_comes_after_all(rank, world_size):
    ddp = DDP(Growing(), find_unused_parameters=True)
    for step in range(2):
        _grow(ddp, rank, world_size, step, 0, True)
    for step in range(2, 4):  # in no graph that is known when backward begins
        _grow(ddp, rank, world_size, step, 1, True)


class Moving(nn.Module):
    """``shared`` is in the outer graph, or in a reentrant checkpoint's alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.other, self.shared = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, nested):
        x = self.other(x)
        x = checkpoint(self.shared, x, use_reentrant=True) if nested else self.shared(x)
        return x.pow(2).sum()


@on_ranks(2)
def test_a_parameter_that_moves_into_a_checkpoint(rank, world_size):
    ddp = DDP(Moving(), find_unused_parameters=True)
    for step in range(5):
        ddp.zero_grad()
        expected = _mean(ddp.module, world_size, lambda r: ddp.module(_x(r, step), False))
        ddp(_x(rank, step), step > 2).backward()
        _check(ddp.module, expected)
    for skips in (False, True):  # zeros are on their way, or nothing is
        ddp = DDP(Moving(), find_unused_parameters=True, skip_all_reduce_unused_params=skips, **ALONE)
        for step in range(3):
            ddp(_x(rank, step), False).backward()
        with pytest.raises(RuntimeError, match="shared.weight has been marked as ready twice"):
            ddp(_x(rank), True).backward()


# ---- which parameters took part


@on_ranks(2)
def test_usage_ends_with_its_iteration(rank, world_size):
    ddp = DDP(Two(), find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        ddp(_x(rank, step)).backward()
        mine = torch.full((2, 4), 1.0 + rank)
        ddp.zero_grad()
        ddp.module.right.weight.grad = mine.clone()
        ddp(_x(rank, step), ("left",)).backward()
        assert torch.equal(ddp.module.right.weight.grad, mine)
        assert ddp.module.right.bias.grad is None


@on_ranks(2)
def test_a_graph_that_changes_is_told(rank, world_size):
    same, changes = DDP(Two(), find_unused_parameters=True), DDP(Two(), find_unused_parameters=True)
    for step in range(3):
        same(_x(rank, step), ("left",)).backward()
        changes(_x(rank, step), ("left",) if step < 2 else ("left", "right")).backward()
    assert same.reducer._ddp_graph_static() and not changes.reducer._ddp_graph_static()


@on_ranks(2)
def test_a_static_graph_that_loses_a_parameter(rank, world_size):
    ddp = DDP(Two(), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(2):
        ddp(_x(rank, step)).backward()
        optimizer.step()
    ddp(_x(rank, 2), ("left",)).backward()
    with pytest.raises(RuntimeError, match=r"(?s)training graph has changed.*right\.weight, right\.bias"):
        optimizer.step()


@on_ranks(2)
def test_backward_with_inputs_launches_as_the_others_do(rank, world_size):
    """Of ``backward(inputs=...)``, what is not asked for does not hold up what is."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), find_unused_parameters=True, **ALONE)
    for step in range(3):
        ddp(_x(rank, step)).sum().backward()
    ddp.zero_grad()
    weight = ddp.module[0].weight
    ddp(_x(rank)).sum().backward(inputs=[weight])
    step = ddp.reducer.last_step()
    asked = next(i for i, name in enumerate(ddp.reducer.names) if name == "0.weight")
    others = [i for i, bucket in enumerate(ddp.reducer.buckets()) if asked not in bucket]
    first = min(others)
    assert step["buckets"][first]["launch_ns"] < step["ready_ns"][asked]
    assert ddp.module[2].weight.grad is None and weight.grad is not None


# ---- whose backward it is


class Hidden:
    """An output that nobody finds a tensor in."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Scale(nn.Module):
    """One node, or with ``nodes=2`` two."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, nodes=1):
        y = x * self.weight
        return Hidden(y if nodes == 1 else y * 2.0)


def _x_mean(world_size, step=0):
    return sum(_x(r, step).sum(0) for r in range(world_size)) / world_size


@on_ranks(2)
def test_outputs_that_the_walk_does_not_find(rank, world_size):
    ddp = DDP(Scale())
    for step in range(3):
        first, second = ddp(_x(rank, step), 2), ddp(_x(rank, step + 10), 2)
        for output, scale in ((first, 1.0), (second, 3.0)):
            ddp.zero_grad()
            (output.value * scale).sum().backward()
            at = step if output is first else step + 10
            torch.testing.assert_close(ddp.module.weight.grad, _x_mean(world_size, at) * 2 * scale)


class Visible(Scale):
    def forward(self, x):
        return x * self.weight


@on_ranks(2)
def test_the_node_after_a_forward_is_not_its_own(rank, world_size):
    ddp = DDP(Visible())
    for step in range(3):
        out = ddp(_x(rank, step))
        next_node = torch.mul(ddp.module.weight, _x(rank, step)[0])
        out.sum().backward()
        ddp.zero_grad()
        next_node.sum().backward()  # not from the node itself: autograd does not list a root
        assert torch.equal(ddp.module.weight.grad, _x(rank, step)[0])
        ddp.zero_grad()


@on_ranks(2)
def test_prepare_for_backward_arms_one_backward(rank, world_size):
    ddp = DDP(Two())
    for step in range(3):
        for armed in (True, False):
            ddp.zero_grad()
            if armed:
                ddp.reducer.prepare_for_backward([])
            expected = _mean(ddp.module, world_size, lambda r: ddp.module(_x(r, step)))
            local = _mean(ddp.module, 1, lambda r: ddp.module(_x(rank, step)))
            ddp.module(_x(rank, step)).backward()
            _check(ddp.module, expected if armed else local)


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_a_bypass_after_create_graph_is_local(rank, world_size):
    ddp = DDP(Two())
    for step in range(2):
        ddp.zero_grad()
        ddp(_x(rank, step)).backward(create_graph=True)
        ddp.zero_grad()
        ddp(_x(rank, step)).backward()
        ddp.zero_grad()
        local = _mean(ddp.module, 1, lambda r: ddp.module(_x(rank, step)))
        ddp.module(_x(rank, step)).backward()
        _check(ddp.module, local)


class Square(Scale):
    def forward(self, x):
        return (self.weight.pow(2) * x).sum()


@on_ranks(2)
def test_a_backward_through_gradients_is_their_backwards(rank, world_size):
    for views in (False, True):
        ddp = DDP(Square(), gradient_as_bucket_view=views)
        for step in range(3):
            ddp.zero_grad()
            ddp(_x(rank, step)).backward(create_graph=True)
            gradient, ddp.module.weight.grad = ddp.module.weight.grad, None
            gradient.sum().backward()  # holds no node that forward made: d(w * w * x) = 2 * w * x
            torch.testing.assert_close(ddp.module.weight.grad, 2 * _x_mean(world_size, step))


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 4), nn.Linear(4, 1), None

    def forward(self, x):
        self.kept = self.first(x)
        return self.last(x).sum()


@on_ranks(2)
def test_no_sync_is_no_bypass(rank, world_size):
    """Through the output, and through a tensor of forward's that is no output."""
    ddp = DDP(Keeps())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss = ddp(_x(rank, step))
            (loss if step else ddp.module.kept.sum()).backward()
        assert not ddp.reducer.bypassed()
        optimizer.step()


# ---- sums, which count no result twice


@on_ranks(2)
def test_sums_over_micro_batches(rank, world_size):
    for kwargs in ({}, ALONE, {"gradient_as_bucket_view": True}):
        ddp = DDP(Two(), reduction="sum", **kwargs)

        def total(steps, ddp=ddp):
            return _mean(ddp.module, world_size, lambda r: sum(ddp.module(_x(r, i)) for i in steps), divisor=1)

        for step in range(4):  # buckets are cut anew after the first
            expected = total([step, step + 1])
            ddp.zero_grad(set_to_none=bool(step % 2))
            with ddp.no_sync():
                ddp(_x(rank, step)).backward()
            ddp(_x(rank, step + 1)).backward()
            _check(ddp.module, expected)


@on_ranks(2)
def test_a_sum_is_not_summed_again(rank, world_size):
    sparse, dense = (nn.Embedding(4, 2, sparse=True), torch.tensor([rank, 3])), (nn.Linear(4, 2), torch.ones(1, 4))
    for module, x in (dense, sparse):
        ddp = DDP(module, reduction="sum")

        def backward(ddp=ddp, x=x):
            ddp(x).square().sum().backward()

        backward()
        for p in module.parameters():
            p.grad.mul_(0.5)  # as a clip does
        for context in (contextlib.nullcontext, ddp.no_sync):
            message = f"'(weight|bias)' holds the result.*zero_grad.*no_sync.*rank {rank}"
            with pytest.raises(RuntimeError, match=message):
                with context():
                    backward()
            minddp.abort_iteration(ddp)
        ddp.zero_grad()
        backward()


@on_ranks(2)
def test_a_result_that_nothing_adds_to_is_not_summed_again(rank, world_size):
    """A result that nothing adds to is sent as well."""
    ddp = DDP(Two(), reduction="sum", find_unused_parameters=True)
    ddp(_x(rank), ("left",)).backward()
    with pytest.raises(RuntimeError, match="left.*holds the result"):
        ddp(_x(rank), ("right",)).backward()


# ---- .grad


@on_ranks(2)
def test_gradients_of_other_strides(rank, world_size):
    for kwargs in ({}, ALONE, {"gradient_as_bucket_view": True}):
        ddp = DDP(Two(), **kwargs)
        for step in range(3):
            expected = _mean(ddp.module, world_size, lambda r: ddp.module(_x(r, step)))
            ddp.zero_grad()
            for p in (ddp.module.left.weight, ddp.module.right.weight):
                p.grad = torch.zeros(4, 2).t()
            ddp(_x(rank, step)).backward()
            _check(ddp.module, expected)


@on_ranks(2)
def test_an_optimizer_in_backward_leaves_gradients_alone(rank, world_size):
    ddp = DDP(Two())
    ddp(_x(rank)).backward()
    ddp.reducer.optimizer_in_backward = True
    ddp.zero_grad()
    local = _mean(ddp.module, 1, lambda r: ddp.module(_x(rank, 1)))
    ddp(_x(rank, 1)).backward()
    _check(ddp.module, local)


class Lookup(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 2))
        self.sparse = sparse

    def forward(self, rows):
        return nn.functional.embedding(rows, self.table, sparse=self.sparse)


@on_ranks(2)
def test_a_sparse_gradient_of_a_dense_parameter_is_named(rank, world_size):
    ddp = DDP(Lookup(sparse=True))
    with pytest.raises(RuntimeError, match="'table' is sparse Float on cpu, expected dense Float on cpu"):
        ddp(torch.tensor([1])).sum().backward()


@on_ranks(2)
def test_sparse_results_hold_the_touched_rows_only(rank, world_size):
    ddp = DDP(nn.Embedding(6, 2, sparse=True))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([[1], [2, 3, 5]][rank])).sum().backward()
        assert ddp.module.weight.grad.coalesce().indices()[0].tolist() == [1, 2, 3, 5]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.weight * self.scale * x).abs().pow(2).sum()


def _complex(rank, world_size, **arguments):
    ddp = DDP(Complex(), **arguments)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        ddp.zero_grad()
        expected = _mean(ddp.module, world_size, lambda r: ddp.module(torch.complex(_x(r, step), _x(r, step + 1))))
        ddp(torch.complex(_x(rank, step), _x(rank, step + 1))).backward()
        _check(ddp.module, expected)
        optimizer.step()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_complex_parameters(backend):
    run_ranks(_complex, 2, backend=backend)
    run_ranks(functools.partial(_complex, check_finite=True), 2, backend=backend)


# ---- an iteration given up


@on_ranks(2)
def test_abort_forgets_futures(rank, world_size):
    ddp = DDP(Two())
    ddp.reducer.wait_after_backward(torch.futures.Future())  # which nobody completes
    minddp.abort_iteration(ddp)
    ddp(_x(rank)).backward()


@on_ranks(2)
def test_abort_forgets_weights(rank, world_size):
    ddp = DDP(Two(), reduction="weighted")
    minddp.add_weight(ddp, 100)
    minddp.abort_iteration(ddp)
    minddp.add_weight(ddp, 1)
    expected = _mean(ddp.module, world_size, lambda r: ddp.module(_x(r)))
    ddp(_x(rank)).backward()
    _check(ddp.module, expected)


@on_ranks(2)
def test_abort_forgets_what_was_not_finite(rank, world_size):
    ddp = DDP(Two(), check_finite=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    (ddp(_x(rank)) * math.nan).backward()
    minddp.abort_iteration(ddp)
    optimizer.zero_grad()
    ddp(_x(rank)).backward()
    optimizer.step()


def _fails():
    raise RuntimeError("the disk is full")


@on_ranks(2)
def test_a_mended_failure_is_taken_back(rank, world_size):
    """Rank 1 reports a failure, mends that, and is slow then: nobody may take its failure for a present one."""
    ddp = DDP(nn.Linear(4, 2))
    for _ in range(2):  # the second gives it the name that it keeps
        ddp(_x(rank)).sum().backward()
    if rank == 1:
        with pytest.raises(RuntimeError, match="disk"):
            ddp._minddp_averager.report_failure(_fails)
    dist.barrier()
    ddp.zero_grad()
    loss = ddp(_x(rank)).sum()
    if rank == 1:
        time.sleep(2.5)
    loss.backward()
    dist.barrier()  # a rank that ends at once closes its connections


# ---- buckets


@on_ranks(2)
def test_buckets_leave_in_one_order_on_all_ranks(rank, world_size):
    """Also if gradients arrive in another order on each rank. None before it is complete, or backward is over."""
    ddp = DDP(Two(), **ALONE)
    orders = []
    for step in range(3):
        ddp.zero_grad()
        expected = _mean(ddp.module, world_size, lambda r: ddp.module(_x(r, step)))
        ddp(_x(rank, step), ("left", "right") if rank == 0 else ("right", "left")).backward()
        _check(ddp.module, expected)
        stamps = ddp.reducer.last_step()
        for bucket in stamps["buckets"]:
            whole = max(stamps["ready_ns"][i] for i in bucket["parameters"])
            assert bucket["launch_ns"] >= min(whole, stamps["backward_end_ns"])
        order = sorted(stamps["buckets"], key=lambda bucket: bucket["launch_ns"])
        orders.append((ddp.reducer.arrival_order(), [bucket["index"] for bucket in order], ddp.reducer.buckets()))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, orders)
    arrivals, *launches_and_buckets = zip(*[zip(*of_rank) for of_rank in everyone])
    assert arrivals[0] != arrivals[1], "or nothing is tested here"
    assert all(first == second and len(first[-1]) > 1 for first, second in launches_and_buckets)
    assert all(order == sorted(order) for order in launches_and_buckets[0][0])


@on_ranks(2)
def test_buckets_are_cut_anew_once(rank, world_size):
    ddp = DDP(Two(), **ALONE)
    seen = []
    for order in (("left", "right"), ("right", "left"), ("right", "left"), ("left", "right")):
        ddp(_x(rank), order).backward()
        seen.append(ddp.reducer.buckets())
    assert seen[1] == seen[2] == seen[3]


@on_ranks(2)
def test_what_never_arrived_shares_no_bucket(rank, world_size):
    """Where there are several."""
    ddp = DDP(Two(), static_graph=True, bucket_cap_mb=7e-5)  # all but one fit
    for step in range(3):
        ddp(_x(rank, step), ("left",)).backward()
    names = [sorted(ddp.reducer.names[i] for i in bucket) for bucket in ddp.reducer.buckets()]
    assert names == [["left.bias", "left.weight"], ["right.bias", "right.weight"]]


@on_ranks(2)
def test_what_ranks_use_within_a_bucket_may_differ(rank, world_size):
    """Buckets that are skipped must be the same on all ranks; within one that is sent parameters may differ."""
    grads = []
    for wrap in (nn.parallel.DistributedDataParallel, DDP):
        ddp = wrap(Two(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        for step in range(3):
            ddp.zero_grad()
            ddp(_x(rank, step), ("left",) if rank or step == 0 else ("right",)).backward()
        grads.append({name: p.grad for name, p in ddp.module.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0])


@on_ranks(2, 3)
def test_uneven_inputs_where_unused_buckets_are_skipped(rank, world_size):
    """A joined rank cannot know what the others skip; after the join unused buckets are skipped again."""
    weights = []
    for skip in (False, True):
        ddp = DDP(Two(), find_unused_parameters=True, skip_all_reduce_unused_params=skip, **ALONE)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with ddp.join():
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                ddp(_x(rank, step), ("left",)).backward()
                optimizer.step()
        weights.append([p.detach().clone() for p in ddp.parameters()])
    torch.testing.assert_close(weights[1], weights[0])
    sent = []
    ddp.register_comm_hook(None, lambda _, bucket: (sent.append(0), allreduce_hook(dist.group.WORLD, bucket))[1])
    ddp(_x(rank, 0), ("left",)).backward()
    assert (len(sent), len(ddp.reducer.buckets()), ddp.module.right.weight.grad) == (2, 4, None)


@on_ranks(2, 3)
def test_gradients_that_have_changed_places(rank, world_size):
    """As without views: a program may move gradients from one parameter to another, also between buckets."""
    for caps in ({}, ALONE):
        for set_to_none in (None, False):
            seen = []
            for view in (False, True):
                torch.manual_seed(0)
                net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
                ddp, grads = DDP(net, gradient_as_bucket_view=view, **caps), []
                for step in range(4):
                    ddp(_x(rank, step, 6)).pow(2).mean().backward()
                    net[0].weight.grad, net[1].weight.grad = net[1].weight.grad, net[0].weight.grad
                    net[2].weight.grad = net[2].weight.grad.t() if step == 1 else net[2].weight.grad
                    grads += [p.grad.clone() for p in net.parameters()]
                    if set_to_none is not None:
                        ddp.zero_grad(set_to_none=set_to_none)
                seen.append(grads)
            torch.testing.assert_close(seen[1], seen[0])


# ---- a new reducer in the place of the old


@on_ranks(2)
def test_a_replaced_reducer_hears_nothing(rank, world_size):
    ddp = DDP(Two())
    ddp(_x(rank)).backward()
    old = ddp.reducer
    held = ddp.module(_x(rank))  # a graph keeps autograd's nodes, and what is hooked on them
    minddp.refresh(ddp)
    assert ddp.reducer is not old
    ddp.zero_grad()
    before = [old.arrived_in(i) for i in range(len(old.names))]
    for step in range(2):
        ddp(_x(rank, step)).backward()
    assert old.iteration() == 1 and old.bypassed() == []
    assert [old.arrived_in(i) for i in range(len(old.names))] == before
    del held
    assert ddp.reducer.iteration() == 2


@on_ranks(2)
def test_no_sync_survives_a_new_reducer(rank, world_size):
    ddp = DDP(Two())
    ddp.require_backward_grad_sync = False
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert not ddp.require_backward_grad_sync
    local = _mean(ddp.module, 1, lambda r: ddp.module(_x(rank)))
    ddp(_x(rank)).backward()
    _check(ddp.module, local)


# ---- steps on local gradients


@on_ranks(2)
def test_an_optimizer_is_asked_for_its_own_parameters(rank, world_size):
    ddp, other = DDP(Two()), nn.Linear(2, 2)
    ddp(_x(rank)).backward()
    ddp.zero_grad()
    ddp.module(_x(rank), ("left",)).backward()  # past the wrapper: not for an optimizer that uses it
    torch.optim.SGD(ddp.module.right.parameters(), 0.1).step()
    torch.optim.SGD(other.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match=r"never averaged, of 'left\.weight'"):
        torch.optim.SGD(ddp.module.left.parameters(), 0.1).step()
    ddp.zero_grad()
    ddp(_x(rank), ("left",)).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        torch.optim.SGD(ddp.module.left.parameters(), 0.1).step()
    minddp.abort_iteration(ddp)


@on_ranks(2)
def test_gradients_through_another_wrapper_are_no_bypass(rank, world_size):
    base = Two()
    first, second = DDP(base), DDP(base)
    first(_x(rank)).backward()
    base.zero_grad()
    with second.no_sync():
        second(_x(rank)).backward()
    assert first.reducer.bypassed()  # or nothing is tested here
    torch.optim.SGD(base.parameters(), 0.1).step()


@on_ranks(2)
def test_a_gradient_that_only_one_rank_has_is_refused(rank, world_size):
    ddp = DDP(Two())
    ddp(_x(rank)).backward()
    ddp.zero_grad()
    layers = (ddp.module.left, ddp.module.right) if rank == 0 else (ddp.module.right,)
    sum(layer.weight.pow(2).sum() for layer in layers).backward()
    refuses = pytest.raises(RuntimeError, match=r"never averaged, of 'left\.weight'")
    with refuses if rank == 0 else contextlib.nullcontext():
        torch.optim.SGD(ddp.parameters(), 0.1).step()


@on_ranks(2)
def test_a_gradient_that_was_zeroed_has_bypassed_nothing(rank, world_size):
    """Then a step under no_sync is the program's own decision (local SGD)."""
    ddp = DDP(Two())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    ddp(_x(rank)).backward()
    ddp.module(_x(rank)).backward()
    optimizer.zero_grad(set_to_none=False)
    with ddp.no_sync():
        ddp(_x(rank)).backward()
    optimizer.step()


@on_ranks(2)
def test_each_step_compares_its_own_gradients(rank, world_size):
    ddp = DDP(Two())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        ddp.zero_grad()
        ((step + 1) * ddp.module.left.weight.pow(2).sum()).backward()  # the same on both ranks
        if rank == 1:
            time.sleep(0.5)
        optimizer.step()


@on_ranks(2)
def test_functional_call_is_no_change(rank, world_size):
    ddp = DDP(Two())
    ddp(_x(rank)).backward()
    values = {f"module.{name}": nn.Parameter(p.detach() * 2) for name, p in ddp.module.named_parameters()}
    nn.Linear(1, 1)  # a registration somewhere: the module is looked at
    torch.func.functional_call(ddp, values, (_x(rank),))


class Tied(nn.Module):
    """One submodule under two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 4)
        self.other = self.one
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.other(self.one(x)))


@on_ranks(2)
def test_tensors_that_functional_call_leaves_are_seen_by_the_next_backward_of_each_wrapper(rank, world_size):
    module = Tied()
    ddp, another = DDP(module), DDP(nn.Sequential(nn.Linear(4, 4), module.one))
    for wrapper in (ddp, another):  # which looks at one place in each forward, and at all of them in the first
        wrapper(_x(rank)).sum().backward()
    values = {name: p.detach().clone().requires_grad_() for name, p in ddp.named_parameters()}
    torch.func.functional_call(ddp, values, (_x(rank),))
    assert module.one.weight is values["module.one.weight"]  # torch does not put it back
    for wrapper in (ddp, another):
        wrapper(_x(rank)).sum().backward()
        with pytest.raises(RuntimeError, match="module has changed"):  # what it has left open
            wrapper(_x(rank)).sum().backward()


# ---- what an iteration that was given up has on its way


@on_ranks(1)
def test_a_late_collective_does_not_write_to_gradients(rank, world_size):
    ddp = DDP(Two(), gradient_as_bucket_view=True, bucket_cap_mb_list=[1e-6] * 2)
    late = []

    def hook(state, bucket):
        future = torch.futures.Future()
        if failing:
            late.append(bucket.buffer())
        else:
            future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    failing = False
    ddp(_x(rank)).backward()

    def fails(grad):
        raise ValueError("on purpose")

    failing = True
    handle = ddp.module.left.bias.register_hook(fails)
    with pytest.raises(ValueError, match="on purpose"):
        ddp(_x(rank)).backward()
    handle.remove()
    assert late
    minddp.abort_iteration(ddp)
    failing = False
    ddp.zero_grad(set_to_none=False)
    for buffer in late:
        buffer.fill_(7.0)
    assert not any(p.grad.any() for p in ddp.parameters())
    ddp(_x(rank)).backward()
    expected = Two()
    expected(_x(rank)).backward()
    for a, b in zip(ddp.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# ---- a backward that comes to no parameter


@on_ranks(2)
def test_a_backward_that_is_to_come_to_no_parameter_changes_nothing(rank, world_size):
    generator, critic = DDP(nn.Linear(4, 4)), DDP(Two(), find_unused_parameters=True)
    for step in range(3):
        critic.requires_grad_(False)
        critic(generator(_x(rank))).backward()
        assert critic.reducer.iteration() == step  # a frozen one takes no part
        critic.requires_grad_(True)
        critic(generator(_x(rank)).detach()).backward()
        assert critic.reducer.iteration() == step + 1
        x = _x(rank).requires_grad_()
        torch.autograd.grad(critic(x), x)
        critic(x).backward(inputs=[x])
        assert critic.reducer.iteration() == step + 1
