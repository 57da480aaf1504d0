"""The tutorials' losses under DDP: values and every parameter's gradient are those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import minddp
from minddp import DistributedDataParallel
from tests.on_ranks import on_ranks
from tutorials import losses


def _nt_xent_by_the_formula(z1, z2, temperature=0.5):
    """-log(exp(s_ij) / sum over k != i of exp(s_ik)), one term after the other."""
    views = normalize(torch.cat([z1, z2]), dim=1)
    weights = (views @ views.T / temperature).exp()
    batch = len(z1)
    terms = [
        -(weights[i, (i + batch) % (2 * batch)] / (weights[i].sum() - weights[i, i])).log() for i in range(2 * batch)
    ]
    return sum(terms) / (2 * batch)


def _clip_in_one_process(image, text, scale):
    logits = scale * normalize(image, dim=1) @ normalize(text, dim=1).T
    pairs = torch.arange(len(image))
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


def _barlow_twins_in_one_process(z1, z2, weight=5e-3):
    norm = nn.BatchNorm1d(z1.shape[1], affine=False).to(z1.dtype)
    correlation = norm(z1).T @ norm(z2) / len(z1)
    identity = torch.eye(len(correlation), dtype=z1.dtype)
    squares = (correlation - identity).square()
    return (squares * (identity + weight * (1 - identity))).sum()


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, a, b):
        return self.first(a), self.second(b), self.log_scale.exp()


class Discriminator(nn.Module):
    def __init__(self, statistic):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh())
        self.statistic = statistic
        self.head = nn.Conv2d(4, 1, 2)

    def forward(self, x):
        return self.head(self.statistic(self.body(x)))


class _StdDevInOneProcess(nn.Module):
    def forward(self, x):
        deviation = (x.var(0, unbiased=False) + 1e-8).sqrt().mean()
        return torch.cat([x, deviation.expand(len(x), 1, *x.shape[2:])], dim=1)


def _module(cls, *args):
    torch.manual_seed(3)
    return cls(*args).double()


def _compare_gradients(ddp, reference):
    ours = {name: p.grad for name, p in ddp.module.named_parameters()}
    for name, p in reference.named_parameters():
        if p.grad is None:  # the scale, where a loss has none
            assert ours[name] is None or not ours[name].any()
            continue
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def _share(whole, rank, size):
    return whole.chunk(size)[rank]


CONTRASTIVE = {
    "nt_xent": (lambda a, b, s: losses.nt_xent(a, b), lambda a, b, s: _nt_xent_by_the_formula(a, b)),
    "clip, local": (lambda a, b, s: losses.clip(a, b, s), _clip_in_one_process),
    "clip, whole": (lambda a, b, s: losses.clip(a, b, s, local_loss=False), _clip_in_one_process),
    "barlow_twins": (
        lambda a, b, s: losses.barlow_twins(a, b),
        lambda a, b, s: _barlow_twins_in_one_process(a, b),
    ),
}


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("name", CONTRASTIVE)
@on_ranks(2, 3)
def test_a_contrastive_loss_equals_one_process(rank, size, name, few):
    per_rank = 1 if few else 3 if name == "barlow_twins" else 4
    ours, in_one_process = CONTRASTIVE[name]
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size * per_rank, 5, dtype=torch.float64, generator=generator)
    reference, ddp = (
        _module(TwoTowers),
        DistributedDataParallel(_module(TwoTowers), find_unused_parameters=True),
    )
    expected = in_one_process(*reference(a, b))
    expected.backward()
    loss = ours(*ddp(_share(a, rank, size), _share(b, rank, size)))
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / size, expected.detach())
    _compare_gradients(ddp, reference)


@pytest.mark.parametrize("name", CONTRASTIVE)
@on_ranks(2, 3)
def test_uneven_shares_by_weights(rank, size, name):
    """Shares of 1, 2, .. samples: sums and weights give what means cannot."""
    ours, in_one_process = CONTRASTIVE[name]
    shares = list(range(1, size + 1))
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, sum(shares), 5, dtype=torch.float64, generator=generator)
    reference = _module(TwoTowers)
    ddp = DistributedDataParallel(_module(TwoTowers), find_unused_parameters=True, reduction="weighted")
    in_one_process(*reference(a, b)).backward()
    mine = ours(*ddp(a.split(shares)[rank], b.split(shares)[rank]))
    minddp.add_weight(ddp, shares[rank])
    (shares[rank] * mine).backward()
    _compare_gradients(ddp, reference)


@pytest.mark.parametrize("per_rank", [1, 4])
@pytest.mark.parametrize("own_group", [False, True])
@on_ranks(2, 3)
def test_minibatch_stddev_equals_one_process(rank, size, per_rank, own_group):
    group = dist.new_group() if own_group else None
    x = torch.randn(size * per_rank, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference = _module(Discriminator, _StdDevInOneProcess())
    # Buckets of one parameter: DDP's collectives fall between the layer's own.
    ddp = DistributedDataParallel(
        _module(Discriminator, losses.MinibatchStdDev(group)), bucket_cap_mb_list=[1e-6] * 2, broadcast_buffers=False
    )
    for _ in range(3):
        reference.zero_grad()
        ddp.zero_grad()
        expected = reference(x)
        expected.square().mean().backward()
        actual = ddp(_share(x, rank, size))
        actual.square().mean().backward()
        torch.testing.assert_close(actual, _share(expected, rank, size))
        _compare_gradients(ddp, reference)
