"""What :class:`Owned` asks of a wrapper: its group, its waits, its reports, which gradients are this rank's alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..averager import Averager, averagers
from ..messages import gather_objects, indented

Result = TypeVar("Result")


class Binding:
    """One wrapper, seen from its optimizer; or none, in a program of one process.

    Attributes:
        group: the wrapper's process group; None in a program of one process.
        rank, ranks: in that group.
        loads: what each rank's parameters cost so far.
    """

    def __init__(self, averager: Averager | None):
        self._averager = averager
        self.group: dist.ProcessGroup | None = None if averager is None else averager.group
        self.rank, self.ranks = (0, 1) if self.group is None else (self.group.rank(), self.group.size())
        self.loads = [0.0] * self.ranks

    @property
    def reduced(self) -> Sequence[torch.Tensor]:
        """The parameters that the wrapper reduces, the same on all ranks."""
        return () if self._averager is None else self._averager.parameters.reduced

    def follow(self, module: torch.nn.Module) -> None:
        """Goes over to a younger wrapper of ``module``, which has taken it over.

        Raises:
            RuntimeError: its process group is another one.
        """
        if self._averager is None or self._averager is averagers()[-1]:
            return
        younger = bind(module)
        if younger.group is not None and younger.group is not self.group:
            raise RuntimeError(
                f"minddp.Owned: rank {self.rank}: the module has a wrapper with another process group now. Make a "
                "new Owned, and load the old one's state."
            )
        self._averager = younger._averager

    def collective(self) -> AbstractContextManager[None]:
        """Inside, the other ranks know that this rank waits in a collective of this wrapper."""
        return nullcontext() if self._averager is None else self._averager.observers.together()

    def report(self, act: Callable[[], Result]) -> Result:
        """``act()``; the other ranks, which will wait for this one, are given the text of what it raises."""
        try:
            return act()
        except BaseException as error:
            if self._averager is not None:
                self._averager.failed(error, "collective")
            raise

    def everyone(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order. Collective."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def check_averaged(self, trained: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if the wrapper does not average all of ``trained``, or they are on several devices."""
        averager = self._averager
        if averager is None or self.ranks == 1:
            return
        where, averaged = f"minddp.Owned: rank {self.rank}: the", averager.parameter_ids()
        if unknown := [str(tuple(p.shape)) for p in trained if id(p) not in averaged]:
            raise ValueError(
                f"{where} wrapper does not average the gradients of {len(unknown)} of the parameters, so their "
                f"owner's values would overwrite the other ranks'. Their shapes:\n{indented(unknown)}\n"
                "Give them to the optimizer itself, or let the wrapper reduce them."
            )
        if len(devices := sorted({str(p.device) for p in trained})) > 1:
            raise ValueError(f"{where} parameters are on several devices, {devices}: use one Owned for each device.")

    def check_synchronized(self) -> None:
        """Raises RuntimeError if a ``.grad`` has contributions of this rank alone."""
        averager = self._averager
        if averager is None or self.ranks == 1:
            return
        where = f"minddp.Owned.step() on rank {self.rank}:"
        if averager.is_joining:
            raise RuntimeError(
                f"{where} inside of join() a rank that has run out of data takes no steps, and the others would wait "
                "for its parameters. Give all ranks as many batches, or use the optimizer itself."
            )
        if averager.observers.get("guards") is None:  # nobody knows where gradients have come from
            return
        reducer = averager.reducer
        passed = {index for index, _ in reducer.bypassed()}  # the wrapper compares these over ranks
        local = []
        for i, parameter in enumerate(averager.parameters.reduced):
            backward = reducer.arrived_in(i)  # -1: none, so the program has put the gradient there itself
            if parameter.grad is not None and i not in passed and not backward < 0:
                local += [] if reducer.averaged_since(i, backward) else [averager.parameters.names[i]]
        if local:
            raise RuntimeError(
                f"{where} gradients of {local[:10]} are this rank's alone: the last backward ran under no_sync(). An "
                "owner would send every rank a step with its own. Step after a synchronized backward, or call "
                "zero_grad() first; for local steps (local SGD) use the optimizer itself."
            )


def bind(module: torch.nn.Module) -> Binding:
    """The wrapper that averages the gradients of ``module``, which may be the wrapper itself.

    Raises:
        RuntimeError: there are several processes, and no wrapper reduces its parameters.
    """
    wanted = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    found = [averager for averager in averagers() if not wanted.isdisjoint(averager.parameter_ids())]
    if not found and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "minddp.Owned: no minddp.DistributedDataParallel reduces the module's parameters, so no rank may leave "
            "their step to another one. Wrap the module first, or use the optimizer itself."
        )
    return Binding(found[-1] if found else None)  # the youngest, which has taken them over from the others
