"""Python imports this before a program: ranks get minddp's class in the place of torch's, and say how often."""

import atexit
import os
import sys

if "LOCAL_RANK" in os.environ:  # not torchrun itself
    import minddp

    minddp.install()
    made = 0
    construct = minddp.DistributedDataParallel.__init__

    def count(self, *args, **kwargs):
        global made
        made += 1
        construct(self, *args, **kwargs)

    minddp.DistributedDataParallel.__init__ = count
    atexit.register(lambda: print(f"minddp's class was constructed {made} times", file=sys.stderr, flush=True))
