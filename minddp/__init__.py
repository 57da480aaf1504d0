"""minddp: DistributedDataParallel for PyTorch, from scratch.

``DistributedDataParallel`` replaces torch's; ``functional`` has collectives with right gradients;
``SyncBatchNorm`` works on CPU too; ``trace`` draws where a step's time goes; ``planner`` computes the best
buckets. csrc/README.md says where to begin reading.

What importing it does to a process: the backends ``"shm"`` and ``"auto"`` are registered, and functions for the
process's end (a rank's last words to the others, and wrappers that go before their groups). Torch's hooks for a whole
process, on optimizers and on registrations in modules, come with the first wrapper.
"""

from ._location import package_path

__path__ = package_path(__path__)  # before anything else is imported from it

from ._extension import config as __config__
from ._extension import load as _load

_load()

# The extension must be checked first.
from . import functional, planner, shm  # noqa: E402
from .guards.stall_inspector import LostPeer  # noqa: E402
from .launching.install import install, uninstall  # noqa: E402
from .module.distributed import DistributedDataParallel  # noqa: E402
from .planner import BucketPlan  # noqa: E402
from .sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402
from .timeline import trace  # noqa: E402
from .wire import Wire  # noqa: E402

__version__ = "0.2.0"

__all__ = [
    "BucketPlan",
    "DistributedDataParallel",
    "LostPeer",
    "SyncBatchNorm",
    "Wire",
    "__config__",
    "convert_sync_batchnorm",
    "functional",
    "install",
    "planner",
    "shm",
    "trace",
    "uninstall",
]
