"""minddp: DistributedDataParallel for PyTorch, from scratch."""

from ._extension import config as __config__
from ._extension import load as _load

_load()

from .distributed import DistributedDataParallel  # noqa: E402  (the extension must be checked first)

__all__ = ["DistributedDataParallel", "__config__"]
