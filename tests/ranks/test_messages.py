"""What ranks tell each other arrives, and is never executed."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist

from minddp import messages
from tests.on_ranks import on_ranks
from tests.ranks.own_group import OwnGroup
from tests.ranks_pool import run_ranks

VALUES = ("", "größe", {"a": [1, None, True]}, [0.1, float("inf")], 2**53 - 1, "x" * 100_000)


@on_ranks(1, 2, 3)
def test_every_rank_has_every_ranks_value(rank, world_size):
    for value in VALUES:
        assert messages.gather_objects({"rank": rank, "value": value}, dist.group.WORLD) == [
            {"rank": r, "value": value} for r in range(world_size)
        ]
    assert messages.gather_objects("x" * rank, dist.group.WORLD) == ["x" * r for r in range(world_size)]


@on_ranks(2, 3)
def test_through_a_groups_own_class_in_python(rank, world_size):
    group = OwnGroup("messages")
    for i in range(200):
        assert messages.gather_objects(rank + i, group) == [i + r for r in range(world_size)]
        message = torch.tensor([rank + i])
        messages.broadcast_from(group, message, 1, "the message")
        assert message.item() == 1 + i


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _bombed(rank, world_size, path):
    if rank == 1:
        messages._gather_bytes(pickle.dumps(Bomb(path)), dist.group.WORLD)
    else:
        with pytest.raises(ValueError):
            messages.gather_objects("harmless", dist.group.WORLD)


def test_what_a_peer_sends_is_not_executed(tmp_path):
    run_ranks(_bombed, 2, str(tmp_path / "bomb"))
    assert not (tmp_path / "bomb").exists()
    pickle.loads(pickle.dumps(Bomb(str(tmp_path / "bomb"))))
    assert (tmp_path / "bomb").exists()
