"""docs/trust.md: nothing that a peer sends is executed, no port is opened, garbage on the open ones does no harm."""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import minddp
from tests.ranks_pool import free_port, run_ranks, shutdown

ROOT = Path(minddp.__file__).parent
GARBAGE = (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)), b"\0" * 64, b"\xff" * 4096)


def test_nothing_that_another_rank_says_is_unpickled():
    """Of all code that a rank runs."""
    executes = re.compile(r"pickle\.loads?\(|gather_object\(|object_list\(|weights_only=False")
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if executes.search(path.read_text())}
    assert found == set()


def _listening():
    """The TCP ports on which this process listens."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    listens = "0A"
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == listens and row[9] in inodes}


def _train(ddp):
    for _ in range(3):
        ddp(torch.ones(2, 4)).sum().backward()


def _scanned(rank, world_size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    before = _listening()
    ddp = minddp.DistributedDataParallel(nn.Linear(4, 2))
    _train(ddp)
    assert before and _listening() == before
    for opened in before:
        for data in GARBAGE:
            with suppress(TimeoutError, ConnectionError), socket.create_connection(("127.0.0.1", opened), 5) as link:
                link.settimeout(0.2)
                link.sendall(data)
                link.recv(16)
    dist.barrier()
    _train(ddp)
    dist.destroy_process_group()
    return True


def test_a_rank_opens_no_port_and_garbage_on_those_that_are_open_does_no_harm():
    shutdown()  # ranks that have had another group may still be closing its port
    try:
        assert run_ranks(_scanned, 2, free_port(), backend=None) == [True, True]
    finally:
        shutdown()
