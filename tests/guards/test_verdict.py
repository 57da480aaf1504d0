"""Who keeps the others waiting: from facts to names."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn

import minddp
from minddp.guards import board
from minddp.guards.board import Board
from minddp.guards.verdict import CANNOT_COME, Fact, Kind, Wait, describe, given_all, judge, lost, root_causes, slow
from minddp.ranks.processes import Process, Sight, began, here, look
from minddp.ranks.waiting import ASKED, SHADOWED
from minddp.testing import run_ranks

NAMES = {3: "a.weight", 2: "a.bias"}
WAIT = Wait("w/7|bucket 1 of iteration 7", "the reduction of bucket 1", 0, (4, 5, 6), "w", NAMES, iteration=7)
RUNNING = Sight("running")
PROCESS = Process("node7", "m", "n", 77, 1)


def place(phase="between", iteration=6, wait=None, collective="", still=100.0, missing=(), wrapper="w", inside=False,
          ended=False):  # fmt: skip
    places = {wrapper: {"phase": phase, "iteration": iteration, "missing": list(missing)}}
    said = {"line": "train.py:3 in f", "words": ""}
    how = {"inside": inside, "ended": ended}
    return {"places": places, "wait": wait, "collective": collective, "still": still, **how, **said}


def fact(sight=RUNNING, failure=None, where=None, process=PROCESS, distant=False, rank=5, lasts=100.0):
    return Fact(rank, process, sight, failure, where, distant, lasts)


FAILED = {"words": "KeyError: x", "because": [], "left": False}


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        (fact(failure=FAILED), Kind.FAILED),
        (fact(failure={**FAILED, "left": True}), Kind.LEFT),
        (fact(Sight("gone", "SIGKILL")), Kind.GONE),
        (fact(Sight("stopped")), Kind.STOPPED),
        (fact(distant=True), Kind.SILENT),
        (fact(), Kind.UNKNOWN),
        (fact(process=None, sight=None), Kind.UNKNOWN),
        (fact(Sight("stopped"), lasts=1.0), Kind.UNKNOWN),  # a debugger's look, say
        (fact(distant=True, lasts=1.0), Kind.UNKNOWN),
        (fact(where=place("forward", 7, inside=True)), Kind.STUCK),
        (fact(where=place("backward", 7, inside=True)), Kind.STUCK),
        (fact(where=place("backward", 7)), Kind.BUSY),  # the program's own time, between two backwards
        (fact(where=place("forward", 7, still=0.0, inside=True)), Kind.BUSY),
        (fact(where=place("forward", 1, inside=True)), Kind.BUSY),
        (fact(where=place("forward", 8)), Kind.COMES),  # it has sent what is waited for
        (fact(where=place("backward", 7, wrapper="another", inside=True)), Kind.STUCK),
        (fact(where=place("backward", 7, wrapper="another")), Kind.BUSY),  # one that was never finished
        (fact(where=place("backward", 1, wrapper="another", inside=True)), Kind.BUSY),
        (fact(where=place("between", 6)), Kind.BUSY),
        (fact(where=place("between", 6, ended=True)), Kind.STUCK),
        (fact(where=place("between", 6, ended=True, still=0.0)), Kind.BUSY),
        (fact(where=place(collective="barrier")), Kind.ELSEWHERE),
        (fact(where=place(collective="barrier", still=0.0)), Kind.BUSY),
        (fact(where=place(wait="w/6|bucket 0 of iteration 6")), Kind.ELSEWHERE),
        (fact(where=place(wait=f"w|{ASKED}")), Kind.BUSY),  # it raises by itself
        (fact(where=place(wait=WAIT.key)), Kind.COMES),
        (fact(where=place(wait=f"group|{SHADOWED}")), Kind.COMES),  # without data it takes part in anything
    ],
)
def test_kinds(known, kind):
    assert judge(known, WAIT, may_be_silent=True, patience=4.0) is kind


@pytest.mark.parametrize(
    ("kind", "members", "others", "becomes"),
    [
        (Kind.ELSEWHERE, [Kind.COMES], [], Kind.ELSEWHERE),
        (Kind.ELSEWHERE, [], [Kind.BUSY], Kind.BUSY),
        (Kind.ELSEWHERE, [], [Kind.UNKNOWN], Kind.BUSY),
        (Kind.ELSEWHERE, [Kind.STUCK], [], Kind.ELSEWHERE),
        (Kind.STUCK, [Kind.BUSY], [], Kind.STUCK),
        (Kind.FAILED, [Kind.BUSY], [], Kind.FAILED),
        (Kind.LEFT, [Kind.BUSY], [], Kind.BUSY),  # it may have done its part
        (Kind.LEFT, [Kind.COMES], [Kind.BUSY], Kind.LEFT),
    ],
)
def test_who_waits_elsewhere_or_has_left_is_judged_beside_those_on_their_way(kind, members, others, becomes):
    members = [kind, *members]
    assert given_all(kind, members, members + others) is becomes


def test_a_rank_is_silent_only_once_it_could_have_answered():
    assert judge(fact(distant=True), WAIT, may_be_silent=False, patience=4.0) is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("known", "kind", "text"),
    [
        (fact(Sight("stopped"), lasts=1.0), Kind.UNKNOWN, "is stopped (SIGSTOP"),
        (fact(failure={**FAILED, "left": True}), Kind.BUSY, "does not come any more: KeyError: x"),
        (fact(failure=FAILED), Kind.FAILED, "rank 5 (process 77 on node7) says: KeyError: x"),
        (fact(Sight("gone", "SIGKILL")), Kind.GONE, "is gone (SIGKILL), without a word"),
        (fact(Sight("stopped")), Kind.STOPPED, "is stopped (SIGSTOP"),
        (fact(where=place("forward", 7)), Kind.STUCK,
         "is in forward of iteration 7, at train.py:3 in f; it never produced a.weight, a.bias"),
        (fact(where=place("backward", 7, missing=[2])), Kind.STUCK, "; it never produced a.bias"),
        (fact(where=place()), Kind.BUSY, "is between iterations 6 and 7, at train.py:3 in f"),
        (fact(where=place(collective="barrier")), Kind.ELSEWHERE, "in torch.distributed's barrier"),
        (fact(where=place(wait="w/6|bucket 0 of iteration 6")), Kind.ELSEWHERE, "waits for bucket 0 of iteration 6"),
        (fact(process=None), Kind.UNKNOWN, "rank 5 has made no DistributedDataParallel yet"),
    ],
)  # fmt: skip
def test_words(known, kind, text):
    assert text in describe(known, kind, WAIT)


def test_the_first_cause_is_named():
    first = fact(Sight("gone", "SIGKILL"))
    second = fact(failure={"words": "rank 1 will not", "because": [5], "left": False}, rank=6)
    both = [(second, Kind.FAILED), (first, Kind.GONE)]
    assert root_causes(both) == [(first, Kind.GONE)]
    assert root_causes(both[:1]) == both[:1]
    victim = (fact(where=place(wait="w/6|bucket 0 of iteration 6"), rank=6), Kind.ELSEWHERE)
    assert root_causes([victim, (first, Kind.STOPPED)]) == [(first, Kind.STOPPED)]
    assert root_causes([victim]) == [victim]
    text = lost(WAIT, 3.0, root_causes(both), "Connection closed\nat somewhere")
    begin = "rank 5 will not take part in the reduction of bucket 1, for which rank 4 has waited 3 s. Rank 5 (process"
    assert text.startswith(begin)
    assert text.endswith("The collective's own error: Connection closed")


def test_the_warning():
    here_too = (fact(where=place(wait=WAIT.key), rank=6), Kind.COMES)
    text = slow(WAIT, 10.0, [(fact(where=place()), Kind.BUSY), here_too], store_is_silent=True)
    assert "Ranks [5] have not reported waiting" in text and "store does not answer" in text
    assert slow(WAIT, 10.0, [here_too], store_is_silent=False).endswith("all ranks are there: a slow network?")
    hooked = slow(replace(WAIT, hook="my_hook"), 10.0, [here_too], store_is_silent=False)
    assert "my_hook, which must not wait for a collective in a callback" in hooked
    pair = slow(replace(WAIT, ranks=(4, 6)), 10.0, [here_too], store_is_silent=False)
    assert pair.endswith("a slow network? Or a communication hook that one of the two ranks alone has?")


def test_who_has_no_data_left_takes_part_in_anything():
    shadowing = Wait(f"group|{SHADOWED}", SHADOWED, 0, (4, 5, 6))
    assert judge(fact(where=place(wait="w/6|bucket 0 of iteration 6")), shadowing, False, 4.0) is Kind.COMES
    assert judge(fact(where=place(collective="barrier")), shadowing, False, 4.0) is Kind.ELSEWHERE


def test_busy_ranks_are_waited_for():
    assert CANNOT_COME.isdisjoint({Kind.BUSY, Kind.UNKNOWN, Kind.COMES})


_SLEEPS = """
import time
from minddp.ranks.processes import here
print(*here()[3:], flush=True)
time.sleep(60)
"""


def test_what_becomes_of_a_process():
    child = subprocess.Popen(
        [sys.executable, "-c", _SLEEPS],
        stdout=subprocess.PIPE,
        text=True,
    )
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
    child.wait()
    assert look(process) == Sight("gone")


def test_what_earlier_ranks_left_on_the_store_is_passed_over(monkeypatch):
    """torchrun may give restarted ranks the store of those that failed."""
    store = dist.HashStore()
    earlier = Board(store, 1, PROCESS)
    earlier.introduce(PROCESS)
    earlier.tell({"words": "its program ended with KeyError", "because": [], "over": False})
    first = Board(store, 0, here())
    assert first.process(1) == PROCESS
    assert [entry["words"] for entry in first.news()] == ["its program ended with KeyError"]
    monkeypatch.setattr(board, "began", lambda: time.time() + 10)
    later = Board(store, 0, here()._replace(pid=1))
    assert later.process(1) is None and later.news() == []
    monkeypatch.setattr(board, "began", lambda: time.time() - 1)
    earlier.tell({"words": "again", "because": [], "over": False})
    assert [entry["words"] for entry in later.news()] == ["again"]


def test_each_group_on_a_store_has_words_of_its_own():
    """A rank that goes on, and one whose process is another than before, meet on a new store."""
    told = {"words": "KeyError", "because": [], "over": False}
    survivor, newcomer = PROCESS, here()
    store = dist.HashStore()
    Board(store, 0, survivor).tell(told)
    assert Board(store, 0, survivor).news() == []  # its next group
    another = dist.HashStore()
    Board(another, 0, survivor).tell(told)
    assert [entry["words"] for entry in Board(another, 1, newcomer).news()] == ["KeyError"]


def test_when_this_process_began():
    assert time.time() - 3600 * 24 < began() <= time.time() + 1


def _bad_timeouts(rank, world_size):
    for value, error in ((0, ValueError), (-1.0, ValueError), ("x", TypeError), (True, TypeError)):
        with pytest.raises(error, match="desync_timeout must be a"):
            minddp.DistributedDataParallel(nn.Linear(1, 1), desync_timeout=value)


def test_a_bad_timeout_is_named():
    run_ranks(_bad_timeouts, 1)


def test_another_ranks_lack_of_memory_is_none_here():
    """Programs look for "out of memory" in an error, and skip the batch."""
    failed = fact(failure={**FAILED, "words": "OutOfMemoryError: CUDA out of memory"})
    assert "CUDA out-of-memory" in lost(WAIT, 3.0, [(failed, Kind.FAILED)], "")


def test_what_the_readme_says_of_ranks_that_cannot_be_told_from_busy_ones():
    """A wait for work of the program's own shows nothing; a thread of the waiting rank is nobody's way."""
    assert judge(fact(where=place("between", 6)), WAIT, may_be_silent=True, patience=4.0) is Kind.BUSY
    assert judge(fact(where=place("forward", 7, still=0.0, inside=True)), WAIT, True, 4.0) is Kind.BUSY  # computes
    elsewhere = judge(fact(where=place(collective="recv")), WAIT, may_be_silent=True, patience=4.0)
    assert given_all(elsewhere, [elsewhere], [elsewhere]) is Kind.ELSEWHERE  # whatever runs on the waiting rank
