"""Pickles and copies of a wrapper, which have a reducer of their own, and pickles of torch's class."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP

from ..config import MIB, choose_group
from ..parameters import Parameters
from ..torch_base import TorchBase, fill
from .delayed_params import name_of

_MADE_ANEW = ("process_group", "_minddp_averager", "_minddp_observers", "_minddp_wrapped", "_minddp_cast")
# The constructor's arguments that torch's class keeps under their names.
_ARGUMENTS = (
    "device_ids", "output_device", "dim", "find_unused_parameters", "static_graph", "gradient_as_bucket_view",
    "skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation", "mixed_precision",
)  # fmt: skip


class _Copies:
    def __getstate__(self: Any) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP pickling is only supported with the default process group: construct without "
                "process_group= to pickle or copy the wrapper, or save ddp.module.state_dict()."
            )
        state = {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}
        state["broadcast_buffers"] = self.forward_sync_buffers
        state["_minddp_hook"] = self._minddp_averager.hook
        state["_minddp_left_alone"] = self._minddp_wrapped.left_alone
        state["_minddp_settings"] = settings = self._minddp_observers.settings
        trigger = settings["torch_surface"].trigger
        if trigger is not None and name_of(self.module, trigger) is None:
            raise RuntimeError(
                "A DistributedDataParallel whose param_to_hook_all_reduce is not a parameter of its module cannot be "
                "copied or pickled: the copy's delayed gradients would never be reduced. Save the state_dict()."
            )
        return state

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        if "_minddp_left_alone" not in state:
            return _load_torchs(self, state)
        state = dict(state)
        state.pop("broadcast_buffers", None)
        hook, left_alone, settings = (state.pop(f"_minddp_{name}") for name in ("hook", "left_alone", "settings"))
        self.process_group = choose_group(None, None)
        super(_TorchDDP, self).__setstate__(state)  # type: ignore[misc]
        self._minddp_observe(settings)
        self._minddp_observers.get("torch_surface").is_copied = True
        self._minddp_wrapped = Parameters(self.module, left_alone, self._minddp_apart)
        self._minddp_average(None)
        if hook is not None:
            self._minddp_averager.set_hook(*hook)


def _load_torchs(ddp: Any, state: dict[str, Any]) -> None:
    """Becomes what torch's class has pickled as ``state``: made anew with its arguments, and all other attributes
    as they were.

    Raises:
        RuntimeError: some of its parameters' reduction was delayed, of which the state does not say until when.
    """
    if state.get("_delay_all_reduce_params"):
        raise RuntimeError(
            "DistributedDataParallel: a wrapper of torch's class with delay_all_reduce_named_params cannot be "
            "loaded as one of minddp's. Save ddp.module.state_dict() there, and load it into a module here."
        )
    caps = [cap / MIB for cap in state.get("bucket_bytes_cap_list", ())]
    cap = None if caps or state.get("bucket_bytes_cap_default", True) else state["bucket_bytes_cap"] / MIB
    named = {name: state[name] for name in _ARGUMENTS if name in state}
    buffers = state.get("forward_sync_buffers", state.get("broadcast_buffers", True))
    # A subclass's constructor has arguments of its own.
    base: Any = next(cls for cls in type(ddp).__mro__ if cls.__base__ is TorchBase)
    base.__init__(
        ddp,
        state["_modules"]["module"],
        **named,
        bucket_cap_mb=cap,
        bucket_cap_mb_list=caps or None,
        forward_sync_buffers=buffers,
        init_sync=False,
    )
    own = vars(ddp).keys() - vars(torch.nn.Module()).keys()
    more = {name: value for name, value in state.items() if name not in own and not hasattr(type(ddp), name)}
    vars(ddp).update(more)


fill(_Copies)
