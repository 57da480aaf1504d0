"""``bucket_cap_mb="auto"``: bucket sizes are tried while training runs, and the fastest stays.

Overview
    A trial is a choice of buckets, run for a few iterations. Rank 0 holds the :class:`PlanSearch`,
    which asks for trials and learns their times; :class:`AutoTuner` carries them out on every rank.

        the default buckets, then those of each cap (as ``bucket_cap_mb=cap`` cuts them)
        laps among the best so far                  (a loser by more than noise drops out; the
                                                     default stays in, as what must be beaten)
        the fastest stays, and the tuner costs nothing from then on

What always holds
    Every rank leaves a trial after the same synchronized backward: iterations are counted, clocks never
    decide. Rank 0 alone chooses; the others take its buckets. A trial's time is that of the slowest
    rank. The default buckets stay unless all of another choice's middle half of steps, from quartile to
    quartile, was faster than the default's, and nine were measured of each.

Gradients do not depend on the choice but for rounding: sums of three or more ranks may be taken in
another order. Save the plan and pin it (``bucket_plan=``) where a restart must give the same bits. Nothing
is computed ahead: ``benchmarks/bucket_size.py`` shows how far each size is from the computed optimum.
"""

from __future__ import annotations

import json
import statistics
import time
import weakref
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..averager import Averager
from ..buckets import assign_buckets, ready_order
from ..logs import log
from ..messages import backend_of, broadcast_from, wait_for
from .plan import BucketPlan

__all__ = ["AutoTuner", "PlanSearch", "Trial", "TunerSettings"]

MIB = 1 << 20
_WHAT = 'bucket_cap_mb="auto"'
_ENOUGH = 9  # steps of the default, if another choice is to beat it
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
        caps_mb: caps tried, in MiB.
        noise: the relative uncertainty of the finalists' medians at which no further lap is run.
    """

    warmup_iterations: int = 5
    settle_iterations: int = 1
    measured_iterations: int = 3
    laps: int = 6
    finalists: int = 4
    caps_mb: tuple[float, ...] = (0.5, 1, 2, 5, 10, 25, 50)
    noise: float = 0.01

    def __post_init__(self) -> None:
        least = {"warmup_iterations": 2, "settle_iterations": 0, "measured_iterations": 1, "laps": 1}
        least |= {"finalists": 1, "noise": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"TunerSettings: {name} must be at least {bound}, got {getattr(self, name)}")
        if any(cap <= 0 for cap in self.caps_mb):
            raise ValueError(f"TunerSettings: caps_mb must be above 0, got {self.caps_mb}")


@dataclass(eq=False)
class Trial:
    """A choice of buckets (parameter indices in launch order), and the seconds of each step measured so far."""

    name: str
    buckets: Buckets
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.step_seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one, in seconds; of one step, that step."""
        if len(self.step_seconds) == 1:
            return self.step_seconds[0], self.step_seconds[0]
        low, _, high = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return low, high

    def summary(self) -> dict[str, Any]:
        """The trial in numbers that JSON can hold."""
        return {
            "name": self.name,
            "buckets": len(self.buckets),
            "steps": len(self.step_seconds),
            "step_seconds": self.median,
            "quartiles": list(self.quartiles),
        }


# The search: rank 0's -------------------------------------------------------------------------------


class PlanSearch:
    """Which buckets to try next, and which to keep. Knows nothing of ranks or clocks.

    ``run()`` is a generator: it yields the trial to run, is sent the seconds of its steps, and returns
    the trial to keep.

    Args:
        nbytes: bytes of each gradient, by parameter index.
        kinds: what may not share a bucket, by parameter index.
        ready_ns: when each gradient came, by parameter index; negative where none did.
        default: the buckets to start from and to beat.
        settings: how far to search.
    """

    def __init__(
        self,
        nbytes: Sequence[int],
        kinds: Sequence[Hashable],
        ready_ns: Sequence[int],
        default: Buckets,
        settings: TunerSettings,
    ):
        self.settings = settings
        self.default = Trial("default", default)
        self.trials: list[Trial] = []
        self._nbytes, self._kinds = nbytes, kinds
        self._orders = ready_order(ready_ns)

    def run(self) -> Generator[Trial, list[float], Trial]:
        """The trials, in the order of this module's text."""
        yield from self._lap([self.default, *self._capped_trials()])
        finalists = self._finalists(self.trials)
        for _ in range(1, self.settings.laps):
            if self._tells_enough(finalists):
                break
            # The default comes along even when it is behind: it is what must be beaten, and a machine
            # that slows down or speeds up meanwhile must do so for both.
            yield from self._lap(finalists if self.default in finalists else [self.default, *finalists])
            finalists = self._finalists(finalists)
        return next((trial for trial in finalists if _beats(trial, self.default)), self.default)

    def _tells_enough(self, finalists: list[Trial]) -> bool:
        """Whether no further lap is needed. The quartiles of few steps lie apart by chance, so who would beat the
        default is measured on."""
        quiet = len(finalists) == 1 or all(self._uncertainty(t) < self.settings.noise for t in finalists)
        beats = any(_beats(trial, self.default) for trial in finalists)
        return quiet and not (beats and len(self.default.step_seconds) < _ENOUGH)

    def _lap(self, trials: Sequence[Trial]) -> Generator[Trial, list[float], None]:
        for trial in trials:
            if trial not in self.trials:
                self.trials.append(trial)
            trial.step_seconds += yield trial

    def _capped_trials(self) -> list[Trial]:
        """Each different choice once."""
        trials: list[Trial] = []
        for cap in self.settings.caps_mb:
            buckets = self._capped(int(cap * MIB))
            if all(buckets != trial.buckets for trial in [self.default, *trials]):
                trials.append(Trial(f"uniform {cap:g} MiB", buckets))
        return trials

    def _capped(self, cap: int) -> Buckets:
        """As the reducer cuts them: what came and what never came do not share buckets."""
        return [b for order in self._orders for b in assign_buckets(self._nbytes, self._kinds, order, [cap])]

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


def _beats(trial: Trial, other: Trial) -> bool:
    """By more than what both have spread: their quartiles do not overlap."""
    return trial.quartiles[1] < other.quartiles[0]


# The tuner: every rank's ----------------------------------------------------------------------------


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
    """Tunes one wrapper's buckets on all ranks of its group together.

    Every rank makes one and calls :meth:`before_forward` at the start of each forward whose backward will be
    synchronized. Now and then that call is a collective, at the same iteration on every rank; so ranks that run
    out of data early (``join``) must not be tuned: stop calling it, on all ranks, from the first step in which a
    rank may be missing.

    Args:
        averager: whose buckets to tune, of the reducer that it has now.
        model: what the plan calls the model.
        settings: how long and how widely to search; may be replaced before the first step, on all ranks.
    """

    def __init__(self, averager: Averager, model: str = "", settings: TunerSettings | None = None):
        self.settings = settings if settings is not None else TunerSettings()
        self.plan: BucketPlan | None = None
        self.settled = averager.group.size() == 1  # nothing to communicate, nothing to tune
        self._averager, self._reducer = weakref.proxy(averager), averager.reducer
        self._group, self._device = averager.group, averager.parameters.device  # where the tuner's own messages lie
        self._facts, self._model = averager.parameters.facts(), model
        self._seen_iteration = 0
        self._forward_begin_ns = 0
        self._skip = -1  # not begun
        self._seconds: list[float] = []  # of each measured step of this trial, on this rank
        self._search: PlanSearch | None = None
        self._run: Generator[Trial, list[float], Trial] | None = None

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
        end = step["finalize_end_ns"]
        if self._device.type != "cpu":  # the host only enqueued the step: wait for its end
            torch.accelerator.synchronize(self._device)
            end = time.monotonic_ns()
        self._seconds.append((end - step["forward_begin_ns"]) * 1e-9)
        if len(self._seconds) == self.settings.measured_iterations:
            self._end_trial(step["ready_ns"])

    def _end_trial(self, ready_ns: Sequence[int]) -> None:
        seconds = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        wait_for(self._group.allreduce([seconds], options), self._group, f"{_WHAT}: a trial's times")
        self._seconds = []
        self._skip = self.settings.settle_iterations
        move = self._broadcast(self._next_move(seconds.tolist(), ready_ns) if self._decides() else None)
        if move.failure is not None and self._decides():
            log.warning('bucket_cap_mb="auto" gave up and keeps the default buckets: %s', move.failure)
        if move.buckets != self._reducer.buckets():
            self._averager.set_buckets(move.buckets)
        self.settled = move.plan is not None or move.failure is not None
        self.plan = move.plan
        if move.plan is not None and self._decides():
            log.info('bucket_cap_mb="auto": %s', move.plan.summary())

    def _decides(self) -> bool:
        return bool(self._group.rank() == 0)

    def _broadcast(self, move: _Move | None) -> _Move:
        """Rank 0's, as JSON: nothing that a rank is told is executed."""
        text = b"" if move is None else move.to_json().encode()
        size = torch.tensor([len(text)], device=self._device)
        broadcast_from(self._group, size, 0, f"{_WHAT}: the next buckets")
        data = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8).to(self._device)
        broadcast_from(self._group, data, 0, f"{_WHAT}: the next buckets")
        return _Move.from_json(data.cpu().numpy().tobytes().decode())

    def _next_move(self, seconds: list[float], ready_ns: Sequence[int]) -> _Move:
        """Rank 0's choice. Whatever goes wrong in it, the other ranks must hear of it and not hang."""
        try:
            return self._advance(seconds, ready_ns)
        except Exception as error:
            buckets = self._search.default.buckets if self._search is not None else self._reducer.buckets()
            return _Move(buckets, failure=f"{type(error).__name__}: {error}")

    def _advance(self, seconds: list[float], ready_ns: Sequence[int]) -> _Move:
        if self._search is None or self._run is None:
            averager, default = self._averager, self._reducer.buckets()
            self._search = PlanSearch(averager.nbytes, averager.kinds, ready_ns, default, self.settings)
            self._run = self._search.run()
            next(self._run)
        try:
            return _Move(self._run.send(seconds).buckets)
        except StopIteration as end:
            return _Move(end.value.buckets, plan=self._plan_of(end.value))

    def _plan_of(self, winner: Trial) -> BucketPlan:
        """The winner as a plan that can be saved and pinned."""
        assert self._search is not None
        ranks = self._group.size()
        notes = {
            "found_by": f'bucket_cap_mb="auto" on {ranks} ranks',
            "model": self._model,
            "ranks": ranks,
            "backend": backend_of(self._group),
            "choice": winner.name,
            "measured_step_seconds": winner.median,
            "default_step_seconds": self._search.default.median,
            "trials": [trial.summary() for trial in self._search.trials],
        }
        return BucketPlan.of_indices(winner.buckets, *self._facts, notes)
