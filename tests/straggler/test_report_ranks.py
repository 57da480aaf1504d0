"""Reports and ``on_straggler=`` on real ranks."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.guards.step import spent_ns
from minddp.straggler import Report, Straggler, command, exchange, report
from minddp.testing import run_ranks
from minddp.timeline import load
from tests.faults.logged import logged
from tests.on_ranks import on_ranks

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
        for patience in ("_FOR_THE_OTHERS", "_FOR_THE_REPORT"):
            patch.setattr(exchange, patience, 60.0)
        return report(ddp, *arguments, **more)


def _name_the_late(rank: int, world_size: int) -> list[tuple[str, dict[str, Any], str]]:
    found = []
    for number, phase in enumerate(PHASES):
        late = rank == number % world_size
        ddp = _train(16, {phase: DELAY} if late else {})
        made = _together(ddp, 12, links=phase == "input")
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
        assert "did not come" not in text and "not measured" not in text


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
    before = spent_ns()
    begin = time.monotonic_ns()
    optimizer.step()
    assert 20_000_000 <= spent_ns() - before <= time.monotonic_ns() - begin


@on_ranks(1)
def test_arguments_that_make_no_sense_are_refused(rank: int, world_size: int) -> None:
    ddp = _train(1)
    for arguments, words in (
        ({"steps": 0}, "steps must be 1 to 32"),
        ({"steps": 2.5}, "steps must be a number of steps, got 2.5"),
        ({"links": "yes"}, "links must be a bool, got 'yes'"),
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
    """Each rank asks by itself, links included, while the other one has collectives of its own to come to."""
    ddp = _train(8)
    found = []
    for who in range(world_size):
        dist.barrier()
        if rank == who:
            begin = time.monotonic()
            text = str(report(ddp, links=True))
            assert exchange._FOR_THE_OTHERS <= 0.4 and time.monotonic() - begin < 60
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


def _apart(rank: int, world_size: int, rank_0_begins: bool) -> str:
    """Rank 1 gives up: before rank 0 comes, or when rank 0 has begun with the links and rank 1 has not seen it."""
    ddp = _train(3)
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchange, "_FOR_THE_REPORT", 60.0)
            if rank_0_begins:
                come = exchange._Turn.comes
                patch.setattr(
                    exchange._Turn, "comes", lambda turn, keys, _: come(turn, keys, 60) and keys[0] != "links"
                )
            else:
                patch.setattr(exchange, "_FOR_THE_OTHERS", 0.0)
            text = str(report(ddp, links=True))
    if not rank_0_begins:
        dist.barrier()
    if rank != 1:
        text = str(_together(ddp, links=True))
    dist.barrier()
    return text


@pytest.mark.parametrize("rank_0_begins", [False, True])
def test_links_are_measured_by_all_ranks_or_by_none(rank_0_begins):
    texts = run_ranks(_apart, 3, rank_0_begins)
    assert ["not measured" in text for text in texts] == [not rank_0_begins, False, not rank_0_begins]
    assert ("rank 1's part alone" in texts[1]) == (not rank_0_begins)
    assert texts[0] == texts[2] and "on 3 ranks" in texts[0]


@on_ranks(2)
def test_a_store_that_fails_is_a_note(rank: int, world_size: int) -> None:
    ddp = _train(3)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("the store is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "dist", Broken())
        text = str(report(ddp))
    assert f"This is rank {rank}'s part alone: the store is gone" in text and "on 1 rank" in text


@on_ranks(2)
def test_reports_do_not_fill_the_store(rank: int, world_size: int) -> None:
    ddp = _train(3)
    turns = []
    for _ in range(4):
        assert len(_together(ddp).ranks) == world_size
        turns.append(exchange._turns[ddp.reducer][-1])
    dist.barrier()
    keys = ["report", "links", *map(str, range(1, world_size))]
    there = [[turn.comes([key], 0) for key in keys] for turn in turns]
    assert there == [[False] * 3] * 2 + [[True] * 3] * 2


def _watch(rank: int, world_size: int) -> tuple[list[Straggler], list[str], list[Straggler]]:
    found: list[Straggler] = []
    with logged() as lines:
        _train(42, {"forward": DELAY} if rank == 1 else {}, on_straggler=found.append)
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


@on_ranks(3)
def test_measuring_links_leaves_the_programs_messages_and_random_numbers_alone(rank: int, world_size: int) -> None:
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(3):
        ddp(torch.ones(2, 2)).sum().backward()
    received = torch.empty(4)
    work = dist.irecv(received, src=0) if rank == 1 else None
    random_state = torch.get_rng_state()
    assert "not measured" not in str(_together(ddp, links=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    if rank == 0:
        dist.send(torch.arange(4.0), dst=1)
    if work is not None:
        work.wait()
    assert rank != 1 or received.tolist() == [0.0, 1.0, 2.0, 3.0]


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
    made = command.report_of(load(path), 5)
    assert isinstance(made, Report)
    assert made.steps == 5


def test_a_trace_without_steps_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.json"
    for text, words in (
        ("{}", "not a trace"),
        (_old_trace(), "older minddp"),
        (_old_trace(steps=[]), "no finished step in common"),
    ):
        path.write_text(text)
        assert command.main([str(path)]) == 1
        assert words in capsys.readouterr().err
    assert command.main([str(Path("nowhere.json"))]) == 1


_MOMENTS = ("forward_begin_ns", "backward_begin_ns", "backward_end_ns", "finalize_end_ns")
_OLD_STEP = {"iteration": 1, "ready_ns": [], "buckets": [], **dict.fromkeys(_MOMENTS, 1)}


def _old_trace(steps: Any = (_OLD_STEP,)) -> str:
    module = {"name": "Net", "parameter_names": [], "steps": list(steps)}
    part = {"rank": 0, "offset_ns": 0, "error_ns": 0, "modules": [module]}
    return json.dumps({"minddp": {"world_size": 1, "missing_ranks": [], "ranks": [part]}})
