"""minddp/timeline without ranks: seconds from stamps, events, the file, the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minddp import documents, timeline
from minddp.straggler import command as straggler_command
from minddp.timeline import RankStep, Trace, draw, rank_steps, recording, step_times, table
from minddp.timeline.recording import after_step, path_of
from tests.faults.logged import logged
from tests.straggler.test_analysis import shifted

MS = 1_000_000


def bucket(index: int, launch: int, done: int, unpack: tuple[int, int] | None, **other: Any) -> dict[str, Any]:
    """Stamps of one bucket in ms; packing takes 1 ms and begins when the bucket is ready."""
    begin, end = unpack or (-1 / MS, -1 / MS)
    stamps = {
        "ready_ns": launch - 1, "pack_begin_ns": launch - 1, "launch_ns": launch,
        "launch_end_ns": launch, "done_ns": done, "unpack_begin_ns": begin, "unpack_end_ns": end,
    } | other  # fmt: skip
    return {
        "index": index, "nbytes": 1000 * (index + 1), "parameters": [index],
        **{name: round(value * MS) for name, value in stamps.items()},
    }  # fmt: skip


def step(iteration: int = 1, start: int = 0) -> dict[str, Any]:
    """Forward 0-10, backward 10-30; bucket 0 hidden, 1 ends at 36, 2 at 44; unpacking takes 2 ms each."""
    buckets = [bucket(0, 15, 25, (30, 32)), bucket(1, 22, 36, (36, 38)), bucket(2, 29, 44, (44, 46))]
    stamps = {
        "iteration": iteration, "forward_begin_ns": 0, "forward_end_ns": 10 * MS,
        "backward_begin_ns": 10 * MS, "backward_end_ns": 30 * MS, "finalize_end_ns": 46 * MS,
        "ready_ns": [14 * MS, 21 * MS, 28 * MS],
        **dict.fromkeys(("previous_end_ns", "first_arrival_ns", "arrival_ns", "optimizer_ns"), 0),
    }  # fmt: skip
    return shifted({**stamps, "buckets": buckets}, start)


class FakeModule(torch.nn.Module):
    """Stands where the wrapped module stands: names, a reducer with stamps, the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter_names = ["a.weight", "b.weight", "c.weight"]
        self.module = torch.nn.Identity()
        self.stamps = step(0)
        self.reducer = SimpleNamespace(last_step=lambda: self.stamps)


def test_seconds_of_a_step():
    times = step_times(step())
    assert times.forward_seconds == pytest.approx(0.010)
    assert times.backward_seconds == pytest.approx(0.020)
    assert times.step_seconds == pytest.approx(0.046)
    assert times.communication_seconds == pytest.approx(0.044 - 0.015)
    # Bucket 0 ended before backward did. Bucket 1: 32 to 36. Bucket 2: 38 to 44.
    assert [b.exposed_seconds for b in times.buckets] == pytest.approx([0.0, 0.004, 0.006])
    assert times.exposed_seconds == pytest.approx(0.010)
    second = times.buckets[1]
    assert (second.launched, second.done, second.unpacked) == pytest.approx((0.012, 0.026, 0.028))
    assert (second.pack_seconds, second.communication_seconds) == pytest.approx((0.001, 0.014))
    assert (second.nbytes, second.parameters, second.unpack_seconds) == (2000, (1,), pytest.approx(0.002))


def test_a_step_on_a_device_has_no_communication_times():
    """The host's stamps say when it enqueued; a table of them has dashes."""
    stamps = step()
    for bucket in stamps["buckets"]:
        bucket["on_device"] = True
    times = step_times(stamps)
    assert times.backward_seconds == pytest.approx(0.020)
    assert (times.communication_seconds, times.exposed_seconds) == (None, None)
    for bucket in times.buckets:
        assert (bucket.done, bucket.communication_seconds, bucket.exposed_seconds) == (None, None, None)
    part = {"rank": 0}
    rows = table([RankStep(part, {"parameter_names": ["a", "b", "c"]}, stamps)]).splitlines()
    assert rows[2].split()[-2:] == ["-", "-"]


def test_views_are_not_unpacked():
    stamps = step()
    stamps["buckets"] = [bucket(0, 15, 25, None), bucket(1, 22, 36, None)]
    times = step_times(stamps)
    assert [b.unpack_seconds for b in times.buckets] == [0.0, 0.0]
    assert [b.exposed_seconds for b in times.buckets] == pytest.approx([0.0, 0.006])


def test_an_end_that_nobody_saw_is_the_end_of_the_wait():
    stamps = step()
    stamps["buckets"] = [bucket(0, 15, 36, (36, 38), done_ns=-1 / MS)]
    assert step_times(stamps).buckets[0].communication_seconds == pytest.approx(0.021)


def test_a_bucket_that_was_not_reduced_is_left_out():
    stamps = step()
    stamps["buckets"][1].update(launch_ns=-1, done_ns=-1, unpack_begin_ns=-1, unpack_end_ns=-1)
    times = step_times(stamps)
    assert [b.index for b in times.buckets] == [0, 2]
    assert times.exposed_seconds == pytest.approx(0.012)


@pytest.mark.parametrize("stamps", [step(0), {**step(2), "backward_begin_ns": 50 * MS}])
def test_without_a_whole_step_it_says_so(stamps):
    times = step_times(stamps)
    assert (times.iteration, times.step_seconds, times.exposed_seconds, times.buckets) == (0, 0.0, None, ())


def test_a_forward_of_the_next_step_is_not_counted():
    times = step_times({**step(), "forward_begin_ns": 60 * MS})
    assert times.forward_seconds == 0
    assert times.step_seconds == pytest.approx(0.036)


def record(path: Path, iterations: int, **arguments: Any) -> dict[str, Any]:
    """A trace over ``iterations`` fake steps, the way the module calls it."""
    ddp = FakeModule()
    with recording.trace(path, **arguments):
        begin = recording.time.monotonic_ns()
        for iteration in range(1, iterations + 1):
            after_step(ddp)
            after_step(ddp)  # a second forward before the backward adds nothing
            ddp.stamps = step(iteration, begin + iteration * 50 * MS)
    return json.loads(path.read_text())


def test_each_step_is_recorded_once_the_last_on_closing(tmp_path):
    document = record(tmp_path / "t.json", 4)
    (part,) = document["minddp"]["ranks"]
    assert [s["iteration"] for s in part["modules"][0]["steps"]] == [1, 2, 3, 4]
    assert part["modules"][0]["parameter_names"] == ["a.weight", "b.weight", "c.weight"]
    assert not recording.active


def test_steps_beyond_the_limit_are_counted(tmp_path):
    (part,) = record(tmp_path / "t.json", 5, steps=2)["minddp"]["ranks"]
    module = part["modules"][0]
    assert ([s["iteration"] for s in module["steps"]], module["dropped"]) == ([1, 2], 3)


def test_what_was_before_the_trace_is_left_out(tmp_path):
    ddp = FakeModule()
    ddp.stamps = step(7, recording.time.monotonic_ns() - 100 * MS)
    with recording.trace(tmp_path / "t.json"):
        after_step(ddp)
    (part,) = json.loads((tmp_path / "t.json").read_text())["minddp"]["ranks"]
    assert part["modules"][0]["steps"] == []


def test_events_say_what_happened_when(tmp_path):
    events = record(tmp_path / "t.json", 1)["traceEvents"]
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    arrivals = {e["name"]: e["ts"] for e in events if e["ph"] == "i"}
    assert (spans["forward"]["ts"], spans["forward"]["dur"]) == (0.0, 10_000.0)
    assert (spans["backward"]["ts"], spans["backward"]["dur"]) == (10_000.0, 20_000.0)
    assert (spans["bucket 1"]["ts"], spans["bucket 1"]["dur"]) == (22_000.0, 14_000.0)
    assert (spans["pack bucket 1"]["ts"], spans["pack bucket 1"]["dur"]) == (21_000.0, 1_000.0)
    assert (spans["wait for bucket 2"]["ts"], spans["wait for bucket 2"]["dur"]) == (38_000.0, 6_000.0)
    assert spans["bucket 1"]["args"] == {"nbytes": 2000, "parameters": ["b.weight"]}
    assert arrivals == {"a.weight": 14_000.0, "b.weight": 21_000.0, "c.weight": 28_000.0}
    assert len({spans[f"bucket {i}"]["tid"] for i in range(3)}) == 2  # 0 has ended when 2 begins, not 1
    assert all({"ph", "name", "pid"} <= event.keys() for event in events)


def test_only_one_trace_at_a_time(tmp_path):
    with recording.trace(tmp_path / "a.json"):
        with pytest.raises(RuntimeError, match=r"already open .*a.json"), recording.trace(tmp_path / "b.json"):
            pass
        assert recording.active
    assert not (tmp_path / "b.json").exists()


def test_bad_arguments_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        recording.trace(tmp_path / "t.json", steps=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        recording.trace(tmp_path / "nowhere" / "t.json")
    with pytest.raises(ValueError, match="minddp.trace: path must name a file, got ''"):
        recording.trace("")
    for wrong in ({"path": 3}, {"path": tmp_path / "t.json", "steps": "3"}):
        with pytest.raises(TypeError, match=r"minddp.trace: (path must be a path|steps must be a number of steps)"):
            recording.trace(**wrong)


def test_paths(tmp_path: Path) -> None:
    assert path_of(tmp_path / "a.json") == str(tmp_path / "a.json") and path_of("a.json") == "a.json"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    refused = [("", ValueError, "file, got ''"), ("a\0b", ValueError, "file"), ("\ud800", ValueError, "file")]
    refused += [(3, TypeError, "as text or os.PathLike, got 3"), (b"a", TypeError, "as text or os.PathLike")]
    refused += [(tmp_path / "no" / "a", FileNotFoundError, "does not exist")]
    refused += [(tmp_path, IsADirectoryError, "is a folder; name a file in it")]
    refused += [(tmp_path / name, OSError, "path is a device, a pipe or a socket") for name in ("pipe", "link")]
    for path, kind, words in refused:
        with pytest.raises(kind, match=f"minddp.trace: .*{re.escape(words)}"):
            path_of(path)


def test_an_exception_in_the_block_still_writes_the_file(tmp_path):
    with pytest.raises(ZeroDivisionError), recording.trace(tmp_path / "t.json"):
        raise ZeroDivisionError
    assert json.loads((tmp_path / "t.json").read_text())["minddp"]["world_size"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_the_environment_opens_a_trace_that_unused_processes_do_not_write(tmp_path):
    code = "import minddp.timeline; print(minddp.timeline.recording.active)"
    path = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**recording.os.environ, "MINDDP_TRACE": str(path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert not path.exists()


@pytest.mark.parametrize("place", ["nowhere/t.json", ""])
def test_a_bad_path_in_the_environment_is_a_warning_and_no_trace(tmp_path, place):
    done = subprocess.run(
        [sys.executable, "-c", "import minddp; print(minddp.timeline.recording.active)"],
        env={**recording.os.environ, "MINDDP_TRACE": str(tmp_path / place)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"
    assert "MINDDP_TRACE: this process takes no trace" in done.stderr
    with pytest.raises(OSError, match=r"does not exist|is a folder"):
        recording.trace(tmp_path / place)


def test_a_folder_that_goes_before_the_environments_trace_is_written_is_a_warning(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    opened = Trace(folder / "t.json", 3)
    opened.__enter__()
    after_step(FakeModule())
    folder.rmdir()
    with logged() as texts:
        opened.close_if_used()
    assert "could not be written" in texts[0]
    assert not recording.active


def test_the_command_prints_exposed_time_per_bucket_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "t.json"
    record(path, 3)
    assert timeline.main([str(path), "--iteration", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("iteration 2")
    assert lines[2].split() == ["0", "46.00", "10.00", "20.00", "29.00", "10.00", "0.00"]
    assert [line.split()[-1] for line in lines[7:10]] == ["0.00", "4.00", "6.00"]
    assert (tmp_path / "t.png").stat().st_size > 5000
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_without_matplotlib_the_command_prints_and_a_picture_that_was_asked_for_is_an_error(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record(tmp_path / "t.json", 3)
    assert timeline.main([str(tmp_path / "t.json")]) == 0
    assert "not drawn: the picture needs matplotlib: install it" in capsys.readouterr().out
    assert timeline.main([str(tmp_path / "t.json"), "--picture", str(tmp_path / "t.png")]) == 1


def two_ranks(later: int = 12, clock: str = "one") -> dict[str, Any]:
    """Rank 1 does all that rank 0 does, so many ms later; ``clock``: which one it reads."""
    module = {"parameter_names": ["a.weight", "b.weight", "c.weight"]}
    ranks = [
        {"rank": 0, "clock": "one", "modules": [{**module, "steps": [step()]}]},
        {"rank": 1, "clock": clock, "modules": [{**module, "steps": [step(start=later * MS)]}]},
    ]
    return {"world_size": 2, "missing_ranks": [], "ranks": ranks}


def test_waiting_for_a_late_rank_is_no_transfer():
    lines = timeline.table(rank_steps(two_ranks())).splitlines()
    # The step stands still for 4 + 6 ms; the last 3 of them, from 41 to 44, rank 1 takes part in bucket 2.
    assert [line.split()[-2:] for line in lines[2:4]] == [["10.00", "5.00"], ["10.00", "0.00"]]
    assert [line.split()[-3:] for line in lines[8:11]] == [
        ["10.00", "0.00", "0.00"], ["12.00", "2.00", "4.00"], ["12.00", "3.00", "6.00"],
    ]  # fmt: skip
    assert [line.split()[-3] for line in lines[11:14]] == ["0.00", "0.00", "0.00"]


@pytest.mark.parametrize(
    ("later", "clock", "ranks", "late"), [(0, "one", 2, "0.00"), (0, "two", 2, "-"), (12, "one", 3, "-")]
)
def test_nobody_is_said_to_be_late_where_it_is_not_so_or_not_known(later, clock, ranks, late):
    lines = timeline.table(rank_steps({**two_ranks(later, clock), "world_size": ranks})).splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == [late, late]
    assert clock == "one" or [line.split()[-3:-1] for line in lines[8:11]] == [["-", "-"]] * 3


def test_the_picture_shows_who_waits_for_a_late_rank(tmp_path):
    pytest.importorskip("matplotlib")
    late, aligned = tmp_path / "late.svg", tmp_path / "aligned.svg"
    draw(rank_steps(two_ranks()), [late])
    draw(rank_steps(two_ranks(0)), [aligned])
    title = "In iteration 1 communication blocks rank 0 for 10.0 of 46.0 ms, 5.0 ms of them for a late rank"
    assert title in late.read_text()
    assert "exposed: late rank" in late.read_text()
    assert "late rank" not in aligned.read_text()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"minddp": 3}', '{"minddp": {"ranks": []}}', "[" * 100_000, "\xff"], ids=str.__len__
)
def test_the_command_refuses_other_files(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    path.write_text(content, encoding="latin-1")
    for main in (timeline.main, straggler_command.main):
        assert main([str(path)]) == 1
        assert "other.json is not a trace written by minddp.trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    "before, after, why",
    [
        ('"iteration": 1,', '"iteration": "1",', "['steps'][0]['iteration'] is '1'"),
        ('"launch_ns": ', '"launched": ', "['buckets'][0] has no 'launch_ns'"),
        ('"finalize_end_ns": ', '"finalize_end_ns": -', "iteration 1 of Identity has not ended"),
        ('"index": 0,', '"index": 1e400,', "['buckets'][0]['index'] is inf"),
        ('"index": 0,', f'"index": {10**30},', f"['index'] is {10**30}"),
        ('"parameters": [0]', '"parameters": [7]', "iteration 1 of Identity is of other parameters than its 3"),
        ('"parameters": [0]', '"parameters": {}', "['parameters'] is {}"),
        ('"minddp": {', '"minddp": {"ranks": null, "x": {', "it['minddp'] has no"),
    ],
)
def test_a_damaged_trace_is_refused_by_place(tmp_path, before, after, why):
    path = tmp_path / "t.json"
    record(path, 3)
    text = path.read_text()
    begin = text.index('"minddp": {')
    assert before in text[begin:]
    text = text[:begin] + text[begin:].replace(before, after, 1)
    path.write_text(text + "}" * ("null" in after))
    with pytest.raises(timeline.TraceFileError, match=re.escape(why)):
        timeline.load(path)


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(documents.secrets, "token_hex", lambda _: "known")
    (tmp_path / "theirs").write_text("as it was")
    (tmp_path / "t.json.known.part").symlink_to("theirs")
    with pytest.raises(FileExistsError):
        documents.write_whole(tmp_path / "t.json", "text")
    (tmp_path / "t.json").symlink_to("theirs")
    documents.write_whole(tmp_path / "t.json", "text")
    assert (tmp_path / "theirs").read_text() == "as it was"
    assert not (tmp_path / "t.json").is_symlink() and (tmp_path / "t.json").read_text() == "text"


def test_the_command_says_which_iterations_there_are(tmp_path, capsys):
    record(tmp_path / "t.json", 3)
    assert timeline.main([str(tmp_path / "t.json"), "--iteration", "9"]) == 1
    assert "iteration 9 is not there: all ranks have iterations 1 to 3" in capsys.readouterr().err
    assert timeline.main([str(tmp_path / "t.json"), "--module", "-1", "--no-picture"]) == 0
    for module in ("1", "-2"):
        assert timeline.main([str(tmp_path / "t.json"), "--module", module]) == 1
        assert f"module {module} is not there: the trace has 1 of them" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert timeline.main([str(tmp_path / "t.json"), "--picture", str(tmp_path / "t.xyz")]) == 1
    assert "xyz" in capsys.readouterr().err
