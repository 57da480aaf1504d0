"""12. Break it: what torch's class and minddp's do when a program is wrong.

    python tutorials/12_break_it.py

Each program below has a mistake that people make. It runs on two ranks with torch's class, then with minddp's,
and has 10 seconds. What happened is printed: how far each rank came, what it raised, and whether both ranks still
have the same weights. Weights that differ, without an error, are the worst end: training goes on, and is wrong.
"""

import logging
import re
import textwrap
import time
import warnings
from collections.abc import Callable
from typing import Any

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import minddp

LIMIT = 10.0
WAITS = f"waits for the other rank, still after {LIMIT:.0f} seconds"
CLASSES = {"torch": nn.parallel.DistributedDataParallel, "minddp": minddp.DistributedDataParallel}

# %% [markdown]
# ## How it is watched
#
# A program is a generator that yields how far it has come. An exception that it raises is noted, too. A rank that has
# ended stays until the others have ended, or until the time is up, as a process that trains on would. An exception
# after that counts as a wait: the rank has waited for the other one all the time.

# %%


def watched(rank: int, world_size: int, program: Callable, which: str, extra: dict) -> tuple[list[str], list[Tensor]]:
    """(what happened on this rank, its weights at the end)."""
    warm_up()
    told: list[str] = []
    store, begin = dist.distributed_c10d._get_default_store(), time.monotonic()
    warnings.simplefilter("ignore")  # of a long wait: what comes of it is told below
    logging.getLogger("minddp").setLevel(logging.ERROR)  # likewise
    torch.manual_seed(0)
    model: Any = nn.ModuleList()
    try:
        for message in program(rank, CLASSES[which], extra, model):
            told.append(message)
    except Exception as error:
        waited = time.monotonic() - begin > LIMIT - 1 and "gloo" in str(error)  # its connection was closed
        text = re.sub(r"process \d+ on [\w.-]+|(?<=waited )\d+", "…", " ".join(str(error).split()))
        told.append(WAITS if waited else f"{type(error).__name__}: {text}")
    store.add("ended", 1)
    while store.add("ended", 0) < world_size and time.monotonic() - begin < LIMIT:
        time.sleep(0.05)
    return told, [parameter.detach().clone() for parameter in model.parameters()]


def warm_up() -> None:
    """A step that goes well: what is imported the first time does not count."""
    for wrap in CLASSES.values():
        wrap(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where both hold the same NaN."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def shorten(text: str) -> str:
    """Cut in the middle: names stand near a message's beginning, or at its end."""
    if len(text) <= 400:
        return text
    head, tail = textwrap.shorten(text, 240, placeholder=""), textwrap.shorten(text[::-1], 160, placeholder="")[::-1]
    return f"{head} … {tail}"


def show(title: str, program: Callable, **extra: Any) -> dict[str, tuple[list[list[str]], bool | None]]:
    """Prints what each class does; by class, what each rank told, and whether the ranks' weights are equal."""
    print(title)
    found = {}
    for which in CLASSES:
        # A rank that waits, even after the other one has gone, gives None.
        told = run_ranks(watched, 2, program, which, extra, timeout=LIMIT + 30)
        results = [result or ([WAITS], []) for result in told]
        equal = None
        (_, mine), (_, others) = results
        if [tensor.shape for tensor in mine] == [tensor.shape for tensor in others]:
            equal = all(map(same_bits, mine, others))
        for rank in range(2):
            words = "; ".join(results[rank][0])
            label = f"   {which if rank == 0 else '':7} rank {rank}: "
            print(textwrap.fill(shorten(words), 110, initial_indent=label, subsequent_indent=" " * 19))
        if equal is not None:
            print(f"           the ranks' weights are {'the same' if equal else 'DIFFERENT'}")
        found[which] = [results[rank][0] for rank in range(2)], equal
    print()
    return found


def ended_well(told: list[str]) -> bool:
    return not raised(told) and told[-1] != WAITS


def raised(told: list[str]) -> bool:
    return re.match(r"[A-Z]\w+: ", told[-1]) is not None


# %% [markdown]
# ## 1. A branch that the loss does not use
#
# Without `find_unused_parameters=True`, all parameters must take part. Here one layer does not. Its bucket is never
# complete and never sent, and the other layer shares that bucket.

# %%


def unused_branch(rank: int, wrap: Any, extra: dict, model: Any):
    model.extend([nn.Linear(4, 4), nn.Linear(4, 4)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.branch = model

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    ddp = wrap(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        ddp(torch.randn(2, 4) + rank).square().sum().backward()
        optimizer.step()
        yield f"step {step} done"


def break_unused() -> None:
    found = show("1. A branch that the loss does not use", unused_branch)
    told, equal = found["torch"]
    assert told[0][0] == "step 0 done" and raised(told[0]) and equal is False
    told, equal = found["minddp"]
    assert all(len(rank) == 1 and raised(rank) for rank in told) and equal is True


# %% [markdown]
# ## 2. Two models, trained in another order on each rank
#
# Rank 0 runs the backward of `a` first, rank 1 that of `b`. A process group matches calls by their order alone, so
# gradients of `a` are added to gradients of `b`. Both models have the same size, so nobody notices. minddp's weights
# drift, too: neither class can see it from one rank's point of view. This is why the reducer launches its own buckets
# in one order.
#
# A process group for each wrapper does not help. `backward()` waits for its own collectives, so each rank would
# wait for the other one. Call them in one order on all ranks.

# %%


def another_order(rank: int, wrap: Any, extra: dict, model: Any):
    model.extend([nn.Linear(4, 4), nn.Linear(4, 4)])
    wrapped = [wrap(part) for part in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [ddp(torch.ones(2, 4) * (1 + 5 * index) * (1 + rank)).sum() for index, ddp in enumerate(wrapped)]
    for index in [0, 1] if rank == 0 else [1, 0]:
        losses[index].backward()
    optimizer.step()
    yield "step 0 done"


def break_order() -> None:
    found = show("2. Two models, trained in another order on each rank", another_order)
    print("   With minddp the weights drift, too: no class can see this from one rank. Call wrappers in one order.\n")
    assert all(all(map(ended_well, told)) and equal is False for told, equal in found.values())


# %% [markdown]
# ## 3. A NaN on one rank
#
# One bad sample on rank 1. The average has the NaN on all ranks, and after the step, so have all weights. Nothing
# tells where it came from. minddp looks at each rank's own gradient, before the average, if you pass
# `check_finite=True`.

# %%


def a_nan(rank: int, wrap: Any, extra: dict, model: Any):
    model.append(nn.Linear(4, 4))
    ddp = wrap(model[0], **({"check_finite": True} if wrap is CLASSES["minddp"] else {}))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        x = torch.ones(2, 4)
        if rank == 1 and step == 1:
            x[0, 0] = float("nan")
        ddp(x).square().sum().backward()
        optimizer.step()
        bad = sum(int(parameter.isnan().sum()) for parameter in ddp.parameters())
        yield f"step {step} done, {bad} weights are NaN"


def break_nan() -> None:
    found = show("3. A NaN on one rank", a_nan)
    assert all("20 weights are NaN" in told[-1] for told in found["torch"][0])
    assert all(raised(told) and "rank 1" in told[-1] for told in found["minddp"][0])


# %% [markdown]
# ## 4. Different models
#
# Rank 1 has a wider layer: a command-line argument that differs, a vocabulary that was counted on each rank's own
# data.

# %%


def different_models(rank: int, wrap: Any, extra: dict, model: Any):
    model.append(nn.Linear(4, 4 + rank))
    ddp = wrap(model[0])
    yield "wrapped"
    ddp(torch.ones(2, 4)).sum().backward()
    yield "backward done"


def break_models() -> None:
    found = show("4. Different models", different_models)
    assert found["torch"][0][0] == [WAITS] and raised(found["torch"][0][1])
    assert all(map(raised, found["minddp"][0]))


# %% [markdown]
# ## 5. `.module` on one rank
#
# Rank 1 calls `ddp.module(x)` in place of `ddp(x)`, in an `if rank == 1` that was meant for a print. That goes past
# the wrapper: its gradients are its own. With torch's class rank 1 takes a step of its own and trains on, while
# rank 0 waits. With minddp's, rank 1 asks rank 0 for its gradients. Rank 0 is in its next forward, and waits for
# rank 1, so rank 1 raises before the step. Rank 0 raises, too, and names rank 1, once rank 1's program has ended by
# that exception. Here it goes on: then rank 0's log says, after ten seconds, where rank 1 is and what it has met.

# %%


def past_the_wrapper(rank: int, wrap: Any, extra: dict, model: Any):
    model.append(nn.Linear(4, 4))
    ddp = wrap(model[0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        bypass = step == 1 and (rank == 1 or extra.get("all_ranks"))
        (ddp.module if bypass else ddp)(torch.ones(2, 4) + rank).square().sum().backward()
        optimizer.step()
        yield f"step {step} done"


def break_module() -> None:
    found = show("5. `.module` on one rank", past_the_wrapper)
    assert found["torch"][0][0][-1] == WAITS and ended_well(found["torch"][0][1])
    told, equal = found["minddp"]
    assert not ended_well(told[0]) and raised(told[1]) and equal is True
    found = show("6. `.module` on all ranks", past_the_wrapper, all_ranks=True)
    assert all(map(ended_well, found["torch"][0])) and found["torch"][1] is False
    assert not any(map(ended_well, found["minddp"][0])) and found["minddp"][1] is True


# %% [markdown]
# ## 6. `.module` on all ranks
#
# The same on all ranks, which is easier to write by mistake. Nobody waits, and the replicas drift apart.

# %% [markdown]
# ## 7. A second backward of one graph
#
# `loss.backward(retain_graph=True)`, then `loss.backward()` again. With torch's class, forward prepares for one
# backward. The second one adds gradients that are this rank's own.

# %%


def second_backward(rank: int, wrap: Any, extra: dict, model: Any):
    model.append(nn.Linear(4, 4))
    ddp = wrap(model[0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss = ddp(torch.ones(2, 4) + rank).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    yield "step 0 done"


def break_second_backward() -> None:
    found = show("7. A second backward of one graph", second_backward)
    assert all(map(ended_well, found["torch"][0])) and found["torch"][1] is False
    assert all(map(ended_well, found["minddp"][0])) and found["minddp"][1] is True


# %% [markdown]
# ## 8. An exception in one rank's backward
#
# Rank 1 meets an exception in backward, catches it, and goes to the next batch, as a loop that skips bad batches
# does. It never sends its buckets. With torch's class rank 0 waits until the group's timeout. With minddp's, rank 0
# raises within seconds, and names rank 1.

# %%


def skipped_batch(rank: int, wrap: Any, extra: dict, model: Any):
    model.append(nn.Linear(4, 4))
    ddp = wrap(model[0])
    for step in range(2):
        if rank == 1 and step == 1:
            model[0].weight.register_hook(lambda _: 1 / 0)
        try:
            ddp(torch.ones(2, 4)).sum().backward()
            yield f"step {step} done"
        except ZeroDivisionError:
            yield "bad batch, skipped"


def break_exception() -> None:
    found = show("8. An exception in one rank's backward", skipped_batch)
    assert found["torch"][0][0][-1] == WAITS
    assert raised(found["minddp"][0][0]) and "rank 1" in found["minddp"][0][0][-1]


# %% [markdown]
# ## 9. A layer unfrozen after wrapping
#
# Fine-tuning: a frozen layer is thawed later. Torch's class made its hooks at construction, and knows nothing of it.

# %%


def unfrozen(rank: int, wrap: Any, extra: dict, model: Any):
    model.extend([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[0].requires_grad_(False)
    ddp = wrap(nn.Sequential(*model))
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp(torch.ones(2, 4) + rank).square().sum().backward()
    optimizer.step()
    yield "step 0 done"


def break_unfrozen() -> None:
    found = show("9. A layer unfrozen after wrapping", unfrozen)
    assert all(map(ended_well, found["torch"][0])) and found["torch"][1] is False
    assert not any(map(ended_well, found["minddp"][0])) and found["minddp"][1] is True


# %%

if __name__ == "__main__":
    break_unused()
    break_order()
    break_nan()
    break_models()
    break_module()
    break_second_backward()
    break_exception()
    break_unfrozen()
