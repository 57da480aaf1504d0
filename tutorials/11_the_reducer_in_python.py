"""11. The reducer in Python, rung by rung: from buckets that overlap to what `minddp._C` does.

    python tutorials/11_the_reducer_in_python.py

[02](02_how_ddp_works.py) ends with buckets that are launched while backward runs. The real reducer does more, and
each rung here adds one thing, in some 40 lines. Every rung trains the programs of the rungs below and one more
that those cannot do, and ends with the same bits as `minddp.DistributedDataParallel`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.autograd import Variable

import minddp

RANKS = 2
CAP = 3  # parameters to a bucket: small, so that there are several

# %% [markdown]
# ## 1. Buckets that overlap
#
# Where 02 ended, as a class that knows only parameters. A hook copies each gradient into its bucket; a full bucket
# leaves, in order; at the end of backward the results are copied back.

# %%


class Bucket:
    def __init__(self, indices: list[int], parameters: list[Tensor]):
        self.indices = indices
        self.buffer = torch.zeros(sum(parameters[index].numel() for index in indices))
        sizes = [parameters[index].numel() for index in indices]
        self.parts = dict(zip(indices, self.buffer.split(sizes)))
        self.pending = set(indices)
        self.work: dist.Work | None = None


class Buckets:
    """Rung 1. REQUIRES: every parameter gets one gradient in every backward."""

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.set_buckets(cut(list(reversed(range(len(self.parameters))))))
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self.on_ready(index))
        self.running = False

    def set_buckets(self, groups: list[list[int]]) -> None:
        self.buckets = [Bucket(group, self.parameters) for group in groups]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.indices}

    def on_ready(self, index: int) -> None:
        if not self.running:
            self.begin_iteration()
        self.mark_variable_ready(index)

    def begin_iteration(self) -> None:
        self.running = True
        for bucket in self.buckets:
            bucket.pending, bucket.work = set(bucket.indices), None
        Variable._execution_engine.queue_callback(self.finish_backward)

    def mark_variable_ready(self, index: int) -> None:
        bucket = self.bucket_of[index]
        self.pack(index, bucket.parts[index])
        bucket.pending.discard(index)
        self.launch_in_order()

    def pack(self, index: int, part: Tensor) -> None:
        grad = self.parameters[index].grad
        torch.div(grad.reshape(-1), dist.get_world_size(), out=part) if grad is not None else part.zero_()

    def launch_in_order(self) -> None:
        for bucket in self.buckets:
            if bucket.pending:
                break  # later ones wait, complete or not
            if bucket.work is None:
                bucket.work = dist.all_reduce(bucket.buffer, async_op=True)

    def finish_backward(self) -> None:
        self.finalize_backward()

    def finalize_backward(self) -> None:
        for bucket in self.buckets:
            assert bucket.work is not None, "a gradient did not come"
            bucket.work.wait()
            for index, part in bucket.parts.items():
                self.unpack(index, part)
        self.running = False

    def unpack(self, index: int, part: Tensor) -> None:
        self.parameters[index].grad.copy_(part.view_as(self.parameters[index]))


def cut(order: list[int]) -> list[list[int]]:
    return [order[first : first + CAP] for first in range(0, len(order), CAP)]


# %% [markdown]
# ## 2. Cut anew by arrival
#
# Parameters often arrive in another order than they were defined in. Then a bucket waits for one that comes late,
# though all others are there. So the first iteration only watches; nothing leaves before its end. Afterwards
# buckets are cut along the order of arrival. Rank 0's order counts, since a bucket must hold the same parameters on
# all ranks.

# %%


class ByArrival(Buckets):
    """Rung 2."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.arrived: list[int] = []
        self.recorded = False

    def on_ready(self, index: int) -> None:
        if not self.recorded and index not in self.arrived:
            self.arrived.append(index)
        super().on_ready(index)

    def launch_in_order(self) -> None:
        if self.recorded:
            super().launch_in_order()

    def finalize_backward(self) -> None:
        first, self.recorded = not self.recorded, True
        super().launch_in_order()
        super().finalize_backward()
        if first:
            absent = [index for index in range(len(self.parameters)) if index not in self.arrived]
            order = [self.arrived + absent]
            dist.broadcast_object_list(order, src=0)
            self.set_buckets(cut(order[0]))


# %% [markdown]
# ## 3. Phases, and backwards that are not synchronized
#
# Under `no_sync` gradients gather without being sent. And a backward may end with gradients missing, which a second
# one brings: two losses, one backward each. So "running or not" is too little. The real reducer has these three
# phases, too.
#
# `.grad` may hold averages of an earlier backward as well as new gradients. What is sent is all of `.grad`: the
# average of equal numbers is that number.

# %%


class Phase(Enum):
    IDLE = "no backward is open"
    BACKWARD = "gradients arrive"
    INCOMPLETE = "a backward ended, and gradients are missing"


class Phases(ByArrival):
    """Rung 3."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.phase = Phase.IDLE
        self.synchronized = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronized = False
        try:
            yield
        finally:
            self.synchronized = True

    def on_ready(self, index: int) -> None:
        if not self.synchronized:
            return
        if self.phase is Phase.INCOMPLETE:  # another backward goes on where the last one ended
            Variable._execution_engine.queue_callback(self.finish_backward)
        elif self.phase is Phase.IDLE:
            self.running = False
        self.phase = Phase.BACKWARD
        super().on_ready(index)

    def finish_backward(self) -> None:
        if any(bucket.pending for bucket in self.buckets):
            self.phase = Phase.INCOMPLETE
            return
        super().finish_backward()
        self.phase = Phase.IDLE

    def check_finished(self) -> None:
        """Before the next forward, and before optimizer.step()."""
        if self.phase is not Phase.IDLE:
            missing = sorted(index for bucket in self.buckets for index in bucket.pending)
            raise RuntimeError(f"the gradients of parameters {missing} did not come, so nothing was averaged")


# %% [markdown]
# ## 4. Unused parameters
#
# Where a rank may leave parameters out, an absent gradient is no error. It counts as zero, if another rank has one;
# if nobody has, `.grad` stays as it was. So ranks add up who used what, after the last bucket.
#
# What is absent must be known early, or its bucket would hold up all later ones until the end of backward. Autograd's
# engine knows: it has walked the graph before it runs the first node. In C++ one can ask it. Here we walk the graph
# ourselves, from the loss, as torch's reducer does in forward.

# %%


class Unused(Phases):
    """Rung 4."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.used = torch.zeros(len(self.parameters), dtype=torch.int32)
        self.takes_part: set[int] | None = None

    def before_backward(self, loss: Tensor) -> None:
        self.takes_part = reached(loss, self.parameters)

    def begin_iteration(self) -> None:
        super().begin_iteration()
        absent = set(range(len(self.parameters))) - (self.takes_part or set())
        for index in sorted(absent):
            self.mark_variable_ready(index)

    def on_ready(self, index: int) -> None:
        self.used[index] = 1  # under no_sync, too: what gathers is sent by the next one
        super().on_ready(index)

    def finalize_backward(self) -> None:
        self.by_all = self.used.clone()
        dist.all_reduce(self.by_all)
        super().finalize_backward()
        self.used.zero_()

    def unpack(self, index: int, part: Tensor) -> None:
        if not self.by_all[index]:
            return
        if self.parameters[index].grad is None:
            self.parameters[index].grad = torch.zeros_like(self.parameters[index])
        super().unpack(index, part)


def reached(loss: Tensor, parameters: list[Tensor]) -> set[int]:
    """The parameters whose AccumulateGrad the graph of ``loss`` leads to."""
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    seen, waiting, found = set(), [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(place.get(id(node.variable), -1))
        waiting += [other for other, _ in node.next_functions]
    return found - {-1}


# %% [markdown]
# ## 5. Several arrivals
#
# A parameter that reentrant checkpoints share gets its gradient in parts: several arrivals in one backward. After
# the first of them it is not whole. How many there will be, nobody can tell in advance. So the first iteration,
# which sends nothing before its end, counts. From then on a parameter is ready at its usual last arrival. If one
# more comes, its bucket may have left, and an error is the only answer.
#
# A checkpoint's graph does not exist before backward reaches it. So the walk from the loss does not find its
# parameters, and they would be taken for absent. The first iteration notes them as nested. And its gradients may be
# the first to arrive: a callback that is queued then runs when the checkpoint's own graph task ends, which is too
# early. A hook on the loss runs in the outermost one.

# %%


class SeveralArrivals(Unused):
    """Rung 5."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.arrivals = [0] * len(self.parameters)
        self.expected = [1] * len(self.parameters)
        self.nested: set[int] = set()

    def before_backward(self, loss: Tensor) -> None:
        self.takes_part = reached(loss, self.parameters) | self.nested
        if self.synchronized:
            loss.grad_fn.register_prehook(lambda _: self.enter_backward())

    def enter_backward(self) -> None:
        """In the outermost graph task: what is queued here runs when all of backward is over."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.BACKWARD
            self.begin_iteration()

    def begin_iteration(self) -> None:
        self.arrivals = [0] * len(self.parameters)
        super().begin_iteration()

    def on_ready(self, index: int) -> None:
        if self.synchronized:
            self.arrivals[index] += 1
        if index not in (self.takes_part or ()):
            self.nested.add(index)
        super().on_ready(index)

    def mark_variable_ready(self, index: int) -> None:
        if self.recorded and index in self.takes_part:
            if self.arrivals[index] < self.expected[index]:
                return
            if self.arrivals[index] > self.expected[index]:
                raise RuntimeError(f"parameter {index}: its gradient came once more than in the first backward")
        super().mark_variable_ready(index)  # in the first iteration again and again: the last copy is whole

    def finalize_backward(self) -> None:
        if not self.recorded:
            self.expected = [max(1, count) for count in self.arrivals]
        super().finalize_backward()


# %% [markdown]
# ## 6. Gradient views
#
# Until now each gradient has two homes: `.grad`, and its place in the bucket. If `.grad` *is* that place, half the
# memory is saved, and nothing has to be copied back. AccumulateGrad adds in place to a `.grad` that exists, so the
# view stays. Only after `zero_grad(set_to_none=True)` autograd makes a new tensor, which is copied once and
# replaced by the view.
#
# The price: while the collective runs, `.grad` shows what is in the bucket. It may be half reduced.

# %%


class Views(SeveralArrivals):
    """Rung 6."""

    def pack(self, index: int, part: Tensor) -> None:
        parameter = self.parameters[index]
        if parameter.grad is None:
            part.zero_()
            return
        view = part.view_as(parameter)
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            if self.recorded:  # before that, buckets will be cut anew
                parameter.grad = view
        # Several arrivals: what came first would be divided again. So it is divided in unpack.

    def unpack(self, index: int, part: Tensor) -> None:
        if not self.by_all[index]:
            return
        part /= dist.get_world_size()
        parameter = self.parameters[index]
        if parameter.grad is None or parameter.grad.data_ptr() != part.data_ptr():
            super().unpack(index, part)


# %% [markdown]
# ## What each rung can do
#
# Four programs, each one needing a further rung. All rungs from there on must give minddp's gradients, bit for bit.

# %%


class Net(nn.Module):
    """Layers that are used in another order than they are defined in; one may be left out, one may come again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor, leave_out: bool = False, again: bool = False) -> Tensor:
        for index in (3, 0, 4, 1):
            if not (leave_out and index == 4):
                x = torch.tanh(self.layers[index](x))
        if again:
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layers[2], x, use_reentrant=True)
            return x
        return torch.tanh(self.layers[2](x))


Program = Callable[[Any, Net, Callable[[], Tensor]], None]


def backward(reducer: Any, loss: Tensor) -> None:
    if isinstance(reducer, Unused):
        reducer.before_backward(loss)
    loss.backward()


def plain(reducer: Any, net: Net, draw: Callable[[], Tensor]) -> None:
    backward(reducer, net(draw()).square().mean())


def gathered(reducer: Any, net: Net, draw: Callable[[], Tensor]) -> None:
    """Two micro-batches under no_sync, then a synchronized one."""
    with reducer.no_sync():
        for _ in range(2):
            backward(reducer, net(draw()).square().mean())
    backward(reducer, net(draw()).square().mean())


def left_out(reducer: Any, net: Net, draw: Callable[[], Tensor]) -> None:
    """Rank 1 leaves a layer out."""
    backward(reducer, net(draw(), leave_out=dist.get_rank() == 1).square().mean())


def came_again(reducer: Any, net: Net, draw: Callable[[], Tensor]) -> None:
    """One layer in two reentrant checkpoints."""
    backward(reducer, net(draw(), again=True).square().mean())


RUNGS = [Buckets, ByArrival, Phases, Unused, SeveralArrivals, Views]
PROGRAMS: dict[str, tuple[Program, type]] = {
    "plain": (plain, Buckets),
    "no_sync": (gathered, Phases),
    "a rank leaves a layer out": (left_out, Unused),
    "a layer in two checkpoints": (came_again, SeveralArrivals),
}
STEPS = 4


def train(make: Callable[[Net], tuple[Any, Any]], program: Program) -> Tensor:
    """All gradients of all steps, on this rank."""
    torch.manual_seed(0)
    net = Net()
    reducer, callee = make(net)
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        program(reducer, callee, lambda: torch.randn(8, 6))
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters()]).clone())
        optimizer.step()
    return torch.cat(found)


def climb(rank: int, world_size: int, program: str) -> dict[str, str]:
    """By rung: how it did, beside minddp's class."""
    run, needs = PROGRAMS[program]

    def real(net: Net) -> tuple[Any, Any]:
        ddp = minddp.DistributedDataParallel(net, find_unused_parameters=True, gradient_as_bucket_view=True)
        return ddp, ddp

    truth = train(real, run)
    found = {}
    for rung in RUNGS:
        if RUNGS.index(rung) < RUNGS.index(needs):
            found[rung.__name__] = "-"
            continue
        mine = train(lambda net, rung=rung: (rung(net), net), run)
        found[rung.__name__] = "same bits" if torch.equal(mine, truth) else f"off by {(mine - truth).abs().max():.0e}"
    return found


def main() -> None:
    print(f"{'':28}" + "".join(f"{rung.__name__:>17}" for rung in RUNGS))
    for program in PROGRAMS:
        ranks = run_ranks(climb, RANKS, program)
        assert ranks[0] == ranks[1]
        print(f"{program:28}" + "".join(f"{ranks[0][rung.__name__]:>17}" for rung in RUNGS))
        assert set(ranks[0].values()) <= {"same bits", "-"}
    print("Each against minddp.DistributedDataParallel, over 4 steps on 2 ranks. -: this rung cannot do it yet.")


# %% [markdown]
# What is left to `minddp._C`: a whole bucket is packed in one pass, without a tensor operation a parameter; streams
# of a GPU; sparse, complex and half-precision gradients; telling a backward of this module from one past it; errors
# that name the parameter and the rank. [The annotated source](../csrc/reducer/reducer.h) goes on here.

# %%

if __name__ == "__main__":
    main()
