"""The search for buckets, on simulated ranks whose true times are known."""

import random

import pytest

from minddp.planner import LinearCost, bucket_spans, capped_buckets, optimal_plan
from minddp.planner.autotune import PlanSearch, TrialTimes, TunerSettings
from minddp.planner.backward_profile import BackwardProfile, bursts, simulate_step


class World:
    """A model whose step takes what the simulator says, give or take ``noise``; indices run backwards."""

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
        return simulate_step(self.profile, self.positions(buckets), self.cost).step_seconds

    def measure(self, trial, settings):
        self.runs += 1
        buckets = self.positions(trial.buckets)
        spans = bucket_spans(buckets, self.profile.ready_seconds, self.profile.nbytes, self.cost)
        collectives = [
            (sum(self.profile.nbytes[p] for p in bucket), self.profile.ready_seconds[max(bucket)], end)
            for bucket, (_, end) in zip(buckets, spans)
        ]
        shaken = [1 + self.rng.uniform(-1, 1) * self.noise for _ in range(settings.measured_iterations)]
        return TrialTimes(
            [self.step(trial.buckets) * factor for factor in shaken],
            self.profile,
            self.order,
            bursts(collectives),
        )


def search(world, settings=None, kinds=None):
    settings = settings or TunerSettings()
    nbytes = [world.profile.nbytes[world.order.index(i)] for i in range(len(world.order))]
    default = world.indices(capped_buckets(world.profile.nbytes, 25 << 20, 1 << 20, kinds))
    by_index = [kinds[world.order.index(i)] if kinds else 0 for i in range(len(world.order))]
    found = PlanSearch(nbytes, by_index, default, settings)
    run = found.run()
    trial = next(run)
    try:
        while True:
            trial = run.send(world.measure(trial, settings))
    except StopIteration as end:
        return found, end.value


def comm_bound(seed=0, n=40):
    rng = random.Random(seed)
    ready = sorted(rng.uniform(0.01, 0.2) for _ in range(n))
    return BackwardProfile(ready, [rng.choice([4 << 10, 1 << 20, 4 << 20]) for _ in ready], 0.2, 0.1, 0.002)


@pytest.mark.parametrize("seed", range(4))
def test_the_winner_is_as_fast_as_the_optimum_and_any_uniform_cap(seed):
    world = World(comm_bound(seed), LinearCost(5e-4, 4e-9), noise=0.01, seed=seed)
    found, winner = search(world)
    profile = world.profile
    optimum = optimal_plan(profile.ready_seconds, profile.nbytes, world.cost)
    caps = [world.indices(capped_buckets(profile.nbytes, cap << 18)) for cap in range(1, 120)]
    assert world.step(winner.buckets) <= min(map(world.step, caps)) * 1.02
    assert world.step(winner.buckets) <= world.step(world.indices(optimum.buckets)) * 1.02
    assert world.step(winner.buckets) < world.step(found.default.buckets) * 0.97


def test_the_cost_is_learned_from_the_trials_collectives():
    found, _ = search(World(comm_bound(), LinearCost(5e-4, 4e-9)))
    assert found.cost.latency_seconds == pytest.approx(5e-4, rel=1e-3)
    assert found.cost.seconds_per_byte == pytest.approx(4e-9, rel=1e-3)


def test_the_default_stays_where_nothing_is_faster_than_it_beyond_noise():
    hidden = BackwardProfile([0.001 * k for k in range(20)], [1000] * 20, 1.0)
    for seed in range(5):
        found, winner = search(World(hidden, LinearCost(1e-4, 1e-10), noise=0.004, seed=seed))
        assert winner is found.default


def test_plans_settle_and_losers_drop_out():
    settings = TunerSettings(laps=3, finalists=2)
    world = World(comm_bound(), LinearCost(5e-4, 4e-9), noise=0.02)
    found, _ = search(world, settings)
    first_lap = len(found.trials)
    assert len([t for t in found.trials if t.name.startswith("planned")]) == 1  # the second was the same
    assert first_lap < world.runs <= first_lap + 2 * 3  # two finalists and the default, twice
    assert len({str(t.buckets) for t in found.trials}) == first_lap


def test_no_trial_mixes_kinds():
    kinds = [k % 3 // 2 for k in range(40)]
    world = World(comm_bound(), LinearCost(5e-4, 4e-9))
    found, _ = search(world, kinds=kinds)
    assert any(t.name.startswith("planned") for t in found.trials)
    for trial in found.trials:
        for bucket in world.positions(trial.buckets):
            assert len({kinds[position] for position in bucket}) == 1


def test_a_summary_predicts_what_the_simulator_measured():
    found, winner = search(World(comm_bound(), LinearCost(5e-4, 4e-9)))
    summary = found.summary(winner)
    assert summary["predicted_step_seconds"] == pytest.approx(summary["step_seconds"], rel=1e-3)
    assert summary["buckets"] == len(winner.buckets)


@pytest.mark.parametrize("noise, seed", [(0.1, 28), (0.25, 8), (0.25, 1), (0.5, 2)])
def test_being_measured_in_every_lap_does_not_hand_the_default_the_win(noise, seed):
    found, winner = search(World(comm_bound(seed), LinearCost(5e-4, 4e-9), noise=noise, seed=seed))
    often = [trial.median for trial in found.trials if len(trial.step_seconds) >= 9]
    assert winner is not found.default or winner.median <= 1.01 * min(often)


@pytest.mark.parametrize(
    "bad", [{"warmup_iterations": 1}, {"measured_iterations": 0}, {"caps_mb": (1, 0)}, {"noise": -0.1}]
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ValueError, match=f"TunerSettings: {next(iter(bad))} must be"):
        TunerSettings(**bad)
