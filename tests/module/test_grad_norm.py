"""clip_grad_norm_, grad_norm and gradient_noise_scale beside torch's function and the paper's formula."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import minddp
from minddp.testing import run_ranks


class Net(nn.Module):
    """Weights and biases, a table, a branch that the even iterations leave out, and one frozen layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(50, 6, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(6, 300, dtype=dtype), nn.Tanh(), nn.Linear(300, 4, dtype=dtype))
        self.branch, self.frozen = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype).requires_grad_(False)

    def forward(self, rows, branches):
        out = self.frozen(self.body(self.table(rows)))
        return self.branch(out) if branches else out


def _backward(ddp, iteration, branches=True, scale=1.0):
    torch.manual_seed(100 * iteration + dist.get_rank())
    (ddp(torch.randint(50, (8,)), branches).float().pow(2).mean() * scale).backward()


def _expected(ddp, max_norm, **arguments):
    """What torch's function makes of the same gradients."""
    copies = [nn.Parameter(p.detach().clone()) for p in ddp.parameters()]
    for other, p in zip(copies, ddp.parameters()):
        other.requires_grad_(p.requires_grad)
        other.grad = None if p.grad is None else p.grad.clone()
    return clip_grad_norm_(copies, max_norm, **arguments), [p.grad for p in copies]


def _check(ddp, max_norm, tolerance=1e-6, **arguments):
    norm, grads = _expected(ddp, max_norm, **arguments)
    ours = ddp.clip_grad_norm_(max_norm, **arguments)
    assert ours.dtype == norm.dtype and ours.shape == norm.shape
    torch.testing.assert_close(ours, norm, rtol=tolerance, atol=0, equal_nan=True)
    for theirs, p in zip(grads, ddp.parameters()):
        assert (theirs is None) == (p.grad is None)
        if theirs is not None:
            torch.testing.assert_close(p.grad, theirs, rtol=4 * tolerance, atol=0, equal_nan=True)
    return norm


def _writes_data(ddp):
    for p in ddp.parameters():
        if p.grad is not None:
            p.grad.data.mul_(3)


def _clamps_data(ddp):
    for p in ddp.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-3, 1e-3)


def _writes_numpy(ddp):
    ddp.module.body[0].weight.grad.numpy()[:] *= 2


def _writes_one(ddp):
    ddp.module.body[0].weight.grad[2, 3] += 1


def _replaces(ddp):
    ddp.module.body[0].bias.grad = torch.randn(300)


def _accumulates(ddp):
    if ddp.reduction == "sum":
        ddp.zero_grad()  # sums do not grow
    with ddp.no_sync():
        _backward(ddp, 77)


def _unscales(ddp):
    for p in ddp.parameters():
        if p.grad is not None:
            torch._amp_foreach_non_finite_check_and_unscale_([p.grad], torch.zeros(1), torch.full((1,), 0.25))


def _drops(ddp):
    ddp.module.body[2].bias.grad = None


BETWEEN = {
    "nothing": lambda ddp: None,
    "data": _writes_data,
    "clamped data": _clamps_data,
    "numpy": _writes_numpy,
    "one value": _writes_one,
    "another tensor": _replaces,
    "no_sync": _accumulates,
    "unscale": _unscales,
    "none": _drops,
}
WAYS = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb_list": [0.001] * 2},
    {"reduction": "sum"},
    {"lazy_bucket_allocation": True, "bucket_cap_mb_list": [0.001] * 2},
    {"wire": "int8"},
]


def _clips_as_torch(rank, world_size):
    for way in WAYS:
        ddp = minddp.DistributedDataParallel(Net(), find_unused_parameters=True, **way)
        for iteration, between in enumerate(BETWEEN.values()):
            ddp.zero_grad(set_to_none=iteration != 5)
            _backward(ddp, iteration, branches=iteration % 2 == 0)
            between(ddp)
            first = ddp.grad_norm()  # before anybody looks at a gradient
            norm = _check(ddp, 1e6)
            assert (first - norm).abs() <= 1e-6 * norm and ddp.grad_norm() == first
            _check(ddp, norm.item() / 3)
            _check(ddp, norm.item() / 30)  # of what was clipped
        copy.deepcopy(ddp)
    return True


def _other_norms_and_dtypes(rank, world_size):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        ddp = minddp.DistributedDataParallel(Net(dtype))
        for iteration in range(2):
            ddp.zero_grad()
            _backward(ddp, iteration)
            _check(ddp, 0.01, tolerance)
    ddp = minddp.DistributedDataParallel(Net())
    assert ddp.grad_norm() == get_total_norm([]) and ddp.clip_grad_norm_(1.0) == 0
    for norm_type in (1.0, math.inf, 0.5):
        _backward(ddp, 3)
        _check(ddp, 0.01, norm_type=norm_type)
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        assert ddp.grad_norm(norm_type) == get_total_norm(grads, norm_type)
    for scale in (math.inf, math.nan):
        ddp.zero_grad()
        _backward(ddp, 4, scale=scale)
        with pytest.raises(RuntimeError, match="non-finite"):
            ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
        _check(ddp, 1.0)
    return True


def _odd_gradients(rank, world_size):
    """What torch's function takes, or refuses, it takes and refuses."""

    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.phase = nn.Linear(4, 4), nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x):
            return (self.real(x) * self.phase).abs()

    ddp = minddp.DistributedDataParallel(Complex())
    half = minddp.DistributedDataParallel(nn.Linear(8, 8).half())
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        _check(ddp, 0.1)
        half(torch.ones(2, 8).half()).sum().backward()
        half.module.weight.grad.fill_(60000)
        with pytest.raises(RuntimeError, match="non-finite"):
            half.clip_grad_norm_(1.0, error_if_nonfinite=True)
    ddp.module.real.bias.grad = torch._efficientzerotensor(4)  # has no memory
    _check(ddp, 0.1)


def _noise_of_what_is_sent(rank, world_size):
    """Not of a micro-batch that was thrown away, nor of a step that overflowed."""
    ddp = minddp.DistributedDataParallel(Net(), find_unused_parameters=True)
    for iteration in range(2):
        with ddp.no_sync():
            _backward(ddp, 50 + iteration, scale=1e6)
        ddp.zero_grad(set_to_none=iteration == 0)
        _backward(ddp, iteration, branches=False)
        found = ddp.gradient_noise_scale(8, decay=0)
        assert found is None if iteration == 0 else abs(found.variance) < 1e6
    ddp.zero_grad()
    _backward(ddp, 3, scale=math.inf)
    assert ddp.gradient_noise_scale(8, decay=0.5) is None
    ddp.zero_grad()
    _backward(ddp, 4)
    assert math.isfinite(ddp.gradient_noise_scale(8, decay=0.5).examples)


def _noise_scale(rank, world_size, reduction):
    """Beside the formula, from the ranks' gradients themselves."""
    ddp = minddp.DistributedDataParallel(Net(), reduction=reduction)
    own, examples = copy.deepcopy(ddp.module), 8
    assert ddp.gradient_noise_scale(examples) is None
    for iteration in range(3):
        ddp.zero_grad()
        own.zero_grad()
        _backward(ddp, iteration)
        _backward(own, iteration)
        flat = torch.cat([p.grad.flatten() for p in own.parameters() if p.requires_grad]).double()
        everyone = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(everyone, flat)
        ddp.clip_grad_norm_(1e-3)  # what was clipped later is no matter
        found = ddp.gradient_noise_scale(examples, decay=0)
        small = sum(grad.square().sum() for grad in everyone).item() / world_size
        large = (sum(everyone) / world_size).square().sum().item()
        batch = world_size * examples
        square = (batch * large - examples * small) / (batch - examples)
        variance = (small - large) / (1 / examples - 1 / batch)
        assert found.square == pytest.approx(square, rel=1e-4) and found.variance == pytest.approx(variance, rel=1e-5)
        assert found.examples == pytest.approx(variance / square if square > 0 else math.inf, rel=1e-3)
    for wrong in (1 + rank, rank):  # all of them raise
        with pytest.raises(ValueError, match="must be the same on all ranks, got"):
            ddp.gradient_noise_scale(wrong)
    with pytest.raises(ValueError, match="at least 1, and 0 <= decay < 1; got 0"):
        ddp.gradient_noise_scale(0)
    return True


def _scenarios(rank, world_size):
    _odd_gradients(rank, world_size)
    _noise_of_what_is_sent(rank, world_size)
    for reduction in ("mean", "sum"):
        _noise_scale(rank, world_size, reduction)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        minddp.DistributedDataParallel(Net(), reduction="weighted").gradient_noise_scale(8)
    return _other_norms_and_dtypes(rank, world_size)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.all)])
def test_norms_are_torchs(world_size):
    assert run_ranks(_clips_as_torch, world_size) == [True] * world_size


def test_other_norms_and_the_noise_scale():
    assert run_ranks(_scenarios, 2) == [True] * 2
