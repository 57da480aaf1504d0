"""minddp/straggler without ranks: parts of a step, who is late, which link is slow, what is predicted, the words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from minddp.planner import LinearCost
from minddp.planner.backward_profile import WIRE_BYTES, BackwardProfile, Burst
from minddp.straggler import Advice, Prediction, Straggler
from minddp.straggler.advice import Gradients, _on_wire, advise
from minddp.straggler.casts import Casts
from minddp.straggler.diagnosis import find_slow_link, find_straggler
from minddp.straggler.intervals import common, length, union, without
from minddp.straggler.parts import PHASES, last_launches, own_phases, parts_of
from minddp.straggler.probe import rounds
from minddp.straggler.result import Probed, RankSteps, make_report
from minddp.straggler.text import describe
from minddp.straggler.watch import StragglerWatch, find_in_window

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


def ranks(late: dict[int, dict[str, int]], count: int = 20, world: int = 3) -> list[RankSteps]:
    """Ranks on one clock; all leave the step together, as late as the latest."""
    total = max([0, *(sum(more.values()) for more in late.values())])
    parts = []
    for rank in range(world):
        mine = late.get(rank, {})
        steps = [step(2 + i, total * i, mine) for i in range(count)]
        for each in steps:
            lacking = (total - sum(mine.values())) * MS
            each["finalize_end_ns"] += lacking
            for name in ("done_ns", "unpack_begin_ns", "unpack_end_ns"):
                each["buckets"][1][name] += lacking
        parts.append(RankSteps(rank, 0, steps))
    return parts


# --- intervals


def test_sets_of_moments():
    first, second = union([(5, 9), (0, 2), (1, 3), (4, 4)]), [(2, 6), (8, 12)]
    assert first == [(0, 3), (5, 9)]
    assert common(first, second) == [(2, 3), (5, 6), (8, 9)]
    assert without(first, second) == [(0, 2), (6, 8)]
    assert length(first) == 7
    assert union([(0, 2), (2, 4)]) == [(0, 4)]


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
    parts = parts_of(stamps, last_launches({0: (stamps, 0)}))
    assert (parts.hidden_seconds, parts.exposed_seconds) == pytest.approx((0.0, 0.006))


def test_transfers_and_waits():
    early, behind = step(), step(late={"forward": 4})
    early["buckets"][1].update(done_ns=behind["buckets"][1]["done_ns"])
    last = last_launches({0: (early, 0), 1: (behind, 0)})
    parts = parts_of(early, last)
    # Bucket 0 is awaited until 29, and travels until 30. Bucket 1 is awaited from 37 to 41, and travels until 49.
    assert parts.hidden_seconds == pytest.approx(0.001)
    assert parts.waiting_seconds == pytest.approx(0.004)
    assert parts.waiting_for == {1: pytest.approx(0.004)}
    assert parts.exposed_seconds == pytest.approx(0.008)
    assert parts.blocked_seconds == pytest.approx(0.012)
    assert parts.meeting_seconds == pytest.approx(0.001)
    assert parts.exposed_by_bucket == {1: pytest.approx(0.012)}


def test_clocks_that_differ_are_brought_together():
    early, behind = step(), step(late={"forward": 4})
    skewed = shifted(behind, 7_000 * MS)
    aligned = last_launches({0: (early, 0), 1: (skewed, 7_000 * MS)})
    assert aligned == last_launches({0: (early, 0), 1: (behind, 0)})


def test_without_clocks_transfers_are_not_told_from_waits():
    parts = parts_of(step(), None)
    assert parts.blocked_seconds == pytest.approx(0.008)
    assert (parts.hidden_seconds, parts.exposed_seconds, parts.waiting_seconds) == (None, None, None)


# --- who is late


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("phase", ["input", "forward", "backward", "hook"])
def test_the_late_rank_is_named_with_its_phase(rank, phase):
    report = make_report(ranks({rank: {phase: 5}}), 20)
    assert report.straggler == Straggler(rank, phase, pytest.approx(0.005), pytest.approx(5 / 51), 20, 20)
    assert f"rank {rank} holds the others up by 5.0 ms a step (10%), in {phase}" in str(report)
    others = [row for row in report.ranks if row.rank != rank]
    assert all(row.waits_for == rank for row in others)
    assert all(row.waiting_seconds == pytest.approx(0.005) for row in others)


@pytest.mark.parametrize("late", [{}, {1: {"forward": 1}}, {0: {"input": 1}, 1: {"hook": 1}}])
def test_nobody_is_named_for_little(late):
    report = make_report(ranks(late), 20)
    assert report.straggler is None
    assert "no rank holds the others up" in str(report)


# Rank 0's excess is all in forward; that of rank 1 in backward.
IN_PHASES = [dict.fromkeys(PHASES, 0.0) for _ in range(3)]
IN_PHASES[0]["forward"] = IN_PHASES[1]["backward"] = 1.0


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
    own = [[0.1 + more for more in excess], [0.1] * len(excess), [0.1] * len(excess)]
    assert find_straggler(own, 0.1, IN_PHASES) is None


def test_noise_does_not_hide_who_is_late():
    noise = [0.001 * (i * 7 % 5 - 2) for i in range(20)]
    own = [[0.1 + n for n in noise], [0.106 - n for n in noise], [0.1 + n / 2 for n in noise]]
    found = find_straggler(own, 0.1, IN_PHASES)
    assert found is not None
    assert found.rank == 1


def test_what_no_phase_has_names_nobody():
    own = [[0.106] * 20, [0.1] * 20, [0.1] * 20]
    spread = [dict.fromkeys(PHASES, 0.002), dict.fromkeys(PHASES, 0.001), dict.fromkeys(PHASES, 0.001)]
    assert find_straggler(own, 0.1, spread) is None
    assert find_straggler(own, 0.1, IN_PHASES) is not None


def test_of_two_late_ranks_the_later_one_is_named():
    report = make_report(ranks({0: {"forward": 4}, 3: {"hook": 6}}, world=5), 20)
    assert report.straggler is not None
    assert (report.straggler.rank, report.straggler.phase) == (3, "hook")


def test_few_steps_name_nobody():
    report = make_report(ranks({1: {"forward": 9}}, count=7), 20)
    assert report.straggler is None
    assert "7 steps are too few" in str(report)


# --- links


def ring(slow: dict[tuple[int, int], float], size: int = 4) -> dict[tuple[int, int], float]:
    links = [edge for links in rounds(size) for a, b in links for edge in ((a, b), (b, a))]
    return {edge: 0.004 * slow.get(edge, 1.0) for edge in links}


def test_a_rank_has_one_partner_at_a_time():
    for size in range(3, 9):
        links = rounds(size)
        assert sorted(tuple(sorted(link)) for each in links for link in each) == sorted(
            tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)
        )
        for each in links:
            assert len({rank for link in each for rank in link}) == 2 * len(each)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_slow_links(size):
    find = lambda slow: find_slow_link(ring(slow, size), 1 << 19, 10 << 20, 0.1)  # noqa: E731
    assert find({}) is None
    assert find(dict.fromkeys([(0, 1), (0, size - 1)], 1.4)) is None
    sends = {(1, 0): 2.0, (1, 2): 2.0}
    receives = {(0, 1): 2.0, (2, 1): 2.0}
    for slow, direction in ((sends, "sends"), (receives, "receives"), (sends | receives, "both ways")):
        found = find(slow)
        assert (found.ranks, found.direction) == ((1,), direction)
        assert (found.seconds, found.usual_seconds) == pytest.approx((0.008, 0.004))
    found = find({(1, 2): 2.0})
    assert (found.ranks, found.direction) == ((1, 2), "link")
    assert "the link from rank 1 to rank 2 is slow: 8.00 ms" in str(found)


def test_a_slow_link_that_costs_little_is_not_named():
    slow = ring({(1, 0): 2.0, (1, 2): 2.0})
    assert find_slow_link(slow, 1 << 19, 1 << 18, 0.1) is None  # 2 ms of 100
    assert find_slow_link(slow, 1 << 19, 1 << 20, 0.1) is not None  # 8 ms


# --- predictions

GRADIENTS = Gradients([1_000_000, 1_000_000], ["float32", "float32"], True)
ALONE = [Burst(1, 1000, 0.0001), Burst(1, 500_000, 0.0026)]


def test_predictions_for_what_was_measured():
    advice = advise([part.steps for part in ranks({}, count=6)], GRADIENTS, ALONE)
    assert advice is not None
    assert advice.measured_seconds == pytest.approx(0.039)
    assert advice.present.buckets == 2
    # Bucket 1 is launched 19 after backward's begin. Collectives were seen to take 5 and 9.
    assert 0.010 + 0.019 + 0.005 + 0.001 <= advice.present.seconds <= 0.010 + 0.019 + 0.009 + 0.001
    assert [other.name.partition("=")[0] for other in advice.others] == ["bucket_cap_mb"] * 2 + ["wire"] * 2
    assert len(advice.caps) > 1 and advice.others[0] == min(advice.caps, key=lambda cap: cap.seconds)
    int8 = advice.others[-1]
    assert int8.seconds < advice.present.seconds
    assert not int8.exact


def test_ranks_that_are_late_in_turn_are_not_added_up():
    """Rank 0 in forward, rank 1 in backward: the step is 5 ms longer, not 10."""
    late = {0: {"forward": 5}, 1: {"backward": 5}}
    advice = advise([part.steps for part in ranks(late, count=6)], GRADIENTS, ALONE)
    assert advice is not None and advice.measured_seconds == pytest.approx(0.044)
    # As above, with a backward of 24 in place of 19: collectives were seen to take 5 and 9.
    assert 0.010 + 0.024 + 0.005 + 0.001 <= advice.present.seconds + 1e-9 <= 0.010 + 0.024 + 0.009 + 0.0011


def test_casts_take_time_where_gradients_were_not_copied():
    """Both buckets have one gradient. Bucket 1 is launched later by two casts, and what is unpacked ends the step."""
    steps = [part.steps for part in ranks({}, count=6)]
    casts = {"copy": Casts(1e-9, 1e-9), "bf16": Casts(2e-9, 3e-9), "int8": Casts(4e-9, 1e-9)}
    without = {other.name: other.seconds for other in advise(steps, GRADIENTS, ALONE).others}
    found = {other.name: other.seconds for other in advise(steps, GRADIENTS, ALONE, casts).others}
    more = {name: seconds - without[name] for name, seconds in found.items() if name.startswith("wire")}
    assert more == {'wire="bf16"': pytest.approx(0.010), 'wire="int8"': pytest.approx(0.010)}
    together = _on_wire(BackwardProfile([1, 2], [1_000_000] * 2, 3), "bf16", [[0, 1]], casts)
    assert together.ready_seconds == [pytest.approx(1.001), pytest.approx(2.002)]
    assert (together.backward_seconds, together.tail_seconds) == (pytest.approx(3.002), pytest.approx(0.004))


def test_what_collectives_take_from_backward_is_given_back_and_taken():
    """Bucket 0 is beside backward. Without it backward ends sooner; beside a collective of a quarter, by less."""
    steps = [part.steps for part in ranks({}, count=6)]
    takes = {None: LinearCost(0.0, 2e-9), "int8": LinearCost(0.0, 2e-9)}
    without, found = (advise(steps, GRADIENTS, ALONE, taken=taken) for taken in ({}, takes))
    # Bucket 1 begins 1 ms before the end, of its 9.
    assert (without.taken_seconds, found.taken_seconds) == (0, pytest.approx(0.002 + 0.002 / 9))
    assert found.present.seconds == pytest.approx(without.present.seconds)
    assert found.others[-1].seconds == pytest.approx(without.others[-1].seconds - 0.002 * (1 - WIRE_BYTES["int8"]))
    assert "Collectives take 2.22 ms of it" in describe(replace(make_report(ranks({}), 6), advice=found))


def test_without_sizes_that_differ_there_is_no_advice():
    steps = [part.steps for part in ranks({}, count=6)]
    assert advise(steps, GRADIENTS) is None
    assert advise(steps, Gradients([1], ["float32"], True), ALONE) is None


def test_gradients_that_cannot_shrink_are_not_shrunk():
    steps = [part.steps for part in ranks({}, count=6)]
    advice = advise(steps, Gradients(GRADIENTS.nbytes, GRADIENTS.kinds, False), ALONE)
    assert advice is not None
    assert all(other.exact for other in advice.others)


def test_the_best_of_what_is_predicted():
    present = Prediction("present", 2, 0.040)
    cap, auto = Prediction("cap", 4, 0.039), Prediction("auto", 3, 0.036)
    int8 = Prediction('wire="int8"', 2, 0.030, exact=False)
    advice = Advice(0.042, present, (cap, auto, int8))
    assert (advice.best(), advice.best(exact=True)) == (int8, auto)
    assert advice.error == pytest.approx(-2 / 42)
    assert Advice(0.042, present, (cap,)).best() is None


# --- the report


def test_a_report_reads_and_is_json():
    links = Probed(1 << 19, dict.fromkeys(ring({}, 3), 0.004), ALONE)
    report = make_report(ranks({1: {"forward": 5}}), 10, GRADIENTS, links, ["A note."])
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["steps"], told["first_iteration"], told["last_iteration"]) == (10, 12, 21)
    assert told["straggler"]["rank"] == 1
    assert told["ranks"][1]["phases"]["forward"] == pytest.approx(0.015)
    text = str(report)
    assert text.startswith("10 steps (iterations 12 to 21) on 3 ranks, 51.00 ms a step.")
    for words in ("A note.", "Overlap: ", "Exposed buckets: 1 (", "predicted ", ", measured ", "Best: "):
        assert words in text
    assert len(text.splitlines()) < 20


def test_a_report_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    make_report(ranks({1: {"forward": 5}}), 10).draw(tmp_path / "report.svg")
    assert "<svg" in (tmp_path / "report.svg").read_text()


def test_on_a_device_nothing_is_invented():
    parts = ranks({1: {"forward": 5}})
    for each in (b for part in parts for s in part.steps for b in s["buckets"]):
        each["on_device"] = True
    report = make_report(parts, 20, GRADIENTS)
    assert (report.straggler, report.overlap, report.advice, report.exposed_buckets) == (None, None, None, ())
    assert {row.blocked_seconds for row in report.ranks} == {None}
    assert "times are the host's" in str(report)


def test_clocks_that_are_not_known_leave_dashes():
    parts = ranks({1: {"forward": 5}})
    parts[2] = RankSteps(2, None, parts[2].steps)
    report = make_report(parts, 20)
    assert report.straggler is not None
    assert report.straggler.rank == 1
    assert report.overlap is None
    assert "clocks could not be aligned" in str(report)


@pytest.mark.parametrize("change", ["nothing in common", "none before"])
def test_without_steps_it_says_so(change):
    parts = ranks({}, count=3)
    if change == "nothing in common":
        parts[1] = RankSteps(1, 0, [])
    else:
        for each in parts[1].steps:
            each["previous_end_ns"] = -1
    with pytest.raises(ValueError, match="no finished synchronized step in common"):
        make_report(parts, 20)


# --- the watch


def test_windows_are_counted_in_steps():
    watch = StragglerWatch(lambda found: None)
    assert [i for i in range(45) if watch.is_due(i) and (setattr(watch, "_seen", i) or True)] == [20, 40]
    assert not watch.is_due(3)  # a reducer made anew
    assert watch.is_due(23)


def test_windows_that_begin_elsewhere_are_brought_together():
    phases = [0, 0, 0, 10_000, 0, 0, 0]
    first = {"first": 2, "own": [99_000, *[10_000] * 19], "step": 20_000, "phases": phases}
    late = {"first": 3, "own": [12_000] * 19, "step": 20_000, "phases": [0, 0, 0, 10_000, 2_000, 0, 0]}
    found = find_in_window([first, late])
    assert found == Straggler(1, "backward", pytest.approx(0.002), pytest.approx(0.1), 19, 19)
    assert find_in_window([first, {**late, "own": []}]) is None
