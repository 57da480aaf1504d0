"""What public functions are given, and the files that they write: each error names function and argument."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp import events
from minddp.documents import write_or_log, write_whole
from minddp.functions import group_of, module_of, refuse_left


class _OfOnesOwn(dist.ProcessGroup):
    """A process group that is written in Python, which torch's tables do not hold."""


def _raises(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_groups(tmp_path: Path) -> None:
    _raises(lambda: group_of(None, "f", "group"), ValueError, "f needs a process group: call torch.distributed.init")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        assert group_of(None, "f") is dist.group.WORLD and group_of(other, "f") is other
        own = _OfOnesOwn(0, 1)
        assert group_of(own, "f") is own
        dist.destroy_process_group(other)
        words = (
            "process_group (on rank 0 of the default group) was destroyed: pass one that torch.distributed.new_group("
        )
        _raises(lambda: group_of(other, "f"), RuntimeError, f"f: {words}")
        net = torch.nn.Linear(2, 2)
        wrap = minddp.DistributedDataParallel
        _raises(lambda: wrap(net, process_group=other), RuntimeError, f"DistributedDataParallel: {words}")
        outside = dist.GroupMember.NON_GROUP_MEMBER
        _raises(lambda: group_of(outside, "f"), RuntimeError, "f: process_group: this rank is not a member")
        for wrong in (3, "gloo", torch.ones(2), net):
            _raises(lambda given=wrong: group_of(given, "f", "g"), TypeError, "f: g must be a torch.distributed.Proc")
    finally:
        dist.destroy_process_group()


def test_modules() -> None:
    net = torch.nn.Linear(2, 2)
    assert module_of(net, "f") is net
    _raises(lambda: module_of(None, "f"), TypeError, "f: module must be a torch.nn.Module, got NoneType")
    _raises(lambda: minddp.DistributedDataParallel(int), TypeError, "module must be a torch.nn.Module, got type")


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for pipe in (tmp_path / "pipe", tmp_path / "link"):
        _raises(lambda at=pipe: write_whole(at, "text"), OSError, "is a device, a pipe or a socket")
        assert pipe.is_fifo()


def test_arguments_that_left() -> None:
    ways = {"links": "Measure links by iperf3."}
    words = "f no longer has the argument 'links'. Measure links by iperf3."
    _raises(lambda: refuse_left("f", ["links"], ways), TypeError, words)
    _raises(lambda: refuse_left("f", ["link"], ways), TypeError, "f() got an unexpected keyword argument 'link'")

    class Companion(events.Observer):
        name = "a companion"
        left = ways

    events.register(Companion)
    try:
        _raises(lambda: events.parse({"links": True}), TypeError, f"DistributedDataParallel{words[1:]}")
    finally:
        events.unregister("a companion")


@pytest.mark.parametrize("where", ["gone/t.json", "/dev/full/t.json", "is_a_folder"])
def test_a_file_that_cannot_be_written_is_logged_with_path_and_reason(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "is_a_folder").mkdir()
    path = tmp_path / where
    assert not write_or_log(path, "text", "the trace")
    (record,) = caplog.records
    assert f"the trace {path} could not be written: " in record.getMessage()
    assert write_or_log(tmp_path / "t.json", "text", "the trace")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["is_a_folder", "t.json"]
