"""Who asks the other ranks, about gradients made past a wrapper or steps that have not ended, and when."""

import itertools
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minddp.guards import optimizer_guard, times
from minddp.guards.local_gradients import LocalGradients


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
            weights = '{"weight": [1.4142135623730951, 1.764842187284489, 0.963558185417193]}'
            self.set(keys[0], "" if keys[0].startswith("taken") else weights)
            time.sleep(0.03)
        return there


def test_a_rank_that_is_there_when_the_time_is_over_is_not_missed(monkeypatch):
    monkeypatch.setattr(times, "look", 0.01)
    monkeypatch.setattr(LocalGradients, "_store", _StandsStill())
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper", lambda rank, seconds, within: False)
    guard.meet(1, [])
    guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_a_rank_that_has_said_that_it_sends_is_not_asked():
    store = dist.HashStore()
    here, there = (LocalGradients(_Group(), store, "wrapper", lambda *_: pytest.fail("it asks")) for _ in range(2))
    there._rank = 1
    there.note_sending(1, [1, 0])
    here.meet(1, [1, 0])
    there.note_sending(2, [2, 0])
    with pytest.raises(RuntimeError, match="rank 1 has had no such backward"):
        here.meet(2, [1, 0])


def test_a_rank_that_will_certainly_not_come_is_named():
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper", lambda rank, seconds, within: False)
    with pytest.raises(RuntimeError, match="on rank 0 .* rank 1 has had no such backward"):
        guard.meet(1, [])
    with pytest.raises(RuntimeError, match="rank 1 has shown none"):
        guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_a_rank_that_has_left_has_no_replica_that_could_differ():
    asks = lambda rank, seconds, within: False  # noqa: E731
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper", asks, has_ended=lambda rank: True)
    guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_a_joined_rank_is_not_asked_until_it_is_back():
    store = dist.HashStore()
    here, there = (LocalGradients(_Group(), store, "wrapper", lambda *_: False) for _ in range(2))
    there._rank = 1
    there.note_joined()
    here.meet(1, [])
    there.note_back()
    with pytest.raises(RuntimeError, match="rank 1 has had no such backward"):
        here.meet(2, [])


def test_any_other_rank_is_waited_for_as_long_as_the_store_says(monkeypatch):
    monkeypatch.setattr(times, "look", 0.02)
    store, looks = dist.HashStore(), []

    def comes(rank, seconds, within):
        looks.append((rank, within))
        if len(looks) == 5:
            dist.PrefixStore("minddp/local/wrapper", store).set("taken/1/1", "")
        return None

    guard = LocalGradients(_Group(), store, "wrapper", comes)
    guard.meet(1, [])
    assert looks == [(1, True)] * 5
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="rank 1 has had no such backward"):
        guard.meet(2, [])


def test_the_groups_timeout_counts_if_it_is_longer(monkeypatch):
    monkeypatch.setattr(times, "look", 0.02)
    store, looks = dist.HashStore(), []
    store.set_timeout(timedelta(seconds=0.01))

    def comes(rank, seconds, within):
        looks.append(rank)
        if len(looks) == 5:
            dist.PrefixStore("minddp/local/wrapper", store).set("taken/1/1", "")
        return None

    options = SimpleNamespace(_timeout=timedelta(seconds=60))
    monkeypatch.setattr(_Group, "_get_backend", lambda *_: SimpleNamespace(options=options), raising=False)
    LocalGradients(_Group(), store, "wrapper", comes).meet(1, [])
    assert len(looks) == 5


def test_a_store_whose_host_has_left_ends_no_program(caplog):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guard = LocalGradients(_Group(), dist.TCPStore("127.0.0.1", host.port), "wrapper")
    del host
    for _ in range(2):  # once a backward
        guard.check([("weight", torch.ones(2))], backward=3, iteration=1)
    (told,) = caplog.records
    assert "'weight'" in told.getMessage() and "the group's store has ended" in told.getMessage()
    guard.meet(1, [])
    assert "in the same backward" in caplog.records[-1].getMessage()


def test_a_rank_that_says_nothing_is_not_waited_for_long_and_compared_later(monkeypatch, caplog):
    monkeypatch.setattr(times, "look", 0.01)
    store = dist.HashStore()
    guard = LocalGradients(_Group(), store, "wrapper")
    ones = [("weight", torch.ones(2))]
    for backward in (3, 4):
        guard.check(ones, backward, iteration=backward)
    assert [record.getMessage()[:73] for record in caplog.records] == [
        "optimizer.step() on rank 0 uses gradients of a backward that ran past Dis"
    ]
    theirs = dist.PrefixStore("minddp/local/wrapper", store)
    theirs.set("3/0/1", theirs.get("3/0/0") if theirs.check(["3/0/0"]) else theirs.get("4/0/0"))
    theirs.set("4/0/1", '{"weight": [1.0, 1.0, 0.0]}')
    with pytest.raises(RuntimeError, match="'weight': .* they differ from rank 1's"):
        guard.check(ones, backward=5, iteration=5)


def test_a_rank_says_its_word_also_where_it_steps_other_parameters():
    store = dist.HashStore()
    LocalGradients(_Group(), store, "wrapper").check([("weight", torch.ones(2))], 3, iteration=1, uses=False)
    assert dist.PrefixStore("minddp/local/wrapper", store).check(["1/0/0"])


class _Cares:
    """All that optimizer_guard asks who cares for parameters, where no step is refused."""

    def __init__(self, parameters):
        self._ids = {id(parameter) for parameter in parameters}
        self.averaged_ns = time.monotonic_ns()

    def may_refuse_step(self):
        return False

    def parameter_ids(self):
        return self._ids

    def last_averages(self):
        return self._ids, self.averaged_ns


class _Raising(torch.optim.SGD):
    """Its step raises when it has changed so many parameters."""

    def step(self, closure=None, changes=None):
        parameters = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = parameters[:changes]
        try:
            super().step(closure)
        finally:
            self.param_groups[0]["params"] = parameters
        if changes is not None:
            raise ValueError


def test_a_step_is_interrupted_if_it_has_not_ended_and_that_makes_a_difference():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    cares = _Cares(layer.parameters())
    optimizer_guard.watch(cares)
    optimizer = _Raising(layer.parameters(), 0.1)

    def fail(changes):
        with pytest.raises(ValueError):
            optimizer.step(changes=changes)

    fail(0)
    assert optimizer_guard.interrupted(cares), "the other ranks have stepped"
    assert not optimizer_guard.interrupted(cares), "each is told of once"
    fail(0)
    optimizer.step()
    assert not optimizer_guard.interrupted(cares), "tried again"
    fail(0)
    assert not optimizer_guard.interrupted(cares), "no backward has been since the last step"
    fail(1)
    assert optimizer_guard.interrupted(cares)
    fail(2)
    assert not optimizer_guard.interrupted(cares), "all has changed"
    cares.averaged_ns = time.monotonic_ns()
    optimizer.step()
    fail(1)
    assert optimizer_guard.interrupted(cares), "the step before has ended"


def test_an_exception_of_a_closure_that_runs_again():
    layer = torch.nn.Linear(2, 2)
    cares = _Cares(layer.parameters())
    optimizer_guard.watch(cares)
    optimizer, calls = torch.optim.LBFGS(layer.parameters(), max_iter=4), itertools.count()

    def closure():
        if next(calls) == 1:
            raise ValueError
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError):
        optimizer.step(closure)
    assert optimizer_guard.interrupted(cares)
