"""02. How data-parallel training works, from a loop over parameters to the reducer in C++.

    python tutorials/02_how_ddp_works.py

One copy of the model is broadcast, the data is dealt out, every rank computes alone, gradients are averaged,
and every rank takes the same step. Since all start with the same weights and add the same averages, they stay
equal without ever sending a weight again. All that a library has to do happens inside `loss.backward()`:

    hook  ->  bucket  ->  launch  ->  wait  ->  averaged .grad

Below it is built five times, each time a little more like the real one, and each time with the same bits.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mini_ddp import MiniDDP
from ranks import run_ranks
from torch import Tensor, nn

import minddp
from minddp.timeline import step_times

RANKS = 2

# %% [markdown]
# ## 1. What is synchronized, and when
#
# Weights are sent once, when the model is wrapped. Losses are never sent: each rank's is its own. Gradients are
# averaged in `backward()`, so they are averages when it returns. All ranks take the same step with them, and stay
# equal.

# %%


def two_and_four(rank: int, world_size: int) -> dict[str, float]:
    """One weight of 10; the loss's slope is +2 on rank 0 and +4 on rank 1."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 10.0)
    net = minddp.DistributedDataParallel(layer)
    loss = net(torch.tensor([[2.0 + 2 * rank]])).sum()
    before = layer.weight.grad
    loss.backward()
    gradient = layer.weight.grad.item()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    return {"loss": loss.item(), "before": before, "gradient": gradient, "weight": layer.weight.item()}


def what_is_synchronized() -> None:
    print("1. A weight of 10, slopes +2 on rank 0 and +4 on rank 1")
    ranks = run_ranks(two_and_four, RANKS)
    print(f"   the ranks' losses              {ranks[0]['loss']} and {ranks[1]['loss']}: their own, not averaged")
    print(
        f"   .grad after backward()         {ranks[0]['gradient']} and {ranks[1]['gradient']}: averaged in backward()"
    )
    print(f"   weight after a step of rate 1  {ranks[0]['weight']} and {ranks[1]['weight']}\n")
    assert [rank["loss"] for rank in ranks] == [20.0, 40.0]
    assert all((rank["before"], rank["gradient"], rank["weight"]) == (None, 3.0, 7.0) for rank in ranks)


# %% [markdown]
# ## 2. Replicas left to themselves
#
# The same start is not enough. On different data, each rank's weights go their own way from the first step on.

# %%


def distances(rank: int, world_size: int, synchronized: bool) -> list[float]:
    """How far the two ranks' weights are apart, after 0, 1, 10 and 100 steps on different data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    net = minddp.DistributedDataParallel(model) if synchronized else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)
    found = []
    for step in range(101):
        if step in (0, 1, 10, 100):
            mine = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            other = mine.clone()
            dist.broadcast(other, src=1)
            found.append((mine - other).norm().item())
        optimizer.zero_grad()
        x = torch.randn(8, 4)
        F.mse_loss(net(x), x.square().sum(1, keepdim=True)).backward()
        optimizer.step()
    return found


def replicas_alone() -> None:
    print("2. The same start, different data: distance between the ranks' weights after 0, 1, 10, 100 steps")
    for synchronized in (False, True):
        found = run_ranks(distances, RANKS, synchronized)[0]
        label = "averaged gradients" if synchronized else "no communication"
        print(f"   {label:20} " + "  ".join(f"{value:.4f}" for value in found))
        assert (found[-1] == 0.0) if synchronized else (found[0] == 0.0 and 0 < found[1] < found[2])
    print()


# %% [markdown]
# ## 3. The ladder
#
# Each rung is a class with one method, `backward`, which leaves averaged gradients behind.
#
# 1. One collective for each parameter is easy, and slow: starting a collective costs a fixed time, its latency.
# 2. One flat buffer pays the latency once. But nothing is sent before backward is over.
# 3. Hooks send while backward still runs. But each parameter pays its latency again.
# 4. Buckets do both. This rung is [DDP in 100 lines](mini_ddp.py).
# 5. The real one does it in C++.

# %%


class Link:
    """An allreduce over a link of set speed: the real one, then a pause for as long as the bytes would take.

    One thread, so one collective at a time, as on a wire. The pause takes no processor time from backward, as a
    network card takes none.
    """

    def __init__(self, bytes_per_second: float | None = None, latency: float = 2e-4):
        self.rate, self.latency = bytes_per_second, latency
        self.thread = ThreadPoolExecutor(1)

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.rate if self.rate else 0.0

    def send(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        time.sleep(self.seconds(tensor.nbytes))
        return tensor

    def all_reduce(self, tensor: Tensor, async_op: bool = False) -> Any:
        if self.rate is None:
            return dist.all_reduce(tensor, async_op=async_op)
        work = self.thread.submit(self.send, tensor)
        return SimpleNamespace(wait=work.result) if async_op else work.result()

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The same for DistributedDataParallel, as a communication hook: it adds; dividing is the hook's business."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer = bucket.buffer().div_(dist.get_world_size())
        self.thread.submit(self.send, buffer).add_done_callback(lambda done: future.set_result(done.result()))
        return future


link = Link()


class PerParameter:
    """Rung 1: when backward has ended, one allreduce for each parameter."""

    def __init__(self, model: nn.Module):
        self.model = model

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for parameter in self.model.parameters():
            parameter.grad /= dist.get_world_size()
            link.all_reduce(parameter.grad)


class Flat(PerParameter):
    """Rung 2: all gradients in one buffer. One latency instead of many, at the price of two copies."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        buffer = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
        link.all_reduce(buffer)
        for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class Overlapped(PerParameter):
    """Rung 3: a hook starts each parameter's allreduce as soon as its gradient is there.

    Backward goes on with earlier layers meanwhile; what is not hidden is waited for at the end.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.works: list[dist.Work] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter: Tensor) -> None:
        parameter.grad /= dist.get_world_size()
        self.works.append(link.all_reduce(parameter.grad, async_op=True))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for work in self.works:
            work.wait()
        self.works.clear()


class Bucketed(PerParameter):
    """Rung 4: the reducer, in Python: mini_ddp.py. Both at once: few collectives, and they
    overlap backward. Buckets leave in one order even if a later one is ready first.
    """

    def __init__(self, model: nn.Module, cap_bytes: int):
        mini = MiniDDP(model, cap_bytes / 2**20)
        mini.launch = lambda bucket: link.all_reduce(bucket.buffer, async_op=True)
        super().__init__(mini)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # a callback at its end waits for the buckets


class Reducer(PerParameter):
    """Rung 5: minddp. What it adds to rung 4: one pass in C++ packs a whole bucket; buckets follow the order of
    arrival that was observed; unused, shared, sparse and mixed parameters; errors instead of hangs.
    """

    def __init__(self, model: nn.Module, cap_bytes: int):
        ddp = minddp.DistributedDataParallel(model, bucket_cap_mb=cap_bytes / 2**20)
        if link.rate is not None:
            ddp.register_comm_hook(None, link.hook)
        super().__init__(ddp)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Local(PerParameter):
    """No communication at all: what the rungs are timed beside."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()


CAP_BYTES = 256 * 1024
REPEATS = 9
RATE = 31.25e6  # bytes a second
ALONE = "backward alone (no averaging)"
RUNGS = {
    ALONE: Local,
    "1 per parameter, after backward": PerParameter,
    "2 one flat buffer, after backward": Flat,
    "3 per parameter, overlapped": Overlapped,
    "4 buckets, overlapped, in Python": lambda model: Bucketed(model, CAP_BYTES),
    "5 minddp.DistributedDataParallel": lambda model: Reducer(model, CAP_BYTES),
}


def deep_net() -> nn.Module:
    """40 small parameters, 1.3 MB of gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(128, 128), nn.Tanh())])


Climbed = dict[str, tuple[float, Tensor]]


def climb(rank: int, world_size: int, repeats: int, rows: int, rate: float | None) -> Climbed:
    """(seconds of the median step, gradients) of each rung; the rungs take turns, so all see the same noise."""
    global link
    link = Link(rate)
    torch.manual_seed(2)
    x, target = torch.randn(world_size, rows, 128)[rank], torch.randn(world_size, rows, 128)[rank]
    rungs = {name: make(deep_net()) for name, make in RUNGS.items()}
    times: dict[str, list[float]] = {name: [] for name in rungs}
    for _ in range(repeats):
        for name, rung in rungs.items():
            rung.model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            rung.backward(F.mse_loss(rung.model(x), target))
            times[name].append(time.perf_counter() - begin)
    return {
        name: (
            sorted(times[name])[repeats // 2],
            torch.cat([parameter.grad.reshape(-1) for parameter in rung.model.parameters()]),
        )
        for name, rung in rungs.items()
    }


def bar(alone: float, step: float, longest: float) -> str:
    """What a step consists of: forward and backward, then what of the communication nothing hides."""
    cells = 40 / longest
    return "█" * max(1, round(alone * cells)) + "░" * round(max(0.0, step - alone) * cells)


def show_rungs(ranks: list[Climbed]) -> None:
    alone = ranks[0][ALONE][0]
    longest = max(seconds for seconds, _ in ranks[0].values())
    previous = None
    for name, (seconds, gradient) in ranks[0].items():
        print(f"   {name:36} {seconds * 1e3:6.2f} ms   {bar(alone, seconds, longest)}")
        assert torch.equal(gradient, ranks[1][name][1]) != (name == ALONE)
        if previous is not None:
            assert torch.equal(gradient, previous), f"{name} differs from the rung below"
        previous = gradient if name != ALONE else None
    own = [rank[ALONE][1] for rank in ranks]
    assert torch.equal(previous, own[0] / 2 + own[1] / 2)


def ladder() -> None:
    parameters = list(deep_net().parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    print(f"3. The ladder: {len(parameters)} parameters, {size / 1e6:.1f} MB of gradients; median of {REPEATS} steps")
    print("   █ forward and backward, ░ communication that nothing hides")
    print("   Little to compute, and ranks that share a machine:")
    show_rungs(run_ranks(climb, RANKS, REPEATS, 16, None))
    print("   What counts here is how many collectives there are: rungs 1 and 3 pay 40 latencies, the others few.")
    print("   Overlap has little to gain. Backward is short, and the processor that computes moves the data, too.")
    print(f"   More to compute, and a link of {RATE * 8 / 1e6:.0f} Mbit/s:")
    for _ in range(4):  # a machine that others use, too, hides what is to be seen: once more then
        ranks = run_ranks(climb, RANKS, REPEATS, 768, RATE)
        after, *meanwhile = (seconds for name, (seconds, _) in ranks[0].items() if name[0] in "245")
        if max(meanwhile) < after:
            break
    show_rungs(ranks)
    fourth, fifth = ((after - seconds) * 1e3 for seconds in meanwhile)
    transfer = size / RATE * 1e3
    print(f"   All gradients need {transfer:.0f} ms on it. Rung 2 sends after backward: all of it is exposed.")
    print(f"   Rung 4 sends meanwhile, and hides {fourth:.0f} ms of it behind backward; rung 5 hides {fifth:.0f} ms.")
    print("   If that is little: backward is shorter than the transfer, or the machine is too busy to show it.")
    print("   Every rung has the same gradients as the one below, bit for bit, and both ranks have them.\n")


# %% [markdown]
# ## 4. Following gradients through it
#
# The reducer notes when each gradient arrives and when each bucket is launched, reduced and copied back.

# %%


def timeline(rank: int, world_size: int) -> dict:
    """The times of one backward, as the reducer noted them."""
    net = minddp.DistributedDataParallel(deep_net(), bucket_cap_mb=CAP_BYTES / 2**20)
    x = torch.randn(256, 128)
    for _ in range(4):
        net.zero_grad()
        net(x).square().mean().backward()
    raw = net.reducer.last_step()
    times = step_times(raw)
    return {
        "names": [name for name, _ in net.module.named_parameters()],
        "arrived": [(moment - raw["backward_begin_ns"]) * 1e-6 for moment in raw["ready_ns"]],
        "backward": times.backward_seconds * 1e3,
        "buckets": [
            (bucket.parameters, bucket.nbytes, bucket.ready, bucket.launched, bucket.done, bucket.unpacked)
            for bucket in times.buckets
        ],
    }


def follow_gradients() -> None:
    found = run_ranks(timeline, RANKS)[0]
    print(f"4. One backward of {found['backward']:.2f} ms on rank 0, as the reducer saw it (ms since it began)")
    print("   bucket       kB   first .. last parameter          last hook  launched   reduced  in .grad")
    for index, (parameters, nbytes, *moments) in enumerate(found["buckets"]):
        names = f"{found['names'][parameters[0]]} .. {found['names'][parameters[-1]]}"
        columns = "  ".join(f"{moment * 1e3:8.2f}" for moment in moments)
        print(f"   {index:6}   {nbytes / 1e3:6.0f}   {names:30}  {columns}")
        ready, launched, done, unpacked = moments
        assert ready <= launched <= done <= unpacked
        assert max(found["arrived"][p] for p in parameters) <= ready * 1e3 + 1e-3
    launches = [bucket[3] for bucket in found["buckets"]]
    assert launches == sorted(launches), "buckets are launched in order on every rank"
    during = sum(launch * 1e3 < found["backward"] for launch in launches)
    print(f"   {during} of {len(launches)} allreduces were launched while backward was still running.\n")


# %% [markdown]
# ## 5. The model cut instead
#
# Data parallelism copies the model and cuts the batch. The other way round is model parallelism: what travels then
# grows with the batch, not with the model.

# %%


def two_halves(rank: int, world_size: int) -> dict[str, float]:
    """Model parallelism: rank 0 has the first layer, rank 1 the second; activations travel."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 32), nn.Linear(32, 1)
    x = torch.randn(8, 6)
    whole = second(torch.tanh(first(x))).square().mean()
    hidden = torch.empty(8, 32)
    if rank == 0:
        out = torch.tanh(first(x))
        dist.send(out.detach(), 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)
        (truth,) = torch.autograd.grad(whole, [first.weight])
        difference = (truth - first.weight.grad).abs().max().item()
    else:
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        second(hidden).square().mean().backward()
        dist.send(hidden.grad, 0)
        (truth,) = torch.autograd.grad(whole, [second.weight])
        difference = (truth - second.weight.grad).abs().max().item()
    return {
        "difference": difference,
        "activations": 2 * hidden.nbytes,
        "gradients": sum(p.nbytes for layer in (first, second) for p in layer.parameters()),
    }


def model_parallel() -> None:
    print("5. Model parallelism: one copy, cut in two; the same batch goes through both ranks in turn")
    ranks = run_ranks(two_halves, RANKS)
    print(f"   gradients beside the uncut model's: largest difference {max(r['difference'] for r in ranks):.0e}")
    print(
        f"   it sends {ranks[0]['activations']:,} bytes of activations and their gradients (growing with the batch);"
    )
    print(f"   data parallelism averages {ranks[0]['gradients']:,} bytes of gradients (growing with the model)")
    assert max(rank["difference"] for rank in ranks) < 1e-6


if __name__ == "__main__":
    what_is_synchronized()
    replicas_alone()
    ladder()
    follow_gradients()
    model_parallel()
