"""Who asks the other ranks, about gradients made past a wrapper or steps that have not ended, and when."""

import time
from datetime import timedelta

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
            self.set(keys[0], '{"weight": [1.4142135623730951, 1.764842187284489, 0.963558185417193]}')
            time.sleep(0.03)
        return there


def test_a_rank_that_is_there_when_the_time_is_over_is_not_missed(monkeypatch):
    monkeypatch.setattr(times, "look", 0.01)
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper", lambda rank, seconds, within: False)
    guard._store = _StandsStill()
    guard.meet(1)
    guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_a_rank_that_will_certainly_not_come_is_named():
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper", lambda rank, seconds, within: False)
    with pytest.raises(RuntimeError, match="on rank 0 .* rank 1 has had no such backward"):
        guard.meet(1)
    with pytest.raises(RuntimeError, match="rank 1 has shown none"):
        guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_any_other_rank_is_waited_for_as_long_as_the_store_says(monkeypatch):
    monkeypatch.setattr(times, "look", 0.02)
    store, looks = dist.HashStore(), []

    def comes(rank, seconds, within):
        looks.append((rank, within))
        if len(looks) == 5:
            dist.PrefixStore("minddp/local/wrapper", store).set("taken/1/1", "")
        return None

    guard = LocalGradients(_Group(), store, "wrapper", comes)
    guard.meet(1)
    assert looks == [(1, True)] * 5
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="rank 1 has had no such backward"):
        guard.meet(2)


def test_a_store_whose_host_has_left_ends_no_program():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guard = LocalGradients(_Group(), dist.TCPStore("127.0.0.1", host.port), "wrapper")
    del host
    with pytest.warns(UserWarning, match="'weight' .* the group's store has ended"):
        guard.check([("weight", torch.ones(2))], backward=3, iteration=1)


class _Cares:
    """All that optimizer_guard asks who cares for parameters, where no step is refused."""

    def __init__(self, parameters):
        self._ids = {id(parameter) for parameter in parameters}

    def may_refuse_step(self):
        return False

    def parameter_ids(self):
        return self._ids


class _Raising(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise ValueError("after the parameters have changed")


def test_a_step_is_interrupted_until_it_has_ended():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    cares = _Cares(layer.parameters())
    optimizer_guard.watch(cares)
    well, raising = torch.optim.SGD(layer.parameters(), 0.1), _Raising(layer.parameters(), 0.1)
    well.step()
    assert not optimizer_guard.interrupted(cares)
    with pytest.raises(ValueError):
        raising.step()
    assert optimizer_guard.interrupted(cares)
    assert not optimizer_guard.interrupted(cares), "each is told of once"
