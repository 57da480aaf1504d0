"""Who asks the other ranks, about gradients made past a wrapper or steps that have not ended, and when."""

import pytest
import torch
import torch.distributed as dist

from minddp.guards import local_gradients, optimizer_guard
from minddp.guards.local_gradients import LocalGradients


class _Group:
    def rank(self):
        return 0

    def size(self):
        return 2


class _StandsStill:
    """A store whose waits run out: the machine stood still, and the clock went on."""

    def __init__(self, there):
        self.values, self.there, self.waited = {}, there, []

    def set(self, key, value):
        self.values[key] = value
        if self.there:
            self.values[key.removesuffix("0") + "1"] = value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def wait(self, keys, timeout):
        self.waited += keys
        raise dist.DistStoreError(f"wait timeout after {timeout}")


def _guard(there):
    guard = LocalGradients(_Group(), dist.HashStore(), "wrapper")
    guard._store = _StandsStill(there)
    return guard


def test_a_rank_that_is_there_when_the_time_is_over_is_not_missed():
    guard = _guard(there=True)
    guard.meet(1)
    guard.check([("weight", torch.ones(2))], backward=3, iteration=1)
    assert guard._store.waited == ["taken/1/1", "1/0/1"]  # nobody waits for his own word


def test_a_rank_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(local_gradients, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="on rank 0 .* rank 1 has had no such backward"):
        _guard(there=False).meet(1)
    with pytest.raises(RuntimeError, match="rank 1 has shown none"):
        _guard(there=False).check([("weight", torch.ones(2))], backward=3, iteration=1)


def test_a_rank_on_its_way_that_once_does_not_answer_is_waited_for(monkeypatch):
    """Looks at its place run out, too, on a busy machine; patience begins with the last one that did not."""
    monkeypatch.setattr(local_gradients, "PATIENCE_SECONDS", 1.5)
    store, looks = dist.HashStore(), [True, True, None, True]

    def on_its_way(rank):
        if not looks:
            dist.PrefixStore("minddp/local/wrapper", store).set("taken/1/1", "")
            return None
        return looks.pop(0)

    LocalGradients(_Group(), store, "wrapper", on_its_way).meet(1)
    assert not looks
    looks += [True, True]
    with pytest.raises(RuntimeError, match="rank 1 has had no such backward"):
        LocalGradients(_Group(), store, "wrapper", lambda rank: looks.pop() if looks else None).meet(2)


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
