"""This process's TCP connections to a store, which torch's stores show to nobody. Linux; elsewhere none is found.

A request to a store whose host has left raises, and torch writes a C++ stack to stderr first. That the host has
closed the connection can be seen without a request.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

Connections = Mapping[str, int]  # file descriptors, by what /proc calls the socket: "socket:[inode]"


def to_port(port: int | None) -> Connections:
    """Those whose other end has this port."""
    found = {}
    for name in _names("/proc/self/fd") if port is not None else ():
        with suppress(OSError):  # closed meanwhile, or not connected
            link = _link(int(name))
            if link.startswith("socket:"):
                with _copied(int(name)) as mine:
                    if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername()[1] == port:
                        found[link] = int(name)
    return found


def closed_by_host(connections: Connections) -> bool:
    """Whether one of them was."""
    return any(_at_its_end(link, fd) for link, fd in connections.items())


def cut(port: int) -> None:
    """Ends those to this port, and with them the requests that wait there for a stopped host."""
    for fd in to_port(port).values():
        with suppress(OSError), _copied(fd) as mine:
            mine.shutdown(socket.SHUT_RDWR)


def _at_its_end(link: str, fd: int) -> bool:
    with suppress(OSError):  # this process has closed it itself
        if _link(fd) == link:
            with _copied(fd) as mine:
                try:
                    return mine.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                except BlockingIOError:
                    return False
                except OSError:
                    return True
    return False


def _names(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _link(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


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
