"""Traces of real ranks: one file of all, nothing hangs, and what cannot be written ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp.timeline import Trace, gathering, recording
from tests.faults.logged import logged
from tests.ranks_pool import run_ranks

SKEW_NS = 5_000_000_000_000


def _stamps(begin: int) -> dict[str, Any]:
    """A step of 3 ms that began at ``begin``, without buckets."""
    ends = {"forward_end_ns": 1, "backward_begin_ns": 1, "backward_end_ns": 3, "finalize_end_ns": 3}
    moments = {name: begin + value * 1_000_000 for name, value in ends.items()}
    moments |= {"forward_begin_ns": begin, "ready_ns": [begin + 2_000_000]}
    moments |= dict.fromkeys(("previous_end_ns", "first_arrival_ns", "arrival_ns", "optimizer_ns"), begin)
    return {"iteration": 1, "buckets": [], **moments}


def _take_step(rank: int) -> None:
    """Shows the open trace one step that begins at the same moment on all ranks."""
    dist.barrier()
    reducer = SimpleNamespace(last_step=lambda: _stamps(recording.time.monotonic_ns()))
    ddp = _Fake(reducer=reducer, parameter_names=[f"weight of rank {rank}"], module=object())
    recording.after_step(ddp)


class _Fake(SimpleNamespace):
    __hash__ = object.__hash__


def _pretend_other_machine(rank: int) -> None:
    """Rank 1 reads a clock of its own, ``SKEW_NS`` ahead."""
    gathering.clock_identity = lambda: f"machine {rank}"
    if rank == 1:
        recording.time = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + SKEW_NS)


def _restore() -> None:
    gathering.clock_identity = _clock_identity
    recording.time = time


_clock_identity = gathering.clock_identity


def _same_machine(rank: int, world_size: int, path: str) -> None:
    with recording.trace(path):
        _take_step(rank)
    dist.barrier()


def _skewed(rank: int, world_size: int, path: str) -> list[str]:
    _pretend_other_machine(rank)
    try:
        with logged() as caught, recording.trace(path):
            _take_step(rank)
        dist.barrier()
    finally:
        _restore()
    return caught


def _ends_early(rank: int, world_size: int, path: str, ending: str, early: int) -> float:
    """Rank ``early`` leaves the block by an exception, the other one two seconds later as it should."""
    begin = time.monotonic()
    try:
        with recording.trace(path):
            _take_step(rank)
            if rank != early:
                time.sleep(2)
            elif ending == "an error":
                raise ValueError(ending)
            else:
                sys.exit(0)
    except (ValueError, SystemExit):
        pass
    seconds = time.monotonic() - begin
    dist.barrier()
    with recording.trace(path + "2"):
        _take_step(rank)
    return seconds


def _only_rank_0(rank: int, world_size: int, path: str) -> list[str]:
    with logged() as caught:
        if rank == 0:
            with Trace(path, 10, 0.5):
                pass
    dist.barrier()
    return caught


def _group_gone(rank: int, world_size: int, path: str, store_path: str) -> None:
    """The trace is closed after the process group was destroyed."""
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with recording.trace(path):
        _take_step(rank)
        dist.destroy_process_group()


def _train(rank: int, world_size: int, path: str) -> tuple[Any, list[int]]:
    """Three traced steps, one before and one after; the last step's times and the buckets' bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    ddp = minddp.DistributedDataParallel(model, bucket_cap_mb_list=[0.01] * 2)
    batch = torch.randn(4, 64)
    ddp(batch).sum().backward()
    with recording.trace(path):
        for _ in range(3):
            ddp.zero_grad()
            ddp(batch).sum().backward()
    times = minddp.last_step(ddp)
    ddp(batch).sum().backward()
    return times, [sum(ddp._minddp_wrapped.reduced[i].nbytes for i in bucket) for bucket in ddp.reducer.buckets()]


def test_training_is_traced_from_within_the_module(tmp_path: Path):
    path = tmp_path / "t.json"
    results = run_ranks(_train, 2, str(path))
    document = json.loads(path.read_text())
    for part, (times, sizes) in zip(document["minddp"]["ranks"], results, strict=True):
        (module,) = part["modules"]
        assert module["name"] == "Sequential"
        assert [step["iteration"] for step in module["steps"]] == [2, 3, 4]
        assert [[b["nbytes"] for b in step["buckets"]] for step in module["steps"]] == [sizes] * 3
        assert times.iteration == 4
        assert [bucket.nbytes for bucket in times.buckets] == sizes
        for step in module["steps"]:
            _check_order(step)
    arrivals = [e["name"] for e in document["traceEvents"] if e["ph"] == "i"]
    assert sorted(set(arrivals)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert len(arrivals) == 2 * 3 * 4


def _train_and_refresh(rank: int, world_size: int, path: str) -> None:
    """Two traced steps, a model that loses a parameter and gets two, two more steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    ddp = minddp.DistributedDataParallel(model)
    with recording.trace(path):
        for turn in range(4):
            if turn == 2:
                model[0].bias.requires_grad_(False)
                model.add_module("2", torch.nn.Linear(8, 2))
                minddp.refresh(ddp)
            ddp.zero_grad()
            ddp(torch.randn(4, 8)).sum().backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_refresh_neither_loses_nor_breaks_an_open_trace(tmp_path: Path, world_size: int):
    path = tmp_path / "t.json"
    run_ranks(_train_and_refresh, world_size, str(path))
    document = json.loads(path.read_text())
    for part in document["minddp"]["ranks"]:
        before, after = part["modules"]
        assert [len(module["steps"]) for module in (before, after)] == [2, 2]
        assert after["name"] == "Sequential (remade after 2 steps)"
        assert before["parameter_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert after["parameter_names"] == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    arrivals = [e["name"] for e in document["traceEvents"] if e["ph"] == "i"]
    assert arrivals.count("0.bias") == arrivals.count("2.bias") == 2 * world_size


def _check_order(step: dict[str, Any]) -> None:
    """Stamps of one step are in the order in which things happen."""
    assert step["forward_begin_ns"] < step["backward_begin_ns"] < step["backward_end_ns"] <= step["finalize_end_ns"]
    for bucket in step["buckets"]:
        moments = [bucket[f"{name}_ns"] for name in ("ready", "pack_begin", "launch", "unpack_begin", "unpack_end")]
        assert moments == sorted(moments)
        # The end is stamped by another thread, which the step may not have waited for.
        assert bucket["done_ns"] == -1 or bucket["done_ns"] >= bucket["launch_ns"]
        assert max(step["ready_ns"][i] for i in bucket["parameters"]) <= bucket["ready_ns"]


_PROGRAM = """
import sys, torch, torch.distributed as dist, minddp
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    ddp(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def test_the_environment_traces_an_unedited_program(tmp_path: Path):
    path = tmp_path / "t.json"
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "store")],
        env={**os.environ, "MINDDP_TRACE": str(path)}, check=True,
    )  # fmt: skip
    (part,) = json.loads(path.read_text())["minddp"]["ranks"]
    assert [step["iteration"] for step in part["modules"][0]["steps"]] == [1, 2, 3]


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_file_holds_all_ranks(tmp_path: Path, world_size: int):
    path = tmp_path / "t.json"
    run_ranks(_same_machine, world_size, str(path))
    own = json.loads(path.read_text())["minddp"]
    assert [part["rank"] for part in own["ranks"]] == list(range(world_size))
    assert own["missing_ranks"] == []
    for part in own["ranks"]:
        assert part["clock"] == own["ranks"][0]["clock"]
        assert part["modules"][0]["parameter_names"] == [f"weight of rank {part['rank']}"]
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_another_machines_clock_is_noted_and_its_steps_begin_at_0(tmp_path: Path):
    path = tmp_path / "t.json"
    (lines, _) = run_ranks(_skewed, 2, str(path))
    document = json.loads(path.read_text())
    note = "rank 1 read another clock, so their steps are not beside the others'"
    assert document["minddp"]["notes"] == [note] and any(note in line for line in lines)
    assert [e["ts"] for e in document["traceEvents"] if e["name"] == "forward"] == [0.0, 0.0]


def _unwritable(rank: int, world_size: int, folder: str) -> list[str]:
    """Traces whose folder goes, whose part is torn or is none, or whose store fails, and a step after each."""
    ddp = minddp.DistributedDataParallel(torch.nn.Linear(4, 4))
    base = dist.distributed_c10d._get_default_store()
    with logged() as lines:
        for fault in ("gone", "torn", "no part", "no store"):
            path = Path(folder, fault, "t.json")
            if rank == 0:
                path.parent.mkdir()
            dist.barrier()
            with pytest.MonkeyPatch.context() as patch:
                if fault == "no store":
                    patch.setattr(dist.distributed_c10d, "_get_default_store", dist.Store)
                with recording.trace(path):
                    for _ in range(2):
                        ddp(torch.ones(2, 4)).sum().backward()
                    dist.barrier()
                    if fault == "gone" and rank == 0:
                        path.parent.rmdir()
                    if fault == "torn" and rank == 1:
                        patch.setattr(gathering.zlib, "compress", lambda data: data[:9])
                    if fault == "no part" and rank == 1:
                        patch.setattr(gathering.json, "dumps", lambda part: '{"rank": 1, "modules": [{}]}')
            ddp(torch.ones(2, 4)).sum().backward()
    assert base is dist.distributed_c10d._get_default_store()
    return lines


def test_a_trace_that_cannot_be_written_or_read_ends_nothing(tmp_path: Path):
    lines, others = run_ranks(_unwritable, 2, str(tmp_path))
    gone, torn, missing, no_part, missing_too, *no_store = lines
    assert f"the trace {tmp_path / 'gone' / 't.json'} could not be written: No such file or directory" in gone
    assert "trace: rank 1's part cannot be read" in torn and "rank 1 did not hand in a part" in missing
    assert (
        "trace: rank 1's part cannot be read: it has no 'clock'" in no_part
        and "rank 1 did not hand in a part" in missing_too
    )
    assert "trace: rank 0 does not reach the other ranks" in no_store[0] and "rank 1 did not hand in" in no_store[1]
    assert [line for line in others if "does not reach the other ranks" not in line] == []
    for fault in ("torn", "no part", "no store"):
        assert [p["rank"] for p in json.loads((tmp_path / fault / "t.json").read_text())["minddp"]["ranks"]] == [0]


def test_a_missing_rank_is_named_and_nobody_hangs(tmp_path: Path):
    path = tmp_path / "t.json"
    messages, _ = run_ranks(_only_rank_0, 2, str(path))
    assert any("rank 1 did not hand in a part in time" in message for message in messages)
    assert json.loads(path.read_text())["minddp"]["missing_ranks"] == [1]


@pytest.mark.parametrize("ending, early, here", [("an error", 0, [0]), ("an error", 1, [0, 1]), ("exit", 0, [0, 1])])
def test_an_exception_inside_does_not_wait_for_the_other_ranks(
    tmp_path: Path, ending: str, early: int, here: list[int]
):
    path = tmp_path / "t.json"
    seconds = run_ranks(_ends_early, 2, str(path), ending, early)
    assert [part["rank"] for part in json.loads(path.read_text())["minddp"]["ranks"]] == here
    assert len(json.loads((tmp_path / "t.json2").read_text())["minddp"]["ranks"]) == 2
    assert ending == "exit" or seconds[early] < 10  # a busy machine


def test_the_group_may_be_gone_when_the_trace_closes(tmp_path: Path):
    path = tmp_path / "t.json"
    run_ranks(_group_gone, 2, str(path), str(tmp_path / "store"), backend=None)
    assert len(json.loads(path.read_text())["minddp"]["ranks"]) == 2
