"""Whether the other ranks construct this class, too: a process that was started past ``minddp run`` has torch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import messages
from ..messages import ranks_text

_OURS = -int.from_bytes(b"ddp", "little")  # no number of parameters, but an int32, as which torch's class reads it


def refuse_torchs_class(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> None:
    """Raises RuntimeError if ranks construct torch's class; they raise, too. Collective: the constructor's first.

    torch's constructor begins with a collective of the same kind, size and device: each rank gathers how many
    parameters the others have, and raises if that is not its own number.

    Args:
        group: the wrapper's.
        devices: of the parameters that are reduced.
    """
    if group.size() == 1 or not devices:
        return
    # A rank whose module is on meta takes part: the others may have values, and it is refused later, on all ranks.
    device = messages.device_of(group) if devices[0].type == "meta" else devices[0]
    mine = torch.tensor([_OURS], device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    messages.all_gather(group, everyone, mine, "the other ranks' constructors")
    others = [rank for rank, theirs in enumerate(torch.cat(everyone).tolist()) if theirs != _OURS]
    if others:
        raise RuntimeError(
            f"DistributedDataParallel: {ranks_text(others)} constructed torch's class, rank {group.rank()} minddp's: "
            "their collectives do not fit together. A process was started past `minddp run` and minddp.install(); "
            "docs/launching.md says which processes these do not reach."
        )
