"""Who asks the other ranks, about gradients made past a wrapper or steps that have not ended, and when."""

import time

import pytest
import torch
import torch.distributed as dist

from minddp.guards import step, times
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


@pytest.mark.parametrize("both", [True, False])
def test_a_step_that_an_exception_has_ended_on_one_rank_alone_is_named_after_the_next_backward(both):
    store = dist.HashStore()
    here, there = (_guard(store) for _ in range(2))
    there._rank = 1
    here.note_interrupted(1)
    here.check_interrupted(1)
    if both:
        there.note_interrupted(1)
        here.check_interrupted(2)
    else:
        with pytest.raises(RuntimeError, match="on rank 0 ended with an exception.* on rank 1 it did not"):
            here.check_interrupted(2)
    here.check_interrupted(3)  # once


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
    guard.note_interrupted(1)
    guard.check_interrupted(2)


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


class _Cares(step.Guarded):
    """All that minddp.guards.step asks who cares for parameters, where no step is refused."""

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
    torch.optim.SGD(layer.parameters(), 0.1)  # from now on the base class's step has torch's hooks, too
    layer(torch.ones(1, 2)).sum().backward()
    cares = _Cares(layer.parameters())
    step.watch(cares)  # it hears of the steps
    optimizer = _Raising(layer.parameters(), 0.1)

    def fail(changes):
        with pytest.raises(ValueError):
            optimizer.step(changes=changes)

    fail(0)
    assert step.interrupted(cares.last_averages), "the other ranks have stepped"
    assert not step.interrupted(cares.last_averages), "each is told of once"
    fail(0)
    optimizer.step()
    assert not step.interrupted(cares.last_averages), "tried again"
    fail(0)
    assert not step.interrupted(cares.last_averages), "no backward has been since the last step"
    cares.averaged_ns = time.monotonic_ns()
    fail(1)
    assert step.interrupted(cares.last_averages), "one of two has changed"
    fail(2)
    assert not step.interrupted(cares.last_averages), "all has changed"
