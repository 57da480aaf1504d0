"""Pickles and copies of the wrapper, which have a reducer of their own; and its end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import choose_group
from .parameters import Parameters

# Given up when the interpreter ends; `device` and the like stay.
_GIVEN_UP = ("process_group", "_minddp_engine", "_minddp_delayed")
_TIED_TO_GROUP = (*_GIVEN_UP, "_minddp_wrapped")  # made anew where the module is unpickled or copied


class Copies:
    """The part of :class:`DistributedDataParallel` that is pickled, copied and given up."""

    module: torch.nn.Module
    forward_sync_buffers: bool
    _minddp_wrapped: Parameters
    _minddp_engine: Any
    _minddp_take_parameters: Any

    def _minddp_let_go(self) -> None:
        """Of the process group and all that works with it; nothing can be done with the wrapper any more."""
        self.__dict__.update(dict.fromkeys(_GIVEN_UP))

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP pickling is only supported with the default process group: construct without "
                "process_group= to pickle or copy the wrapper, or save ddp.module.state_dict()."
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _TIED_TO_GROUP}
        state["broadcast_buffers"] = self.forward_sync_buffers
        state["_minddp_hook"] = None if self._minddp_engine is None else self._minddp_engine.hook
        state["_minddp_names"] = self._minddp_wrapped.for_copies()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        state.pop("broadcast_buffers", None)
        mine = "_minddp" if "_minddp_names" in state else ""  # else pickled by an older minddp
        hook, names = state.pop(f"{mine}_hook", None), state.pop(f"{mine}_names")
        self.process_group = choose_group(None, None)
        super().__setstate__(state)  # type: ignore[misc]
        self._minddp_wrapped = Parameters.like(self.module, names)
        self._minddp_take_parameters()
        if hook is not None and self._minddp_engine is not None:
            self._minddp_engine.set_hook(*hook)
