"""Runs a user's script as it is, but destroys no process group and ends without shutting Python down.

A rank with torch's class may hang in ``dist.destroy_process_group()``: it joins gloo's threads while it holds the
GIL, which one of them waits for. With six busy loops beside it, about every other run of
``scripts/checkpoint_script.py`` did. It may also abort as Python shuts down (``minddp/lifetime.py`` says why).
minddp's ranks must let go of their groups and end by themselves: they run without this.
"""

import os
import runpy
import sys

import torch.distributed as dist


def meet_instead(group: dist.ProcessGroup | None = None) -> None:
    """What ``destroy_process_group`` does here: no rank is gone before the others have what they wait for."""
    dist.barrier(group)


def main() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    dist.destroy_process_group = meet_instead
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
