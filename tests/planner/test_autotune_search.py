"""The search for buckets, on simulated ranks whose true times are known."""

import random
from dataclasses import dataclass

import pytest

from minddp.buckets import assign_buckets
from minddp.planner import LinearCost, optimal_plan, plan_finish
from minddp.planner.autotune import PlanSearch, Trial, TunerSettings

MIB = 1 << 20


@dataclass
class Profile:
    """A backward: when each gradient is ready, in ready order, its bytes, and the length of backward."""

    ready: list[float]
    nbytes: list[int]
    backward: float


class World:
    """A model whose step takes what the cost says, give or take ``noise``; indices run backwards."""

    def __init__(self, profile, cost, noise=0.0, seed=0):
        self.profile, self.cost, self.noise = profile, cost, noise
        self.rng = random.Random(seed)
        self.order = list(range(len(profile.nbytes)))[::-1]
        self.runs = 0

    def positions(self, buckets):
        return [[self.order.index(index) for index in bucket] for bucket in buckets]

    def indices(self, buckets):
        return [[self.order[position] for position in bucket] for bucket in buckets]

    def step(self, buckets):
        profile = self.profile
        finish = plan_finish(self.positions(buckets), profile.ready, profile.nbytes, self.cost)
        return 0.1 + max(profile.backward, finish)

    def measure(self, trial, settings):
        self.runs += 1
        shaken = [1 + self.rng.uniform(-1, 1) * self.noise for _ in range(settings.measured_iterations)]
        return [self.step(trial.buckets) * factor for factor in shaken]

    def capped(self, caps, kinds=None):
        """As ``bucket_cap_mb`` cuts them; several caps: in turn."""
        nbytes, by_index = self.by_index(kinds)
        return assign_buckets(nbytes, by_index, self.order, caps)

    def by_index(self, kinds=None):
        positions = [self.order.index(i) for i in range(len(self.order))]
        return [self.profile.nbytes[p] for p in positions], [kinds[p] if kinds else 0 for p in positions]


def search(world, settings=None, kinds=None):
    settings = settings or TunerSettings()
    nbytes, by_index = world.by_index(kinds)
    ready_ns = [world.order.index(i) for i in range(len(world.order))]
    default = world.capped([MIB, 25 * MIB, 25 * MIB], kinds)
    found = PlanSearch(nbytes, by_index, ready_ns, default, settings)
    return found, run(found, lambda trial: world.measure(trial, settings))


def run(found, measure):
    """The trial that the search keeps."""
    running = found.run()
    trial = next(running)
    try:
        while True:
            trial = running.send(measure(trial))
    except StopIteration as end:
        return end.value


def comm_bound(seed=0, n=40):
    rng = random.Random(seed)
    ready = sorted(rng.uniform(0.01, 0.2) for _ in range(n))
    return Profile(ready, [rng.choice([4 << 10, 1 << 20, 4 << 20]) for _ in ready], 0.2)


@pytest.mark.parametrize("seed", range(4))
def test_the_winner_is_as_fast_as_any_uniform_cap_and_near_the_optimum(seed):
    world = World(comm_bound(seed), LinearCost(5e-4, 4e-9), noise=0.01, seed=seed)
    found, winner = search(world)
    profile = world.profile
    optimum = optimal_plan(profile.ready, profile.nbytes, world.cost)
    assert world.step(winner.buckets) <= min(world.step(world.capped([cap << 18])) for cap in range(1, 120)) * 1.02
    assert world.step(winner.buckets) <= world.step(world.indices(optimum.buckets)) * 1.04
    assert world.step(winner.buckets) < world.step(found.default.buckets) * 0.97


def test_a_cap_is_cut_as_bucket_cap_mb_cuts_it_and_what_never_came_stays_apart():
    nbytes = [MIB] * 6
    came = [5, 4, -1, 3, 2, 1]  # the third gradient never came
    found = PlanSearch(nbytes, [0] * 6, came, [[0, 1, 2, 3, 4, 5]], TunerSettings(caps_mb=(2, 25)))
    run(found, lambda trial: [1.0, 1.0, 1.0])
    assert [(trial.name, trial.buckets) for trial in found.trials[1:]] == [
        ("uniform 2 MiB", [*assign_buckets(nbytes, [0] * 6, [5, 4, 3, 1, 0], [2 * MIB]), [2]]),
        ("uniform 25 MiB", [[5, 4, 3, 1, 0], [2]]),
    ]


@pytest.mark.parametrize("noise", [0.004, 0.01, 0.3])
def test_the_default_stays_where_nothing_is_faster_than_it_beyond_noise(noise):
    """Also of quiet steps, so few of which are measured that their quartiles lie apart by chance."""
    hidden = Profile([0.001 * k for k in range(40)], [MIB] * 40, 1.0)
    kept = 0
    for seed in range(40):
        found, winner = search(World(hidden, LinearCost(1e-4, 1e-10), noise=noise, seed=seed))
        kept += winner is found.default
    assert kept >= 32


@pytest.mark.parametrize("gap, kept", [(0.12, "default"), (0.30, "uniform 1 MiB")])
def test_the_default_stays_where_its_quartiles_overlap_the_others(gap, kept):
    """Steps between 0.9 and 1.1 of their median: twelve percent less is within what was measured, thirty is not."""
    spread = [0.9, 0.95, 1.0, 1.05, 1.1]
    settings = TunerSettings(measured_iterations=5, caps_mb=(1,))
    found = PlanSearch([MIB] * 4, [0] * 4, [3, 2, 1, 0], [[3, 2, 1, 0]], settings)
    winner = run(found, lambda trial: [part * (1.0 if trial is found.default else 1 - gap / 1.5) for part in spread])
    assert winner.name == kept


def test_losers_drop_out():
    settings = TunerSettings(laps=3, finalists=2)
    world = World(comm_bound(), LinearCost(5e-4, 4e-9), noise=0.02)
    found, _ = search(world, settings)
    first_lap = len(found.trials)
    assert first_lap < world.runs <= first_lap + 2 * 3  # two finalists and the default, twice
    assert len({str(t.buckets) for t in found.trials}) == first_lap


def test_no_trial_mixes_kinds():
    kinds = [k % 3 // 2 for k in range(40)]
    world = World(comm_bound(), LinearCost(5e-4, 4e-9))
    found, _ = search(world, kinds=kinds)
    assert len(found.trials) > 3
    for trial in found.trials:
        for bucket in world.positions(trial.buckets):
            assert len({kinds[position] for position in bucket}) == 1


def test_a_trials_summary_has_its_median_and_quartiles():
    trial = Trial("uniform 1 MiB", [[0], [1]], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert trial.summary() == {
        "name": "uniform 1 MiB", "buckets": 2, "steps": 5, "step_seconds": 0.3, "quartiles": [0.2, 0.4],
    }  # fmt: skip
    assert Trial("one", [[0]], [0.1]).quartiles == (0.1, 0.1)


@pytest.mark.parametrize("noise, seed", [(0.02, 1), (0.1, 28), (0.25, 8), (0.25, 1), (0.5, 2)])
def test_being_measured_in_every_lap_does_not_hand_the_default_the_win(noise, seed):
    """The fastest by its median is kept wherever its quartiles lie below the default's."""
    found, winner = search(World(comm_bound(seed), LinearCost(5e-4, 4e-9), noise=noise, seed=seed))
    often = [trial for trial in found.trials if len(trial.step_seconds) >= 9]
    apart = [trial for trial in often if trial.quartiles[1] < found.default.quartiles[0]]
    assert winner.median == min((trial.median for trial in apart), default=found.default.median)
    assert apart or noise > 0.02  # the more noise, the more a choice must win by


@pytest.mark.parametrize(
    "bad", [{"warmup_iterations": 1}, {"measured_iterations": 0}, {"caps_mb": (1, 0)}, {"noise": -0.1}]
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError, match=f"TunerSettings: {next(iter(bad))} must be"):
        TunerSettings(**bad)
