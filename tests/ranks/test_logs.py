"""What a program's logging does with minddp's records ends nothing."""

import logging

import pytest
import torch

from minddp.guards.words import Words
from minddp.logs import log


@pytest.fixture
def records():
    """What comes to a handler whose filter expects a step in every record, and raises for all others."""
    seen = []

    def expects_a_step(record):
        seen.append(record)
        return record.args["step"] >= 0

    handler = logging.Handler()
    handler.addFilter(expects_a_step)
    logger = logging.getLogger("minddp")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)


@pytest.mark.parametrize("say", [log.warning, log.error])
def test_a_filter_that_raises_ends_nothing(say, records):
    say("rank %d is late", 1)
    assert [record.getMessage() for record in records] == ["rank 1 is late"]
    assert records[0].filename == "test_logs.py"


class _Nobody:
    """A group of two ranks, a wrapper's watch and its watchdog: nobody answers."""

    interval, lost, rank, size = 0.01, False, lambda self: 0, lambda self: 2

    @property
    def group(self):
        return self

    dog = group

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_a_wait_ends_where_the_clock_stands_still(monkeypatch, records):
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    monkeypatch.setattr("minddp.guards.times.look", 0.01)
    Words(_Nobody()).check([("weight", torch.ones(2))], 3, iteration=1)
    assert "has said nothing about its own" in records[0].getMessage()
