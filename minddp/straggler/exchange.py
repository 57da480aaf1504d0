"""What ranks exchange for a report: their stamps, their clocks, and how fast their links are. Collective."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._functions import engine_of
from ..ranks.messages import gather_objects, ranks_text
from ..timeline.gathering import Ranks, clock_identity
from .advice import Gradients
from .probe import probe
from .result import RankSteps, Report, make_report

__all__ = ["MAX_STEPS", "StampedReducer", "collect", "report"]

MAX_STEPS = 32  # that a reducer keeps
_TIMEOUT = timedelta(seconds=30)
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of reports, by group


def report(ddp: torch.nn.Module, steps: int = 20, *, probe: bool = True) -> Report:
    """Which rank holds the others up, and in what; what of communication backward hides; what would help.

    Collective: call it on all ranks at the same point between two steps, with the same arguments. ``print()`` of
    what it returns is a table with sentences. Ranks are numbered as in the wrapper's process group.

    Args:
        ddp: the wrapper.
        steps: of the last so many synchronized steps, 1 to 32. Fewer than 8 name nobody. New buckets (after the
            first step, while ``"auto"`` measures) begin anew.
        probe: measure the links by short messages, with three ranks or more, and lone allreduces, which the
            predictions need; takes a second or so. CPU only.

    Returns:
        The same report on every rank, in seconds.

    Raises:
        TypeError, ValueError: an argument makes no sense, or differs between ranks; on every rank.
        RuntimeError: no step that has another before it has ended on all ranks; every parameter is delayed.
    """
    engine = engine_of(ddp, "report")
    with engine.collective():
        arguments = {"steps": steps, "probe": probe}
        return collect(engine.reducer, engine.group, arguments, engine.gradients(), engine.parameters.device)


class StampedReducer(Protocol):
    """The part of the reducer that a report reads."""

    def recent_steps(self, at_most: int) -> list[dict[str, Any]]: ...


def collect(
    reducer: StampedReducer,
    group: Any,
    arguments: Mapping[str, Any],
    gradients: Gradients,
    device: torch.device,
) -> Report:
    """The report, on every rank of ``group``. Collective.

    Args:
        reducer: whose steps.
        group: its process group.
        arguments: ``steps`` and ``probe``, as this rank was asked.
        gradients: what travels.
        device: where the parameters are.

    Raises:
        TypeError, ValueError: an argument makes no sense, or differs between ranks; on every rank.
        RuntimeError: too few steps have ended on all ranks; on every rank.
    """
    steps = reducer.recent_steps(MAX_STEPS)
    told = {name: repr(value) for name, value in arguments.items()}
    everyone = gather_objects({"arguments": told, "clock": clock_identity(), "steps": steps}, group)
    _check_equal([theirs["arguments"] for theirs in everyone])
    _check(arguments)
    notes: list[str] = []
    offsets = _offsets([theirs["clock"] for theirs in everyone], group)
    parts = [RankSteps(rank, offsets[rank], theirs["steps"]) for rank, theirs in enumerate(everyone)]
    probed = None
    if arguments["probe"] and group.size() > 1:
        total = sum(gradients.nbytes)
        probed = probe(group, device, total)
        if probed is None:
            notes.append("Links were not probed: that needs a process group of torch's own, and a module on the CPU.")
    try:
        return make_report(parts, arguments["steps"], gradients, probed, notes)
    except ValueError as error:
        raise RuntimeError(f"report: {error}. Train some steps first; new buckets begin anew.") from None


def _check_equal(everyone: Sequence[Mapping[str, str]]) -> None:
    for name in everyone[0]:
        by_value: dict[str, list[int]] = {}
        for rank, arguments in enumerate(everyone):
            by_value.setdefault(arguments[name], []).append(rank)
        if len(by_value) > 1:
            given = "; ".join(f"{name}={value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
            raise ValueError(f"report: the ranks passed different arguments: {given}. Pass the same on all of them.")


def _check(arguments: Mapping[str, Any]) -> None:
    steps, probes = arguments["steps"], arguments["probe"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"report: steps must be a number of steps, got {steps!r}")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"report: steps must be 1 to {MAX_STEPS}, which are kept, got {steps}")
    if not isinstance(probes, bool):
        raise TypeError(f"report: probe must be a bool, got {probes!r}")


def _offsets(clocks: Sequence[str], group: Any) -> list[int | None]:
    """By rank, its clock less rank 0's in nanoseconds; ``None`` where nobody could measure it."""
    if len(set(clocks)) == 1:
        return [0] * len(clocks)
    number = next(_numbers[group.group_name])  # the same on all ranks: they make their reports together
    if type(group) is not dist.ProcessGroup or not dist.is_initialized():
        return [0 if clock == clocks[0] else None for clock in clocks]
    store = dist.PrefixStore(f"minddp-report/{group.group_name}/{number}", dist.distributed_c10d._get_default_store())
    measured = Ranks(store, group.rank(), group.size()).offsets(clocks, _TIMEOUT)
    told: list[int | None] = gather_objects(measured, group)[0]
    return told
