"""Whether the two ranks of a Gloo group may sum small buckets in a way of their own (``csrc/transport/pair_sum.h``).

Both must, or none. A communication hook may send a bucket by a collective of the process group's, and a program may
have one on one rank only. So they tell each other, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..ranks import waiting


class PairAgreement:
    """Asked where buckets are cut anew, in forward: in backward a hook's threads may call the group, in an order of
    each rank's own. Awaited at the end of the next backward, so that no rank waits for the other here: its buckets of
    that backward come after its answer.

    Args:
        group: of two ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._hooks = [_flag(False), _flag(False)]  # whether a rank has one
        self._work: Any = None

    @property
    def asked(self) -> bool:
        return self._work is not None

    def ask(self, has_hook: bool) -> None:
        """Collective, as :meth:`reached`."""
        self._work = dist.all_gather(self._hooks, _flag(has_hook), group=self._group, async_op=True)

    def reached(self) -> bool:
        """Whether no rank had a hook."""
        waiting.wait_for(self._work, self._group, "whether the other rank has a communication hook")
        return not any(hook.item() for hook in self._hooks)


def _flag(value: bool) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device="cpu")  # whatever the program's defaults are
