"""09. A parameter server beside allreduce: the same training, over different links.

    python tutorials/09_parameter_server.py

Data-parallel training needs one thing from communication: every rank must end a step with the same averaged
gradient. There are two classical ways to get it, and DistributedDataParallel is often mistaken for the first.

  * A parameter server holds the weights. Each worker sends it S bytes of gradients; it averages, takes the
    step, and sends S bytes of weights back. Over the server's link go M * S bytes in and M * S out for M
    workers: twice the workers, twice the time.
  * Allreduce has no server. In a ring every rank sends to its right neighbour only. M - 1 rounds of S / M
    bytes leave each rank with one finished M-th of the sum (reduce-scatter), M - 1 more spread the parts
    (all-gather): 2 (M - 1) / M * S out of, and into, every rank. That is under 2 S for any M, and no link
    carries more than another. (Patarasu and Yuan 2009 show that no allreduce can move less.)

Both are written here in a few lines of `send` and `recv`; neither uses a collective. The bytes are counted
where they are sent and, independently, measured by the kernel at the sockets. The weights end the same.
"""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import _clone  # noqa: F401 (finds minddp in this clone)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import minddp

STEPS = 4
WIDTH = 256

# %% [markdown]
# ## A link that counts
#
# All sends and receives below go through it, so that what is claimed is counted.

# %%


class Link:
    """This rank's point-to-point calls, and the bytes of tensors that they carried."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def exchange(self, out: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        """Sends and receives at the same time; either may be None."""
        works = []
        if out is not None:
            works.append(dist.isend(out, to))
            self.sent += out.nbytes
        if into is not None:
            works.append(dist.irecv(into, source))
            self.received += into.nbytes
        for work in works:
            work.wait()


def flat(tensors: Iterator[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data.copy_(part.view_as(tensor))

# %% [markdown]
# ## The parameter server
#
# All ranks send their gradients to one, which takes the step and sends the weights back. Its link carries
# everybody's traffic.

# %%


def server_step(model: nn.Module, link: Link, rate: float) -> None:
    """Rank 0 is the server and a worker at once; the others push gradients and pull weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    gradient = flat(parameter.grad for parameter in parameters)
    if rank == 0:
        pushed = torch.empty_like(gradient)
        for worker in range(1, world_size):
            link.exchange(None, -1, pushed, worker)
            gradient += pushed
        weights = flat(parameters) - rate * gradient / world_size
        for worker in range(1, world_size):
            link.exchange(weights, worker, None, -1)
    else:
        weights = torch.empty_like(gradient)
        link.exchange(gradient, 0, None, -1)
        link.exchange(None, -1, weights, 0)
    unflatten(weights, parameters)

# %% [markdown]
# ## The ring
#
# Nobody is in the middle: each rank sends to its right neighbour only, one part of the vector at a time.

# %%


def ring_allreduce(vector: Tensor, link: Link) -> None:
    """The sum over ranks, in place. Every rank sends to the right and receives from the left only."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    parts = list(vector.tensor_split(world_size))
    incoming = torch.empty_like(max(parts, key=len))
    for step in range(world_size - 1):  # reduce-scatter: part p starts at rank p and grows on its way round
        own, grown = parts[(rank - step) % world_size], parts[(rank - step - 1) % world_size]
        link.exchange(own, right, incoming[: len(grown)], left)
        grown += incoming[: len(grown)]
    for step in range(world_size - 1):  # all-gather: the finished parts go round once more
        own, finished = parts[(rank + 1 - step) % world_size], parts[(rank - step) % world_size]
        link.exchange(own, right, finished, left)


def ring_step(model: nn.Module, link: Link, rate: float) -> None:
    parameters = list(model.parameters())
    gradient = flat(parameter.grad for parameter in parameters)
    ring_allreduce(gradient, link)
    unflatten(flat(parameters) - rate * gradient / dist.get_world_size(), parameters)


def ddp_step(model: nn.Module, link: Link, rate: float) -> None:
    """backward() has averaged the gradients already."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad


# %% [markdown]
# ## What the kernel counted
#
# Linux counts the bytes of each socket. So the numbers are checked below the program that claims them.

# %%


# Offsets of 64-bit counters in Linux's struct tcp_info.
TCP_INFO_RECEIVED, TCP_INFO_SENT, TCP_INFO_SENT_AGAIN = 128, 200, 208


def socket_bytes() -> tuple[int, int]:
    """(bytes out, bytes in) over all TCP connections of this process so far, by the kernel's own count."""
    out = into = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            connection = socket.fromfd(int(entry.name), socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # the folder's own descriptor is gone already
            continue
        with connection:
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
            except OSError:  # not a TCP socket
                continue
            out += struct.unpack_from("Q", info, TCP_INFO_SENT)[0]
            out -= struct.unpack_from("Q", info, TCP_INFO_SENT_AGAIN)[0]
            into += struct.unpack_from("Q", info, TCP_INFO_RECEIVED)[0]
    return out, into

# %% [markdown]
# ## The same training on each way
#
# Three ways to one average: they must end at the same weights.

# %%


def train(rank: int, world_size: int, way: str) -> dict:
    """STEPS steps of plain SGD on this rank's share of the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    step = {"server": server_step, "ring": ring_step, "ddp": ddp_step}[way]
    net = minddp.DistributedDataParallel(model) if way == "ddp" else model
    data = torch.randn(STEPS, world_size, 8, 32)
    dist.barrier()
    link, before = Link(), socket_bytes()
    for batch in data[:, rank]:
        net.zero_grad()
        F.mse_loss(net(batch), batch.sum(1, keepdim=True)).backward()
        step(model, link, rate=0.01)
    counted = (link.sent, link.received)
    dist.barrier()
    after = socket_bytes()
    dist.barrier()  # nobody leaves, and closes connections, before all have read their counters
    return {
        "weights": flat(model.parameters()),
        "size": sum(parameter.nbytes for parameter in model.parameters()),
        "counted": counted,
        "measured": (after[0] - before[0], after[1] - before[1]),
    }


def report(way: str, results: list[dict], size: int) -> None:
    for rank, result in enumerate(results):
        counted = "   ".join(f"{value / STEPS / size:5.2f} S" for value in result["counted"])
        measured = "   ".join(f"{value / STEPS / size:5.2f} S" for value in result["measured"])
        print(f"  {way if rank == 0 else '':18} {rank}      {counted}       {measured}")


def main() -> None:
    for world_size in (2, 4):
        server, ring, ddp = (run_ranks(train, world_size, way) for way in ("server", "ring", "ddp"))
        size = server[0]["size"]
        print(f"{world_size} ranks, S = {size:,} bytes of gradients, {STEPS} steps; bytes per step:")
        print("                     rank   counted out   in       measured out   in")
        report("parameter server", server, size)
        report("ring allreduce", ring, size)

        truth = server[0]["weights"]
        for name, results in (("ring", ring), ("DDP", ddp)):
            difference = max((result["weights"] - truth).abs().max().item() for result in results)
            print(f"  weights of {name} beside the server's: largest difference {difference:.1e}")
            assert difference < 1e-6
        for results in (server, ring, ddp):
            assert all(torch.equal(result["weights"], results[0]["weights"]) for result in results)
        print("  on each of the three ways all ranks hold the same bits\n")

        bound = 2 * (world_size - 1) / world_size
        assert server[0]["counted"] == (STEPS * (world_size - 1) * size,) * 2
        for result in ring:
            assert abs(result["counted"][0] / STEPS / size / bound - 1) < 0.01
        for result in (*server, *ring):
            for counted, measured in zip(result["counted"], result["measured"], strict=True):
                assert counted <= measured < 1.05 * counted + 50_000, (counted, measured)
    print("The server's link carries (M - 1) S each way (rank 0 works too): 3 times as much with 4 ranks as 2.")
    print("Each link of the ring carries 2 (M - 1) / M S: 1 S at 2 ranks, 1.5 S at 4, never more than 2 S.")


if __name__ == "__main__":
    main()
