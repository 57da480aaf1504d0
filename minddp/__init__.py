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
from typing import TYPE_CHECKING, Any

from ._extension import config as __config__
from ._extension import load as _load

_load()

# The extension must be checked first.
from . import functional, planner, shm  # noqa: E402
from ._functions import FUNCTIONS as _FUNCTIONS  # noqa: E402
from .cli.install import install, uninstall  # noqa: E402
from .ddp import DistributedDataParallel  # noqa: E402
from .functional.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402
from .guards.stall_inspector import LostPeer  # noqa: E402
from .owned import Owned  # noqa: E402
from .planner import BucketPlan  # noqa: E402
from .timeline import trace  # noqa: E402
from .wire import Wire  # noqa: E402

if TYPE_CHECKING:
    from .functions import abort_iteration, bucket_plan, refresh, release_buckets
    from .guards.check import check_replicas, repair_replicas
    from .guards.finite_check import skipped_steps
    from .reductions.weights import add_weight, clear_weight
    from .straggler.exchange import report
    from .timeline.step_times import last_step
    from .wire.format import load_wire_state, wire_state
else:

    def __getattr__(name: str) -> Any:
        """The functions that take a wrapper, imported when they are asked for."""
        if name not in _FUNCTIONS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        function = getattr(_import_module(f".{_FUNCTIONS[name]}", __name__), name)
        globals()[name] = function
        return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "clear_weight",
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
