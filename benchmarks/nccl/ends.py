"""How a rank goes wrong in its fourth backward, and what the others then tell: see `many.py ends`.

raise   it raises, and exits                    late    it sleeps for 14 s, longer than the group's timeout of 8 s
kill    SIGKILL                                 stop    SIGSTOP: its process is there, and does nothing
stay    it raises, but its process stays        differ  its model has other shapes from the beginning
"""

from __future__ import annotations

import os
import signal
import time

import torch
from cases import SMALL, batches, net, wrap
from here import RANK, WORLD, Write, synchronize

VICTIM = WORLD - 1
STEP = 3


def run(write: Write, how: str, which: str) -> None:
    """Trains for six steps; the last rank goes wrong in step 3. What happens, and when, is written and raised."""
    width = 64 + (RANK == VICTIM) * 64 if how == "differ" else 64
    step, began, wrong = -1, time.time(), [False]

    def go_wrong(gradient: torch.Tensor) -> torch.Tensor:
        if wrong[0] and RANK == VICTIM:
            write(f"{how} now")
            if how in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            if how in ("raise", "stay"):
                raise RuntimeError("planted in backward")
            if how == "late":
                time.sleep(14)
        return gradient

    try:
        model = wrap(which, net(width=width), **SMALL)
        list(model.parameters())[4].register_hook(go_wrong)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, x in enumerate(batches(6, width=width)):
            wrong[0] = step == STEP
            if wrong[0]:
                began = time.time()
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            loss.item()  # on a device the host waits here
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            synchronize()
            if wrong[0]:
                moved = sum(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
                seconds = time.time() - began
                write(f"step {STEP}, {seconds:.1f} s after: optimizer.step() has changed {moved} parameters")
        write(f"all {step + 1} steps ended")
    except BaseException as error:
        said = " ".join(str(error).split())[:380]
        write(f"step {step}, {time.time() - began:.1f} s after: {type(error).__name__}: {said}")
        if how == "stay" and RANK == VICTIM:  # its sockets stay open, as NVLink's peers do
            time.sleep(14)
            os._exit(7)
        raise
