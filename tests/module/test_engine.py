"""What is remade is remade in one place: hooks, plans, weights, errors and their exits, a program's own groups."""

import contextlib
import copy
import gc
import pickle
import unittest.mock
import warnings
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import minddp
from tests.nets import OneOf
from tests.on_ranks import all_alike, on_ranks
from tests.programs.beside_torch import batch, mlp
from tests.ranks.own_group import made_by_hand
from tests.ranks_pool import run_ranks
from tests.reducer.test_reducer_contracts import Complex

DDP = minddp.DistributedDataParallel


def _step(ddp, rank, i=0):
    ddp.zero_grad()
    ddp(batch(rank, i)).pow(2).sum().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def _truth(net, world_size, i=0, reduce="mean"):
    """By one process, of the same weights."""
    net = copy.deepcopy(net).float()
    net.zero_grad()
    for rank in range(world_size):
        net(batch(rank, i)).pow(2).sum().backward()
    return [p.grad / (world_size if reduce == "mean" else 1) for p in net.parameters()]


def _same(mine, expected, tolerance=1e-5):
    torch.testing.assert_close(list(mine), list(expected), rtol=tolerance, atol=tolerance)


@contextlib.contextmanager
def _reducers_made():
    """A list of the reducers that are made inside, which it keeps."""
    made, kind = [], minddp._C.Reducer
    with unittest.mock.patch.object(minddp._C, "Reducer", lambda *given: made.append(kind(*given)) or made[-1]):
        yield made


def _hooked_on(parameter, reducers):
    """How many reducers hear of ``parameter``: told by those whose used map a backward of it alone marks."""
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    before = [(r.arrived_in(0), r.bypassed()) for r in reducers]
    parameter.sum().backward()
    after = [(r.arrived_in(0), r.bypassed()) for r in reducers]
    parameter.grad = None
    assert node is not None
    return sum(a != b for a, b in zip(after, before))


# ---- remaking


def _in_place(remake):
    return lambda ddp: (remake(ddp), ddp)[1]


def _unpickled(ddp):
    return pickle.loads(pickle.dumps(ddp))


_refresh = _in_place(minddp.refresh)
_static = _in_place(DDP._set_static_graph)
_new_group = _in_place(lambda ddp: ddp._update_process_group(dist.new_group()))
_builtin = _in_place(lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))
_hook = _in_place(lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook))
REMAKE = [_refresh, _static, _new_group, _builtin, _hook, _unpickled, copy.deepcopy]
ARGUMENTS = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"check_finite": True}]


@on_ranks(2, 3)
def test_after_each_remaking_one_reducer_is_hooked_and_right(rank, world_size):
    warnings.simplefilter("ignore")
    for remake in REMAKE:
        for arguments in ARGUMENTS:
            with _reducers_made() as made:
                ddp = DDP(mlp(), **arguments)
                if remake in (_refresh, _new_group):
                    _step(ddp, rank)
                same = remake(ddp)
            gc.collect()
            assert len(made) > 1 or remake is _hook
            assert _hooked_on(same.module[0].weight, made) == 1, remake
            for i in range(3):
                _same(_step(same, rank, i), _truth(same.module, world_size, i))
            del ddp, same, made


@on_ranks(2)
def test_the_tuner_and_mixed_precision_follow_the_reducer(rank, world_size):
    mixed = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    auto = DDP(mlp(), bucket_cap_mb="auto")
    auto._set_static_graph()
    assert auto._minddp_observers.get("planner").tuner._reducer is auto.reducer
    group = dist.new_group()
    for ddp in (auto, DDP(mlp(), mixed_precision=mixed)):
        ddp._update_process_group(group)
        low = ddp.mixed_precision is not None
        for i in range(3):
            _same(_step(ddp, rank, i), _truth(ddp.module, world_size, i), 2e-1 if low else 1e-5)


@on_ranks(2)
def test_nothing_outlives_its_wrapper(rank, world_size):
    options = [
        {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True},
        {"reduction": "sum"}, {"reduction": "weighted"}, {"check_finite": True}, {"bucket_cap_mb": "auto"},
        {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
    ]  # fmt: skip
    alive = []
    for option in options:
        for hook in (False, True):
            ddp = DDP(mlp(), **option)
            if hook and option.get("bucket_cap_mb") != "auto":
                ddp.register_comm_hook(ddp, lambda state, bucket: default_hooks.allreduce_hook(None, bucket))
            for i in range(2):
                if option.get("reduction") == "weighted":
                    minddp.add_weight(ddp, 1.0)
                _step(ddp, rank, i)
            found = weakref.ref(ddp), weakref.ref(ddp.reducer), weakref.ref(ddp.module)
            del ddp
            gc.collect()
            alive += [(option, hook, i) for i, ref in enumerate(found) if ref() is not None]
    assert not alive, alive


@on_ranks(2)
def test_a_constructor_that_failed_leaves_no_hooks(rank, world_size):
    net = mlp()
    other = minddp.bucket_plan(DDP(nn.Linear(3, 3)))
    with _reducers_made() as made:
        with pytest.raises(ValueError, match="plan"):
            DDP(net, bucket_plan=other)
        gc.collect()
        with pytest.raises(ValueError, match="contradict"):
            DDP(net, gradient_as_bucket_view=True, reduce_dtype=torch.float64)
        ddp = DDP(net)
    assert _hooked_on(net[0].weight, made) == 1
    _same(_step(ddp, rank), _truth(net, world_size))


# ---- sums and weights


@on_ranks(1)
def test_a_weight_divides_once(rank, world_size):
    for reduction, expected in (("sum", 2.0), ("weighted", None)):
        ddp = DDP(nn.Linear(1, 1, bias=False), reduction=reduction)
        for i in range(2):
            if reduction == "weighted":
                minddp.add_weight(ddp, 2)
            refuses = i and expected is None
            with pytest.raises(RuntimeError, match="holds the result") if refuses else contextlib.nullcontext():
                ddp(torch.ones(1, 1)).sum().backward()
        assert expected is None or ddp.module.weight.grad.item() == expected


# ---- plans


def _plans(rank, world_size, folder):
    ddp = DDP(mlp(), bucket_cap_mb=numpy.float64(1e-5), bucket_cap_mb_list=None)
    _step(ddp, rank)
    _step(ddp, rank)
    plan = minddp.bucket_plan(ddp)
    path = f"{folder}/plan-{rank}.json"
    plan.save(path)
    pinned = DDP(mlp(), bucket_plan=path)
    buckets = pinned.reducer.buckets()
    assert buckets == ddp.reducer.buckets()
    for same in (copy.deepcopy(pinned), _unpickled(pinned), _static(pinned), _builtin(DDP(mlp(), bucket_plan=plan))):
        assert same.reducer.buckets() == buckets
        _step(same, rank)
        _step(same, rank)
        assert same.reducer.buckets() == buckets
    # The same numbers of buckets and positions, other parameters in them.
    names, shapes, dtypes = ddp._minddp_wrapped.facts()
    order = [i for bucket in buckets for i in bucket]
    other = minddp.BucketPlan([[i] for i in range(4)]).for_parameters(names, shapes, dtypes, order)
    turned = minddp.BucketPlan([[i] for i in range(4)]).for_parameters(names, shapes, dtypes, order[::-1])
    with pytest.raises(ValueError, match="bucket_plan"):
        DDP(mlp(), bucket_plan=other if rank == 0 else turned)
    with pytest.raises(TypeError, match="bucket_plan"):
        DDP(mlp(), bucket_plan=3)
    return True


def test_a_plan_is_kept_by_all_that_remakes_and_compared_by_name(tmp_path):
    assert run_ranks(_plans, 2, str(tmp_path)) == [True, True]


# ---- errors and their exits


class Boom(Exception):
    pass


def _raise_after(backward_calls):
    left = [backward_calls]

    def hook(grad):
        left[0] -= 1
        if left[0] == 0:
            raise Boom

    return hook


def _one_of_two():
    return OneOf({name: nn.Linear(1, 1, bias=False) for name in "ab"})


@on_ranks(2, 3)
def test_after_an_exception_that_all_ranks_met(rank, world_size):
    for index in (-1, 0):  # before the first gradient of a backward, and in its midst
        net = mlp()
        ddp = DDP(net, bucket_cap_mb_list=[1e-5] * 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        for i in range(2):
            _step(ddp, rank, i)
        ddp.zero_grad()
        handle = (
            net[2].register_full_backward_pre_hook(lambda *_: (_ for _ in ()).throw(Boom()))
            if index == -1
            else net[0].weight.register_hook(_raise_after(1))
        )
        with pytest.raises(Boom):
            ddp(batch(rank)).pow(2).sum().backward()
        handle.remove()
        if index == 0:
            with pytest.raises(RuntimeError, match="ended with an exception.*abort_iteration"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="ended with an exception"):
                ddp(batch(rank))
            minddp.abort_iteration(ddp)
        for i in range(3):
            _same(_step(ddp, rank, i), _truth(net, world_size, i))
            optimizer.step()


@on_ranks(2)
def test_an_unfinished_iteration_can_be_given_up(rank, world_size):
    ddp = DDP(_one_of_two())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.0)
    x = torch.ones(1, 1)
    for _ in range(2):
        ddp(x, "a").sum().backward()
        with pytest.raises(RuntimeError, match="b.weight"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="b.weight"):
            ddp(x, "a")
        minddp.abort_iteration(ddp)
        ddp.zero_grad()
        (ddp(x, "a") + ddp(x, "b")).sum().backward()
        optimizer.step()
        assert ddp.module.b.weight.grad.item() == 1.0
    ddp(x, "a").sum().backward()
    again = DDP(ddp.module, find_unused_parameters=True)  # the first is left as it is
    optimizer.zero_grad()
    again(x, "a").sum().backward()
    optimizer.step()


# ---- kinds of gradients


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, i, use=True):
        return self.head(self.table(i).mean(1)) if use else self.head(torch.ones(len(i), 3))


@on_ranks(2, 3)
def test_sparse_gradients_on_one_rank_and_under_join(rank, world_size):
    ddp = DDP(Sparse(), find_unused_parameters=True)
    for i in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([[i, 2]]), rank == 0).sum().backward()
        grad = ddp.module.table.weight.grad
        assert grad.is_sparse and grad.sparse_dim() == 1
        expected = torch.zeros(6, 3)
        expected[[i, 2]] += ddp.module.head.weight.detach().sum(0) / 2 / world_size * (2 if i == 2 else 1)
        torch.testing.assert_close(grad.to_dense(), expected)
    joined = DDP(Sparse())
    with joined.join():
        for i in range(2 + rank):
            joined.zero_grad()
            joined(torch.tensor([[i, 2]])).sum().backward()


@on_ranks(2)
def test_the_finite_check_beside_skipped_buckets_and_join(rank, world_size):
    """The last bucket is skipped as unused; and ranks that are out of data take part in the question."""
    ddp = DDP(_one_of_two(), check_finite=True, find_unused_parameters=True, skip_all_reduce_unused_params=True,
              bucket_cap_mb_list=[1e-6] * 2)  # fmt: skip
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for which in ("a", "b"):
        for value in (1.0, float("nan") if rank == 1 else 1.0):
            ddp.zero_grad()
            ddp(torch.full((1, 1), value), which).sum().backward()
        with pytest.raises(RuntimeError, match=f"'{which}.weight' on rank 1"):
            optimizer.step()
    ddp = DDP(mlp(), check_finite=True)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with ddp.join():
        for i in range(2 + 2 * rank):
            _step(ddp, rank, i)
            optimizer.step()


# ---- what forward returns, what it is given


@on_ranks(2)
def test_odd_parameters_and_names(rank, world_size):
    net = mlp()
    if hasattr(net[0].weight, "grad_dtype"):
        net.half()
        net[0].weight.grad_dtype = torch.float32
        with pytest.raises(RuntimeError, match="'0.weight'.*grad_dtype"):
            DDP(net)
    net = mlp()
    net.register_buffer("one", torch.ones(2))
    net.register_buffer("two", net.one)
    net._ddp_params_and_buffers_to_ignore = ["nowhere", "two"]
    with unittest.TestCase().assertLogs("minddp", "WARNING") as logs:
        ddp = DDP(net)
    assert "nowhere" in logs.output[0]
    _same(_step(ddp, rank), _truth(mlp(), world_size))
    mixed = DDP(mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    mixed(batch(rank))
    state = mixed.state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32}
    mixed.load_state_dict(pickle.loads(pickle.dumps(state)))


# ---- process groups of the program's own


class Work(dist._Work):
    """Done when it is made; ``wait`` needs its argument, as in PyTorch's own tests."""

    def __init__(self, result):
        super().__init__()
        self.future = torch.futures.Future()
        self.future.set_result(result)

    def wait(self, timeout):
        return True

    def get_future(self):
        return self.future


class PythonGroup(dist.ProcessGroup):
    """A group over the default one, known to nobody."""

    def __init__(self):
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.calls = []

    def getBackendName(self):
        return "python"

    def getSize(self):
        return dist.get_world_size()

    def broadcast(self, tensors, options):
        self.calls.append("broadcast")
        dist.broadcast(tensors[0], options.rootRank)
        return Work(tensors)

    def allgather(self, outputs, inputs, options):
        self.calls.append("allgather")
        dist.all_gather(outputs[0], inputs[0])
        return Work(outputs)

    def allreduce(self, tensors, options=None):
        self.calls.append("allreduce")
        dist.all_reduce(tensors[0])
        return Work(tensors)


class WithoutHash(PythonGroup):
    def __eq__(self, other):
        return self is other

    __hash__ = None


@pytest.mark.parametrize("make", [PythonGroup, WithoutHash, made_by_hand])
@on_ranks(1, 2, 3)
def test_a_process_group_of_the_programs_own(rank, world_size, make):
    for arguments in (
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"check_finite": True},
    ):
        group = make()
        net = mlp()
        if rank:
            net[0].weight.data.zero_()  # rank 0's is broadcast
        net.register_buffer("count", torch.full((1,), float(rank)))
        ddp = DDP(net, process_group=group, **arguments)
        for i in range(3):
            _same(_step(ddp, rank, i), _truth(net, world_size, i))
        assert make is made_by_hand or {"broadcast", "allreduce"} <= set(group.calls)
        assert net.count.item() == 0.0


class RealGroup(PythonGroup):
    """One that knows no complex numbers."""

    def allreduce(self, tensors, options=None):
        assert not tensors[0].is_complex()
        return super().allreduce(tensors, options)


@on_ranks(2)
def test_complex_gradients_travel_as_pairs_of_real_ones(rank, world_size):
    ddp = DDP(Complex(), process_group=RealGroup())
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((4,), 1.0 + rank)).backward()
        squares = sum((1.0 + r) ** 2 for r in range(world_size)) / world_size
        assert torch.equal(ddp.module.weight.grad, torch.full((4,), 2 * squares, dtype=torch.complex64))


# ---- what is made anew has all that the first had


@on_ranks(3)
def test_another_group_for_delayed_parameters(rank, world_size):
    """Where every parameter is delayed there are no buckets; the one collective goes over the new group, too."""
    pair = dist.new_group([0, 1])
    for all_delayed in (True, False):
        net = mlp()
        delayed = [named for named in net.named_parameters() if all_delayed or named[0].startswith("2.")]
        ddp = DDP(net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net[0].weight)
        if rank == 2:
            continue
        ddp._update_process_group(pair)
        assert ddp.process_group is pair
        _same(_step(ddp, rank), _truth(net, 2))


@on_ranks(2)
def test_refresh_repeats_what_construction_checks_and_agrees_on(rank, world_size):
    ddp = DDP(mlp().double(), gradient_as_bucket_view=True, reduce_dtype=torch.float64)
    ddp.module.float()
    with pytest.raises(ValueError, match="contradict"):
        minddp.refresh(ddp)
    ddp = DDP(mlp(), find_unused_parameters=True)
    key = ddp._minddp_observers.get("guards").watch.key
    minddp.refresh(ddp)
    assert ddp._minddp_observers.get("guards").watch.key == key  # under which the others look for what one tells
    assert all_alike(torch.tensor(list(key.encode())))
    _same(_step(ddp, rank), _truth(ddp.module, world_size))


@on_ranks(2)
def test_an_unpickled_wrapper_logs_its_hook(rank, world_size):
    names = []
    for hook in (default_hooks.allreduce_hook, dist.BuiltinCommHookType.ALLREDUCE):
        ddp = DDP(mlp())
        if isinstance(hook, dist.BuiltinCommHookType):
            ddp._register_builtin_comm_hook(hook)
        else:
            ddp.register_comm_hook(None, hook)
        names.append([d._get_ddp_logging_data()["comm_hook"] for d in (ddp, pickle.loads(pickle.dumps(ddp)))])
    assert all(before == after and before for before, after in names)


@on_ranks(2)
def test_a_wrapper_that_torchs_class_has_pickled(rank, world_size):
    """Loaded where minddp's class stands in the place of torch's, it trains on as torch's does."""
    theirs = torch.nn.parallel.DistributedDataParallel(mlp(), find_unused_parameters=True, bucket_cap_mb=3)
    theirs.note = "the program's own"
    theirs.eval()
    data = pickle.dumps(theirs)
    minddp.install()
    try:
        ours = pickle.loads(data)
    finally:
        minddp.uninstall()
    assert type(ours) is DDP and not ours.training and ours.note == "the program's own"
    assert ours.find_unused_parameters and ours._minddp_config.caps == (3 << 20,)
    for ddp in (theirs, ours):
        ddp(batch(rank)).sum().backward()
    assert all(torch.allclose(p.grad, q.grad) for p, q in zip(theirs.parameters(), ours.parameters()))
