"""Who asks the other ranks, about gradients made past a wrapper or steps that have not ended, and when."""

import time

import pytest
import torch
import torch.distributed as dist

from minddp.guards import times
from minddp.guards.local_gradients import LocalGradients, Word

ONES = [("weight", torch.ones(2))]


class _Group:
    def rank(self):
        return 0

    def size(self):
        return 2


class _StandsStill(dist.HashStore):
    """A store that answers a question late, and the clock went on: meanwhile the other rank has come."""

    def check(self, keys):
        there = super().check(keys)
        if not there:
            self.set(keys[0], '{"weight": [1.4142135623730951, 1.764842187284489, 0.963558185417193]}')
            time.sleep(0.03)
        return there


def _guard(store=None, word=Word.OPEN):
    return LocalGradients(_Group(), store or dist.HashStore(), "wrapper", lambda rank, seconds: word)


def test_a_rank_that_is_there_when_the_time_is_over_is_not_missed(monkeypatch):
    monkeypatch.setattr(times, "look", 0.01)
    monkeypatch.setattr(LocalGradients, "_store", _StandsStill())
    _guard(word=Word.PASSED).check(ONES, moment=3, iteration=1)


def test_a_rank_that_has_gone_on_without_is_named():
    guard = _guard(word=Word.PASSED)
    with pytest.raises(RuntimeError, match="rank 1 has shown none"):
        guard.check(ONES, moment=3, iteration=1)


def test_a_rank_that_has_left_has_no_replica_that_could_differ():
    _guard(word=Word.LEFT).check(ONES, moment=3, iteration=1)


def test_a_joined_rank_is_not_asked_until_it_is_back():
    store = dist.HashStore()
    here, there = (_guard(store, Word.PASSED) for _ in range(2))
    there._rank = 1
    there.note_joined(True)
    here.check(ONES, moment=3, iteration=1)
    there.note_joined(False)
    with pytest.raises(RuntimeError, match="rank 1 has shown none"):
        here.check(ONES, moment=4, iteration=2)


def test_what_is_known_of_a_rank_may_end_the_wait():
    def asks(rank, seconds):
        raise KeyError(rank)

    with pytest.raises(KeyError, match="1"):
        LocalGradients(_Group(), dist.HashStore(), "wrapper", asks).check(ONES, moment=3, iteration=1)


def test_a_store_whose_host_has_left_ends_no_program(caplog):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guard = LocalGradients(_Group(), dist.TCPStore("127.0.0.1", host.port), "wrapper")
    del host
    for _ in range(2):  # once a moment
        guard.check(ONES, moment=3, iteration=1)
    (told,) = caplog.records
    assert "'weight'" in told.getMessage() and "the group's store has ended" in told.getMessage()


def test_a_rank_that_says_nothing_is_not_waited_for_long(monkeypatch, caplog):
    monkeypatch.setattr(times, "look", 0.01)
    store = dist.HashStore()
    guard = LocalGradients(_Group(), store, "wrapper")
    for moment in (3, 4):
        guard.check(ONES, moment, iteration=moment)
    assert [record.getMessage()[:73] for record in caplog.records] == [
        "optimizer.step() on rank 0 uses gradients that DistributedDataParallel ha"
    ]
    dist.PrefixStore("minddp/local/wrapper", store).set("5/0/1", '{"weight": [1.0, 1.0, 0.0]}')
    with pytest.raises(RuntimeError, match="'weight': .* they differ from rank 1's"):
        guard.check(ONES, moment=5, iteration=5)


def test_a_rank_says_its_word_also_where_it_steps_other_parameters():
    store = dist.HashStore()
    LocalGradients(_Group(), store, "wrapper").check(ONES, 3, iteration=1, uses=False)
    assert dist.PrefixStore("minddp/local/wrapper", store).check(["1/0/0"])
