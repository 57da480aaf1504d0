"""A group is given up from the watchdog's thread, once, where a rank is certainly lost; never on suspicion."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from minddp import _C
from minddp.guards import stall_inspector, watchdog
from minddp.guards.evidence import Fact
from minddp.guards.processes import Sight
from minddp.guards.stall_inspector import LostPeer, StallInspector
from tests.guards.test_evidence import report, told

W = "g/0"  # the wrapper's name
LAUNCHED = [1, 2, 3, 4, 5]  # the moments of an iteration that is over
IN_BACKWARD = [6, 7, 8, 4, 5]
DONE, ON_ITS_WAY = report("between", 7, wrapper=W), report("forward", 7, wrapper=W)


class Reducer:
    def __init__(self, moments, phase):
        self._moments, self.phase = moments, phase

    def position(self):
        return {"phase": self.phase, "iteration": 7, "missing": []}

    def moments(self):
        return self._moments

    def iteration(self):
        return 7


class Dog:
    """What an inspector asks of a watchdog."""

    def __init__(self, facts):
        self.known, self.gone, self.said, self.seen = facts, 0.0, [], []

    def facts(self, wait):
        return [fact._replace(ended_at=0.0) if fact.has_ended else fact for fact in self.known]

    def has_settled(self, facts):
        return bool(facts) and self.gone >= 5.0

    def tell(self, words, *wrappers, **how):
        assert len(wrappers) >= 2, "the group's and the wrapper's; it is not the program's end"
        self.said.append(words)

    def add(self, inspector):
        self.seen.append(inspector)

    def inspectors(self):
        return self.seen

    def note_forward(self):
        pass

    def waits_no_more(self):
        pass


class Group:
    """Of three ranks; counts who gives it up."""

    group_name = "g"

    def __init__(self):
        self.aborts, self.aborted = 0, threading.Event()

    def rank(self):
        return 0

    def size(self):
        return 3

    def abort(self):
        self.aborts += 1
        self.lost_then = self.inspector.lost
        self.aborted.set()


@pytest.fixture
def looks(monkeypatch):
    """Lets a watchdog look four times at ranks 1 and 2 as given; answers how often the group was given up."""
    monkeypatch.setattr(stall_inspector.dist, "get_process_group_ranks", lambda group: [0, 1, 2])

    def run(first, second=None, gone=60.0, moments=LAUNCHED, hook="", phase=_C.Phase.IDLE, forwards=0):
        monkeypatch.setattr(stall_inspector, "_counters", {})
        second = second or Fact(2, report=DONE)
        dog, group, reducer = Dog([first, second]), Group(), Reducer(moments, phase)
        monkeypatch.setattr(watchdog, "current", lambda group: dog)
        inspector = StallInspector(group, reducer, [], None, has_streams=True)
        inspector.rename(W)
        inspector.hook, dog.gone, group.inspector = hook, gone, inspector
        for _ in range(forwards):
            inspector.note_forward()
        for _ in range(4):
            inspector.heed_loss()
        if dog.said:
            assert group.aborted.wait(250)
        return SimpleNamespace(dog=dog, group=group, inspector=inspector, reducer=reducer)

    return run


FAILED = Fact(1, failure=told(phase="backward", iteration=7, wrapper=W))
KILLED = Fact(1, sight=Sight("gone", "SIGKILL"))
LEFT = Fact(1, failure=told("it has destroyed its process group", left=True, phase="between", iteration=6, wrapper=W))
CRASHED = Fact(1, failure=told(wrapper="another", ends=True))


def test_who_is_certainly_lost_is_given_up_once_and_named(looks):
    seen = looks(FAILED)
    assert seen.group.aborts == len(seen.dog.said) == 1
    assert seen.group.lost_then is not None, "nothing may step in between"
    for _ in range(2):
        with pytest.raises(LostPeer, match="rank 1 will not take part in the reduction of iteration 7") as raised:
            seen.inspector.check_lost()
        assert raised.value.lost_ranks == [1]


@pytest.mark.parametrize(
    "fact",
    [
        Fact(1, sight=Sight("stopped")),
        Fact(1, report=ON_ITS_WAY, silent=True),
        Fact(1, report=ON_ITS_WAY),
        Fact(1),
        Fact(1, sight=Sight("gone"), report=DONE),  # after its part
        Fact(1, failure=told(phase="backward", iteration=8, wrapper=W)),
        Fact(1, failure=told(wrapper="another")),  # it may not have come to this one any more
        KILLED,  # after its part, perhaps: its last report is a second old
        LEFT,
        CRASHED,
        Fact(1, failure={**told("has ended", left=True), "places": {}}, sight=Sight("gone", "exit code 0")),
    ],
)
def test_who_is_suspected_is_not(fact, looks):
    assert looks(fact).group.aborts == 0


def test_who_was_gone_before_the_forward_began_is_lost(looks):
    for fact in (KILLED, LEFT):
        assert looks(fact, forwards=1).group.aborts == 1
        assert looks(fact, forwards=1, hook="sends to some ranks only").group.aborts == 0
        next_forward = [6, 7, 3, 4, 5]
        assert [looks(fact, forwards=n, moments=next_forward).group.aborts for n in (1, 2)] == [0, 1]


def test_a_rank_that_is_gone_without_a_word_is_named_once(looks, caplog):
    assert looks(KILLED).group.aborts == 0
    assert [r.message for r in caplog.records] == [
        "rank 1 is gone (SIGKILL), without a word. If rank 0 waits for its device, it may wait for the part of the "
        "reduction of iteration 7 that is missing, until the process group's own timeout. If not, the forward "
        "after its next backward raises LostPeer."
    ]
    caplog.clear()
    for fact, seconds in ((KILLED, 1.0), (LEFT, 60.0), (Fact(1, sight=Sight("gone"), report=DONE), 60.0)):
        looks(fact, gone=seconds)
    assert not caplog.records, "its last words may be on their way; it has ended; it has done its part"


def test_only_what_was_launched_is_waited_for_on_a_device(looks):
    """In a backward this rank may be about to raise the same."""
    assert looks(FAILED, moments=IN_BACKWARD).group.aborts == 0
    assert looks(FAILED, phase=_C.Phase.INCOMPLETE).group.aborts == 0
