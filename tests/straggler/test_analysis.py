"""minddp/straggler without ranks: parts of a step, who is late, the report's words."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from minddp.straggler import Report, Straggler, diagnosis, result
from minddp.straggler.diagnosis import find_straggler
from minddp.straggler.parts import PHASES, Part, RankTimes, part_of
from minddp.straggler.parts import times_of as times_of_part

MS = 1_000_000


def bucket(index: int, launch: int, done: int, hook: int = 0, **other: Any) -> dict[str, Any]:
    """In ms; ``hook``: how long launching takes. Unpacking takes 1 ms and follows the end."""
    return {
        "index": index, "nbytes": 1_000_000, "parameters": [index],
        "ready_ns": launch * MS, "pack_begin_ns": launch * MS, "launch_ns": launch * MS,
        "launch_end_ns": (launch + hook) * MS, "done_ns": done * MS,
        "unpack_begin_ns": done * MS, "unpack_end_ns": (done + 1) * MS, **other,
    }  # fmt: skip


def step(iteration: int = 2, shift: int = 0, late: dict[str, int] | None = None) -> dict[str, Any]:
    """Between steps 0-6 (of it 2 in the optimizer), meets others 6-7, forward 7-17, backward 17-37; bucket 0 from 25
    to 30, bucket 1 from 36 (1 in the hook) to 45, all over at 46. ``late``: phases that take so many ms longer."""
    more = {"input": 0, "forward": 0, "backward": 0, "hook": 0} | (late or {})
    arrival = 6 + more["input"]
    forward = arrival + 1
    begin = forward + 10 + more["forward"]
    launch = begin + 19 + more["backward"]
    end = launch + 1 + more["hook"]
    total = sum(more.values())
    stamps = {
        "iteration": iteration, "previous_end_ns": 0, "first_arrival_ns": arrival * MS, "arrival_ns": arrival * MS,
        "optimizer_ns": 2 * MS, "forward_begin_ns": forward * MS, "forward_end_ns": (begin - 1) * MS,
        "backward_begin_ns": begin * MS, "backward_end_ns": end * MS, "finalize_end_ns": (46 + total) * MS,
        "ready_ns": [(begin + 8) * MS, launch * MS],
        "buckets": [bucket(0, begin + 8, begin + 13), bucket(1, launch, 45 + total, 1 + more["hook"])],
    }  # fmt: skip
    return shifted(stamps, (shift + 46 * iteration) * MS)


def shifted(part: dict[str, Any], by: int) -> dict[str, Any]:
    def moved(name: str, value: Any) -> Any:
        if name == "buckets":
            return [shifted(each, by) for each in value]
        if not name.endswith("_ns") or name == "optimizer_ns":
            return value
        return [v + by for v in value] if isinstance(value, list) else value + by

    return {name: moved(name, value) for name, value in part.items()}


def ranks(late: dict[int, dict[str, int]], count: int = 20, world: int = 3) -> dict[int, list[dict[str, Any]]]:
    """By rank, its steps; all ranks leave a step together, as late as the latest."""
    total = max([0, *(sum(more.values()) for more in late.values())])
    parts = {}
    for rank in range(world):
        mine = late.get(rank, {})
        parts[rank] = [step(2 + i, total * i, mine) for i in range(count)]
        for each in parts[rank]:
            lacking = (total - sum(mine.values())) * MS
            each["finalize_end_ns"] += lacking
            for name in ("done_ns", "unpack_begin_ns", "unpack_end_ns"):
                each["buckets"][1][name] += lacking
    return parts


def own_phases(stamps: dict[str, Any]) -> dict[str, float]:
    return times_of(0, stamps).phases


def times_of(rank: int, stamps: dict[str, Any]) -> RankTimes:
    return times_of_part(rank, part_of(stamps))


def make_report(by_rank: dict[int, list[dict[str, Any]]], *arguments: Any, **more: Any) -> Report:
    """Of stamps; what travels between ranks is JSON."""
    whole = {rank: [part_of(s) for s in steps if s["previous_end_ns"] >= 0] for rank, steps in by_rank.items()}
    parts = {rank: [Part(*row) for row in json.loads(json.dumps(rows))] for rank, rows in whole.items()}
    return result.make_report(parts, *arguments, **more)


# --- parts


def test_own_phases():
    own = own_phases(step())
    expected = {"input": 4, "optimizer": 2, "micro-batches": 0, "forward": 10, "backward": 19, "hook": 1, "unpack": 1}
    assert {phase: round(own[phase] * 1e3, 6) for phase in PHASES} == expected


def test_earlier_forwards_are_a_phase_of_their_own():
    stamps = step()
    stamps["first_arrival_ns"] -= 3 * MS
    own = own_phases(stamps)
    assert (own["input"], own["micro-batches"]) == pytest.approx((0.001, 0.003))


def test_a_forward_that_is_not_the_wrappers_counts_as_input():
    stamps = step() | {"forward_begin_ns": -1, "arrival_ns": -1, "first_arrival_ns": -1}
    own = own_phases(stamps)
    assert (own["input"], own["forward"]) == pytest.approx((0.015, 0.0))


def test_a_hook_that_waits_itself_is_no_work_of_the_rank():
    stamps = step()
    for each, hook in zip(stamps["buckets"], (5, 1)):
        each["launch_end_ns"] = each["done_ns"] = each["launch_ns"] + hook * MS
    own = own_phases(stamps)
    assert (own["hook"], own["backward"]) == pytest.approx((0.0, 0.014))
    times = times_of(0, stamps)
    assert (times.under_way_seconds, times.blocked_seconds) == pytest.approx((0.006, 0.006))


def test_what_blocks():
    times = times_of(0, step())
    # Bucket 0 is under way from 25 to 30, bucket 1 from 37 to 45, when backward has ended.
    assert (times.under_way_seconds, times.blocked_seconds) == pytest.approx((0.013, 0.008))
    assert (times.meeting_seconds, times.waiting_seconds, times.exposed_seconds) == (pytest.approx(0.001), None, None)


def test_who_is_blocked_longer_than_the_late_rank_waits_for_it():
    """Rank 1 is 4 ms late. It is blocked by transfers alone: of 13 ms, 8 after backward."""
    report = make_report(ranks({1: {"forward": 4}}), 20)
    assert [row.waiting_seconds for row in report.ranks] == pytest.approx([0.004, 0.0, 0.004])
    assert [row.exposed_seconds for row in report.ranks] == pytest.approx([0.008] * 3)
    assert report.overlap == pytest.approx(5 / 13)


def test_clocks_may_differ():
    parts = ranks({1: {"forward": 4}})
    expected = make_report(parts, 20).to_dict()
    parts[1] = [shifted(each, 7_000 * MS) for each in parts[1]]
    assert make_report(parts, 20).to_dict() == expected


# --- who is late


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "hook"])
def test_the_late_rank_is_named_with_its_phase(rank, phase):
    report = make_report(ranks({rank: {phase: 5}}), 20)
    assert report.straggler == Straggler(rank, phase, pytest.approx(0.005), pytest.approx(5 / 51), 20, 20)
    assert f"rank {rank} holds the others up by 5.0 ms a step (10%), in {phase}" in str(report)
    others = [row for row in report.ranks if row.rank != rank]
    assert all(row.waiting_seconds == pytest.approx(0.005) for row in others)


@pytest.mark.parametrize("late", [{}, {1: {"forward": 1}}, {0: {"input": 1}, 1: {"hook": 1}}])
def test_nobody_is_named_for_little(late):
    report = make_report(ranks(late), 20)
    assert report.straggler is None
    assert "no rank holds the others up" in str(report)


def by_phase(own: list[float], phase: str) -> list[dict[str, float]]:
    """A rank's work in each step; what exceeds 0.1 is in ``phase``."""
    return [
        dict.fromkeys(PHASES, 0.0) | {"input": 0.1} | {phase: seconds - 0.1 * (phase != "input")} for seconds in own
    ]


@pytest.mark.parametrize(
    "excess",
    [
        [0.05] + [0.0] * 19,  # once
        [0.05, -0.05] * 10,  # in turn
        [0.005] * 12 + [-0.002] * 8,  # in too few
        [0.03, 0.0, 0.02, -0.03, 0.03, 0.02, -0.03, 0.02],  # varies by more
    ],
)
def test_no_alarm_for_what_is_not_steady(excess):
    own = [by_phase([0.1 + more for more in excess], "forward"), *[by_phase([0.1] * len(excess), "input")] * 2]
    assert find_straggler(own, 0.1) is None


def test_noise_does_not_hide_who_is_late():
    noise = [0.001 * (i * 7 % 5 - 2) for i in range(20)]
    own = [[0.1 + n for n in noise], [0.106 - n for n in noise], [0.1 + n / 2 for n in noise]]
    found = find_straggler([by_phase(row, "backward") for row in own], 0.1)
    assert found is not None
    assert (found.rank, found.phase) == (1, "backward")


def test_what_no_phase_has_names_nobody():
    usual = [by_phase([0.1] * 20, "input")] * 2
    assert find_straggler([by_phase([0.106] * 20, "hook"), *usual], 0.1) is not None
    spread = [dict.fromkeys(PHASES, 0.106 / 7)] * 20
    others = [dict.fromkeys(PHASES, 0.1 / 7)] * 20
    assert find_straggler([spread, others, others], 0.1) is None


def test_of_two_late_ranks_the_later_one_is_named():
    report = make_report(ranks({0: {"forward": 4}, 3: {"hook": 6}}, world=5), 20)
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.phase) == (3, "hook")


def test_few_steps_name_nobody():
    report = make_report(ranks({1: {"forward": 9}}, count=7), 20)
    assert report.straggler is None
    assert "7 steps are too few" in str(report)


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_who_exceeds_the_median_of_the_others_is_found_by_sorting_once(ranks):
    """The naive version beside it."""
    values = [float(i * 7 % 5) for i in range(ranks)]
    naive = [value - statistics.median(values[:i] + values[i + 1 :]) for i, value in enumerate(values)]
    assert diagnosis._excesses(values) == naive


# --- the report


def test_a_report_reads_and_is_json():
    report = make_report(ranks({1: {"forward": 5}}), 10, ["A note."])
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["steps"], told["first_iteration"], told["last_iteration"]) == (10, 12, 21)
    assert told["straggler"]["rank"] == 1
    assert told["ranks"][1]["phases"]["forward"] == pytest.approx(0.015)
    assert Report.from_dict(told) == report
    text = str(report)
    assert text.startswith("10 steps (iterations 12 to 21) on 3 ranks, 51.00 ms a step.")
    for words in ("A note.", "Late: rank 1 holds", "Overlap: "):
        assert words in text
    assert len(text.splitlines()) < 20


def test_on_a_device_nothing_is_invented():
    parts = ranks({1: {"forward": 5}})
    for each in (b for steps in parts.values() for s in steps for b in s["buckets"]):
        each["on_device"] = True
    report = make_report(parts, 20)
    assert (report.straggler, report.overlap) == (None, None)
    assert {row.blocked_seconds for row in report.ranks} == {None}
    assert "times are the host's" in str(report)


def test_a_rank_that_is_missing_does_not_shift_the_others():
    parts = ranks({3: {"forward": 5}}, world=4)
    del parts[0]
    report = make_report(parts, 20)
    assert report.straggler is not None
    assert (report.straggler.rank, [row.rank for row in report.ranks]) == (3, [1, 2, 3])


@pytest.mark.parametrize("change", ["nothing in common", "none before", "nobody"])
def test_without_steps_it_says_so(change):
    parts = ranks({}, count=3)
    if change == "nothing in common":
        parts[1] = []
    elif change == "nobody":
        parts = {}
    else:
        for each in parts[1]:
            each["previous_end_ns"] = -1
    report = make_report(parts, 20, notes=["A note."])
    assert (report.steps, report.ranks) == (0, ())
    assert str(report).splitlines()[0] == "A note."
    assert "No steps yet" in str(report)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_report_of_many_ranks_has_the_same_size_as_one_of_64():
    """Every rank reads it: those are shown whose own work is longest."""
    of_64, of_500 = (make_report(ranks({7: {"hook": 9}}, 8, world), 20, ["A note."]) for world in (64, 500))
    assert (of_500.rank_count, len(of_500.ranks), of_500.straggler.rank) == (500, 64, 7)
    assert 7 in [row.rank for row in of_500.ranks]
    assert "on 500 ranks" in str(of_500) and "the 64 ranks whose own work takes longest" in str(of_500)
    assert len(json.dumps(of_500.to_dict())) < 1.1 * len(json.dumps(of_64.to_dict()))
