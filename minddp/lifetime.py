"""Who outlives whom: process groups, reducers and the interpreter.

Gloo's threads destroy a collective once it has ended, and take the GIL for that when its tensors are known to
Python. Two things follow. Nobody may join those threads while holding the GIL. And they must be gone before
the interpreter is: one that asks for the GIL while Python shuts down is ended in the middle of a C++
destructor, and the process aborts ("terminate called without an active exception"). A group that was given
to ``dist.destroy_process_group()`` ends with its last reference, so nothing here may keep one beyond that.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

# Its functions take the default group as a default argument, evaluated where the module is imported, and
# torch imports it at the first forward or optimizer. Imported here, usually before there is a group, it keeps none.
import torch.distributed.nn.functional  # noqa: F401

from . import _C

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel

# Without the GIL, for a thread to destroy the last collective of a group that nobody destroyed.
_MOMENT = 0.02

live: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def outlive(reducer: _C.Reducer, group: dist.ProcessGroup) -> None:
    """Keeps ``group`` until after the reducer's C++ half is gone.

    That half dies under the GIL, and must not be the last to let go of the group. Let go of from Python, a
    group is destroyed without the GIL.
    """
    weakref.finalize(reducer, id, group).atexit = False


@atexit.register
def _settle_groups() -> None:
    """Before the interpreter goes: groups that were destroyed end, threads of the others come to rest."""
    modules = list(live)  # kept by global variables or reference cycles
    destroyed = [ddp for ddp in modules if ddp.process_group not in dist.distributed_c10d._world.pg_map]
    for ddp in destroyed:
        ddp._let_go()
    if len(destroyed) < len(modules):
        time.sleep(_MOMENT)
