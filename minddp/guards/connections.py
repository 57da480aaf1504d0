"""This process's TCP connections to a store, which torch's stores show to nobody. Linux; elsewhere none is found.

A request to a store whose host has left raises, and torch writes a C++ stack to stderr first. That the host has
closed the connection can be seen without a request.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Links = frozenset[str]  # what /proc calls sockets: "socket:[inode]"


def to_port(port: int | None) -> Links:
    """Those whose other end has this port."""
    return frozenset(link for link, mine in _connections() if port is not None and mine.getpeername()[1] == port)


def closed_by_host(links: Links) -> bool:
    """Whether one of them was."""
    return any(link in links and _at_its_end(mine) for link, mine in _connections())


def cut(port: int) -> None:
    """Ends those to this port, and with them the requests that wait there for a stopped host."""
    for _, mine in _connections():
        if mine.getpeername()[1] == port:
            mine.shutdown(socket.SHUT_RDWR)


def _at_its_end(mine: socket.socket) -> bool:
    try:
        return mine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _connections() -> Iterator[tuple[str, socket.socket]]:
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir("/proc/self/fd")
    for name in names:
        with suppress(OSError):  # closed meanwhile, or not connected
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with _copied(int(name)) as mine:
                    if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername():
                        yield link, mine


@contextmanager
def _copied(fd: int) -> Iterator[socket.socket]:
    copy = os.dup(fd)
    try:
        mine = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with mine:
        yield mine
