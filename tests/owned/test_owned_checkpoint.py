"""minddp.Owned under torch.distributed.checkpoint, as the page says: a hook gathers the state on all ranks."""

import copy

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import minddp
from minddp import Owned
from tests.on_ranks import on_ranks
from tests.owned.test_owned import Twins, assert_same
from tests.ranks_pool import run_ranks

RULES = ("adamw", "muon", "sgd")


def hooked(owned):
    """The page's recipe."""
    owned.register_state_dict_pre_hook(lambda opt: opt.consolidate_state_dict(to=None))
    return owned


def of(ddp, optimizers):
    return {"model": get_model_state_dict(ddp), "optim": get_optimizer_state_dict(ddp, optimizers)}


def saves(rank, world_size, folder):
    for rule in RULES:
        twins = Twins(rule)
        hooked(twins.owned)
        for _ in range(2):
            twins.backward()
            twins.step()
        plain, owned = of(twins.ddps[0], twins.plain), of(twins.ddps[1], twins.owned)
        assert_same(plain, owned)
        dcp.save(owned, checkpoint_id=f"{folder}/{rule}")


def loads(rank, world_size, folder):
    for rule in RULES:
        twins = Twins(rule)
        hooked(twins.owned)
        for ddp, optimizers in ((twins.ddps[0], twins.plain), (twins.ddps[1], twins.owned)):
            state = of(ddp, optimizers)  # which makes the states of an optimizer that has not stepped
            dcp.load(state, checkpoint_id=f"{folder}/{rule}")
            set_model_state_dict(ddp, state["model"])
            set_optimizer_state_dict(ddp, optimizers, state["optim"])
        for _ in range(2):
            twins.backward()
            twins.step()
        twins.compare_states()


def test_a_checkpoint_of_torchs_goes_to_another_number_of_ranks(tmp_path):
    run_ranks(saves, 2, str(tmp_path))
    run_ranks(loads, 3, str(tmp_path))


@on_ranks(2)
def test_torchs_options_and_ranks_without_a_share(rank, world_size):
    twins = Twins("adamw")
    hooked(twins.owned)
    twins.backward()
    twins.step()
    for options in (StateDictOptions(full_state_dict=True), StateDictOptions(flatten_optimizer_state_dict=True)):
        for ddp, (optimizer,) in zip(twins.ddps, twins.optimizers):
            saved = copy.deepcopy(get_optimizer_state_dict(ddp, optimizer, options=options))
            optimizer.state.clear()
            set_optimizer_state_dict(ddp, optimizer, saved, options=options)
        twins.number = 0  # state_dict() on all ranks, as the hook wants it
        twins.compare_states()
        twins.backward()
        twins.step()

    ddp = minddp.DistributedDataParallel(nn.Linear(3, 1, bias=False))  # which one rank owns
    owned = hooked(Owned(ddp, [(ddp.parameters(), torch.optim.AdamW, {})]))
    for step in (1, 2):
        owned.zero_grad()
        ddp(torch.ones(1, 3)).sum().backward()
        owned.step()
        owned.zero_grad()
        assert get_optimizer_state_dict(ddp, owned)["state"]["weight"]["step"] == step
