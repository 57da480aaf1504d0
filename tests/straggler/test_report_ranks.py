"""``minddp.report(ddp)`` and ``on_straggler=`` on real ranks."""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.guards import optimizer_guard
from minddp.straggler import Report, Straggler, command, exchange, probe
from minddp.testing import run_ranks
from minddp.timeline import gathering, load

DELAY = 0.016  # twice a step: what a busy machine adds is less
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


def _name_the_late(rank: int, world_size: int) -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for number, phase in enumerate(PHASES):
        late = rank == number % world_size
        ddp = _train(16, {phase: DELAY} if late else {})
        report = minddp.report(ddp, 12, probe=phase == "input")
        found.append((phase, report.to_dict(), str(report)))
    return found


def test_the_late_rank_is_named_on_every_rank():
    results = run_ranks(_name_the_late, 3)
    assert results[0] == results[1] == results[2]
    for number, (phase, report, text) in enumerate(results[0]):
        assert report["straggler"] is not None, text
        assert (report["straggler"]["rank"], report["straggler"]["phase"]) == (number % 3, phase), text
        assert report["straggler"]["seconds"] > DELAY / 2
        assert report["steps"] == 12
        assert report["overlap"] is not None
    assert results[0][0][1]["advice"] is not None  # it was probed


def _micro_batches(rank: int, world_size: int) -> dict[str, Any]:
    ddp = minddp.DistributedDataParallel(_Net(0.001, 0.001))
    for _ in range(12):
        with ddp.no_sync():
            ddp(torch.ones(2, 32)).sum().backward()
            time.sleep(DELAY * rank)
        ddp(torch.ones(2, 32)).sum().backward()
    return minddp.report(ddp, 10, probe=False).to_dict()


def test_micro_batches_are_told_from_input():
    report, other = run_ranks(_micro_batches, 2)
    assert report == other
    assert (report["straggler"]["rank"], report["straggler"]["phase"]) == (1, "micro-batches")


class _Twice(torch.optim.SGD):
    """Its step is its base's, and some work: both have torch's hooks."""

    def step(self, closure: Any = None) -> None:
        time.sleep(0.02)
        super().step(closure)


def test_a_step_within_a_step_is_counted_once():
    run_ranks(_step_twice, 1)


def _step_twice(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = _Twice(ddp.parameters(), lr=0.1)
    before = optimizer_guard.spent_ns()
    begin = time.monotonic_ns()
    optimizer.step()
    assert 20_000_000 <= optimizer_guard.spent_ns() - before <= time.monotonic_ns() - begin


def _misuse(rank: int, world_size: int) -> list[str]:
    ddp = _train(1)
    errors = []
    for arguments in ({}, {"steps": 20 - rank}, {"steps": 0}, {"steps": 2.5}, {"probe": "yes"}):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            minddp.report(ddp, **arguments)
        errors.append(str(caught.value))
    return errors


def test_what_is_wrong_is_said_on_every_rank():
    results = run_ranks(_misuse, 2)
    assert results[0] == results[1]
    expected = [
        "no finished synchronized step in common",
        "different arguments: steps=20 on rank 0; steps=19 on rank 1",
        "steps must be 1 to 32",
        "steps must be a number of steps, got 2.5",
        "probe must be a bool, got 'yes'",
    ]
    for error, words in zip(results[0], expected, strict=True):
        assert words in error


def _other_clocks(rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    """Rank 1 reads a clock that is five seconds ahead, also in its stamps."""
    ddp = _train(8)
    skew = 5_000_000_000 * rank
    stamps = [_ahead(step, skew) for step in ddp.reducer.recent_steps()]
    ddp._minddp_engine.reducer.recent_steps = lambda at_most: stamps
    saved = exchange.clock_identity, gathering.time
    exchange.clock_identity = lambda: f"machine {rank}"
    gathering.time = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + skew, monotonic=time.monotonic)
    try:
        report = minddp.report(ddp, probe=False)
    finally:
        exchange.clock_identity, gathering.time = saved
    return str(report), report.to_dict()


def _ahead(part: dict[str, Any], by: int) -> dict[str, Any]:
    moved = {}
    for name, value in part.items():
        if name == "buckets":
            value = [_ahead(bucket, by) for bucket in value]
        elif name.endswith("_ns") and name != "optimizer_ns":
            value = [v + by for v in value] if isinstance(value, list) else value + by
        moved[name] = value
    return moved


def test_clocks_of_other_machines_are_measured():
    (text, report), other = run_ranks(_other_clocks, 2)
    assert (text, report) == other
    assert "could not be aligned" not in text
    assert report["overlap"] is not None
    assert all(row["hidden_seconds"] + row["exposed_seconds"] + row["waiting_seconds"] < 1 for row in report["ranks"])


def _watch(rank: int, world_size: int) -> tuple[list[Straggler], list[str], list[Straggler]]:
    found: list[Straggler] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("minddp").addHandler(handler)
    _train(42, {"forward": DELAY} if rank == 1 else {}, on_straggler=found.append)
    logging.getLogger("minddp").removeHandler(handler)
    quiet: list[Straggler] = []
    _train(22, on_straggler=quiet.append)
    return found, lines, quiet


def test_every_rank_hears_of_a_straggler_and_rank_0_logs_it():
    results = run_ranks(_watch, 2)
    for rank, (found, lines, quiet) in enumerate(results):
        assert [(late.rank, late.phase) for late in found] == [(1, "forward")] * 2
        assert [line for line in lines if "holds the others up" in line][:2] == lines[:2]
        assert len(lines) == (2 if rank == 0 else 0)
        assert len(quiet) <= 1  # 22 steps on a busy machine
    assert "iterations 1 to 20: rank 1 holds the others up" in results[0][1][0]


def _differ(rank: int, world_size: int, name: str, values: list[Any]) -> str:
    with pytest.raises(ValueError) as caught:
        minddp.DistributedDataParallel(torch.nn.Linear(2, 2), **{name: values[rank]})
    return str(caught.value)


@pytest.mark.parametrize("name, values", [("on_straggler", [None, print]), ("bucket_cap_mb", [25, None])])
def test_what_decides_collectives_is_given_alike(name, values):
    """The default, too, is no number: buckets are cut by what the model is."""
    assert all(name in error for error in run_ranks(_differ, 2, name, values))


def _with_a_receive_under_way(rank: int, world_size: int) -> list[float]:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(3):
        ddp(torch.ones(2, 2)).sum().backward()
    received = torch.empty(4)
    work = dist.irecv(received, src=0) if rank == 1 else None
    random_state = torch.get_rng_state()
    minddp.report(ddp)
    assert torch.equal(torch.get_rng_state(), random_state)
    if rank == 0:
        dist.send(torch.arange(4.0), dst=1)
    if work is not None:
        work.wait()
    return received.tolist() if rank == 1 else []


def test_the_probe_leaves_the_programs_messages_and_random_numbers_alone():
    assert run_ranks(_with_a_receive_under_way, 3)[1] == [0.0, 1.0, 2.0, 3.0]


def _contention(rank: int, world_size: int) -> dict[str | None, Any]:
    probed = probe.probe(dist.group.WORLD, torch.device("cpu"), 1 << 16)
    assert probed is not None
    return dict(probed.taken)


def test_what_collectives_take_is_the_same_on_all_ranks():
    first, second = run_ranks(_contention, 2)
    assert first == second
    assert first.keys() == {None, "bf16", "int8"}
    assert first["int8"].seconds_per_byte >= first[None].seconds_per_byte >= 0


def _kept(rank: int, world_size: int) -> dict[str, Any]:
    ddp = _train(40)
    steps = ddp.reducer.recent_steps()
    last, two = ddp.reducer.last_step(), ddp.reducer.recent_steps(2)
    ddp.reducer.set_buckets([[index] for index in reversed(range(6))])
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
    report = command.report_of(load(path), 5)
    assert isinstance(report, Report)
    assert report.steps == 5


def test_a_trace_without_steps_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for text, words in (("{}", "not a trace"), (_old_trace(), "older minddp"), (_old_trace(steps=[]), "no finished")):
        path.write_text(text)
        assert command.main([str(path)]) == 1
        assert words in capsys.readouterr().err
    assert command.main([str(Path("nowhere.json"))]) == 1


def _old_trace(steps: Any = ({"iteration": 1},)) -> str:
    part = {"rank": 0, "offset_ns": 0, "modules": [{"name": "Net", "steps": list(steps)}]}
    return json.dumps({"minddp": {"world_size": 1, "missing_ranks": [], "ranks": [part]}})


@pytest.mark.parametrize("value", [1, "print"])
def test_what_cannot_be_called_is_refused(value):
    run_ranks(_refused, 1, value)


def _refused(rank: int, world_size: int, value: object) -> None:
    with pytest.raises(TypeError, match="on_straggler must be a callable, or None"):
        minddp.DistributedDataParallel(torch.nn.Linear(2, 2), on_straggler=value)
