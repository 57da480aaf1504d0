"""What ranks tell each other through the store, without processes: ranks take turns."""

import subprocess
import time

import pytest
import torch.distributed as dist

from minddp.guards import processes, times
from minddp.guards.processes import Process, began, here
from minddp.guards.roll import Place, Roll, Wait, carries, has_done, listed, runs
from minddp.guards.watchdog import Watchdog

ME = here()
WAIT = Wait("ddp backward", 3, "the reduction of iteration 3", 0, (1, 2))


class Counting:
    """A store's requests."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += name in ("multi_get", "check", "get", "add", "set")
        return getattr(self.store, name)


def rolls(count, store=None, machine=ME.machine):
    """One for each rank, as processes of one machine."""
    store = dist.HashStore() if store is None else store
    mine = [ME._replace(machine=machine, pid=1000 + rank) for rank in range(count)]
    return [Roll(store, rank, count, {rank: mine[rank]}) for rank in range(count)]


def test_a_notice_is_read_once_by_each_rank():
    first, second, third = rolls(3)
    second.tell({"words": "no such file", "wait": WAIT.key})
    for roll in (first, third):
        roll.look()
        assert [(each["by"], each["words"]) for each in roll.notices()] == [(1, "no such file")]
        roll.look()
        assert roll.notices() == []


def test_more_notices_than_a_request_takes_are_all_read():
    first, second = rolls(2)
    for number in range(150):
        second.tell({"words": str(number), "wait": None})
    first.look()
    assert [each["words"] for each in first.notices()] == [str(number) for number in range(150)]


def test_a_notice_that_was_announced_and_never_written_hides_no_later_one():
    first, second = rolls(2)
    second.store.add("notices", 1)  # killed here
    second.tell({"words": "later", "wait": None})
    found = []
    for _ in range(6):
        first.look()
        found += first.notices()
    assert [each["words"] for each in found] == ["later"]


def test_a_call_is_answered_by_those_that_it_concerns_and_leaves_no_key():
    first, second, third, other = rolls(4)
    number = first.call(WAIT)
    for roll in (second, third, other):
        roll.look()
        for call in roll.calls():
            roll.answer(call["number"], {"line": f"at rank {roll.rank}"})
    answers = first.answers(WAIT.others)
    assert {rank: each["line"] for rank, each in answers.items()} == {1: "at rank 1", 2: "at rank 2"}
    assert first.answers([3]) == {}
    assert second.call(WAIT) == 0  # the first one has claimed it
    first.forget_claims()
    assert not first.store.check([f"call/{number}"])
    assert not first.store.check(["claim/ddp backward/3/1"])


def test_ranks_of_one_host_find_each_other():
    first, second = rolls(2)
    (third,) = rolls(1, first.store, machine="another")
    for roll in (first, second, third):
        roll.look()
    assert (first.meet(), second.meet(), third.meet()) == ([0, 1], [0, 1], [0])
    assert first.known[1].pid == 1001


def test_a_look_is_one_request_however_many_ranks_there_are():
    first = rolls(40)[0]
    first.look()
    first.meet()
    first.store = store = Counting(first.store)
    first.look()
    assert first.notices() == first.calls() == first.meet() == []
    assert store.requests == 1
    assert Roll(dist.HashStore(), 0, 10_000, {0: ME}).interval == pytest.approx(5.0)


def test_those_that_have_left_are_found_in_few_requests():
    everyone = rolls(200)
    everyone[70].leave({"end": "its program has ended", "places": {}})
    everyone[0].store = store = Counting(everyone[0].store)
    assert list(everyone[0].left(range(1, 200))) == [70]
    assert store.requests < 450  # halves; a caller alone asks


@pytest.mark.parametrize(
    ("ranks", "ranges"),
    [((), 0), ((3,), 1), (range(10_000), 1), ([*range(7), *range(8, 10_000)], 2), (range(5, 9_999, 8), 1),
     ((0, 1, 5, 6, 7, 20), 4)],
)  # fmt: skip
def test_ranks_travel_as_ranges(ranks, ranges):
    assert listed(runs(ranks)) == [*ranks]
    assert len(runs(ranks)) <= ranges


@pytest.mark.parametrize(
    ("name", "number", "done"),
    [("ddp backward", 3, True), ("ddp backward", 4, False), ("ddp collective", 7, True), ("ddp collective", 8, False),
     ("other backward", 1, False), ("group what all ranks tell each other ", 1, False)],
)  # fmt: skip
def test_a_rank_has_sent_its_part_of_what_it_has_done(name, number, done):
    places = {"ddp": list(Place(4, 3, 7, "in backward of iteration 4"))}
    assert has_done(places, (name, number)) is done


def test_what_all_are_past_is_no_key_and_what_comes_later_is_read():
    with times.faster(0.001):
        store = dist.HashStore()
        _, second, third = rolls(3, store)
        keys = store.num_keys()
        assert second.is_among_first(f"{WAIT.key}")
        second.tell({"words": "no such file", "wait": WAIT.key})
        time.sleep(0.05)
        second.forget_notices({"ddp": Place(3, 3, 0, "")})
        assert store.num_keys() > keys  # nobody knows yet that the others are past it
        second.forget_notices({"ddp": Place(5, 4, 0, "")})
        assert store.num_keys() == keys
        second.tell({"words": "again", "wait": ("ddp backward", 6)})
        found = []
        for _ in range(6):  # a rank that was stopped meanwhile
            third.look()
            found += [each["words"] for each in third.notices()]
        assert found == ["again"]


def test_what_a_process_before_has_left_is_not_believed(monkeypatch):
    """A launcher that starts ranks anew may give them the same store: the next rank 1 is another process."""
    store = dist.HashStore()
    old = Roll(store, 1, 2, {1: Process("host", "machine", 7, began_at(-50))})
    old.tell({"words": "of before", "wait": None})
    mine = Process("host", "machine", 8, began_at(0))
    monkeypatch.setattr(processes, "now", lambda: began(mine) + 1)
    first = Roll(store, 0, 2, {0: mine})
    entry = {"by": 1, "process": list(old.known[1]), "at": began(mine) - 1}
    assert not first.is_believed(entry)
    assert first.is_believed(entry | {"at": began(mine) + 1})
    assert not first.is_believed(entry | {"at": began(mine) + 1, "process": ["host", "elsewhere", 7, 0]})
    first.known[1] = Process("host", "elsewhere", 9, 0)
    assert first.is_believed(entry | {"process": ["host", "elsewhere", 9, 0], "at": 0.0})


def began_at(seconds):
    return ME.started + int(seconds * 100)


def test_an_era_begins_with_each_default_group_of_a_process():
    store = dist.HashStore()
    before, now = Roll(store, 0, 2, {0: ME}), Roll(store, 0, 2, {0: ME})
    before.tell({"words": "of the group before", "wait": None})
    now.look()
    assert now.notices() == []


class _InPython(dist.Store):
    """Whose methods nobody in C++ knows."""


def test_which_stores_carry_it():
    prefixed = dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore()))
    assert carries(prefixed) and not carries(_InPython())


def test_who_died_before_it_said_who_it_is_is_named_beside_those_that_it_took_along():
    dog = Watchdog(dist.HashStore(), 1, 3)
    dog._thread.join(60)  # there is no default group, so it hears of nobody
    child = subprocess.Popen(["true"])
    child.wait()
    dog.know({2: ME._replace(pid=child.pid)})
    verdict = dog.suspects(WAIT._replace(here=1, others=(0, 2)))
    assert sorted(verdict.ranks) == [0, 2] and "rank 0 does not answer" in verdict.words.lower()
