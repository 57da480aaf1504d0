"""check_finite=: every rank learns whose gradient was not finite, before the optimizer uses it."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.on_ranks import on_ranks
from tests.ranks_pool import RankError, run_ranks


def _mean_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _train(rank, world_size, bad, kwargs, hook, use):
    """Three good steps that equal those without the check, then one where ``bad`` says (rank -> parameter: value)."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    wrapped = [
        minddp.DistributedDataParallel(nets[0], check_finite=True, **kwargs),
        minddp.DistributedDataParallel(nets[1], **kwargs),
    ]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for ddp in wrapped if hook else ():
        ddp.register_comm_hook(None, _mean_hook)
    for iteration in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * iteration + rank))
        for ddp, optimizer in zip(wrapped, optimizers, strict=True):
            optimizer.zero_grad()
            ddp(x).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    before = [p.detach().clone() for p in nets[0].parameters()]
    parameters = dict(nets[0].named_parameters())
    for name, value in bad.get(rank, {}).items():
        parameters[name].register_hook(lambda grad, value=value: grad * value)
    optimizers[0].zero_grad()
    wrapped[0](torch.randn(4, 3)).square().sum().backward()
    try:
        optimizers[0].step() if use == "step" else wrapped[0](torch.randn(4, 3))
    finally:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, nets[0].parameters(), strict=True))
        assert unchanged == (use != "step" or bool(bad))
    return True


ON_ONE = ({1: {"2.bias": float("nan")}}, r"of 1 parameters held NaN or infinity:\n  '2.bias' on rank 1\n")
ON_TWO = (
    {0: {"0.weight": float("inf")}, 2: {"0.weight": float("nan"), "2.bias": float("-inf")}},
    r"of 2 parameters held NaN or infinity:\n  '0.weight' on ranks 0, 2\n  '2.bias' on rank 2\n",
)
SMALL, VIEWS = {"bucket_cap_mb_list": [1e-6] * 2}, {"gradient_as_bucket_view": True, "reduction": "sum"}


@pytest.mark.parametrize(
    ("world_size", "case", "kwargs", "hook", "use"),
    [
        *((3, case, kwargs, False, "step") for case in (ON_ONE, ON_TWO) for kwargs in ({}, SMALL, VIEWS)),
        *((2, ON_ONE, {}, hook, use) for hook in (False, True) for use in ("step", "forward")),
    ],
)
def test_every_rank_names_parameters_and_ranks(world_size, case, kwargs, hook, use):
    """At the step or at the next forward, with a communication hook or without."""
    bad, message = case
    with pytest.raises(RankError, match=message) as raised:
        run_ranks(_train, world_size, bad, kwargs, hook, use)
    assert sorted(raised.value.failures) == list(range(world_size))
    assert not any("AssertionError" in text for text in raised.value.failures.values())


@pytest.mark.parametrize("hook", [False, True])
def test_finite_gradients_pass(hook):
    assert run_ranks(_train, 2, {}, {"find_unused_parameters": True}, hook, "step") == [True, True]


@on_ranks(2)
def test_sparse_gradients(rank, world_size):
    net = nn.Embedding(10, 3, sparse=True)
    ddp = minddp.DistributedDataParallel(net, check_finite=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for bad in (False, False, True):
        optimizer.zero_grad()
        (ddp(torch.tensor([rank, 4])) * (float("nan") if bad and rank == 0 else 1.0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"'weight' on rank 0\n") if bad else contextlib.nullcontext():
            optimizer.step()


@on_ranks(2)
def test_a_nan_of_an_earlier_micro_batch(rank, world_size):
    """A NaN of a micro-batch under no_sync is found where its sum is sent; other optimizers are not concerned."""
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    ddp = minddp.DistributedDataParallel(net, check_finite=True)
    optimizer, elsewhere = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, other))
    message = r"of 1 parameters held NaN or infinity:\n  'weight' on rank 1\n"
    for bad in (False, True):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 2), float("nan") if bad and rank == 1 else 1.0)).sum().backward()
        ddp(torch.ones(1, 2)).sum().backward()
        elsewhere.step()
        with pytest.raises(RuntimeError, match=message) if bad else contextlib.nullcontext():
            optimizer.step()


def _steps(other, optimizer):
    """A model of its own is not skipped with another one."""
    before = other.weight.detach().clone()
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(before, other.weight)


@on_ranks(2)
def test_warn_and_skip(rank, world_size):
    """One NaN on rank 1 in the third of five steps, by mode; momentum and weight decay would move parameters."""
    for mode, optimizer_type in (("skip", "sgd"), ("skip", "adam"), ("warn", "sgd")):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        ddp = minddp.DistributedDataParallel(net, check_finite=mode, bucket_cap_mb_list=[1e-6] * 2)
        front, back = list(net[0].parameters()), list(net[2].parameters())
        if optimizer_type == "sgd":
            make = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1)  # noqa: E731
        else:
            make = lambda ps: torch.optim.AdamW(ps, lr=0.1)  # noqa: E731
        optimizers = [make(front), make(back)]  # both of one wrapper
        other = nn.Linear(2, 2)  # of none
        of_other = torch.optim.SGD(other.parameters(), 0.1)
        for iteration in range(5):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * iteration + rank))
            if iteration == 2 and rank == 1:
                x[0, 0] = float("nan")
            ddp(x).square().sum().backward()
            _steps(other, of_other)
            before = [p.detach().clone() for p in net.parameters()]
            steps = [float(s["step"]) for o in optimizers for s in o.state.values() if "step" in s]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.step()
            told = [w for w in caught if "held NaN or infinity" in str(w.message)]
            same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            assert len(told) == (mode == "warn" and iteration >= 2)  # the weights are not finite from then on
            assert not told or iteration > 2 or "'0.weight' on rank 1" in str(told[0].message)
            assert same == (mode == "skip" and iteration == 2), (mode, iteration)
            if same:
                assert steps == [float(s["step"]) for o in optimizers for s in o.state.values() if "step" in s]
                assert all(p.grad is None for p in net.parameters())
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert minddp.skipped_steps(ddp) == (mode == "skip")
        finite = all(p.isfinite().all() for p in net.parameters())
        assert finite == (mode == "skip")
        if finite:
            minddp.check_replicas(ddp)


@on_ranks(2)
def test_skip_agrees_with_a_grad_scaler(rank, world_size):
    """Beside torch's class under a GradScaler: an infinity on rank 1 alone skips the same steps, at equal scales."""
    results = []
    for wrap in (
        lambda net: minddp.DistributedDataParallel(net, check_finite="skip"),
        nn.parallel.DistributedDataParallel,
    ):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        ddp, scaler = wrap(net), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scales = []
        for iteration in range(5):
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * iteration + rank))
            if iteration in (1, 3) and rank == 1:
                x[0, 0] = float("inf")
            scaler.scale(ddp(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append(([p.detach().clone() for p in net.parameters()], scales))
        if isinstance(ddp, minddp.DistributedDataParallel):
            assert minddp.skipped_steps(ddp) == 2
    (ours, scales), (theirs, their_scales) = results
    assert scales == their_scales == [8.0, 4.0, 4.0, 2.0, 2.0]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@on_ranks(1)
def test_a_bad_mode_is_named(rank, world_size):
    with pytest.raises(ValueError, match='check_finite must be a bool, "raise", "warn" or "skip", got \'never\''):
        minddp.DistributedDataParallel(nn.Linear(1, 1), check_finite="never")
