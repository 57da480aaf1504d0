"""One rank is slow, in some place and in some way; the others wait for longer than three warnings.

``train(ddp_class, rank, place, way, seconds)`` is an ordinary program. In its third iteration rank 1 is slow at
``place``: it sleeps, waits for a lock, is stopped by a signal, ... for so many seconds.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import minddp
import minddp.functional

SLOW_STEP, STEPS = 2, 4

# --- ways ---


def sleep(seconds):
    time.sleep(seconds)


def lock(seconds):
    held = threading.Lock()
    held.acquire()
    threading.Timer(seconds, held.release).start()
    with held:
        pass


def thread_that_computes(seconds):
    def compute():
        while time.monotonic() < end:
            torch.ones(100, 100).mm(torch.ones(100, 100))

    end = time.monotonic() + seconds
    _in_thread(compute)


def compute(seconds):
    """On one line of the program."""
    ones, end = torch.ones(100, 100), time.monotonic() + seconds
    while time.monotonic() < end:
        ones.mm(ones)


def process(seconds):
    subprocess.run(["sleep", str(seconds)], check=True)


def socket_of_a_service(seconds):
    ours, theirs = socket.socketpair()
    threading.Timer(seconds, theirs.send, [b"x"]).start()
    ours.recv(1)


def file_lock(seconds):
    with tempfile.NamedTemporaryFile() as file:
        command = ["flock", file.name, "sh", "-c", f"echo held; sleep {seconds}"]
        held = subprocess.Popen(command, stdout=subprocess.PIPE)
        held.stdout.readline()
        fcntl.flock(file, fcntl.LOCK_EX)
        held.wait()


def stopped(seconds):
    """As by a debugger, or a machine that is suspended."""
    until_it_is = "until grep -q '^State:.T' /proc/$0/status; do sleep 0.01; done"
    subprocess.Popen(["sh", "-c", f"{until_it_is}; sleep {seconds}; kill -CONT $0", str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)


def throttled(seconds):
    """Stopped and continued in turn: a twentieth of a processor."""
    turns = max(1, int(seconds / 0.1))
    loop = f"for i in $(seq {turns}); do kill -STOP $0; sleep 0.095; kill -CONT $0; sleep 0.005; done"
    process = subprocess.Popen(["sh", "-c", loop, str(os.getpid())])
    compute(seconds)
    process.wait()


def call_that_holds_the_gil(seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def traced(seconds):
    """By gdb or strace, which stop a process while they look."""
    source = (
        "import ctypes, os, sys, time\n"
        "c, pid = ctypes.CDLL(None), int(sys.argv[1])\n"
        "c.ptrace(16, pid, 0, 0); os.waitpid(pid, 0); time.sleep(float(sys.argv[2])); c.ptrace(17, pid, 0, 0)"
    )
    debugger = subprocess.Popen([sys.executable, "-S", "-c", source, str(os.getpid()), str(seconds)])
    debugger.wait()


WAYS = {
    way.__name__: way
    for way in (
        lock, thread_that_computes, compute, process, socket_of_a_service, file_lock, stopped, throttled,
        call_that_holds_the_gil, traced,
    )
}  # fmt: skip

# --- places ---


class At(nn.Module):
    """Runs ``work`` in its next forward, or when the gradient passes in backward, once."""

    def __init__(self):
        super().__init__()
        self.forward_work = self.backward_work = None

    def forward(self, x):
        work, self.forward_work = self.forward_work, None
        if work is not None:
            work()
        y = x * 1.0
        if self.backward_work is not None and y.requires_grad:
            work, self.backward_work = self.backward_work, None
            y.register_hook(lambda grad: work())
        return y


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = At()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.at(x))


def _net(place):
    torch.manual_seed(0)
    middle = minddp.SyncBatchNorm(6) if place == "SyncBatchNorm" else nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(4, 6), At(), middle, Nested(), nn.Linear(6, 2))


PLACES = (
    "constructor", "data", "forward", "a module that forward calls", "SyncBatchNorm", "functional", "loss",
    "gradient's hook", "hook of an accumulated gradient", "comm hook", "step", "checkpoint", "evaluation",
    "evaluation with gradients", "evaluation of the wrapped module", "join", "between two backwards", "log",
    "barrier of another group", "receive of another group", "thread", "caught exception", "all-reduce by hand",
    "another wrapper's forward", "no_sync", "compile",
)  # fmt: skip


def train(ddp_class, rank, place, way, seconds):
    """Returns the final parameters."""

    def late(here):
        if here == place and rank == 1 and step == SLOW_STEP:
            (WAYS.get(way) or sleep)(seconds)

    step = SLOW_STEP
    late("constructor")
    ddp = ddp_class(_net(place))
    at, nested = ddp.module[1], ddp.module[3].at
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: late("step"))
    other = ddp_class(nn.Sequential(At(), nn.Linear(2, 2))) if place == "another wrapper's forward" else None
    group = dist.new_group() if "another group" in place or place == "all-reduce by hand" else None
    if place == "comm hook":
        ddp.register_comm_hook(None, _hook(lambda: late("comm hook")))
    if place == "hook of an accumulated gradient":
        ddp.module[0].weight.register_post_accumulate_grad_hook(lambda _: late(place))
    forward = torch.compile(ddp, backend=_slow_compiler(lambda: late(place))) if place == "compile" else ddp
    with ddp.join() if place == "join" else contextlib.nullcontext():
        for step in range(STEPS + (rank == 1 and place == "join")):
            late("data")
            late("join")
            late("between two backwards")
            at.forward_work = lambda: late("forward") or late("SyncBatchNorm")
            nested.forward_work = lambda: late("a module that forward calls")
            at.backward_work = lambda: late("gradient's hook")
            if place == "caught exception":
                _raise_and_catch(ddp, late)
            if place == "evaluation with gradients" and rank == 1 and step == SLOW_STEP:
                ddp.eval()
                ddp.module(torch.ones(3, 4)).sum()
                late(place)
                ddp.train()
            if place == "evaluation of the wrapped module" and rank == 1:
                with torch.no_grad():
                    ddp.module[0](torch.ones(3, 4))
                    late(place)
            if place == "no_sync":
                with ddp.no_sync():
                    ddp(_batch(rank, step + 10)).sum().backward()
                    late(place)
            size = 5 if place == "compile" and rank == 1 and step == SLOW_STEP else 3  # which is compiled anew
            output = forward(_batch(rank, step, size))
            if place == "functional":
                late(place)
                output = output + minddp.functional.all_reduce(output.mean())
            if other is not None:
                other.module[0].forward_work = lambda: late(place)
                output = other(output)
            late("loss")
            loss = output.square().mean()
            if place == "thread":
                _in_thread(lambda loss=loss: (late(place), loss.backward()))
            else:
                loss.backward()
            if place == "all-reduce by hand":
                late(place)
                dist.all_reduce(loss.detach(), group=group)
            if place == "barrier of another group":
                late(place)
                dist.barrier(group)
            if place == "receive of another group" and step == SLOW_STEP:
                late(place)
                message = torch.ones(2)
                dist.send(message, 0, group=group) if rank == 1 else dist.recv(message, 1, group=group)
            optimizer.step()
            optimizer.zero_grad()
            late("log")
            if rank == 1:
                late("checkpoint")
                torch.save(ddp.state_dict(), os.devnull)
            if place == "evaluation":
                ddp.eval()
                with torch.no_grad():
                    ddp(torch.ones(3, 4))
                    late(place)
                ddp.train()
    return [p.detach().clone() for p in ddp.parameters()]


def _batch(rank, step, size=3):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def _in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _raise_and_catch(ddp, late):
    """A batch that forward refuses, on all ranks; rank 1 then saves what it has."""
    try:
        ddp.module[1].forward_work = lambda: 1 // 0
        ddp(torch.ones(3, 4))
    except ZeroDivisionError:
        late("caught exception")


def _hook(work):
    def hook(state, bucket):
        work()
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])

    return hook


def _slow_compiler(work):
    def compiler(graph, inputs):
        work()
        return graph.forward

    return compiler


def busy_ranks(ddp_class, rank, seconds):
    """More ranks than processors: all compute at different times."""
    ddp = ddp_class(_net("8 ranks"))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(3):
        compute(seconds * (rank % 3) / 2)
        ddp(_batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in ddp.parameters()]


# --- what happens to a program, and is not its end ---


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.work = nn.Linear(4, 4), None

    def forward(self, x):
        work, self.work = self.work, None
        if work is not None:
            work()
        return self.layer(x)


def _made(ddp_class, module=None):
    torch.manual_seed(0)
    ddp = ddp_class(module or Slow())
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


def _steps(ddp, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


class _Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.one(x).sum(), self.two(x).sum()


def rests_between_two_backwards_of_one_iteration(ddp_class, rank, seconds):
    ddp, optimizer = _made(ddp_class, _Two())
    for step in range(4):
        optimizer.zero_grad()
        one, two = ddp(torch.ones(2, 4))
        one.backward(retain_graph=True)
        time.sleep(seconds * (rank == 1 and step == 2))
        two.backward()
    return ddp


def shows_an_exception(ddp_class, rank, seconds):
    """With ``sys.excepthook``, as a console does, and goes on."""
    ddp, optimizer = _made(ddp_class)
    _steps(ddp, optimizer, 2)
    if rank == 1:
        lines = "try:", "    raise ValueError", "except ValueError:", "    sys.excepthook(*sys.exc_info())"
        exec(compile("import sys\n" + "\n".join(lines), "<console>", "exec"), {})
        time.sleep(seconds)
    _steps(ddp, optimizer)
    return ddp


def is_interrupted_in_forward(ddp_class, rank, seconds):
    """By Ctrl-C, on each rank; rank 1 then saves what it has."""
    ddp, optimizer = _made(ddp_class)
    _steps(ddp, optimizer, 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ddp.module.work = lambda: signal.raise_signal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        _steps(ddp, optimizer)
    signal.signal(signal.SIGINT, before)
    time.sleep(seconds * (rank == 1))
    _steps(ddp, optimizer)
    return ddp


def threads_end(ddp_class, rank, seconds):
    """One that has trained ends by ``sys.exit()``, and later ones, that have its number, by an exception."""
    ddp, optimizer = _made(ddp_class)
    _in_thread(lambda: (_steps(ddp, optimizer, 2), sys.exit()))
    time.sleep(seconds * (rank == 1))
    _steps(ddp, optimizer)
    if rank == 1:
        for _ in range(3):
            _in_thread(lambda: [][0])
        time.sleep(seconds)
    _steps(ddp, optimizer)
    return ddp


def steps_raise(ddp_class, rank, seconds):
    """On every rank, which all catch; rank 1 then writes a report."""
    ddp, optimizer = _made(ddp_class)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        _steps(ddp, optimizer)
    handle.remove()
    time.sleep(seconds * (rank == 1))
    _steps(ddp, optimizer, 2)
    return ddp


def steps_late_on_gradients_made_alike(ddp_class, rank, seconds):
    """By a penalty on the weights, past the wrapper."""
    ddp, optimizer = _made(ddp_class)
    _steps(ddp, optimizer)
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    sum(p.square().sum() for p in ddp.module.parameters()).backward()
    time.sleep(seconds * (rank == 1))
    optimizer.step()
    _steps(ddp, optimizer)
    return ddp


def loses_a_gradient_of_the_input(ddp_class, rank, seconds):
    """An exception ends ``autograd.grad`` to the input alone, which owes no other rank anything."""

    def fails(grad):
        raise ValueError("no gradient for this attack")

    ddp, optimizer = _made(ddp_class)
    _steps(ddp, optimizer, 2)
    x = torch.ones(2, 4, requires_grad=True)
    x.register_hook(fails)
    with contextlib.suppress(ValueError):
        torch.autograd.grad(ddp(x).sum(), x)
    time.sleep(seconds * (rank == 1))
    _steps(ddp, optimizer)
    return ddp


def goes_on_with_another_wrapper(ddp_class, rank, seconds):
    """After an exception in a backward of one that has no more forwards: a model that is too large, say."""

    def fails(grad):
        raise ValueError("out of memory")

    large, _ = _made(ddp_class)
    next(large.module.parameters()).register_hook(fails)
    with contextlib.suppress(ValueError):
        large(torch.ones(2, 4)).sum().backward()
    ddp, optimizer = _made(ddp_class)
    time.sleep(seconds * (rank == 1))
    _steps(ddp, optimizer, 2)
    return ddp


class _Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("out of memory")
        return grad, None


class _Fails(Slow):
    fails = False

    def forward(self, x):
        return _Last.apply(super().forward(x), self.fails)


def tries_a_batch_again(ddp_class, rank, seconds):
    """Which has failed on rank 1 behind the module's output, before any of its parameters had a gradient."""
    ddp, optimizer = _made(ddp_class, _Fails())
    _steps(ddp, optimizer)
    ddp.module.fails = rank == 1
    if rank == 1:
        with contextlib.suppress(ValueError):
            _steps(ddp, optimizer)
        time.sleep(seconds)
        ddp.module.fails = False
    _steps(ddp, optimizer, 2)
    return ddp


def goes_on_with_a_destroyed_groups_wrapper(ddp_class, rank, seconds):
    """Which keeps the group's connections."""
    torch.manual_seed(0)
    group = dist.new_group()
    ddp = ddp_class(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    _steps(ddp, optimizer)
    dist.barrier()
    dist.destroy_process_group(group)
    time.sleep(seconds * (rank == 0))
    _steps(ddp, optimizer)
    return ddp


EVENTS = (
    rests_between_two_backwards_of_one_iteration, shows_an_exception, is_interrupted_in_forward, threads_end,
    steps_raise, steps_late_on_gradients_made_alike, loses_a_gradient_of_the_input,
    goes_on_with_another_wrapper, tries_a_batch_again,
)  # fmt: skip
