"""The shared-memory transport's interface; csrc/shm."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any: ...
def empty(backend: Any, numel: int, dtype: torch.dtype) -> torch.Tensor: ...
def is_shared(backend: Any, tensor: torch.Tensor) -> bool: ...
