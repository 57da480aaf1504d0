"""The module on real ranks: what a backward leaves in .grad, whatever happens around it."""

import copy
import re
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import run_ranks

DDP = minddp.DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x, skip_b=False):
        x = torch.tanh(self.a(x))
        return self.c(x if skip_b else torch.tanh(self.b(x)))


def _data(rank, step=0, n=5):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, 4, generator=generator)


def _ddp(**arguments):
    torch.manual_seed(3)
    return DDP(Net(), **arguments)


def _local_grads(model, batches, loss=lambda y: y.pow(2).sum()):
    model = copy.deepcopy(model)
    model.zero_grad()
    for x in batches:
        loss(model(x)).backward()
    return [p.grad for p in model.parameters()]


def _mean_of(model, world_size, batches_of_rank, loss=lambda y: y.pow(2).sum(), divisor=None):
    """The plain truth: every rank's gradient computed here, added and divided."""
    grads = [_local_grads(model, batches_of_rank(r), loss) for r in range(world_size)]
    return [sum(column) / (divisor or world_size) for column in zip(*grads)]


def _check(ddp, expected, **tolerance):
    for (name, p), want in zip(ddp.module.named_parameters(), expected):
        torch.testing.assert_close(p.grad, want, msg=lambda m: f"{name}: {m}", **tolerance)


def _warm(ddp, rank, steps=3):
    for step in range(steps):
        ddp.zero_grad()
        ddp(_data(rank, step)).pow(2).sum().backward()
    ddp.zero_grad()


def _where_forward_ran_decides(rank, world_size):
    ddp = _ddp()
    _warm(ddp, rank)
    loss = ddp(_data(rank, 10)).pow(2).sum()
    with ddp.no_sync():
        loss.backward()
    _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r, 10)]))
    ddp.zero_grad()
    with ddp.no_sync():
        loss = ddp(_data(rank, 10)).pow(2).sum()
    loss.backward()
    _check(ddp, _local_grads(ddp.module, [_data(rank, 10)]))
    ddp(_data(rank, 11)).pow(2).sum().backward()
    _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r, 10), _data(r, 11)]))


def _second_backward(rank, world_size):
    ddp = _ddp()
    for _ in range(3):
        ddp.zero_grad()
        loss = ddp(_data(rank)).pow(2).sum()
        loss.backward(retain_graph=True)
        _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r)]))
        loss.backward()
        _check(ddp, [2 * g for g in _mean_of(ddp.module, world_size, lambda r: [_data(r)])])


def _bypassed_forward(rank, world_size):
    ddp = _ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), 0.0)
    _warm(ddp, rank)
    for step in range(3):
        ddp.zero_grad()
        ddp.module(_data(rank, step)).pow(2).sum().backward()
        _check(ddp, _local_grads(ddp.module, [_data(rank, step)]))
        with pytest.raises(RuntimeError, match=r"never averaged, of 'a\.weight'.*differ from rank.*ddp\.no_sync"):
            optimizer.step()
        ddp.zero_grad()
        optimizer.step()
        ddp(_data(rank, step)).pow(2).sum().backward()
        _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r, step)]))
        with ddp.no_sync():
            ddp(_data(rank, step)).pow(2).sum().backward()
        optimizer.step()  # local SGD, as asked for
        # What a synchronized backward has averaged with its own is none of the wrapper's business any more, though
        # the same tensors go on as gradients.
        ddp.zero_grad()
        ddp.module(_data(rank, step)).pow(2).sum().backward()
        ddp(_data(rank, step)).pow(2).sum().backward()
        assert ddp.reducer.bypassed() == []
        ddp.zero_grad(set_to_none=False)
        with ddp.no_sync():
            ddp(_data(rank, step)).pow(2).sum().backward()
        optimizer.step()
        ddp.zero_grad()
        sum(p.pow(2).sum() for p in ddp.parameters()).backward()  # the same on all ranks
        optimizer.step()


def _views_are_windows_on_the_buckets(rank, world_size):
    ddp = _ddp(gradient_as_bucket_view=True)
    _warm(ddp, rank)
    ddp(_data(rank)).pow(2).sum().backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in ddp.parameters()}
    assert len(storages) == len(ddp.reducer.buckets())
    assert ddp.reducer.allocated_bytes() == sum(p.nbytes for p in ddp.parameters())
    first = next(ddp.parameters())
    first.grad.detach_()  # refused by torch's views
    ddp.zero_grad(set_to_none=False)
    ddp(_data(rank, 5)).pow(2).sum().backward()
    _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r, 5)]))


def _buckets_can_be_released(rank, world_size):
    ddp = _ddp()
    _warm(ddp, rank)
    assert ddp.reducer.allocated_bytes() > 0
    minddp.release_buckets(ddp)
    assert ddp.reducer.allocated_bytes() == 0
    ddp(_data(rank)).pow(2).sum().backward()
    _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r)]))


def _sum_and_reduce_dtype(rank, world_size):
    for arguments, factor in (
        ({"reduction": "sum"}, world_size),
        ({"reduce_dtype": torch.float64}, 1),
    ):
        ddp = _ddp(**arguments)
        for step in range(3):
            ddp.zero_grad()
            ddp(_data(rank, step)).pow(2).sum().backward()
            mean = _mean_of(ddp.module, world_size, lambda r: [_data(r, step)])
            _check(ddp, [g * factor for g in mean])


def _weighted(rank, world_size):
    """Uneven shares, accumulated unevenly: exactly the gradient of one process with the whole batch."""
    for hook in (None, "allreduce"):
        ddp = _ddp(reduction="weighted", gradient_as_bucket_view=rank >= 0)
        if hook:
            ddp.register_comm_hook(None, allreduce_hook)
        for step in range(3):
            ddp.zero_grad()
            shares = {r: [_data(r, 10 * step + i, n=1 + r + i) for i in range(1 + r)] for r in range(world_size)}
            for i, x in enumerate(shares[rank]):
                ddp.require_backward_grad_sync = i + 1 == len(shares[rank])
                minddp.add_weight(ddp, len(x))
                ddp(x).pow(2).sum().backward()
            whole = torch.cat([x for share in shares.values() for x in share])
            _check(ddp, [g / len(whole) for g in _local_grads(ddp.module, [whole])])


def _weight_errors(rank, world_size):
    ddp = _ddp(reduction="weighted")
    if rank == 0:
        minddp.add_weight(ddp, 3)
    with pytest.raises(RuntimeError, match="add_weight.*this rank" if rank else "add_weight.*another rank"):
        ddp(_data(rank)).pow(2).sum().backward()
    ddp.zero_grad()
    minddp.add_weight(ddp, 1)
    ddp(_data(rank)).pow(2).sum().backward()  # nothing is stuck, and the next step is right
    _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r)]))
    zero = _ddp(reduction="weighted")
    for weights in ((0,), (1e308, 1e308), (1e39,), (1e-320,), (1e-39,)):  # the inverse, too, is a number of float32
        for weight in weights:
            minddp.add_weight(zero, weight)
        with pytest.raises(RuntimeError, match="add up to .* too large"):
            zero(_data(rank)).pow(2).sum().backward()
        zero.zero_grad()
    with pytest.raises(ValueError, match="weight must be finite"):
        minddp.add_weight(zero, -1)
    for weight in ("x", None, 1j, [3], torch.ones(2), 10**400):
        with pytest.raises(TypeError, match="minddp.add_weight: weight must be a number"):
            minddp.add_weight(zero, weight)
    with pytest.raises(RuntimeError, match='needs reduction="weighted"'):
        minddp.add_weight(_ddp(), 1)


def _an_unused_parameter_is_reported_before_step(rank, world_size):
    ddp = _ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before = [p.clone() for p in ddp.parameters()]
    ddp(_data(rank), skip_b=True).sum().backward()
    with pytest.raises(RuntimeError, match=rf"for rank {rank}: 2 3\n.*for rank {rank}: b.weight, b.bias"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, ddp.parameters()))
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        ddp(_data(rank))
    assert ddp._get_ddp_logging_data()["has_error"]


def _ignored_at_the_root(rank, world_size):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((2,), float(rank)))
            self.head = nn.Linear(4, 2)
            self.register_buffer("count", torch.full((1,), float(rank)))

        def forward(self, x):
            return self.head(x) * self.scale

    module = Root()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["scale", "count"])
    ddp = DDP(module)
    for _ in range(2):
        ddp.zero_grad()
        ddp(_data(rank)).sum().backward()
    assert float(module.scale[0]) == rank and float(module.count) == rank
    assert not all_alike(module.scale.grad) and all_alike(module.head.bias.grad)


def _builtin_hook_of_half_precision(rank, world_size):
    ddp = _ddp()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for step in range(3):
        ddp.zero_grad()
        ddp(_data(rank, step)).pow(2).sum().backward()
        _check(ddp, _mean_of(ddp.module, world_size, lambda r: [_data(r, step)]), rtol=5e-3, atol=1e-2)


def _hook_errors(rank, world_size):
    ddp = _ddp()
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 3)
    with pytest.raises(ValueError, match=r"hook\(state, bucket\)"):
        ddp.register_comm_hook(None, lambda state, grads: None)
    with pytest.raises(ValueError, match="annotation"):

        def wrong(state, bucket: int):
            return None

        ddp.register_comm_hook(None, wrong)
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match="only be called once"):
        ddp.register_comm_hook(None, allreduce_hook)
    late = _ddp()
    _warm(late, rank)
    late.register_comm_hook(None, allreduce_hook)  # between iterations, as in torch
    calls = []
    twice = _ddp()
    _warm(twice, rank)
    twice.register_comm_hook(calls, lambda state, bucket: (state.append(1), allreduce_hook(None, bucket))[1])
    _warm(twice, rank)
    assert calls


def _future(value):
    future = torch.futures.Future()
    (future.set_exception if isinstance(value, Exception) else future.set_result)(value)
    return future


def _shrunk(buffer):
    buffer = buffer.clone()
    buffer.untyped_storage().resize_(buffer.nbytes // 2)
    return buffer


def _raises(bucket):
    raise KeyError("the hook's own error")


_WRONG_HOOKS = {
    "without return": (
        lambda bucket: None,
        RuntimeError,
        "torch.futures.Future object, but got NoneType",
    ),
    "a tensor": (lambda bucket: bucket.buffer(), RuntimeError, "torch.futures.Future object, but got Tensor"),
    "raises": (_raises, KeyError, "the hook's own error"),
    "raises later": (lambda b: _future(b.buffer()).then(lambda _: _raises(b)), RuntimeError, "the hook's own error"),
    "an exception": (lambda bucket: _future(KeyError("its own words")), KeyError, "its own words"),
    "nothing": (lambda bucket: _future(None), RuntimeError, "future holds a NoneType, expected a single tensor"),
    "a tuple": (lambda b: _future((b.buffer(),)), RuntimeError, "future holds a tuple, expected a single tensor"),
    "no tensors": (lambda bucket: _future([]), RuntimeError, "future holds a list, expected a single tensor"),
    "short": (lambda b: _future(b.buffer()[:3]), RuntimeError, "bucket 0 holds a tensor of 3 elements in memory"),
    "meta": (lambda b: _future(b.buffer().to("meta")), RuntimeError, "holds a tensor of 0 elements in memory"),
    "shrunk": (lambda b: _future(_shrunk(b.buffer())), RuntimeError, "holds a tensor of 0 elements in memory"),
}


def _wrong_hooks(rank, world_size):
    for kind, (hook, error, words) in _WRONG_HOOKS.items():
        ddp = _ddp()
        ddp.register_comm_hook(None, lambda state, bucket, hook=hook: hook(bucket))
        with pytest.raises(error, match=words):
            ddp(_data(rank)).sum().backward()
            pytest.fail(kind)
    healthy = [(torch.Tensor.double, 1), (lambda b: [b, b], 1), (lambda b: torch._efficientzerotensor(b.shape), 0)]
    for right, factor in healthy:
        ddp = _ddp()
        ddp.register_comm_hook(None, lambda state, bucket, right=right: _future(right(bucket.buffer())))
        ddp(_data(rank)).sum().backward()
        _check(ddp, [factor * gradient for gradient in _local_grads(ddp.module, [_data(rank)], torch.sum)])


def _join(rank, world_size):
    for arguments in ({}, {"find_unused_parameters": True}, {"reduction": "weighted"}):
        for by_initial in (True, False):
            ddp = _ddp(**arguments)
            steps = 2 + 2 * rank
            with ddp.join(divide_by_initial_world_size=by_initial):
                for step in range(steps):
                    ddp.zero_grad()
                    if ddp._minddp_observers.settings["reductions"].reduction == "weighted":
                        minddp.add_weight(ddp, 5)
                    ddp(_data(rank, step)).pow(2).sum().backward()
                    active = [r for r in range(world_size) if 2 + 2 * r > step]
                    divisor = (
                        len(active) * 5
                        if ddp._minddp_observers.settings["reductions"].reduction == "weighted"
                        else (world_size if by_initial else len(active))
                    )
                    expected = [_local_grads(ddp.module, [_data(r, step)]) for r in active]
                    _check(ddp, [sum(column) / divisor for column in zip(*expected)])


def _torch_is_not_used(rank, world_size):
    """Every method of torch's class and reducer raises; training goes on all the same."""

    def refuse(*args, **kwargs):
        raise AssertionError("a line of torch's DDP ran")

    saved, c10d = dict(vars(TorchDDP)), torch._C._distributed_c10d
    names = ["Reducer", "Logger", "_broadcast_coalesced", "_compute_bucket_assignment_by_size"]
    saved_c10d = {name: getattr(c10d, name) for name in names if hasattr(c10d, name)}
    try:
        for name, value in saved.items():
            if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                setattr(TorchDDP, name, property(refuse) if isinstance(value, property) else refuse)
        for name in saved_c10d:
            setattr(c10d, name, refuse)
            if hasattr(dist, name):
                setattr(dist, name, refuse)
        for arguments in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            ddp = _ddp(**arguments)
            assert isinstance(ddp, TorchDDP) and isinstance(ddp, minddp.DistributedDataParallel)
            with ddp.join():
                _warm(ddp, rank)
            with ddp.no_sync():
                ddp(_data(rank)).sum().backward()
            copy.deepcopy(ddp)
            ddp._get_ddp_logging_data(), ddp.state_dict(), ddp.train(), ddp.eval()
    finally:
        for name, value in saved.items():
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__"):
                setattr(TorchDDP, name, value)
        for name, value in saved_c10d.items():
            setattr(c10d, name, value)
            if hasattr(dist, name):
                setattr(dist, name, value)


CASES = [
    _where_forward_ran_decides, _second_backward, _bypassed_forward,
    _views_are_windows_on_the_buckets,
    _buckets_can_be_released, _sum_and_reduce_dtype, _weighted, _weight_errors,
    _an_unused_parameter_is_reported_before_step, _ignored_at_the_root, _builtin_hook_of_half_precision,
    _hook_errors, _wrong_hooks, _join, _torch_is_not_used,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_two_ranks(case):
    run_ranks(case, 2)


@pytest.mark.parametrize("case", [_sum_and_reduce_dtype, _weighted, _join], ids=lambda case: case.__name__.strip("_"))
def test_three_ranks(case):
    run_ranks(case, 3)


@on_ranks(2, 3)
def test_where_the_division_is_decides_the_range(rank, world_size):
    """float16 ends at 65,504: the sum of 40,000s is beyond it, their mean is not."""
    large, small = pytest.approx(40_000, rel=1e-2), pytest.approx(2e-7, rel=0.5)
    cases = [({}, large, small), ({"reduction": "sum"}, float("inf"), pytest.approx(2e-7 * world_size, rel=0.5))]
    for options, *expected in [*cases, ({"reduce_dtype": torch.float32}, large, small)]:
        for value, want in zip((40_000.0, 2e-7), expected):
            ddp = DDP(nn.Linear(1, 1, bias=False).half(), **options)
            ddp(torch.full((1, 1), value, dtype=torch.float16)).sum().backward()
            assert ddp.module.weight.grad.item() == want, (value, options)


MODULES = {
    "net": lambda rank: Net(),
    "frozen": lambda rank: Net().requires_grad_(False),
    "lazy": lambda rank: nn.LazyLinear(3),
    "unequal": lambda rank: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + rank)),
    "unequal count": lambda rank: nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + rank)]),
    "unequal dtype": lambda rank: nn.Linear(4, 4, dtype=torch.float64 if rank else torch.float32),
    "mixed devices": lambda rank: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
}
BAD = [
    ("frozen", {}, "RuntimeError.*doesn't have any parameter that requires a gradient"),
    ("lazy", {}, "RuntimeError.*uninitialized parameters.*'weight'"),
    ("mixed devices", {}, r"ValueError.*same type of devices.*\['cpu', 'meta'\]"),
    ("net", {"device_ids": [0]}, r"ValueError.*device_ids \[0\]"),
    ("net", {"device_ids": [0, 1]}, "ValueError.*single element"),
    ("net", {"output_device": 1}, "ValueError.*output_device 1"),  # 0 is none, as with torch's class
    ("net", {"bucket_cap_mb": -1}, "ValueError.*bucket_cap_mb must be a finite number of MiB, 0 .* or more, got -1"),
    ("net", {"bucket_cap_mb": "big"}, 'ValueError.*bucket_cap_mb.*"auto".*big'),
    ("net", {"bucket_cap_mb": [1]}, "TypeError.*bucket_cap_mb must be a number"),
    ("net", {"bucket_cap_mb_list": [1, -1]}, "ValueError.*bucket_cap_mb_list must be a finite number"),
    ("net", {"reduction": "median"}, "ValueError.*reduction must be.*'median'"),
    ("net", {"bucket_cap_mb": 1e308}, "ValueError.*bucket_cap_mb must be .* got 1e.308 .*less than 2"),
    ("net", {"bucket_cap_mb_list": 25}, "TypeError.*bucket_cap_mb_list must be a list .* got 25"),
    ("net", {"bucket_plan": "none.json"}, "FileNotFoundError.*bucket_plan cannot be read: No such file.*'none.json'"),
    ("net", {"device_ids": 0}, "TypeError.*device_ids must be a list of one device, or None, got 0"),
    *[
        ("net", {name: "False"}, f"TypeError.*{name} must be a bool")
        for name in ("static_graph", "batched_grad_copy")
    ],
    ("net", {"process_group": 1.5}, "TypeError.*process_group must be a .*ProcessGroup, or None, got 1.5"),
    ("net", {"device_mesh": 3}, "TypeError.*device_mesh must be a torch.distributed.DeviceMesh .* got 3"),
    (
        "net",
        {"mixed_precision": torch.float16},
        "TypeError.*mixed_precision must be .*_MixedPrecision.* torch.float16",
    ),
    ("net", {"predivide_factor": 2.0}, "TypeError.*no longer has the argument 'predivide_factor'.*reduce_dtype="),
    *[("net", {"reduce_dtype": d}, "TypeError.*reduce_dtype") for d in (torch.int8, torch.float8_e4m3fn, "half")],
    ("net", {"reduce_dtype": torch.float64, "gradient_as_bucket_view": True}, "ValueError.*contradict"),
    ("net", {"delay_all_reduce_named_params": []}, "ValueError.*at the same time"),
    ("net", {"on_straggler": print}, "TypeError.*no longer has the argument 'on_straggler'. Call minddp.report"),
    ("unequal", {}, r"RuntimeError.*differ at parameter 2.*rank 0: '1.weight' \[2, 4\].*rank 1: '1.weight' \[3, 4\]"),
    ("unequal count", {}, "RuntimeError.*number of parameters differs.*rank 0: 2.*rank 1: 4"),
    ("unequal dtype", {}, "RuntimeError.*differ at parameter 0.*float32.*float64"),
]


@on_ranks(2)
def test_bad_input_raises_on_every_rank(rank, world_size):
    for make, arguments, match in BAD:
        try:
            DDP(MODULES[make](rank), **arguments)
            answer = "no error"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        assert re.search(match, answer, re.S), answer


@on_ranks(1)
def test_odd_arguments_that_torchs_class_takes(rank, world_size):
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), torch.float32)
    DDP(Net(), mixed_precision=types.SimpleNamespace(**dtypes))(_data(rank)).sum().backward()  # torch: on GPUs
    for arguments in (
        {"bucket_cap_mb": 1e9}, {"bucket_cap_mb_list": (25, 1)}, {"bucket_cap_mb_list": 0}, {"device_ids": ()},
    ):  # fmt: skip
        for cls in (torch.nn.parallel.DistributedDataParallel, DDP):
            cls(Net(), **arguments)(_data(rank)).sum().backward()
    net = Net()
    net._ddp_params_and_buffers_to_ignore = [*net.parameters(), None]  # names of nothing
    DDP(net)(_data(rank)).sum().backward()
    ddp = DDP(torch.nn.BatchNorm1d(2))
    ddp._register_buffer_comm_hook(None, lambda state, buffers: [None])
    with pytest.raises(TypeError, match="list of futures, or None; it has None"):
        ddp(torch.ones(2, 2))


@on_ranks(2)
def test_arguments_that_differ_between_ranks_raise_on_all(rank, world_size):
    for name, values, text in (
        ("bucket_cap_mb", (1, 2), "bucket_cap_mb: [1.0] on rank 0, [2.0] on rank 1"),
        ("bucket_cap_mb", ("auto", 2), "bucket_cap_mb: 'auto' on rank 0, [2.0] on rank 1"),
        ("find_unused_parameters", (True, False), "find_unused_parameters: True on rank 0, False on rank 1"),
        ("reduction", ("sum", "mean"), "reduction: 'sum' on rank 0, 'mean' on rank 1"),
        (
            "bucket_cap_mb",
            (25, None),
            "bucket_cap_mb",
        ),  # the default is no number: buckets are cut by what the model is
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            DDP(Net(), **{name: values[rank]})


@on_ranks(1, backend=None)
def test_no_process_group(rank, world_size):
    with pytest.raises(ValueError, match="init_process_group"):
        DDP(Net())


@on_ranks(2)
def test_device_mesh(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        DDP(Net(), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        two_dims = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
        DDP(Net(), device_mesh=two_dims)
    ddp = DDP(Net(), device_mesh=mesh)
    ddp(_data(rank)).sum().backward()
    assert ddp.device_mesh is mesh


@on_ranks(2)
def test_vmap_runs_and_other_optimizers_step_in_inference_mode(rank, world_size):
    module = nn.BatchNorm1d(2).eval()
    x = torch.randn(3, 4, 2)
    assert torch.equal(torch.func.vmap(DDP(module))(x), torch.func.vmap(module)(x))
    with torch.inference_mode():
        direction = torch.ones(3, requires_grad=True)
        direction.grad = torch.ones(3)
        torch.optim.SGD([direction], 0.5).step()
    assert (direction == 0.5).all()
