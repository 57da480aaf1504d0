"""From evidence to what is certain, what is suspected, and what is said: the table, cell by cell."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import minddp
from minddp.guards import times
from minddp.guards.evidence import (
    CERTAIN,
    Awaited,
    Fact,
    Kind,
    Place,
    Wait,
    culprits,
    describe,
    has_gone_on,
    judge,
    lost,
    slow,
)
from minddp.guards.processes import Process, Sight, here, look
from tests.on_ranks import on_ranks

WAIT = Wait(Awaited("w", 7, what="bucket 1 of iteration 7"), 4, (5, 6))
OUTSIDE = Wait(Awaited("group", what="the buffers"), 4, (5, 6))
ASKS = Wait(Awaited("w", what="the others' word"), 4, (5, 6))
PROCESS = Process("node7", "m", 77, 1)
GONE, KILLED, EXITED = Sight("gone"), Sight("gone", "SIGKILL"), Sight("gone", "exit code 3")


def _place(phase, iteration, collectives):
    """Of the phases of an ``iteration``: in it, and after it."""
    begun, done = iteration - (phase in ("forward", "loss")), iteration - (phase != "between")
    return Place(begun, done, collectives, f"{phase} of iteration {iteration}")


def report(phase="between", iteration=6, wait=None, collective=False, wrapper="w"):
    said = {"line": "at train.py:3 in f", "words": ""}
    return {"places": {wrapper: _place(phase, iteration, 3)}, "wait": wait, "collective": collective, **said}


def told(
    words="KeyError: x", left=False, because=(), phase="backward", iteration=7, wrapper="w", ends=False, collectives=3
):
    said = {"words": words, "because": list(because), "ends": ends, "left": left, "over": False}
    return {**said, "places": {wrapper: _place(phase, iteration, collectives)}}


def bucket_0(wrapper, iteration):
    return Awaited(wrapper, iteration, what=f"bucket 0 of iteration {iteration}")


def buffers(wrapper, number):
    return Awaited(wrapper, collective=number, what="the buffers")


RUNNING = Sight("running")


def fact(rank=5, sight=RUNNING, **known):
    return Fact(rank, PROCESS, sight, **known)


BUSY = fact(rank=6, report=report())
THERE = fact(rank=6, report=report(wait=WAIT.awaited))
# (what is known of rank 5, of rank 6, the row, a part of what is said)
CELLS = [
    (fact(report=report(wait=WAIT.awaited)), BUSY, Kind.HERE, "waits for the same"),
    (fact(report=report("forward", 8)), BUSY, Kind.HERE, ""),  # it has sent what is waited for
    (fact(report=report("between", 7)), BUSY, Kind.HERE, ""),
    (fact(report=report(wait=Awaited("group", joins=True))), BUSY, Kind.HERE, ""),  # without data
    (fact(failure=told(left=True, phase="between"), sight=GONE), BUSY, Kind.HERE, ""),  # left, its part done
    (fact(failure=told(phase="between")), BUSY, Kind.HERE, ""),  # it failed later
    (fact(failure=told()), BUSY, Kind.FAILED, "rank 5 (process 77 on node7) says: KeyError: x"),
    (fact(failure=told(), sight=GONE), THERE, Kind.FAILED, "says: KeyError: x"),
    (fact(failure=told(wrapper="another")), BUSY, Kind.FAILED, "says"),
    (fact(failure=told(iteration=6, ends=True)), BUSY, Kind.FAILED, "says"),
    (fact(failure=told(iteration=6, phase="between")), BUSY, Kind.FAILED, "says"),
    (fact(failure=told(iteration=6), report=report()), BUSY, Kind.FAILED, "says"),  # which this rank has ended well
    (fact(sight=KILLED), BUSY, Kind.ENDED, "is gone (SIGKILL), without a word"),
    (fact(sight=EXITED, failure=told("has ended", left=True, wrapper="x")), BUSY, Kind.ENDED, "(exit code 3)"),
    (fact(sight=GONE), THERE, Kind.ENDED, "is gone (its program has ended, or was killed"),
    (fact(sight=GONE), fact(rank=6, report=report(wait=bucket_0("v", 2))), Kind.ENDED, "is gone"),
    (fact(failure=told("it has destroyed", left=True, iteration=6)), BUSY, Kind.ENDED, "come any more: it has"),
    (fact(failure=told(left=True, wrapper="another")), THERE, Kind.ENDED, "does not come any more"),
    (fact(sight=GONE), BUSY, Kind.GONE, "is gone"),  # rank 6 may be the one that is waited for
    (fact(sight=GONE), fact(rank=6, sight=Sight("stopped")), Kind.GONE, "is gone"),
    (fact(failure=told(left=True, wrapper="another")), BUSY, Kind.GONE, "does not come any more"),
    (fact(sight=Sight("stopped"), report=report()), THERE, Kind.STOPPED, "is stopped (SIGSTOP"),
    (fact(silent=True), THERE, Kind.SILENT, "seen: nowhere yet (torch's class, in a process"),
    (fact(silent=True, report=report(wait=WAIT.awaited)), THERE, Kind.SILENT, "waits for bucket 1 of iteration 7"),
    (fact(report=report(wait=bucket_0("w", 6))), THERE, Kind.WAITS, "waits for bucket 0 of iteration 6"),
    (fact(report=report(wait=ASKS.awaited)), THERE, Kind.WAITS, "waits for the others' word"),
    (fact(report=report(collective=True)), THERE, Kind.WAITS, "is between of iteration 6, at train.py:3 in f"),
    (fact(report=report("backward", 7)), THERE, Kind.BUSY, "is backward of iteration 7, at train.py:3 in f"),
    (fact(report=report("backward", 9, wrapper="another")), THERE, Kind.BUSY, "is backward of iteration 9"),
    (fact(report={**report(), "places": {}}), THERE, Kind.BUSY, "is past its last DistributedDataParallel"),
    (fact(report={**report(), "words": "KeyError: x"}), THERE, Kind.BUSY, "in f. Its last error: KeyError: x"),
    (fact(), THERE, Kind.UNKNOWN, "has not said where it is"),
    (Fact(5), THERE, Kind.UNKNOWN, "rank 5 has not said where it is"),
]  # fmt: skip


@pytest.mark.parametrize(("five", "six", "kind", "words"), CELLS)
def test_a_cell(five, six, kind, words):
    judged = judge([five, six], WAIT)
    assert judged[0] == (five, kind)
    assert words in describe(five, kind, "w")


def test_the_docs_print_the_table():
    text = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text()
    for kind in Kind:
        certain = "-" if kind is Kind.HERE else "certain" if kind in CERTAIN else "suspected"
        assert f"| {kind.value[0]} | {certain} |" in text


def test_a_failure_of_an_iteration_that_this_rank_has_given_up_as_well_is_past():
    failed = fact(failure=told(iteration=6), report=report())
    assert judge([failed, BUSY], WAIT._replace(given_up=6))[0][1] is Kind.BUSY
    assert judge([failed, BUSY], WAIT._replace(given_up=5))[0][1] is Kind.FAILED
    assert judge([fact(failure=told()), BUSY], WAIT._replace(given_up=7))[0][1] is Kind.FAILED  # of this one


def test_outside_of_a_backward_no_iteration_tells_who_has_done_its_part():
    gone = fact(sight=GONE, report=report("between", 99))
    assert judge([gone, BUSY], OUTSIDE)[0][1] is Kind.GONE
    assert judge([gone, fact(rank=6, report=report(wait=OUTSIDE.awaited))], OUTSIDE)[0][1] is Kind.ENDED


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        ({"failure": told("has ended", left=True, collectives=4)}, Kind.HERE),  # it was sent the last buffers
        ({"failure": told("has ended", left=True, collectives=3)}, Kind.ENDED),
        ({"failure": told(collectives=4)}, Kind.HERE),  # it failed later
        ({"failure": told(collectives=3)}, Kind.FAILED),
        ({"report": report()}, Kind.BUSY),  # of three collectives
        ({"report": report("forward", 99, wrapper="another")}, Kind.BUSY),
    ],
)
def test_the_number_of_a_collective_tells_who_has_done_its_part(known, kind):
    fourth = OUTSIDE._replace(awaited=buffers("w", 4))
    assert judge([fact(**known), BUSY], fourth)[0][1] is kind


@pytest.mark.parametrize(
    ("known", "gone_on"),
    [
        ({"report": report("between", 7)}, False),  # before its step, or in it
        ({"report": report("forward", 8)}, False),
        ({"report": report("backward", 8)}, True),
        ({"report": report("forward", 9)}, True),
        ({"report": report(wait=bucket_0("w", 7))}, False),  # this rank has sent its part
        ({"report": report(wait=bucket_0("w", 8))}, True),
        ({"report": report(wait=buffers("w", 4))}, True),
        ({"report": report(wait=buffers("w", 3))}, False),  # this rank has begun it
        ({"report": report(wait=buffers("v", 4))}, False),
        ({"report": report("backward", 7)}, False),
        ({"report": report(collective=True)}, False),
        ({"silent": True}, False),
        ({"sight": Sight("stopped"), "report": report()}, False),
    ],
)
def test_who_has_gone_on_without_a_word(known, gone_on):
    assert has_gone_on(fact(**known), report("between", 7)["places"]) is gone_on


def test_the_first_cause_is_named():
    first, second = fact(sight=KILLED), fact(rank=6, failure=told("rank 5 will not", because=[5]))
    both = [(second, Kind.FAILED), (first, Kind.ENDED)]
    assert culprits(both, []) == [(first, Kind.ENDED)]
    assert culprits(both[:1], []) == both[:1]
    assert culprits(both[:1], both) == both[1:], "whom it has named is absent, too"
    victim = (fact(rank=6, report=report(wait=bucket_0("w", 6))), Kind.WAITS)
    assert culprits([victim, (first, Kind.STOPPED)], []) == [(first, Kind.STOPPED)]
    assert culprits([victim], []) == [victim]
    text = lost(WAIT, 3.0, culprits(both, []), "Connection closed\nat somewhere")
    waits = "rank 5 will not take part in bucket 1 of iteration 7, for which rank 4 has waited 3 s. Rank 5 ("
    assert text.startswith(waits)
    assert text.endswith("The collective's own error: Connection closed")
    assert "with ddp.join():" in lost(WAIT, 3.0, [(fact(sight=GONE), Kind.ENDED)], "")


def test_the_warning():
    text = slow(WAIT, 10.0, [(BUSY, Kind.BUSY), (fact(), Kind.HERE)], store_is_silent=True)
    assert "rank 4 has waited 10 s for bucket 1 of iteration 7. rank 6 did not come yet" in text
    assert "store does not answer" in text
    assert slow(WAIT, 10.0, [(THERE, Kind.HERE)], False).endswith("all ranks are there: a slow network?")
    hooked = slow(WAIT._replace(hook="my_hook"), 10.0, [(THERE, Kind.HERE)], False)
    assert "my_hook, which must not wait for a collective in a callback" in hooked


def test_warnings_come_once_a_minute_and_rarer():
    assert [second for second in range(1, 2000) if times.warning_is_due(second)] == [10, 60, 120, 240, 480, 960, 1920]
    with times.faster(0.01):
        due = [looks for looks in range(1, 300) if times.warning_is_due(looks * 0.01)]
    assert due == [10, 60, 120, 240]


def test_another_ranks_lack_of_memory_is_none_here():
    """Programs look for "out of memory" in an error, and skip the batch."""
    failed = fact(failure=told("OutOfMemoryError: CUDA out of memory"))
    assert "CUDA out-of-memory" in lost(WAIT, 3.0, [(failed, Kind.FAILED)], "")


_SLEEPS = """
import time
from minddp.guards.processes import here
print(*here()[2:], flush=True)
time.sleep(60)
"""


def test_what_becomes_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", _SLEEPS], stdout=subprocess.PIPE, text=True)
    try:
        pid, started = map(int, child.stdout.readline().split())
        process = here()._replace(pid=pid, started=started)
        assert look(process).state == "running"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert look(process).state == "stopped"
        assert look(process._replace(started=started - 1)).state == "gone"
        assert look(process._replace(machine="another")).state == "elsewhere"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look(process) == Sight("gone", "SIGKILL")
    child.communicate()
    assert look(process) == Sight("gone")


@on_ranks(1)
def test_timeouts_as_arguments_and_from_the_environment(rank, world_size):
    for value, error in ((0, ValueError), (-1.0, ValueError), ("x", TypeError), (True, TypeError)):
        with pytest.raises(error, match="desync_timeout must be a"):
            minddp.DistributedDataParallel(nn.Linear(1, 1), desync_timeout=value)

    def settings():
        return minddp.DistributedDataParallel(nn.Linear(1, 1))._minddp_observers.settings["guards"]

    assert settings().desync_timeout is None
    os.environ["MINDDP_DESYNC_TIMEOUT"] = "7.5"
    try:
        assert settings().desync_timeout == 7.5
        os.environ["MINDDP_DESYNC_TIMEOUT"] = "soon"
        with pytest.raises(ValueError, match="MINDDP_DESYNC_TIMEOUT is 'soon': set it to a positive number"):
            minddp.DistributedDataParallel(nn.Linear(1, 1))
    finally:
        del os.environ["MINDDP_DESYNC_TIMEOUT"]
