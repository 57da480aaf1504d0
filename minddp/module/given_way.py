"""Subclasses that pass unknown names on to their module, for which minddp's own names are unknown ones.

    class Wrapper(DistributedDataParallel):
        def __getattr__(self, name): ...  # at last: getattr(self.module, name)

With torch's class ``wrapper.report`` is the module's, if the module has one. So it is here; minddp's own is then
``minddp.DistributedDataParallel.report(wrapper)``. minddp itself asks a wrapper for none of these names.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

# Public names of minddp's class that torch's has in no release.
ADDED = (
    "abort_iteration", "add_weight", "bucket_plan", "check_finite", "check_replicas", "clear_weight",
    "has_comm_hook", "last_step", "load_wire_state", "num_iterations", "parameter_names", "reducer_parameters",
    "reduction", "refresh", "release_buckets", "repair_replicas", "report", "skipped_steps", "wire_state",
)  # fmt: skip


class _GivesWay:
    """An attribute that is not there where the wrapped module has one of that name."""

    def __init__(self, name: str, own: Any):
        self._name, self._own = name, own

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            module = instance.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, self._name):
                raise AttributeError(self._name)  # so Python asks __getattr__
        return self._own.__get__(instance, owner)


def give_way(subclass: type, base: type) -> None:
    """Where ``subclass`` answers for unknown names, those of ``base`` are unknown that its module has."""
    if inspect.getattr_static(subclass, "__getattr__", None) is torch.nn.Module.__getattr__:
        return
    for name in ADDED:
        own = inspect.getattr_static(base, name)
        if inspect.getattr_static(subclass, name) is own:
            setattr(subclass, name, _GivesWay(name, own))
