"""A network of set bandwidth on one machine: each rank in its own network namespace.

Overview
    ``with ShapedNetwork("1gbit", ranks=2) as network:`` makes one namespace per rank. Two ranks are
    joined by one veth pair; more ranks each get a veth pair into a bridge that lives in a namespace of
    its own. Every end of every pair is shaped by a token-bucket filter, so that a rank sends and
    receives at most ``rate``. A process moves into its rank's namespace with :func:`enter` before it
    opens sockets.

What always holds
    Every namespace is named ``minddp-<pid>-<number>…`` after the process that made it and the network's number
    in it, since one process may make several. Nothing is created outside those namespaces, and they are deleted
    when the ``with`` block ends, however it ends (exception, SIGINT, SIGTERM, ``sys.exit``). What a killed
    (SIGKILL) process left behind is deleted by the next one that starts.

Needs root and iproute2 (``ip``, ``tc``), Linux. Bandwidth only: no delay is added (a kernel without
``netem`` cannot), so latency is that of a veth pair, some tens of microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["INTERFACE", "Endpoint", "LinkError", "ShapedNetwork", "enter", "parse_rate"]

INTERFACE = "link0"  # the name of every rank's interface, inside its namespace
_PREFIX = "minddp"
_NUMBERS = itertools.count()  # several networks of one process stand side by side
_NAMESPACE_FOLDER = "/var/run/netns"
_CLONE_NEWNET = 0x40000000
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class LinkError(RuntimeError):
    """The network could not be made; the text says what is missing."""


@dataclass(frozen=True)
class Endpoint:
    """Where one rank lives: its namespace, its interface's name and IPv4 address."""

    namespace: str
    interface: str
    address: str


def parse_rate(rate: str) -> float:
    """Bits per second of a rate in tc's notation, such as ``"1gbit"``, ``"250mbit"``, ``"1.5gbit"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) == 0:
        raise LinkError(f"link rate {rate!r} is not understood: write for example 1gbit, 250mbit or 2.5gbit")
    return float(match[1]) * _UNITS[match[2]]


def enter(namespace: str) -> None:
    """Moves the calling thread, and every thread it starts from now on, into ``namespace``.

    Call it before anything opens a socket. Raises :class:`LinkError` when the namespace is not there.
    """
    try:
        handle = os.open(os.path.join(_NAMESPACE_FOLDER, namespace), os.O_RDONLY)
    except FileNotFoundError:
        raise LinkError(f"there is no network namespace {namespace!r}") from None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            raise LinkError(f"cannot enter {namespace!r}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)


class ShapedNetwork:
    """``ranks`` namespaces whose links carry ``rate`` each way; a context manager.

    Args:
        rate: tc's notation, see :func:`parse_rate`.
        ranks: 2 to 200.

    Raises:
        LinkError: on entering: not root, no ``ip`` or ``tc``, a rate that is not understood, or a
            kernel that cannot shape. Nothing is left behind then.
    """

    def __init__(self, rate: str, ranks: int = 2):
        self.bits_per_second = parse_rate(rate)
        if not 2 <= ranks <= 200:
            raise LinkError(f"a shaped network joins 2 to 200 ranks, not {ranks}")
        self.rate = rate
        self.ranks = ranks
        self._number = next(_NUMBERS)
        self._stack = contextlib.ExitStack()

    def endpoint(self, rank: int) -> Endpoint:
        """The namespace, interface and address of ``rank``."""
        return Endpoint(self._namespace(f"r{rank}"), INTERFACE, f"10.77.0.{rank + 1}")

    def _namespace(self, suffix: str) -> str:
        return f"{_PREFIX}-{os.getpid()}-{self._number}{suffix}"

    def limit(self, rank: int, rate: str) -> None:
        """From now on ``rank`` sends and receives at most ``rate``. Of three ranks or more, inside the block.

        Raises:
            LinkError: a pair has one link, which :class:`ShapedNetwork` itself is given the rate of.
        """
        if self.ranks == 2:
            raise LinkError("two ranks share one link: make a network of that rate")
        end = self.endpoint(rank)
        self._shape(end.namespace, end.interface, rate)
        self._shape(self._namespace("switch"), f"port{rank}", rate)

    def __enter__(self) -> ShapedNetwork:
        _require_tools()
        _delete_left_behind()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_terminate_as_exception())
            for rank in range(self.ranks):
                self._add_namespace(stack, self.endpoint(rank).namespace)
            if self.ranks == 2:
                self._join_pair()
            else:
                self._join_bridge(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _add_namespace(self, stack: contextlib.ExitStack, name: str) -> None:
        stack.callback(_delete_namespace, name)
        _command("ip", "netns", "add", name)
        _command("ip", "-n", name, "link", "set", "lo", "up")

    def _join_pair(self) -> None:
        first, second = self.endpoint(0), self.endpoint(1)
        _add_veth(first.namespace, INTERFACE, second.namespace, INTERFACE)
        for end in (first, second):
            self._bring_up(end)

    def _join_bridge(self, stack: contextlib.ExitStack) -> None:
        switch = self._namespace("switch")
        self._add_namespace(stack, switch)
        _command("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "bridge0", "up")
        for rank in range(self.ranks):
            end, port = self.endpoint(rank), f"port{rank}"
            _add_veth(end.namespace, INTERFACE, switch, port)
            _command("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            _command("ip", "-n", switch, "link", "set", port, "up")
            self._shape(switch, port)
            self._bring_up(end)

    def _bring_up(self, end: Endpoint) -> None:
        _command("ip", "-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", end.interface)
        _command("ip", "-n", end.namespace, "link", "set", end.interface, "up")
        self._shape(end.namespace, end.interface)

    def _shape(self, namespace: str, interface: str, rate: str | None = None) -> None:
        """At most ``rate`` (the network's) leaves ``interface``.

        The bucket holds 2 ms of traffic: a timer that ticks 500 times a second must find enough
        tokens for the rate; more would let small collectives pass unshaped. The queue holds 50 ms, so
        that TCP is slowed by waiting and not by losses.
        """
        bits_per_second = self.bits_per_second if rate is None else parse_rate(rate)
        burst = max(int(bits_per_second / 8 * 0.002), 16 * 1024)
        _command(
            "tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf",
            "rate", rate or self.rate, "burst", str(burst), "latency", "50ms",
        )  # fmt: skip


def _add_veth(first: str, first_name: str, second: str, second_name: str) -> None:
    _command(
        "ip", "link", "add", first_name, "netns", first,
        "type", "veth", "peer", "name", second_name, "netns", second,
    )  # fmt: skip


def _require_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise LinkError("--link needs Linux network namespaces; run without --link here")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"--link needs {' and '.join(missing)}: install the package iproute2")
    if os.geteuid() != 0:
        raise LinkError(
            "--link makes network namespaces and shapes their interfaces, which needs root: "
            "run the command under sudo, or leave --link out to measure on loopback"
        )


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        raise LinkError(f"`{' '.join(words)}` failed: {why}")


def _delete_namespace(name: str) -> None:
    """Deletes ``name`` if it is there; its interfaces, and their peers, go with it."""
    subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=30)


def _delete_left_behind() -> None:
    """Deletes namespaces whose maker no longer lives (it was killed before it could clean up)."""
    try:
        names = os.listdir(_NAMESPACE_FOLDER)
    except FileNotFoundError:
        return
    for name in names:
        match = re.fullmatch(_PREFIX + r"-(\d+)-\w+", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _delete_namespace(name)


@contextlib.contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """SIGTERM unwinds the stack like an exception, so that ``with`` blocks clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        previous = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: its own handler, if any, stays
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
