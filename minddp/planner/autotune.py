"""``bucket_cap_mb="auto"``: buckets found by measuring, while training runs.

Overview
    A trial is a choice of buckets, run for a few iterations. Rank 0 holds the :class:`PlanSearch`,
    which asks for trials and learns their times; :class:`AutoTuner` carries them out on every rank.

        a few allreduces of growing size            (what one costs, refined by the trials' own)
        the default buckets, then uniform caps
        the plan for the times measured so far      (minddp.planner; again until it settles)
        laps among the best so far                  (a loser by more than noise drops out; the
                                                     default stays in, as what must be beaten)
        the buckets with the shortest median step stay, and the tuner costs nothing from then on

What always holds
    Every rank leaves a trial after the same synchronized backward: iterations are counted, clocks never
    decide. Rank 0 alone chooses; the others take its buckets. A trial's time is that of the slowest
    rank. The default buckets stay unless others measured faster by more than noise.

Gradients do not depend on the choice but for rounding: sums of three or more ranks may be taken in
another order. Save the plan and pin it (``bucket_plan=``) where a restart must give the same bits.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..logs import log
from .backward_profile import (
    BackwardProfile,
    Burst,
    SimulatedStep,
    StepTimes,
    bursts,
    fit_bursts,
    simulate_step,
)
from .collective_cost import LinearCost, measure_allreduce
from .optimal import capped_buckets, optimal_plan
from .plan import BucketPlan

__all__ = ["AutoTuner", "PlanSearch", "Trial", "TrialTimes", "TunerSettings"]

MIB = 1 << 20
Buckets = list[list[int]]


@dataclass(frozen=True)
class TunerSettings:
    """How long and how widely to search.

    Attributes:
        warmup_iterations: iterations before anything is measured (buckets are rebuilt, caches fill).
        settle_iterations: iterations after a change of buckets that are not measured.
        measured_iterations: iterations measured per trial and lap.
        laps: how often the finalists are measured at most, the first time included.
        finalists: how many trials go through the later laps.
        max_plans: how often to plan again with the times that the plan itself showed.
        caps_mb: uniform caps tried, in MiB.
        noise: the relative difference below which two step times count as equal.
        slack: the part of a step that a plan may finish later than the optimum to have fewer buckets.
    """

    warmup_iterations: int = 5
    settle_iterations: int = 1
    measured_iterations: int = 3
    laps: int = 6
    finalists: int = 4
    max_plans: int = 3
    caps_mb: tuple[float, ...] = (0.5, 1, 2, 5, 10, 25, 50)
    noise: float = 0.01
    slack: float = 0.005

    def __post_init__(self) -> None:
        least = {"warmup_iterations": 2, "settle_iterations": 0, "measured_iterations": 1, "laps": 1}
        least |= {"finalists": 1, "max_plans": 0, "noise": 0, "slack": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"TunerSettings: {name} must be at least {bound}, got {getattr(self, name)}")
        if any(cap <= 0 for cap in self.caps_mb):
            raise ValueError(f"TunerSettings: caps_mb must be above 0, got {self.caps_mb}")


@dataclass(frozen=True)
class TrialTimes:
    """What a trial showed: the slowest rank's step times, the latest ready times, the collectives.

    Attributes:
        step_seconds: one entry a measured iteration.
        profile: the backward, gradients in ready order.
        order: the parameter index at each position of the profile.
        bursts: the collectives, from the slowest rank's launch to their end.
    """

    step_seconds: list[float]
    profile: BackwardProfile
    order: list[int]
    bursts: list[Burst]


@dataclass(eq=False)
class Trial:
    """A choice of buckets (parameter indices in launch order) and what it showed so far."""

    name: str
    buckets: Buckets
    laps: list[TrialTimes] = field(default_factory=list)

    @property
    def step_seconds(self) -> list[float]:
        """All measured steps."""
        return [seconds for lap in self.laps for seconds in lap.step_seconds]

    @property
    def median(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.step_seconds)


# The search: rank 0's -------------------------------------------------------------------------------


class PlanSearch:
    """Which buckets to try next, and which to keep. Knows nothing of ranks or clocks.

    ``run()`` is a generator: it yields the trial to run, is sent its :class:`TrialTimes`, and returns
    the trial to keep.

    Args:
        nbytes: bytes of each gradient, by parameter index.
        kinds: what may not share a bucket, by parameter index.
        default: the buckets to start from and to beat.
        settings: how far to search.
        samples: allreduces measured alone; the trials' own collectives are added to them.
    """

    def __init__(
        self,
        nbytes: Sequence[int],
        kinds: Sequence[Hashable],
        default: Buckets,
        settings: TunerSettings,
        samples: Sequence[Burst] = (),
    ):
        self.nbytes = list(nbytes)
        self.kinds = list(kinds)
        self.settings = settings
        self.default = Trial("default", default)
        self.trials: list[Trial] = []
        self._bursts = list(samples)
        self._cost: LinearCost | None = None

    def run(self) -> Generator[Trial, TrialTimes, Trial]:
        """The trials, in the order of this module's text."""
        yield from self._lap([self.default])
        yield from self._lap(self._uniform_trials())
        yield from self._planned_trials()
        finalists = self._finalists(self.trials)
        for _ in range(1, self.settings.laps):
            if len(finalists) == 1 or all(self._uncertainty(t) < self.settings.noise for t in finalists):
                break
            # The default comes along even when it is behind: it is what must be beaten, and a machine
            # that slows down or speeds up meanwhile must do so for both.
            yield from self._lap(finalists if self.default in finalists else [self.default, *finalists])
            finalists = self._finalists(finalists)
        best = finalists[0]
        return self.default if self.default.median <= best.median * (1 + self.settings.noise) else best

    @property
    def cost(self) -> LinearCost:
        """What an allreduce costs, as far as was seen."""
        if self._cost is None:
            self._cost = fit_bursts(self._bursts)
        return self._cost

    def predict(self, trial: Trial) -> SimulatedStep:
        """The step that the cost model expects of ``trial``, from the times that it showed itself."""
        steps = [self._replay(trial.buckets, lap) for lap in trial.laps]
        return sorted(steps, key=lambda step: step.step_seconds)[len(steps) // 2]

    def _replay(self, buckets: Buckets, times: TrialTimes) -> SimulatedStep:
        position = {index: p for p, index in enumerate(times.order)}
        positions = [[position[index] for index in bucket] for bucket in buckets]
        return simulate_step(times.profile, positions, self.cost)

    def summary(self, trial: Trial) -> dict[str, Any]:
        """A trial in numbers that JSON can hold."""
        return {
            "name": trial.name,
            "buckets": len(trial.buckets),
            "steps": len(trial.step_seconds),
            "step_seconds": trial.median,
            "quartiles": _quartiles(trial.step_seconds),
            "predicted_step_seconds": self.predict(trial).step_seconds,
        }

    def _lap(self, trials: Sequence[Trial]) -> Generator[Trial, TrialTimes, None]:
        for trial in trials:
            if trial not in self.trials:
                self.trials.append(trial)
            times = yield trial
            trial.laps.append(times)
            self._bursts += times.bursts
            self._cost = None

    def _uniform_trials(self) -> list[Trial]:
        """Uniform caps along the default's ready order; each different choice once."""
        trials: list[Trial] = []
        for cap in self.settings.caps_mb:
            buckets = self._in_ready_order(self.default.laps[0], int(cap * MIB))
            if all(buckets != trial.buckets for trial in [self.default, *trials]):
                trials.append(Trial(f"uniform {cap:g} MiB", buckets))
        return trials

    def _in_ready_order(self, times: TrialTimes, cap: int) -> Buckets:
        kinds = [self.kinds[index] for index in times.order]
        buckets = capped_buckets(times.profile.nbytes, cap, kinds=kinds)
        return [[times.order[position] for position in bucket] for bucket in buckets]

    def _planned_trials(self) -> Generator[Trial, TrialTimes, None]:
        """Plans from the best trial's times, then from the plan's own, until a plan comes again."""
        base = min(self.trials, key=lambda trial: trial.median)
        for number in range(1, self.settings.max_plans + 1):
            buckets = self._plan(base)
            if any(buckets == trial.buckets for trial in self.trials):
                return
            base = Trial(f"planned {number}", buckets)
            yield from self._lap([base])

    def _plan(self, base: Trial) -> Buckets:
        times = base.laps[-1]
        plan = optimal_plan(
            times.profile.ready_seconds,
            times.profile.nbytes,
            self.cost,
            kinds=[self.kinds[index] for index in times.order],
            slack_seconds=self.settings.slack * base.median,
        )
        return [[times.order[position] for position in bucket] for bucket in plan.buckets]

    def _finalists(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those of ``trials`` that may be the best one, as far as their spread tells; the fastest first."""
        ranked = sorted(trials, key=lambda trial: trial.median)[: self.settings.finalists]
        best = ranked[0]
        margin = 1 + self.settings.noise + self._uncertainty(best)
        return [t for t in ranked if t.median <= best.median * (margin + self._uncertainty(t))]

    def _uncertainty(self, trial: Trial) -> float:
        """Twice the standard error of a trial's median, relative to it: 2 x 1.25 sigma / sqrt(n).

        Sigma is that of all trials' steps around their medians, for a few steps do not tell their own:
        the deviation that two thirds of them stay below, each median's own step left out.
        """
        deviations = sorted(
            deviation
            for other in self.trials
            for deviation in sorted(abs(s / other.median - 1) for s in other.step_seconds)[1:]
        )
        sigma = deviations[int(0.68 * len(deviations))] if deviations else 0.0
        return 2 * 1.25 * sigma / len(trial.step_seconds) ** 0.5


def _quartiles(samples: Sequence[float]) -> list[float]:
    """The lower and the upper one; of one sample, that sample."""
    cuts = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples
    return [cuts[0], cuts[-1]]


# The tuner: every rank's ----------------------------------------------------------------------------


class TunableReducer(Protocol):
    """The part of the reducer that the tuner uses."""

    def buckets(self) -> list[list[int]]: ...

    def set_buckets(self, buckets: list[list[int]]) -> None: ...

    def last_step(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Move:
    """What rank 0 tells all: the buckets to use from now on; the plan to keep, or why there is none."""

    buckets: Buckets
    plan: BucketPlan | None = None
    failure: str | None = None

    def to_json(self) -> str:
        plan = None if self.plan is None else self.plan.to_json()
        return json.dumps({"buckets": self.buckets, "plan": plan, "failure": self.failure})

    @classmethod
    def from_json(cls, text: str) -> _Move:
        told = json.loads(text)
        plan = None if told["plan"] is None else BucketPlan.from_json(told["plan"])
        return cls(told["buckets"], plan, told["failure"])


class AutoTuner:
    """Tunes one reducer's buckets on all ranks of ``group`` together.

    Every rank makes one with the same arguments and calls :meth:`before_forward` at the start of each
    forward whose backward will be synchronized. Now and then that call is a collective, at the same
    iteration on every rank; so ranks that run out of data early (``join``) must not be tuned: stop
    calling it, on all ranks, from the first step in which a rank may be missing.

    Args:
        reducer: whose buckets to tune.
        group: the process group of its collectives.
        parameter_names: names by parameter index; ``nbytes``, ``shapes`` and ``dtypes`` belong to them.
        nbytes: bytes each parameter's gradient puts on the wire.
        shapes: shapes of the parameters.
        dtypes: dtypes of the parameters.
        kinds: what may not share a bucket, such as (dtype, device); parameters with sparse gradients
            each need a kind of their own. The dtypes when None.
        device: where the tuner's own messages lie: the parameters' device.
        settings: how long and how widely to search; may be replaced before the first step, on all ranks.
    """

    def __init__(
        self,
        reducer: TunableReducer,
        group: Any,
        parameter_names: Sequence[str],
        nbytes: Sequence[int],
        *,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        kinds: Sequence[Hashable] | None = None,
        device: torch.device | str = "cpu",
        settings: TunerSettings | None = None,
    ):
        self._device = torch.device(device)
        self.settings = settings if settings is not None else TunerSettings()
        self.plan: BucketPlan | None = None
        self.settled = dist.get_world_size(group) == 1  # nothing to communicate, nothing to tune
        self._reducer = reducer
        self._group = group
        self._names, self._shapes, self._dtypes = list(parameter_names), list(shapes), list(dtypes)
        self._nbytes = list(nbytes)
        self._kinds = list(kinds if kinds is not None else dtypes)
        self._seen_iteration = 0
        self._forward_begin_ns = 0
        self._skip = -1  # not begun
        self._steps: list[StepTimes] = []
        self._samples: list[Burst] | None = None
        self._search: PlanSearch | None = None
        self._run: Generator[Trial, TrialTimes, Trial] | None = None

    def before_forward(self) -> None:
        """Takes in the step that just ended; a no-op once ``settled``."""
        if self.settled:
            return
        step = self._reducer.last_step()
        if step["iteration"] > self._seen_iteration:  # else it is another forward of the same step
            self._seen_iteration = step["iteration"]
            if step["forward_begin_ns"] > step["backward_begin_ns"]:  # the next forward's already
                step["forward_begin_ns"] = self._forward_begin_ns
            self._take_in(step)
        self._forward_begin_ns = time.monotonic_ns()

    def _take_in(self, step: dict[str, Any]) -> None:
        if self._skip < 0:
            self._skip = self.settings.warmup_iterations
        if self._skip > 0:
            self._skip -= 1
            return
        self._steps.append(self._read(step))
        if len(self._steps) == self.settings.measured_iterations:
            self._end_trial()

    def _read(self, step: dict[str, Any]) -> StepTimes:
        times = StepTimes.from_last_step(step)
        if self._device.type != "cpu":  # the host only enqueued the step: wait for its end
            torch.accelerator.synchronize(self._device)
            times = times.stretched_to((time.monotonic_ns() - step["forward_begin_ns"]) * 1e-9)
        return times

    def _end_trial(self) -> None:
        times = self._agree(self._steps)
        self._steps = []
        self._skip = self.settings.settle_iterations
        if self._samples is None:
            self._samples = self._measure_alone()
        move = self._broadcast(self._next_move(times) if self._decides() else None)
        if move.failure is not None and self._decides():
            log.warning('bucket_cap_mb="auto" gave up and keeps the default buckets: %s', move.failure)
        if move.buckets != self._reducer.buckets():
            self._reducer.set_buckets(move.buckets)
        self.settled = move.plan is not None or move.failure is not None
        self.plan = move.plan
        if move.plan is not None and self._decides():
            log.info('bucket_cap_mb="auto": %s', move.plan.summary())

    def _decides(self) -> bool:
        return dist.get_rank(self._group) == 0

    def _measure_alone(self) -> list[Burst]:
        """Allreduces with nothing beside them: the small ones show the latency, which buckets hide."""
        largest = min(sum(self._nbytes), 4 * MIB)
        sizes, seconds = measure_allreduce(self._group, max_nbytes=largest, device=self._device, budget_seconds=1.0)
        return [Burst(1, nbytes, t) for nbytes, t in zip(sizes, seconds, strict=True)]

    def _agree(self, steps: Sequence[StepTimes]) -> TrialTimes:
        """This trial's times over all ranks."""
        rows = [step.row() for step in steps]
        message = torch.tensor(rows, dtype=torch.float64, device=self._device)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        slowest = [step.with_row(row) for step, row in zip(steps, message.tolist(), strict=True)]
        times = StepTimes.median(slowest)
        profile, order = BackwardProfile.from_times(times, self._nbytes)
        return TrialTimes([step.step_seconds for step in slowest], profile, order, bursts(times.collectives))

    def _broadcast(self, move: _Move | None) -> _Move:
        """Rank 0's, as JSON: nothing that a rank is told is executed."""
        text = b"" if move is None else move.to_json().encode()
        size = torch.tensor([len(text)], device=self._device)
        dist.broadcast(size, group=self._group, group_src=0)
        data = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8).to(self._device)
        dist.broadcast(data, group=self._group, group_src=0)
        return _Move.from_json(data.cpu().numpy().tobytes().decode())

    def _next_move(self, times: TrialTimes) -> _Move:
        """Rank 0's choice. Whatever goes wrong in it, the other ranks must hear of it and not hang."""
        try:
            return self._advance(times)
        except Exception as error:
            buckets = self._search.default.buckets if self._search is not None else self._reducer.buckets()
            return _Move(buckets, failure=f"{type(error).__name__}: {error}")

    def _advance(self, times: TrialTimes) -> _Move:
        if self._search is None or self._run is None:
            # On a device nobody knows when a gradient was ready: only when the host had enqueued what makes it.
            settings = self.settings if self._device.type == "cpu" else replace(self.settings, max_plans=0)
            self._search = PlanSearch(
                self._nbytes, self._kinds, self._reducer.buckets(), settings, self._samples or ()
            )
            self._run = self._search.run()
            next(self._run)
        try:
            return _Move(self._run.send(times).buckets)
        except StopIteration as end:
            return _Move(end.value.buckets, plan=self._plan_of(end.value))

    def _plan_of(self, winner: Trial) -> BucketPlan:
        """The winner as a plan that can be saved and pinned; positions count along its launch order."""
        search = self._search
        assert search is not None
        order = [index for bucket in winner.buckets for index in bucket]
        positions = iter(range(len(order)))
        predicted = search.predict(winner)
        plan = BucketPlan(
            [[next(positions) for _ in bucket] for bucket in winner.buckets],
            finish_seconds=predicted.finish_seconds,
            notes={
                "found_by": f'bucket_cap_mb="auto" on {dist.get_world_size(self._group)} ranks',
                "choice": winner.name,
                "predicted_step_seconds": predicted.step_seconds,
                "measured_step_seconds": winner.median,
                "default_step_seconds": search.default.median,
                "allreduce": repr(search.cost),
                "nbytes": sum(self._nbytes),
                "trials": [search.summary(trial) for trial in search.trials],
            },
        )
        return plan.for_parameters(self._names, self._shapes, self._dtypes, order)
