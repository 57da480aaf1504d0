"""Where calls are compared for a group that has no CPU backend, as ``init_process_group("nccl")`` makes."""

from __future__ import annotations

import types

import pytest
import torch
import torch.distributed as dist

from minddp import functional as F
from minddp.functional import arguments, control
from tests.faults.logged import logged
from tests.ranks_pool import run_ranks


def _calls(rank: int, size: int, without: tuple[int, ...]) -> tuple[list[float], list[str], str, bool]:
    """Collectives of a group that is taken for one of a device alone; Gloo refuses on the ranks ``without``."""
    made = []
    with pytest.MonkeyPatch.context() as patch, logged() as caught:
        patch.setattr(control, "supports", lambda group, device: False)
        patch.setattr(arguments, "control", types.SimpleNamespace(supports=lambda group, device: True))
        new_group = dist.new_group
        patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(1) or new_group(*args, **kwargs))
        if rank in without:

            def refuses() -> None:
                raise RuntimeError("Unable to find address for: eth7\nand more")

            patch.setattr(dist.ProcessGroupGloo, "create_default_device", refuses)
        x = torch.tensor([float(rank)])
        if without:
            with pytest.raises(F.CollectiveError) as error:
                F.all_reduce(x)
            return [], caught, str(error.value), bool(made)
        results = [float(F.all_reduce(x)), float(F.broadcast(x if rank == 1 else None, src=1))]
        results += F.all_gather(torch.full((rank + 1,), float(rank))).tolist()
        with pytest.raises(F.CollectiveError) as error:
            F.all_reduce(torch.ones(1 + rank))
    return results, caught, str(error.value), bool(made)


@pytest.mark.parametrize("without", [(), (1,)])
def test_calls_of_a_group_of_a_device_alone(without: tuple[int, ...]) -> None:
    """They are compared through a Gloo group; where a rank has no network interface, all raise and name it."""
    for results, warned, error, made in run_ranks(_calls, 2, without):
        assert not warned
        assert made == (not without)
        if without:
            assert "rank 1: Unable to find address for: eth7;" in error
            assert "GLOO_SOCKET_IFNAME" in error
        else:
            assert results == [1.0, 1.0, 0.0, 1.0, 1.0]
            assert "do not agree on the shape" in error
