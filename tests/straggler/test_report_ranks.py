"""Reports on real ranks."""

from __future__ import annotations

import copy
import itertools
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.straggler import Report, command, exchange, report
from minddp.timeline import load
from minddp.timeline.observer import optimizer_time
from minddp.timeline.store import ask
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks

DELAY = 0.04  # several steps: what a busy machine adds is less
PHASES = ("input", "forward", "backward", "hook")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _Net(torch.nn.Module):
    def __init__(self, forward: float, backward: float):
        super().__init__()
        self.seconds = forward, backward
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.seconds
        time.sleep(forward)
        for layer in self.layers:
            x = _Sleep.apply(layer(x), backward / 3)
        return x


def _train(steps: int, delays: dict[str, float] | None = None, **arguments: Any) -> minddp.DistributedDataParallel:
    """Steps of some 10 ms, and ``delays`` by phase."""
    more = dict.fromkeys(PHASES, 0.0) | (delays or {})
    net = _Net(0.002 + more["forward"], 0.004 + more["backward"])
    ddp = minddp.DistributedDataParallel(net, bucket_cap_mb_list=[0.002] * 2, **arguments)
    if more["hook"]:

        def hook(state, bucket):
            time.sleep(more["hook"] / len(ddp.reducer.buckets()))
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for _ in range(steps):
        time.sleep(0.002 + more["input"])
        optimizer.zero_grad()
        ddp(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    return ddp


def _together(ddp: minddp.DistributedDataParallel, *arguments: Any, **more: Any) -> Report:
    """The report, however far apart the ranks come on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_PATIENCE", 100.0)
        return report(ddp, *arguments, **more)


def _name_the_late(rank: int, world_size: int) -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for number, phase in enumerate(PHASES):
        late = rank == number % world_size
        ddp = _train(16, {phase: DELAY} if late else {})
        made = _together(ddp, 12)
        found.append((phase, made.to_dict(), str(made)))
    return found


def test_the_late_rank_is_named_on_every_rank():
    results = run_ranks(_name_the_late, 3)
    assert results[0] == results[1] == results[2]
    for number, (phase, made, text) in enumerate(results[0]):
        assert made["straggler"] is not None, text
        assert (made["straggler"]["rank"], made["straggler"]["phase"]) == (number % 3, phase), text
        assert made["straggler"]["seconds"] > DELAY / 2
        assert made["steps"] == 12
        assert made["overlap"] is not None
        assert all(row["waiting_seconds"] is not None for row in made["ranks"])
        assert "did not come" not in text


def _micro_batches(rank: int, world_size: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(_Net(0.001, 0.001))
    for _ in range(12):
        with ddp.no_sync():
            ddp(torch.ones(2, 32)).sum().backward()
            time.sleep(DELAY * rank)
        ddp(torch.ones(2, 32)).sum().backward()
    return _together(ddp, 10).to_dict()


def test_micro_batches_are_told_from_input():
    made, other = run_ranks(_micro_batches, 2)
    assert made == other
    assert (made["straggler"]["rank"], made["straggler"]["phase"]) == (1, "micro-batches")


class _Twice(torch.optim.SGD):
    """Its step is its base's, and some work: both have torch's hooks."""

    def step(self, closure: Any = None) -> None:
        time.sleep(0.02)
        super().step(closure)


@on_ranks(1)
def test_a_step_within_a_step_is_counted_once(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = _Twice(ddp.parameters(), lr=0.1)
    before = optimizer_time().at_forward()
    begin = time.monotonic_ns()
    optimizer.step()
    assert 20_000_000 <= optimizer_time().at_forward() - before <= time.monotonic_ns() - begin


class _Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError


@on_ranks(1)
def test_a_step_that_an_exception_ends_spoils_no_later_one(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(ArithmeticError):
        _Failing(ddp.parameters(), lr=0.1).step()
    time.sleep(0.02)
    before = optimizer_time().at_forward()
    begin = time.monotonic_ns()
    _Twice(ddp.parameters(), lr=0.1).step()
    assert 20_000_000 <= optimizer_time().at_forward() - before <= time.monotonic_ns() - begin


@on_ranks(1)
def test_arguments_that_make_no_sense_are_refused(rank: int, world_size: int) -> None:
    ddp = _train(1)
    for arguments, words in (
        ({"steps": 0}, "steps must be 1 to 32"),
        ({"steps": 2.5}, "steps must be a number of steps, got 2.5"),
        ({"links": True}, "minddp.report no longer has the argument 'links'. nccl-tests and iperf3 measure links"),
        ({"link": True}, "unexpected keyword argument 'link'"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            report(ddp, **arguments)


@on_ranks(1, 2)
def test_before_the_second_step_there_are_none(rank: int, world_size: int) -> None:
    ddp = _train(0)
    found = [str(_together(ddp))]
    ddp(torch.ones(2, 32)).sum().backward()
    found.append(str(_together(ddp)))
    ddp(torch.ones(2, 32)).sum().backward()
    assert found[0] == found[1] and "No steps yet" in found[1]
    assert str(_together(ddp)).startswith(f"1 step (iterations 2 to 2) on {world_size} rank")


def _alone(rank: int, world_size: int) -> list[str]:
    """Each rank asks by itself, while the other one has collectives of its own to come to."""
    ddp = _train(8)
    found = []
    for who in range(world_size):
        dist.barrier()
        if rank == who:
            begin = time.monotonic()
            text = str(report(ddp))
            assert exchange._PATIENCE <= 1 and time.monotonic() - begin < 60
            found.append(text)
        dist.barrier()
        ddp(torch.ones(2, 32)).sum().backward()  # another iteration
        received = torch.tensor(float(rank))
        dist.all_reduce(received)
        assert received.item() == world_size - 1
    return [*found, str(_together(ddp))]


def test_one_rank_alone_gets_its_own_part_and_the_others_are_not_disturbed():
    (first, both), (second, same) = run_ranks(_alone, 2)
    assert "on 1 rank" in first and "Rank 1 did not come. Call report() on all ranks" in first
    assert "on 1 rank" in second and "rank 1's part alone: rank 0, which makes the report, did not come" in second
    assert both == same and "on 2 ranks" in both


class _Own(dist.Store):
    """A program's own store, written in Python, which takes ``seconds`` to answer."""

    def __init__(self, inner: Any, seconds: float):
        super().__init__()
        self._inner, self._seconds = inner, seconds

    def set(self, key: str, value: Any) -> None:
        time.sleep(self._seconds)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self._inner.get(key)
        return found

    def check(self, keys: list[str]) -> bool:
        time.sleep(self._seconds)
        return bool(self._inner.check(keys))


class _Gone(dist.Store):
    pass


@on_ranks(2)
def test_a_store_that_fails_is_a_note(rank: int, world_size: int) -> None:
    """Also one that is not there, one that hangs, and a file that is gone. One in Python works."""
    ddp = _train(3)
    base = dist.distributed_c10d._get_default_store()
    own = _Own(dist.PrefixStore("own", base), 0)
    path = f"{tempfile.gettempdir()}/minddp-no-such-store-{os.getpid()}"
    file = dist.FileStore(path, 1)
    os.unlink(path)
    for store, words in (
        (own, None),
        (_Gone(), ""),
        (file, f"the store's file {path} is gone"),
        (_Own(base, 5.0), "the store has not answered within 2.0 s"),
        (base, "the store has not answered an earlier request yet"),
    ):
        begin = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
            text = str(_together(ddp) if words is None else report(ddp))
        if words is None:
            assert "on 2 ranks" in text
        else:
            assert f"This is rank {rank}'s part alone: " in text and words in text and "on 1 rank" in text, text
        assert time.monotonic() - begin < 60


@on_ranks(2)
def test_a_group_that_was_destroyed_is_reported_on(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    ddp = _train(3, process_group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    assert "on 2 ranks" in str(_together(ddp))


@on_ranks(2)
def test_a_copy_of_a_wrapper_gets_this_ranks_part(rank: int, world_size: int) -> None:
    assert "this wrapper is a copy" in str(report(copy.deepcopy(_train(3))))


@on_ranks(2)
def test_one_rank_asks_in_each_step_and_nothing_ends(rank: int, world_size: int) -> None:
    """Twenty reports of rank 1 alone: the others train on, and the last one is of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_PATIENCE", 0.0)
        ddp = _train(2)
        for _ in range(20):
            ddp(torch.ones(2, 32)).sum().backward()
            if rank == 1:
                assert "rank 0, which makes the report, did not come" in str(report(ddp))
    dist.barrier()
    assert "on 2 ranks" in str(_together(ddp))


@on_ranks(2)
def test_rank_0_returns_when_all_have_read(rank: int, world_size: int) -> None:
    """The store may be in its process, and end with it."""
    ddp, store, read = _train(3), dist.distributed_c10d._get_default_store(), exchange._read

    def late(data: bytes) -> Any:
        if rank:
            time.sleep(0.2)
            store.set("rank 1 reads", b"")
        return read(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_PATIENCE", 60.0)
        patch.setattr(exchange, "_read", late)
        assert "on 2 ranks" in str(_together(ddp))
        assert store.check(["rank 1 reads"])


@on_ranks(2)
def test_reports_do_not_fill_the_store(rank: int, world_size: int) -> None:
    """A rank's keys of the last report are deleted; after new buckets none of the old ones is read."""
    ddp = _train(3)
    store = dist.PrefixStore("minddp/report", dist.distributed_c10d._get_default_store())
    keys = []
    for _ in range(3):
        ddp(torch.ones(2, 32)).sum().backward()
        assert _together(ddp).rank_count == world_size
        timeline = ddp._minddp_averager.observers.get("timeline")
        keys += timeline.keys
        dist.barrier()
    each = len(keys) // 3
    assert [store.check([key]) for key in keys] == [False] * 2 * each + [True] * each
    minddp.refresh(ddp)
    assert str(_together(ddp)).startswith("No steps yet") and not keys[-1].startswith(timeline.key)


@on_ranks(2)
def test_reports_keep_one_connection(rank: int, world_size: int) -> None:
    """Each new one costs torch's store a look at the machine's names. Threads take turns."""
    ddp, port = _train(3), torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
        port += store.port
    dist.broadcast(port, 0)
    if rank:
        store = dist.TCPStore("127.0.0.1", int(port), world_size, False)
    made, clone = [], dist.TCPStore.clone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.TCPStore, "clone", lambda self: made.append(1) or clone(self))
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        for _ in range(3):
            assert "on 2 ranks" in str(_together(ddp))
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda i: ask(store, "test", 60.0, lambda _: i), range(64))
            assert [*answers] == [*range(64)]
    assert len(made) == 1
    dist.barrier()


def _kept(rank: int, world_size: int) -> dict[str, Any]:
    ddp = _train(40)
    steps = ddp.reducer.recent_steps()
    last, two = ddp.reducer.last_step(), ddp.reducer.recent_steps(2)
    ddp._minddp_averager.set_buckets([[index] for index in reversed(range(6))])
    return {"steps": steps, "last": last, "two": two, "after": ddp.reducer.recent_steps()}


def test_the_reducer_keeps_32_steps():
    (kept, _) = run_ranks(_kept, 2)
    steps = kept["steps"]
    assert [step["iteration"] for step in steps] == list(range(9, 41))
    assert steps[-1] == kept["last"]
    assert ["ready_ns" in step for step in steps] == [False] * 31 + [True]
    assert kept["two"] == steps[-2:]
    for before, step in itertools.pairwise(steps):
        assert step["previous_end_ns"] == before["finalize_end_ns"]
        moments = ("previous_end_ns", "first_arrival_ns", "arrival_ns", "forward_begin_ns", "forward_end_ns")
        moments += ("backward_begin_ns", "backward_end_ns", "finalize_end_ns")
        assert [step[name] for name in moments] == sorted(step[name] for name in moments)
        assert 0 < step["optimizer_ns"] < step["arrival_ns"] - step["previous_end_ns"]
        for bucket in step["buckets"]:
            assert bucket["pack_begin_ns"] <= bucket["launch_ns"] <= bucket["launch_end_ns"]
            assert bucket["launch_ns"] < bucket["done_ns"] <= bucket["unpack_begin_ns"] <= bucket["unpack_end_ns"]
    assert kept["after"] == []


def _trace(rank: int, world_size: int, path: str) -> None:
    with minddp.trace(path):
        _train(14, {"input": DELAY} if rank == 1 else {})
    dist.barrier()


def test_a_trace_is_reported(tmp_path, capsys):
    path = tmp_path / "trace.json"
    run_ranks(_trace, 2, str(path))
    assert command.main([str(path), "--json", str(tmp_path / "report.json")]) == 0
    assert "rank 1 holds the others up" in capsys.readouterr().out
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["straggler"]["rank"], told["straggler"]["phase"]) == (1, "input")
    made = command.report_of(load(path), 5)
    assert isinstance(made, Report)
    assert made.steps == 5


def test_a_trace_without_steps_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for text, words, *more in (
        ("{}", "not a trace"),
        (_old_trace(), "trace.json is not a trace written by minddp.trace, or of an older minddp, or damaged"),
        (_old_trace(), "['steps'][0] has no 'previous_end_ns'"),
        (_old_trace(steps=[]), "no finished step in common"),
        (_old_trace(steps=[]), "no finished step in common", "--module", "-1"),
        (_old_trace(steps=[]), "module -5 is not there: the trace has 1 of them", "--module", "-5"),
        (_old_trace(steps=[]), "module 1 is not there", "--module", "1"),
        (_old_trace(steps=[]), "steps must be at least 1", "--steps", "0"),
    ):
        path.write_text(text)
        assert command.main([str(path), *more]) == 1
        assert words in capsys.readouterr().err
    assert command.main([str(Path("nowhere.json"))]) == 1


_MOMENTS = ("forward_begin_ns", "backward_begin_ns", "backward_end_ns", "finalize_end_ns")
_OLD_STEP = {"iteration": 1, "ready_ns": [], "buckets": [], **dict.fromkeys(_MOMENTS, 1)}


def _old_trace(steps: Any = (_OLD_STEP,)) -> str:
    module = {"name": "Net", "parameter_names": [], "steps": list(steps)}
    part = {"rank": 0, "clock": "one", "modules": [module]}
    return json.dumps({"minddp": {"world_size": 1, "missing_ranks": [], "ranks": [part]}})
