"""Ordinary programs that are in nobody's DDP tests: the same numbers as with torch's class, on 2 and 3 ranks.

Each program is run with torch's class and then with minddp's, and gives what it saw: gradients, outputs, weights.
Where torch's own ranks disagree among each other (it went on with local gradients), minddp's must agree.
"""

import time
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import minddp
from tests.programs import beside_torch
from tests.programs.beside_torch import batch, mlp, other_collective
from tests.ranks_pool import run_ranks

MODES = {
    **beside_torch.MODES,
    "unused_small_views": {**beside_torch.MODES["small views"], "find_unused_parameters": True},
}
# With torch's class: its default arguments.
ONLY_HERE = {"auto": {"bucket_cap_mb": "auto"}, "check_finite": {"check_finite": True}}
MODES.update({mode: {} for mode in (*ONLY_HERE, "hook", "fp16_hook")})
HOOKS = {"hook": default_hooks.allreduce_hook, "fp16_hook": default_hooks.fp16_compress_hook}


def grads(*modules):
    return [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]


def gan(wrap, rank, freezes=True):
    """A generator's step behind a discriminator, frozen or not, then the discriminator's."""
    disc, gen, seen = wrap(mlp()), wrap(nn.Linear(4, 4)), []
    for i in range(3):
        z = batch(rank, i)
        disc.requires_grad_(not freezes)
        gen.zero_grad()
        disc(gen(z)).mean().backward()
        seen += grads(gen)
        disc.requires_grad_(True)
        disc.zero_grad()
        (disc(z).mean() - disc(gen(z).detach()).mean()).backward()
        seen += grads(disc)
    return seen


def gan_not_frozen(wrap, rank):
    return gan(wrap, rank, freezes=False)


def train(model, rank, i, seen, optimizer=None):
    model.zero_grad()
    model(batch(rank, i)).pow(2).sum().backward()
    seen += grads(model)
    if optimizer is not None:
        optimizer.step()


def attack(wrap, rank, ranks=(0, 1, 2)):
    """PGD: the gradient of the input by autograd.grad, then a training step."""
    model, seen = wrap(mlp()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        x = batch(rank, i).requires_grad_()
        if rank in ranks:
            (g,) = torch.autograd.grad(model(x).sum(), x)
            x = x + 0.1 * g.sign()
        optimizer.zero_grad()
        model(x.detach()).pow(2).sum().backward()
        seen += grads(model)
        optimizer.step()
    return seen


def attack_on_one_rank(wrap, rank):
    return attack(wrap, rank, ranks=(0,))


def attack_by_inputs(wrap, rank):
    """backward(inputs=[x]) accumulates into the input alone."""
    model, seen = wrap(mlp()), []
    for i in range(3):
        x = batch(rank, i).requires_grad_()
        model(x).sum().backward(inputs=[x])
        seen.append(x.grad.clone())
        train(model, rank, i, seen)
    return seen


def saliency_before_step(wrap, rank):
    model, seen = wrap(mlp()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        train(model, rank, i, seen)
        model.eval()
        x = batch(rank, i).requires_grad_()
        seen += torch.autograd.grad(model(x).sum(), x)
        model.train()
        seen += grads(model)
        optimizer.step()
    return seen


def hessian_vector(wrap, rank):
    model, seen = wrap(mlp()), []
    for i in range(3):
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(batch(rank, i)).pow(2).sum(), parameters, create_graph=True)
        seen += torch.autograd.grad(sum((g * g.detach()).sum() for g in first), parameters)
        train(model, rank, i, seen)
    return seen


def gradient_penalty(wrap, rank):
    model, seen = wrap(mlp()), []
    for i in range(3):
        x = batch(rank, i).requires_grad_()
        model.zero_grad()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(batch(rank, i + 3)).sum() + g.norm()).backward()
        seen += grads(model)
    return seen


def gradient_penalty_alone(wrap, rank):
    """The penalty's graph need not hold a node that forward made."""
    torch.manual_seed(0)
    model, seen = wrap(nn.Linear(4, 2, bias=False)), []
    for i in range(3):
        x = batch(rank, i).requires_grad_()
        model.zero_grad()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (g.pow(2).sum() * (rank + 1)).backward()
        seen += grads(model)
    return seen


def probed_on_one_rank(wrap, rank):
    model, seen = wrap(mlp()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        if rank == 0:
            model.module(batch(rank)).sum().backward()
        train(model, rank, i, seen, optimizer)
    return seen


class StraightThrough(torch.autograd.Function):
    """The row of ``book`` that is nearest; backward passes its gradient on to ``x``, and gives None for ``book``."""

    @staticmethod
    def forward(ctx, x, book):
        return book[torch.cdist(x, book).argmin(1)]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.book, self.head = nn.Linear(4, 4), nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 2)

    def forward(self, x, quantize=True):
        h = self.encoder(x)
        return self.head(StraightThrough.apply(h, self.book) if quantize else h * self.book.sum())


def codebook(wrap, rank):
    """Backward comes to a parameter in every iteration, and never brings it a gradient."""
    model, seen = wrap(Quantized()), []
    for i in range(4):
        train(model, rank, i, seen)
    return seen


def codebook_on_one_rank(wrap, rank):
    """On one rank or the other, in turn, the parameter gets a gradient."""
    model, seen = wrap(Quantized()), []
    for i in range(4):
        model.zero_grad()
        model(batch(rank, i), quantize=(rank + i) % 2 == 0).pow(2).sum().backward()
        seen += grads(model)
    return seen


def second_wrapper(wrap, rank):
    base, seen = mlp(), []
    first, second = wrap(base), wrap(base)
    for i in range(3):
        with second.no_sync():
            second(batch(rank, i)).sum().backward()
        second(batch(rank, i + 7)).sum().backward()
        seen += grads(base)
        base.zero_grad()
        first(batch(rank, i)).sum().backward()
        seen += grads(base)
        base.zero_grad()
    return seen


def made_again(wrap, rank):
    """A notebook cell run twice: the first wrapper is alive, and trained before."""
    base, seen, wrappers = mlp(), [], []
    for _ in range(3):
        wrappers.append(wrap(base))
        for i in range(2):
            train(wrappers[-1], rank, i, seen)
    return seen


def penalty_on_weights(wrap, rank):
    """Weight decay by a backward of its own: local, and the same on every rank."""
    model, seen = wrap(mlp()), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        optimizer.zero_grad()
        model(batch(rank, i)).pow(2).sum().backward()
        (0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
        seen += grads(model)
        optimizer.step()
    return seen + [p.detach().clone() for p in model.parameters()]


def reading_hooks(wrap, rank):
    """Hooks of every kind, which read every gradient while backward runs."""
    model, seen = wrap(mlp()), []
    parameters = list(model.parameters())

    def read(*_):
        seen.extend(grads(model))

    parameters[0].register_hook(read)
    for p in parameters:
        p.register_post_accumulate_grad_hook(read)
        p.view_as(p).grad_fn.next_functions[0][0].register_hook(read)
    model.module[0].register_full_backward_hook(read)
    for i in range(3):
        train(model, rank, i, seen)
    return seen


def changing_hooks(wrap, rank):
    """What a hook of the program's changes in ``.grad`` is sent."""
    model, seen = wrap(mlp()), []

    def scale(p):
        p.grad.mul_(1 + rank)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(scale)
    for i in range(3):
        train(model, rank, i, seen)
    return seen


def checkpointed(use_reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = x.clone().requires_grad_()
            x = checkpoint(lambda t: torch.tanh(self.a(t)), x, use_reentrant=use_reentrant)
            return self.c(checkpoint(lambda t: torch.tanh(self.b(t)), x, use_reentrant=use_reentrant))

    def program(wrap, rank):
        model, seen = wrap(Net()), []
        for i in range(3):
            train(model, rank, i, seen)
        return seen

    return program


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x, which):
        return self.heads[which](torch.tanh(self.body(x)))


def two_modules_one_loss(wrap, rank):
    """The second takes another branch on each rank, beside other collectives in the same backward."""
    torch.manual_seed(0)
    first = wrap(mlp())
    second = wrap(Branches(), find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2, static_graph=False)
    seen = []
    for i in range(4):
        first.zero_grad()
        second.zero_grad()
        x = batch(rank, i)
        loss = other_collective(first(x)).pow(2).sum() + other_collective(second(x, rank % 2)).pow(2).sum()
        loss.backward()
        seen += grads(first, second)
    return seen


def chained_modules(wrap, rank):
    torch.manual_seed(0)
    body = wrap(nn.Linear(4, 4))
    head, seen = wrap(Branches(), find_unused_parameters=True, bucket_cap_mb_list=[1e-5] * 2, static_graph=False), []
    for i in range(4):
        body.zero_grad()
        head.zero_grad()
        head(other_collective(body(batch(rank, i))), (rank + i) % 2).pow(2).sum().backward()
        seen += grads(body, head)
    return seen


def joined_together(wrap, rank):
    """The wrapper and an optimizer with collectives of its own, on one group, in one join."""
    model = wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    for steps in (2 + rank, 4 - rank):
        with Join([model, optimizer]):
            for i in range(steps):
                optimizer.zero_grad()
                model(batch(rank, i)).pow(2).sum().backward()
                optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


PROGRAMS = {
    f.__name__: f
    for f in (
        gan, gan_not_frozen, attack, attack_on_one_rank, attack_by_inputs, saliency_before_step,
        hessian_vector, gradient_penalty, gradient_penalty_alone, probed_on_one_rank,
        second_wrapper, made_again, penalty_on_weights,
        reading_hooks, changing_hooks, codebook, codebook_on_one_rank,
        two_modules_one_loss, chained_modules, joined_together,
    )
}  # fmt: skip
PROGRAMS["checkpointed_reentrant"] = checkpointed(True)
PROGRAMS["checkpointed"] = checkpointed(False)

# Torch's class raises or hangs with a static graph, or with unused parameters: nothing to compare with.
TORCH_FAILS = {
    ("second_wrapper", "static"),
    ("made_again", "static"),
    ("checkpointed_reentrant", "find_unused"),
    ("checkpointed_reentrant", "unused_small_views"),
    ("probed_on_one_rank", "static"),
    ("attack_on_one_rank", "static"),
    ("joined_together", "static"),
}
# With views, what a hook sees is the bucket; which of its values are there is each reducer's own.
NOT_COMPARED = {("reading_hooks", mode) for mode in ("views", "small views", "unused_small_views")}


def _wrap(cls, module, mode, arguments):
    arguments = {**MODES[mode], **arguments}
    if cls is minddp.DistributedDataParallel:
        arguments = {**ONLY_HERE.get(mode, {}), **arguments}
    ddp = cls(module, **arguments)
    if mode in HOOKS:
        ddp.register_comm_hook(None, HOOKS[mode])
    return ddp


def _observe(rank, world_size, names, mode):
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        seen = {}
        for kind, cls in (("torch", TorchDDP), ("minddp", minddp.DistributedDataParallel)):
            if kind == "torch" and (name, mode) in TORCH_FAILS:
                continue
            seen[kind] = PROGRAMS[name](lambda m, cls=cls, **kw: _wrap(cls, m, mode, kw), rank)
        results[name] = seen
    return results


def _close(mine, theirs, mode):
    # Three numbers of half precision, added in another order.
    rtol, atol = (1e-2, 1e-2) if mode == "fp16_hook" else (1e-4, 1e-6)
    return len(mine) == len(theirs) and all(torch.allclose(a, b, rtol, atol) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_same_numbers(mode, world_size):
    ranks = run_ranks(_observe, world_size, list(PROGRAMS), mode)
    failed = []
    for name in PROGRAMS:
        if (name, mode) in NOT_COMPARED:
            continue
        if not all("torch" in seen[name] for seen in ranks):
            continue
        same = [_close(seen[name]["minddp"], seen[name]["torch"], mode) for seen in ranks]
        if not all(same):
            failed.append(name)
    # A static graph's first backward decides in torch, whatever it was: it goes on with local gradients then.
    if mode == "static":
        failed = [name for name in failed if not _torch_is_local(name, ranks)]
    assert not failed


def _torch_is_local(name, ranks):
    """Something on which torch's ranks disagree is the same on all of minddp's."""

    def agree(kind, i):
        values = [seen[name][kind][i] for seen in ranks]
        return all(torch.allclose(value, values[0], rtol=1e-4, atol=1e-6) for value in values)

    return any(agree("minddp", i) and not agree("torch", i) for i in range(len(ranks[0][name]["minddp"])))


class _WithIdle(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.idle = nn.Linear(8, 8)

    def forward(self, x):
        return self.layers(x)


def _static_power_sgd(rank, world_size, wrap):
    ddp = wrap(_WithIdle(), static_graph=True)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=0)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for i in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + rank))).square().mean().backward()
        optimizer.step()
    trained = [p.detach().clone() for p in ddp.parameters()]
    if wrap is TorchDDP:  # Gloo's thread must not be the last to know the group: see minddp/lifetime.py
        del ddp, optimizer
        time.sleep(0.3)
    return trained


@pytest.mark.parametrize("world_size", [2, 3])
def test_power_sgd_with_a_static_graph_and_unused_parameters(world_size):
    """Its collectives follow each other in callbacks; the buckets are not torch's."""
    theirs = run_ranks(_static_power_sgd, world_size, TorchDDP)
    for _ in range(3):
        ours = run_ranks(_static_power_sgd, world_size, minddp.DistributedDataParallel)
        for a, b in zip(ours, theirs, strict=True):
            for mine, their in zip(a, b, strict=True):
                torch.testing.assert_close(mine, their)


def _power_sgd_one_at_a_time(state, bucket):
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


def _power_sgd_in_seven_buckets(rank, world_size, find_unused):
    def trained(wrap, hook):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.BatchNorm1d(64))
        ddp = wrap(net, bucket_cap_mb_list=[0.02] * 2, find_unused_parameters=find_unused)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for i in range(12):
            optimizer.zero_grad()
            ddp(torch.randn(4, 64, generator=torch.Generator().manual_seed(9 * i + rank))).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in net.parameters()]

    theirs = trained(TorchDDP, _power_sgd_one_at_a_time)
    ours = trained(minddp.DistributedDataParallel, powerSGD_hook.powerSGD_hook)
    compressed = trained(
        minddp.DistributedDataParallel, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    )
    return theirs, ours, compressed


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_power_sgd_in_several_buckets_on_the_cpu(world_size, find_unused, backend):
    """Side by side they wait for each other on the process group's own threads: with torch's class, forever."""
    ranks = run_ranks(_power_sgd_in_seven_buckets, world_size, find_unused, backend=backend)
    for theirs, ours, compressed in ranks:
        for their, mine, first, half in zip(theirs, ours, ranks[0][1], compressed, strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(half, mine, rtol=1e-2, atol=1e-2)
            if not find_unused:  # otherwise buckets are not torch's, and matrices are approximated by bucket
                torch.testing.assert_close(mine, their)
