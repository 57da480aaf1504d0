"""00. Autograd in 15 minutes: what data-parallel training needs to know of it.

    python tutorials/00_autograd_for_ddp.py

`loss.backward()` is where all of DistributedDataParallel happens. So before the other pages: what backward does,
when a gradient is there, and what may be hung on that moment. No ranks are started here; one process is enough.
"""

import threading

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
from torch import Tensor, nn
from torch.autograd import Variable

# %% [markdown]
# ## 1. Forward writes a graph
#
# While forward runs, autograd notes for each result how it was made: its `grad_fn`, a node. A node points to the
# nodes of its inputs. A parameter was made by no operation. Where the graph reaches one, it ends in a node called
# `AccumulateGrad`, whose work is to add what comes to the parameter's `.grad`.

# %%


def graph() -> None:
    print("1. The graph of a layer and a loss, from the loss down")
    layer = nn.Linear(2, 1)
    loss = layer(torch.ones(1, 2)).square().sum()
    node, depth = loss.grad_fn, 0
    while node is not None:
        ends = [other.name().split("::")[-1] for other, _ in node.next_functions if other is not None]
        print(f"   {'  ' * depth}{node.name()} -> {', '.join(ends) or 'nothing'}")
        node = node.next_functions[0][0] if node.next_functions else None
        depth += 1
    leaf = torch.autograd.graph.get_gradient_edge(layer.weight).node
    assert leaf.name() == "torch::autograd::AccumulateGrad" and leaf.variable is layer.weight
    print("   The parameter's own node is AccumulateGrad, and it knows its parameter.\n")


# %% [markdown]
# ## 2. Backward runs it, and gradients arrive one by one
#
# `backward()` starts at the loss and runs each node when all gradients that flow into it are there. Layers that
# were last in forward come first. A parameter's gradient is there long before backward is over, if it belongs to a
# late layer. That is the time in which it can be sent.
#
# `register_post_accumulate_grad_hook` asks to be called right after AccumulateGrad has run. It is the one place
# where "this gradient is in `.grad` now" is known. A plain `register_hook` on the parameter comes too early: it
# sees the gradient before it is added, and `.grad` is still the old one.

# %%


def arrivals() -> None:
    print("2. In which order gradients arrive, and what .grad holds in each kind of hook")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    order: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    seen: dict[str, bool] = {}
    weight = net[0].weight
    weight.register_hook(lambda _: seen.update({"tensor hook": weight.grad is not None}))
    weight.register_post_accumulate_grad_hook(lambda p: seen.update({"post hook": p.grad is not None}))
    net(torch.ones(1, 2)).sum().backward()
    print(f"   {', '.join(order)}")
    print(f"   .grad is there: in a tensor hook {seen['tensor hook']}, in a post hook {seen['post hook']}\n")
    assert seen == {"tensor hook": False, "post hook": True}
    assert [name[0] for name in order] == ["2", "2", "1", "1", "0", "0"]


# %% [markdown]
# ## 3. Gradients add up
#
# AccumulateGrad adds. Two backwards without `zero_grad()` in between give the sum of both. This is what `no_sync`
# builds on: several backwards gather, and the last one sends what has gathered. A parameter that is used twice in
# one forward gets one gradient all the same: the engine adds the parts before it runs AccumulateGrad. But a
# checkpoint that is recomputed inside of backward starts an engine run of its own, a *graph task*. Then
# AccumulateGrad of one parameter can run more than once in one backward, and "the gradient is there" is said too
# early.

# %%


def sums() -> None:
    print("3. How often AccumulateGrad runs")
    weight = nn.Parameter(torch.ones(()))
    arrived: list[float] = []
    weight.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.item()))
    (weight * 2 + weight * 3).backward()
    print(f"   used twice in one forward: {len(arrived)} arrival, .grad is {arrived}")
    assert arrived == [5.0]
    (weight * 2).backward()
    print(f"   a second backward:         {len(arrived)} arrivals, .grad is {arrived}")
    assert arrived == [5.0, 7.0]
    arrived.clear()
    weight.grad = None
    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(lambda value: value * weight, x, use_reentrant=True)
    x.backward()
    print(f"   two reentrant checkpoints: {len(arrived)} arrivals in one backward, .grad is {arrived}\n")
    assert arrived == [1.0, 2.0]


# %% [markdown]
# ## 4. Which thread runs it
#
# Gradients on the CPU are made by the thread that called `backward()`. For each GPU the engine has a thread of its
# own. So a hook may run in another thread than your program's. In C++ it runs without the GIL, Python's global
# lock; a hook in Python takes it for as long as it runs.

# %%


def threads() -> None:
    print("4. Threads")
    weight = nn.Parameter(torch.ones(()))
    found: list[threading.Thread] = []
    weight.register_post_accumulate_grad_hook(lambda _: found.append(threading.current_thread()))
    (weight * 2).backward()
    worker = threading.Thread(target=lambda: (weight * 2).backward())
    worker.start()
    worker.join()
    print(f"   backward() called by this thread:  the hook ran in it: {found[0] is threading.main_thread()}")
    print(f"   backward() called by another one:  the hook ran in that: {found[1] is worker}\n")
    assert found == [threading.main_thread(), worker]


# %% [markdown]
# ## 5. When is backward over?
#
# A hook on the last gradient is no answer, since it may never come: a branch may not have been used. The engine has
# a better one. `queue_callback`, called while backward runs, asks for a call at its very end, before `backward()`
# returns. There the reducer waits for its collectives. So `optimizer.step()` on the next line finds averages.

# %%


def the_end() -> None:
    print("5. What runs when")
    told: list[str] = []
    weight = nn.Parameter(torch.ones(()))

    def on_gradient(_: Tensor) -> None:
        told.append("gradient")
        Variable._execution_engine.queue_callback(lambda: told.append("callback"))

    weight.register_post_accumulate_grad_hook(on_gradient)
    (weight * 2).backward()
    told.append("backward() returns")
    print(f"   {' -> '.join(told)}\n")
    assert told == ["gradient", "callback", "backward() returns"]


# %% [markdown]
# ## 6. What does not take part
#
# A parameter that the loss does not use gets no gradient: its `.grad` stays as it was, `None` or the old one. No
# hook tells of it. A reducer that waits for all gradients of a bucket would wait for ever. It must learn that
# nothing will come; how, is the hardest part of it.

# %%


def absent() -> None:
    print("6. A branch that is not used")
    net = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)})
    arrived: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    net["used"](torch.ones(1, 1)).sum().backward()
    print(f"   arrived: {', '.join(sorted(arrived))}")
    print(f"   .grad of unused.weight: {net['unused'].weight.grad}")
    assert sorted(arrived) == ["used.bias", "used.weight"] and net["unused"].weight.grad is None


# %% [markdown]
# Next: [02](02_how_ddp_works.py) builds a reducer from these pieces.

# %%

if __name__ == "__main__":
    graph()
    arrivals()
    sums()
    threads()
    the_end()
    absent()
