"""What ranks tell each other through the store, without processes: ranks take turns, and the clock is an argument."""

import time

import pytest
import torch.distributed as dist

from minddp.guards import processes
from minddp.guards.processes import Process, began, here
from minddp.guards.reports import REQUESTS_A_SECOND, Reports

ME = here()


def opened(store, rank, size, process, clock=time.monotonic):
    reports = Reports(store, rank, size, {rank: process}, clock)
    reports.open(store)
    return reports


class Counted:
    """A store that counts requests."""

    def __init__(self):
        self.store, self.requests = dist.HashStore(), 0

    def __getattr__(self, name):
        def request(*arguments):
            self.requests += 1
            return getattr(self.store, name)(*arguments)

        return request

    def has_extended_api(self):
        return True


class Ranks:
    """``size`` ranks, whose turns come one after the other; some wait, some never answer."""

    def __init__(self, size):
        self.now, self.store, self.size = 0.0, Counted(), size
        self.ranks = [self._rank(rank) for rank in range(size)]
        for rank, reports in enumerate(self.ranks):
            reports.publish(self.report(rank))
        self.waiting, self.mute = {}, set()

    def _rank(self, rank):
        reports = opened(self.store.store, rank, self.size, ME, clock=lambda: self.now)
        reports._store = self.store  # of one group, and counted
        for counter in ("asked", "failures"):
            self.store.add(counter, 0)
        return reports

    def report(self, rank):
        return {"wait": getattr(self, "waiting", {}).get(rank), "places": {}, "line": f"line {rank}"}

    def turns(self, seconds):
        """Returns the requests a second that all of them made."""
        before, interval = self.store.requests, self.ranks[0].interval
        for _ in range(round(seconds / interval)):
            for rank, reports in enumerate(self.ranks):
                self.now += interval / self.size
                if rank not in self.mute:
                    reports.turn(lambda rank=rank: self.report(rank), rank in self.waiting, lambda entries: None)
        return (self.store.requests - before) / seconds


@pytest.mark.parametrize("size", [2, 16, 64, 256])
def test_requests_grow_no_faster_than_ranks(size):
    ranks = Ranks(size)
    interval, late = ranks.ranks[0].interval, size // 2
    idle = ranks.turns(20 * interval)
    ranks.waiting = {rank: "w/1|bucket 0" for rank in range(size) if rank != late}
    ranks.turns(interval)
    waiting = ranks.turns(20 * interval)
    assert idle <= size / interval and idle <= REQUESTS_A_SECOND / 3
    assert waiting <= (3 * size + 1) / interval + 1
    for rank in {0, size - 1} - {late}:
        report, silent = ranks.ranks[rank].of(late)
        assert report["line"] == f"line {late}" and not silent


def test_a_rank_that_does_not_answer_is_silent_until_it_does():
    ranks = Ranks(8)
    ranks.waiting = dict.fromkeys((1, 3, 5, 7), "w/1|bucket 0")
    ranks.turns(2)
    assert ranks.ranks[7].of(3)[0]["wait"] == "w/1|bucket 0" and not ranks.ranks[7].is_settled
    ranks.mute = {1}  # which has asked so far
    ranks.turns(20)
    assert ranks.ranks[7].of(1)[1] and ranks.ranks[7].of(3)[0] and ranks.ranks[7].is_settled
    ranks.mute = set()
    ranks.turns(2)
    assert ranks.ranks[7].of(1)[0]["wait"] == "w/1|bucket 0" and not ranks.ranks[7].of(1)[1]


def test_a_report_of_before_says_nothing_of_this_wait():
    ranks = Ranks(2)
    ranks.waiting = {0: "w/1|bucket 0", 1: "w/1|bucket 0"}
    ranks.turns(10)
    ranks.waiting = {}
    ranks.turns(5)
    ranks.waiting = {0: "w/1|bucket 0"}
    ranks.mute = {1}
    ranks.turns(3)
    assert ranks.ranks[0].of(1) == (None, False)


FAILURE = {"words": "KeyError", "because": [], "over": False, "left": False}


def _news(reports):
    found = []
    reports.turn(lambda: {"wait": None, "places": {}}, False, found.extend)
    return [entry["words"] for entry in found]


def test_why_a_rank_waits_no_more_is_heard_before_it_is_seen(monkeypatch):
    """A rank that gives up reports why, and then does not wait: also while another one is within a turn."""
    ranks = Ranks(3)
    ranks.waiting = dict.fromkeys(range(3), "w/1|bucket 0")
    ranks.turns(10)
    reader, heard, seen = ranks.ranks[2], [], []

    def gives_up():
        ranks.ranks[1].tell(FAILURE)
        ranks.ranks[1].publish({"wait": None, "places": {}, "line": "past it"})

    def hear(entries):
        heard.extend(entries)
        seen.append(reader.of(1)[0]["wait"] is None and not heard)

    collect = reader._all_reports
    monkeypatch.setattr(reader, "_all_reports", lambda: (gives_up(), collect())[1])
    reader.turn(lambda: ranks.report(2), True, hear)
    assert reader.of(1)[0]["line"] == "past it", "it is seen"
    assert [entry["words"] for entry in heard] == ["KeyError"] and not any(seen)


def test_what_earlier_ranks_left_on_the_store_is_passed_over(monkeypatch):
    """A launcher may give restarted ranks the store of those that failed."""
    store, other = dist.HashStore(), ME._replace(pid=1)
    earlier = opened(store, 1, 2, other)
    earlier.tell(FAILURE)
    assert _news(opened(store, 0, 2, ME)) == ["KeyError"]
    monkeypatch.setattr(processes, "began", lambda process: processes.now() + 10)
    later = opened(store, 0, 2, ME._replace(pid=2))
    assert _news(later) == []
    later._known[1] = other  # from the constructor's exchange: whatever the clocks say
    earlier.tell({**FAILURE, "words": "again"})
    assert _news(later) == ["again"]


def test_of_another_machine_only_a_process_that_is_known_is_believed():
    store, far = dist.HashStore(), Process("far", "another boot", 7, 1)
    opened(store, 1, 2, far).tell(FAILURE)
    assert _news(opened(store, 0, 2, ME)) == []
    knows = opened(store, 0, 2, ME._replace(pid=2))
    knows._known[1] = far
    assert _news(knows) == ["KeyError"]
    replaced = opened(store, 0, 2, ME._replace(pid=3))
    replaced._known[1] = far._replace(pid=8)
    assert _news(replaced) == []


def test_each_group_on_a_store_has_words_of_its_own():
    """A rank that goes on, and one whose process is another than before, meet on a new store."""
    store = dist.HashStore()
    opened(store, 1, 2, ME).tell(FAILURE)
    assert _news(opened(store, 1, 2, ME)) == []  # its next group
    another = dist.HashStore()
    opened(another, 1, 2, ME).tell(FAILURE)
    assert _news(opened(another, 0, 2, ME._replace(pid=1))) == ["KeyError"]


def test_when_this_process_began():
    assert 0 < began(ME) <= processes.now()


def test_a_host_that_has_left_is_seen_without_a_request(capfd):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports = opened(dist.TCPStore("127.0.0.1", host.port), 0, 2, ME)
    assert reports.takes_a_last_word()
    del host
    deadline = time.monotonic() + 10
    while reports.takes_a_last_word() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reports.takes_a_last_word()
    assert capfd.readouterr().err == ""
