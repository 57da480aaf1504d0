"""A long run in short, and that growth would be seen."""

import pytest

from minddp.testing import run_ranks, shutdown
from tests.lab import soak


@pytest.mark.timeout(180)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_every_kind_of_wrapper_lives_and_goes(backend):
    steps = 8
    try:
        ranks = run_ranks(soak.soak, 2, 2 * len(soak.OPTIONS) * steps, steps, steps, backend=backend, timeout=150)
    finally:
        shutdown()
    assert [len(samples) for samples in ranks] == [2 * len(soak.OPTIONS)] * 2


def _samples(**growing):
    kept = {"rss_mib": 500.0, "threads": 9, "files": 40}
    return [
        soak.Sample(step, **{name: value + growing.get(name, 0) * step for name, value in kept.items()})
        for step in range(100)
    ]


@pytest.mark.parametrize(
    "growing, told",
    [
        ({}, ""),
        ({"rss_mib": 0.05}, ""),  # 2.5 MiB
        ({"rss_mib": 0.5}, "25.0 MiB"),
        ({"threads": 1}, "50 threads"),
        ({"files": 1}, "50 files"),
    ],
)
def test_growth_is_told(growing, told):
    assert soak.growth(_samples(**growing)) == told


def test_too_few_samples_tell_nothing():
    assert "too few" in soak.growth(_samples()[:3])
