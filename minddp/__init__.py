"""minddp: DistributedDataParallel for PyTorch, from scratch.

``DistributedDataParallel`` replaces torch's; ``functional`` has collectives with right gradients;
``SyncBatchNorm`` works on CPU too; ``trace`` draws where a step's time goes; ``planner`` computes the best
buckets. ``report``, ``add_weight`` and others take a wrapper: docs/wrapper.md lists them. csrc/README.md says where
to begin reading.

Importing it registers the backends ``"shm"`` and ``"auto"``, and functions for the process's end: this rank reports
to the others how it has ended, and wrappers go before their groups. The first wrapper sets torch's hooks for a whole
process on optimizers.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

from ._extension import config as __config__
from ._extension import load as _load

_load()

# The extension must be checked first.
from . import ddp as _ddp  # noqa: E402
from . import events as _events  # noqa: E402
from .ddp import DistributedDataParallel  # noqa: E402
from .functions import FUNCTIONS as _FUNCTIONS  # noqa: E402

# The companions whose observers every wrapper gets, in this order. One that is not there is left out: the core works
# without. "shm" registers its backends.
for _name in ("torch_surface", "reductions", "wire", "timeline", "guards", "planner"):
    if _find_spec(f"{__name__}.{_name}"):
        _events.register(_import_module(f"{__name__}.{_name}.observer").OBSERVER)
if _find_spec(f"{__name__}.shm"):
    _import_module(f"{__name__}.shm")
_ddp.complete_signature()

# Public name -> the companion's module that defines it, imported when the name is asked for.
_LAZY = {
    "BucketPlan": "planner",
    "LostPeer": "guards.lost",
    "Owned": "owned",
    "SyncBatchNorm": "functional.sync_batchnorm",
    "Wire": "wire",
    "convert_sync_batchnorm": "functional.sync_batchnorm",
    "install": "cli.install",
    "trace": "timeline.recording",
    "uninstall": "cli.install",
    **_FUNCTIONS,
}
_FOLDERS = ("functional", "planner", "shm")

if TYPE_CHECKING:
    from . import functional, planner, shm
    from .cli.install import install, uninstall
    from .functional.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
    from .functions import abort_iteration, refresh, release_buckets
    from .guards.check import check_replicas, repair_replicas
    from .guards.finite_check import skipped_steps
    from .guards.lost import LostPeer
    from .owned import Owned
    from .planner import BucketPlan
    from .planner.observer import bucket_plan
    from .reductions.weights import add_weight
    from .straggler.exchange import report
    from .timeline.recording import trace
    from .timeline.step_times import last_step
    from .wire import Wire
    from .wire.format import load_wire_state, wire_state
else:

    def __getattr__(name: str) -> Any:
        """The companions' public names, imported when they are asked for."""
        if name in _FOLDERS:
            return _import_module(f".{name}", __name__)
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """What is public, and the names that every module has; the core's files can be imported all the same."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.2.0"

__all__ = [
    "BucketPlan",
    "DistributedDataParallel",
    "LostPeer",
    "Owned",
    "SyncBatchNorm",
    "Wire",
    "__config__",
    "abort_iteration",
    "add_weight",
    "bucket_plan",
    "check_replicas",
    "convert_sync_batchnorm",
    "functional",
    "install",
    "last_step",
    "load_wire_state",
    "planner",
    "refresh",
    "release_buckets",
    "repair_replicas",
    "report",
    "shm",
    "skipped_steps",
    "trace",
    "uninstall",
    "wire_state",
]
