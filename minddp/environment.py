"""Every environment variable that minddp reads, at the moment when it is asked.

=============================  ==========================================================================
variable                       meaning
=============================  ==========================================================================
``MINDDP_PLAIN``               ``1``: of the companions only ``torch_surface`` is attached to wrappers
``MINDDP_WITHOUT``             names of companions, with commas between them, that are attached to no wrapper
``MINDDP_TRACE``               a path: the whole process is traced, as by :func:`minddp.trace`
``MINDDP_CHECK_COLLECTIVES``   ``0``: ``minddp.functional`` compares no calls before its collectives
``MINDDP_ALWAYS_REDUCE``       ``1``: one rank alone goes through its process group too (tests, benchmarks)
``MINDDP_SHM_HOST_ID``         distinct from other machines' (read by ``minddp/shm``; tests)
``MINDDP_CUDA``                while building: ``0`` leaves CUDA out, ``1`` insists on it (``setup.py``)
``MINDDP_SHM``                 while building: ``0`` leaves the shared-memory transport out (``setup.py``)
``RANK``, ``LOCAL_RANK``       a launcher's: ``minddp tune`` without them starts its own ranks (``cli/tune.py``)
``NCCL_*``, ``GLOO_*``         the transports', for ``ddp.logger`` (``torch_surface/logging_data.py``)
``PYTHONINSPECT``              Python's: a prompt follows the script, whose exception is no end
``PYTORCH_DDP_USE_SIDE_STREAM``  torch's; ``0`` copies inputs on the current stream
=============================  ==========================================================================
"""

from __future__ import annotations

import os
import sys

__all__ = [
    "always_reduce", "check_collectives", "leaves_out", "prompts",
    "shm_host_id", "torch_ddp_variables", "trace_path", "use_side_stream",
]  # fmt: skip


def leaves_out(companion: str) -> bool:
    """Whether the user wants wrappers without ``companion``: is it the reducer or a guard?"""
    if os.environ.get("MINDDP_PLAIN") == "1" and companion != "torch_surface":
        return True
    return companion in os.environ.get("MINDDP_WITHOUT", "").replace(" ", "").split(",")


def trace_path() -> str | None:
    """Where ``MINDDP_TRACE`` wants the trace of this process."""
    return os.environ.get("MINDDP_TRACE") or None


def check_collectives() -> bool:
    """Whether ``minddp.functional`` compares its calls over ranks."""
    return os.environ.get("MINDDP_CHECK_COLLECTIVES", "1") != "0"


def always_reduce() -> bool:
    """Whether a group of one rank is gone through, too."""
    return os.environ.get("MINDDP_ALWAYS_REDUCE") == "1"


def shm_host_id() -> str:
    """What tells hosts apart whose kernel and process ids are one."""
    return os.environ.get("MINDDP_SHM_HOST_ID", "")


def use_side_stream() -> bool:
    """Whether inputs are copied to the device on a stream of their own."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"


def torch_ddp_variables(names: dict[str, str]) -> dict[str, str]:
    """``names`` maps a key of DDP's logging data to a variable; the same keys with the values, or ``N/A``."""
    return {key: os.environ.get(name, "N/A") for key, name in names.items()}


def prompts() -> bool:
    """Whether the interpreter asks its user what to do next, or will when the script has ended (``python -i``)."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect or os.environ.get("PYTHONINSPECT"))
