"""What is the gradient of a collective? Six small programs, on two and on three ranks, and the truth.

On every rank x = 1 and z = (rank + 2) * x. The truth comes from moving each rank's x a little and watching
the sum of all ranks' losses: what a single process would differentiate if it ran all the ranks' programs.

    python tutorials/07_gradient_of_a_collective.py
"""

import textwrap
import warnings

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as torch_nn
from ranks import run_ranks

from minddp import functional as F


def say(text):
    print(textwrap.fill(" ".join(text.split()), 100), end="\n\n")

# %% [markdown]
# ## Three ways to reduce
#
# In place, as `torch.distributed.all_reduce` does it, autograd sees nothing. `torch.distributed.nn` has a backward,
# which is right for some operations. `minddp.functional` has the right one for each.

# %%


def plain_all_reduce(z, op="sum"):
    """torch.distributed.all_reduce on a copy, as autograd sees it: an identity."""
    result = z * 1
    dist.all_reduce(result.data, getattr(dist.ReduceOp, op.upper()))
    return result


def torch_all_reduce(z, op="sum"):
    return torch_nn.all_reduce(z, getattr(dist.ReduceOp, op.upper()))


WAYS = {
    "in place": plain_all_reduce,
    "torch.distributed.nn": torch_all_reduce,
    "minddp.functional": F.all_reduce,
}

# %% [markdown]
# ## The programs and the truth
#
# The truth is found by one process that runs all ranks' programs, and differentiates the sum of their losses.

# %%


# Each program: z, the rank and a way to reduce -> this rank's loss.
PROGRAMS = {
    "all_reduce(z)**2": lambda z, rank, reduce: reduce(z) ** 2,
    "(rank + 2) * all_reduce(z)": lambda z, rank, reduce: (rank + 2) * reduce(z),
    "(rank + 2) * all_reduce(z, product)": lambda z, rank, reduce: (rank + 2) * reduce(z, "product"),
    "(rank + 2) * all_reduce(z, max)": lambda z, rank, reduce: (rank + 2) * reduce(z, "max"),
    "rank * all_reduce(z)": lambda z, rank, reduce: rank * reduce(z),
}


def table(rank, size):
    """For each program its value here, the true gradient, and each way's."""
    warnings.simplefilter("ignore")
    rows = {}
    for name, program in PROGRAMS.items():
        x = torch.ones((), dtype=torch.float64)
        losses = {way: loss_of(program, rank, reduce) for way, reduce in WAYS.items()}
        truth = slope_of_the_sum(losses["minddp.functional"], x, rank, size)
        value = losses["minddp.functional"](x).item()
        gradients = {way: gradient(loss, x) for way, loss in losses.items()}
        rows[name] = value, truth, gradients
    return rows


def slope_of_the_sum(loss, x, rank, size, eps=1e-4):
    """How the sum of all ranks' losses changes with this rank's x alone."""

    def total(owner, step):
        sum_of_losses = loss(x + step * (rank == owner)).detach()
        dist.all_reduce(sum_of_losses)
        return sum_of_losses.item()

    slopes = [(total(owner, eps) - total(owner, -eps)) / (2 * eps) for owner in range(size)]
    return slopes[rank]


def gradient(loss, x):
    """What autograd gives this rank."""
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad.item()


def loss_of(program, rank, reduce):
    return lambda x: program((rank + 2) * x, rank, reduce)


def numbers(values):
    return ", ".join(f"{value:g}" for value in values)


def show_table(size):
    ranks = run_ranks(table, size)
    print(f"{size} ranks: x.grad on rank 0, 1, ..\n")
    print(f"  {'program':38}{'loss':>14}{'truth':>17}", *(f"{way:>22}" for way in WAYS), sep="")
    for name in PROGRAMS:
        values = numbers(rank[name][0] for rank in ranks)
        truth = [round(rank[name][1], 5) for rank in ranks]
        cells = []
        for way in WAYS:
            gradients = [rank[name][2][way] for rank in ranks]
            right = all(abs(a - b) < 1e-4 for a, b in zip(gradients, truth))
            cells.append(numbers(gradients) + ("  " if right else " ✗"))
            assert right or way != "minddp.functional"
        print(f"  {name:38}{values:>14}{numbers(truth):>17}", *(f"{cell:>22}" for cell in cells), sep="")
    print()
    return ranks


def the_numbers_of_the_question(ranks):
    def gradients(program, way):
        return [rank[program][2][way] for rank in ranks]

    assert [rank["all_reduce(z)**2"][0] for rank in ranks] == [25, 25]
    assert gradients("all_reduce(z)**2", "minddp.functional") == [40, 60]
    assert gradients("(rank + 2) * all_reduce(z)", "minddp.functional") == [10, 15]
    assert gradients("(rank + 2) * all_reduce(z)", "in place") == [4, 9]
    assert gradients("(rank + 2) * all_reduce(z, product)", "minddp.functional") == [30, 30]
    assert gradients("rank * all_reduce(z)", "minddp.functional") == [2, 3]

# %% [markdown]
# ## One loss, or two?
#
# If all ranks compute the same loss, is that one loss, or as many as there are ranks? Both readings are right. They
# differ by a factor, so one has to say which is meant.

# %%


def one_loss_or_two(rank, size):
    """x.grad of all_reduce(z)**2 under both readings."""
    gradients = []
    for reading in ("per_rank", "replicated"):
        x = torch.ones((), requires_grad=True)
        (F.all_reduce((rank + 2) * x, loss=reading) ** 2).backward()
        gradients.append(x.grad.item())
    return gradients


def two_readings():
    x = torch.ones((), requires_grad=True)
    ((2 * x + 3 * x) ** 2).backward()
    per_rank, replicated = zip(*run_ranks(one_loss_or_two, 2))
    assert x.grad.item() == 50
    assert per_rank == (40, 60)
    assert replicated == (20, 30)
    say(f"""One process that computes (2x + 3x)**2 finds {x.grad.item():g}. The two ranks'
        {numbers(per_rank)} add up to 100, and that is right as well: two ranks called backward on 25
        each, so two losses were differentiated. Which one do you mean? loss="per_rank" (the default):
        every rank has its own loss, and their sum is differentiated. loss="replicated": all ranks hold
        the same loss, counted once: {numbers(replicated)}, which add up to 50. (Dividing the replicated
        loss by the world size says the same.)""")


def not_replicated(rank, size):
    x = torch.ones((), requires_grad=True)
    try:
        ((rank + 2) * F.all_reduce(x, loss="replicated")).backward()
    except F.CollectiveError as error:
        return str(error)
    return "no error"


def a_wrong_claim_raises():
    texts = run_ranks(not_replicated, 2)
    assert texts[0] == texts[1]
    assert 'use loss="per_rank"' in texts[0]
    say("The claim is checked. With a different factor on each rank it is false, and every rank is told:")
    print(textwrap.indent(textwrap.fill(texts[0], 96), "  | "), end="\n\n")

# %% [markdown]
# ## A gradient of zero
#
# A loss on each rank that does depend on the weight, and a gradient that is zero all the same.

# %%


def distance_from_the_mean(rank, size):
    d = 100.0 * (rank + 1)
    w = torch.ones((), requires_grad=True)
    loss = w * d - F.all_reduce(w * d / size)
    loss.backward()
    return loss.item(), w.grad.item()


def a_gradient_of_zero():
    (loss0, grad0), (loss1, grad1) = run_ranks(distance_from_the_mean, 2)
    assert (loss0, loss1, grad0, grad1) == (-50, 50, 0, 0)
    say(f"""A riddle: w = 1, data d = 100 and 200, loss = w d - all_reduce(w d / 2). The losses are
        {loss0:g} and {loss1:g}, and the gradient of w is {grad0:g} on both ranks. It is no bug: the two
        losses add up to 0 whatever w is. DDP, which averages such gradients, would not train w, and
        rightly so.""")


if __name__ == "__main__":
    say("""An all_reduce gives every rank s the sum y_s of all z_r. Move z_r, and every rank's y_s
        moves: so the gradient of z_r is the sum over s of what comes back to y_s. The backward of an
        all_reduce is an all_reduce. An in-place all_reduce that autograd does not see leaves the other
        ranks' part out; an API that takes every op for a sum gets products and maxima wrong (✗):""")
    the_numbers_of_the_question(show_table(2))
    show_table(3)
    say("""For a product the factor is the product of the *other* ranks' values, computed as such, never
        as y / z: so it is right when one of them is 0. The maximum's gradient goes to the rank that
        holds it, and is shared evenly when several do.""")
    two_readings()
    a_wrong_claim_raises()
    a_gradient_of_zero()
