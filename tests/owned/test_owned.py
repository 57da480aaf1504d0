"""minddp.Owned beside the plain optimizers, in the same ranks: the same bits, shares of states, errors by name."""

import collections
import copy
import datetime
import io
import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import minddp
from minddp import Owned
from minddp.owned import layout
from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import RankError, run_ranks


class OwnRule(torch.optim.Optimizer):
    """A program's own: counts its steps in itself and in its groups, and keeps a list in its state."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "counted": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["counted"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = [*state.get("seen", []), self.steps][-2:]
                    p.sub_(p.grad * group["lr"] / (self.steps * group["counted"]) ** 0.25)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.wide = nn.Linear(12, 2000)  # goes alone, the others packed
        self.last = nn.Linear(2000, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, skip=None):
        for i, layer in enumerate(self.inner):
            if i != skip:
                x = x + torch.tanh(layer(x))
        return self.last(self.wide(x).tanh())


def rules(module):
    """By name: what plain optimizers, and Owned, are made of."""
    every, matrices = list(module.parameters()), [p for p in module.parameters() if p.dim() == 2]
    rest = [p for p in module.parameters() if p.dim() != 2]
    half, momentum = len(every) // 2, {"lr": 0.002, "momentum": 0.9}
    return {
        "sgd": [([{"params": every[:half], "lr": 0.001}, {"params": every[half:]}], torch.optim.SGD, momentum)],
        "adamw": [(every, torch.optim.AdamW, {"lr": 0.01, "foreach": True})],
        "fused": [(every, torch.optim.AdamW, {"lr": 0.01, "fused": True})],
        "adafactor": [(every, torch.optim.Adafactor, {"lr": 0.01})],
        "adagrad": [(every, torch.optim.Adagrad, {"lr": 0.01})],
        "muon": [(matrices, torch.optim.Muon, {"lr": 0.02}), (rest, torch.optim.AdamW, {"lr": 0.01})],
        "own": [(every, OwnRule, {"lr": 0.005})],
    }


class Twins:
    """A model trained by the plain optimizers, and its twin trained by Owned: the same bits after each step."""

    def __init__(self, rule, **arguments):
        torch.manual_seed(0)
        plain = Net()
        self.modules = [plain, copy.deepcopy(plain)]
        self.ddps = [minddp.DistributedDataParallel(module, **arguments) for module in self.modules]
        self.plain = [kind(params, **settings) for params, kind, settings in rules(plain)[rule]]
        self.owned = Owned(self.ddps[1], rules(self.modules[1])[rule])
        self.optimizers = [self.plain, [self.owned]]
        self.rank, self.number = dist.get_rank(), 0
        self.random = torch.Generator().manual_seed(self.rank)

    def batch(self):
        return torch.randn(3, 12, generator=self.random)

    def backward(self, skip=None):
        x = self.batch()
        for ddp in self.ddps:
            ddp(x, skip=skip).square().mean().backward()

    def step(self):
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        self.compare()

    def compare(self):
        for (name, one), two in zip(self.modules[0].named_parameters(), self.modules[1].parameters()):
            assert torch.equal(one, two), name

    def compare_states(self):
        to = self.number % dist.get_world_size() if self.number else None  # all ranks at first
        self.number += 1
        self.owned.consolidate_state_dict(to)
        if to in (None, self.rank):
            whole = self.owned.state_dict()
            for plain, cut in zip(self.plain, whole.get("optimizers", [whole])):
                assert_same(plain.state_dict(), cut)


def assert_same(one, two):
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.all)])
@on_ranks(2, 3, 4, timeout=600)
def test_steps_give_the_plain_optimizers_bits(rank, world_size, steps):
    for rule in ("sgd", "adamw", "fused", "adafactor", "adagrad", "muon", "own"):
        twins = Twins(rule)
        for _ in range(steps):
            twins.backward()
            twins.step()
        owned_states = {id(p) for p in twins.owned.state}
        everyone = [None] * world_size
        dist.all_gather_object(everyone, len(owned_states))
        stepped = sum(p.requires_grad for p in twins.modules[1].parameters())
        # Adagrad makes states at once, for what is frozen too.
        assert sum(everyone) == stepped + (rule == "adagrad"), (rule, everyone)
        twins.compare_states()


ACTS = "accumulate evaluate average checkpoint schedule freeze restart swap forget refresh none".split()


def forget(optimizer, how, parameters):
    """A warm restart: moments begin anew, of all or of some."""
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = collections.defaultdict(dict)
    elif how == "in place":
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    else:
        for p in parameters:
            if how == "pop":
                optimizer.state.pop(p, None)
            else:
                optimizer.state[p] = {}


@on_ranks(2, 3)
def test_anything_may_come_between_two_steps(rank, world_size):
    """Acts between steps, the same on all ranks; what is unused is drawn by each rank."""
    for number in range(6):
        draw, own = random.Random(f"7 {number}"), random.Random(f"7 {number} {rank}")
        rule = draw.choice(["sgd", "adamw", "fused", "muon", "own"])
        views = draw.random() < 0.5
        twins = Twins(rule, find_unused_parameters=True, gradient_as_bucket_view=views)
        averages = [copy.deepcopy(module) for module in twins.modules]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (*twins.plain, twins.owned)]
        for _ in range(8):
            act = draw.choice(ACTS)
            if act == "accumulate":
                with twins.ddps[0].no_sync(), twins.ddps[1].no_sync():
                    twins.backward()
            twins.backward(skip=own.choice([None, 0, 2]))
            if act == "refresh":
                for ddp in twins.ddps:
                    minddp.refresh(ddp)
            if draw.random() < 0.3:
                for module in twins.modules:
                    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            twins.step()
            if act == "evaluate":
                with torch.no_grad():
                    assert torch.equal(*(ddp(torch.ones(1, 12)) for ddp in twins.ddps))
            elif act == "average":
                for average, module in zip(averages, twins.modules):
                    for mean, p in zip(average.parameters(), module.parameters()):
                        mean.data.lerp_(p.data, 0.1)
                assert all(torch.equal(p, q) for p, q in zip(*(a.parameters() for a in averages)))
            elif act == "checkpoint":
                twins.compare_states()
            elif act == "schedule":
                for scheduler in schedulers:
                    scheduler.step()
            elif act == "forget":
                how, first = draw.choice(["clear", "replace", "in place", "pop", "set"]), draw.randrange(4)
                for optimizers, module in zip(twins.optimizers, twins.modules):
                    parameters = set(list(module.parameters())[first::2])
                    for optimizer in optimizers:
                        known = [p for group in optimizer.param_groups for p in group["params"] if p in parameters]
                        forget(optimizer, how, known)
            elif act == "freeze":
                trains = draw.random() < 0.5
                for ddp, module in zip(twins.ddps, twins.modules):
                    module.inner[1].weight.requires_grad_(trains)
                    minddp.refresh(ddp)
            elif act == "swap":
                for p in (p for module in twins.modules for p in module.parameters()):
                    p.data = p.data.clone()
            elif act == "restart" and rule != "own":  # its count of steps is no state
                twins.owned.consolidate_state_dict(to=world_size - 1)
                states = [twins.owned.state_dict() if rank == world_size - 1 else None]
                dist.broadcast_object_list(states, src=world_size - 1)
                twins.owned = Owned(twins.ddps[1], rules(twins.modules[1])[rule])
                twins.owned.load_state_dict(states[0])
                twins.optimizers[1] = [twins.owned]
                schedulers = []


def moves_between_numbers_of_ranks(rank, world_size, saved):
    twins = Twins("adamw")
    if saved is not None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        for optimizer in (*twins.plain, twins.owned):
            optimizer.load_state_dict(copy.deepcopy(state))
    for _ in range(3):
        twins.backward()
        twins.step()
    twins.owned.consolidate_state_dict()
    if rank == 0:
        stream = io.BytesIO()
        torch.save(twins.owned.state_dict(), stream)
        return stream.getvalue()
    return None


def test_a_checkpoint_goes_to_another_number_of_ranks_and_to_the_plain_optimizer():
    saved = run_ranks(moves_between_numbers_of_ranks, 3, None)[0]
    run_ranks(moves_between_numbers_of_ranks, 2, saved)


def test_shares_differ_by_one_parameter_at_most():
    sizes = [7.0, 5, 5, 4, 3, 3, 2, 1, 1]
    for ranks in (2, 3, 4):
        loads = [0.0] * ranks
        owners = layout.owners(sizes, loads)
        assert max(loads) <= sum(sizes) / ranks + max(sizes)
        assert loads == [sum(s for s, o in zip(sizes, owners) if o == rank) for rank in range(ranks)]


def test_pieces_have_each_parameter_once():
    sizes = [[3 << 20] * 5, [9 << 20, 1], []]
    cut = layout.pieces(sizes)
    assert len(cut) == 3
    for rank, theirs in enumerate(sizes):
        assert [i for piece in cut for i in piece[rank]] == list(range(len(theirs)))
    assert [len(piece[0]) for piece in cut] == [2, 1, 2]  # about the same bytes each


# --- errors ---


@on_ranks(2)
def test_a_step_under_no_sync_is_refused_and_the_others_are_told(rank, world_size):
    twins = Twins("adamw")
    twins.backward()
    twins.step()
    before = [p.clone() for p in twins.modules[1].parameters()]
    ddp = twins.ddps[1]
    if rank == 1:
        with ddp.no_sync():
            ddp(twins.batch()).sum().backward()
    else:
        ddp(twins.batch()).sum()
    alone = "are this rank's alone: the last backward ran under no_sync()"
    with pytest.raises(RuntimeError, match=re.escape(alone) if rank else "(?s)rank 1.*no_sync|no_sync.*rank 1"):
        twins.owned.step()
    assert all(torch.equal(p, q) for p, q in zip(before, twins.modules[1].parameters())) or rank == 0


def leaves_a_step_out(rank, world_size):
    twins = Twins("adamw")
    for number in range(2):
        twins.backward()
        if rank == 1 and number == 1:
            raise ValueError("the loss is not finite")
        twins.step()


def test_a_rank_that_leaves_a_step_out_is_named():
    with pytest.raises(RankError) as caught:
        run_ranks(leaves_a_step_out, 2)
    assert "rank 1 will not take part in the parameters that their owners have stepped" in caught.value.failures[0]


class Interrupted(OwnRule):
    """Ctrl-C comes in the second step of rank 1."""

    def step(self, closure=None):
        super().step()
        if self.steps == 2 and dist.get_rank() == 1:
            raise KeyboardInterrupt


@on_ranks(2)
def test_an_interrupted_step_is_reported_and_leaves_nothing_under_way(rank, world_size):
    module, store = Net(), dist.distributed_c10d._get_default_store()
    ddp = minddp.DistributedDataParallel(module)
    owned = Owned(ddp, [(module.parameters(), Interrupted, {"lr": 0.01})])
    for error in (None, (minddp.LostPeer, KeyboardInterrupt)[rank]):
        ddp(torch.ones(2, 12)).sum().backward()
        if error is None:
            owned.step()
            continue
        with pytest.raises(error) as caught:
            owned.step()
    assert rank == 1 or "KeyboardInterrupt" in str(caught.value)
    if rank == 0:
        store.set("named", "")
    store.wait(["named"], datetime.timedelta(seconds=20))


@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name(rank, world_size):
    module = Net()
    ddp = minddp.DistributedDataParallel(module)

    def refused(words, act):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(words)):
            act()

    more = [*module.parameters(), nn.Parameter(torch.ones(7))]
    for words, entry in {
        "LBFGS.step() needs a closure": (module.parameters(), torch.optim.LBFGS, {}),
        "is no optimizer class of one rank": (module.parameters(), torch.nn.Linear, {}),
        "keyword arguments must be a dict": (module.parameters(), torch.optim.SGD, 0.1),
        "optimizers[0] must be (params, optimizer class, keyword arguments)": (module.parameters(), torch.optim.SGD),
        "optimizers[0]: 3 is no optimizer class of one rank": ("x", 3, {}),
        "optimizers[0]: SGD does not take its params or arguments: optimizer can only": ("x", torch.optim.SGD, {}),
        "optimizers[0]: Adam does not take its params or arguments": (
            module.parameters(),
            torch.optim.Adam,
            {"rl": 1},
        ),
        "does not average the gradients of 1 of the parameters": (more, torch.optim.SGD, {"lr": 0.1}),
        "the ranks' parameters differ": ([list(module.parameters())[rank]], torch.optim.SGD, {"lr": 0.1}),
    }.items():
        refused(words, lambda entry=entry: Owned(ddp, [entry]))
    for words, entries in {"optimizers must be a list": 3, "and not empty": []}.items():
        refused(words, lambda entries=entries: Owned(ddp, entries))
    owned = Owned(ddp, [(module.parameters(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})])
    owned.state_dict()  # nothing has been stepped: the plain optimizer's
    ddp(torch.ones(2, 12)).sum().backward()
    owned.step()
    refused("Call opt.consolidate_state_dict(to=rank) on every rank first", owned.state_dict)
    refused("to must be a rank, 0 to 1", lambda: owned.consolidate_state_dict(to=9))
    refused("groups of [[]]", lambda: owned.load_state_dict({"state": {}, "param_groups": []}))
    for wrong in (None, {}, {"state": {}, "param_groups": 3}, {"state": {}, "param_groups": [{}]}, {"optimizers": 3}):
        refused("load_state_dict: state_dict must be what", lambda wrong=wrong: owned.load_state_dict(wrong))
    refused("entry must say which", lambda: owned.add_param_group({"params": []}, entry="x"))
    refused("cannot be pickled or copied", lambda: copy.deepcopy(owned))
    owned.state[next(iter(owned.state))]["made"] = object()
    refused("a state or a group holds what is not sent", owned.consolidate_state_dict)


class CountsInState(OwnRule):
    def step(self, closure=None):
        super().step()
        self.state["steps"] = self.steps


class DictOfItsOwn(OwnRule):
    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}


def test_state_of_no_parameter_is_refused_by_name():
    for kind in (CountsInState, DictOfItsOwn):
        module = nn.Linear(2, 2)
        owned = Owned(module, [(module.parameters(), kind, {})])
        module(torch.ones(1, 2)).sum().backward()
        if kind is CountsInState:
            with pytest.raises(RuntimeError, match=re.escape("belongs to no parameter ('steps')")):
                owned.step()
        else:
            owned.step()
            with pytest.raises(RuntimeError, match="DictOfItsOwn has a state_dict\\(\\) of its own"):
                owned.consolidate_state_dict()


@on_ranks(2)
def test_a_trainers_order_closures_new_groups_and_scalers(rank, world_size):
    # A trainer's order: the optimizer first, the wrapper later; a step through a closure; a new group.
    torch.manual_seed(0)
    modules = [Net(), Net()]
    modules[1].load_state_dict(modules[0].state_dict())
    plain = torch.optim.Adam(modules[0].inner.parameters(), lr=0.01)
    owned = Owned(modules[1], [(modules[1].inner.parameters(), torch.optim.Adam, {"lr": 0.01})])
    owned.load_state_dict(owned.state_dict())  # as Accelerate does, before anything is stepped
    asked = []
    owned.register_step_post_hook(lambda *_: asked.append("once"))
    ddps = [minddp.DistributedDataParallel(module) for module in modules]
    draw = torch.Generator().manual_seed(rank)
    for number in range(4):
        x = torch.randn(2, 12, generator=draw)
        if number == 2:
            for optimizer, module in ((plain, modules[0]), (owned, modules[1])):
                optimizer.add_param_group({"params": list(module.last.parameters()), "lr": 0.5})
        for ddp, optimizer in zip(ddps, (plain, owned)):

            def closure(ddp=ddp, optimizer=optimizer, x=x):
                optimizer.zero_grad()
                loss = ddp(x).square().mean()
                loss.backward()
                return loss

            assert optimizer.step(closure).requires_grad
    assert asked == ["once"] * 4
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in modules)))
    # An overflow on one rank is everybody's, since gradients are averaged; the scaler skips that step on all ranks.
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in modules]
    before = [p.clone() for p in modules[1].parameters()]
    for number in range(3):
        for ddp, optimizer, scaler in zip(ddps, (plain, owned), scalers):
            optimizer.zero_grad()
            factor = float("inf") if (rank, number) == (1, 0) else 1.0
            scaler.scale(ddp(torch.ones(2, 12)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        if number == 0:
            assert all(torch.equal(p, q) for p, q in zip(before, modules[1].parameters()))
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in modules)))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0


class Counts(OwnRule):
    """Counts in itself and in a container of its group; raises where it is told to."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.param_groups[0]["seen"] = {"steps": 0}

    def step(self, closure=None):
        self.param_groups[0]["seen"]["steps"] += 1
        self.steps += 1
        if self.param_groups[0]["seen"]["steps"] == 2:
            raise ArithmeticError("the second step fails")
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data -= p.grad * self.param_groups[0]["lr"] / self.steps


@on_ranks(2)
def test_edits_of_the_state_are_heard(rank, world_size):
    """Warm restarts and ReLoRA: moments begin anew, as a plain optimizer's."""
    for rule in ("adamw", "muon"):
        for how in ("clear", "replace", "in place", "pop", "set"):
            twins = Twins(rule)
            for number in range(5):
                if number in (2, 4):
                    for optimizers, module in zip(twins.optimizers, twins.modules):
                        for optimizer in optimizers:
                            known = {p for group in optimizer.param_groups for p in group["params"]}
                            forget(optimizer, how, [p for p in module.parameters() if p in known])
                twins.backward()
                twins.step()
            twins.compare_states()


@on_ranks(2)
def test_an_edit_after_consolidating_gives_no_stale_state(rank, world_size):
    for how in ("clear", "replace", "in place", "pop", "set"):
        twins = Twins("adamw")
        twins.backward()
        twins.step()
        twins.owned.consolidate_state_dict(None)
        assert_same(*(optimizer.state_dict() for (optimizer,) in twins.optimizers))
        for (optimizer,), module in zip(twins.optimizers, twins.modules):
            forget(optimizer, how, list(module.parameters()))
        with pytest.raises(
            RuntimeError, match=f"(?s)on rank {rank}.*consolidate_state_dict.*and the last edit of opt.state"
        ):
            twins.owned.state_dict()
        twins.compare_states()


@on_ranks(2)
def test_what_programs_do_between_steps_and_in_them(rank, world_size):
    def several_pieces():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(12)])  # 17 MB

    # Several pieces; counters in containers; a step that fails on all ranks and is caught.
    modules = [several_pieces(), several_pieces()]
    ddps = [minddp.DistributedDataParallel(module) for module in modules]
    optimizers = [Counts(modules[0].parameters()), Owned(ddps[1], [(modules[1].parameters(), Counts, {})])]
    for _ in range(4):
        for ddp, optimizer in zip(ddps, optimizers):
            optimizer.zero_grad()
            ddp(torch.ones(1, 600) * (rank + 1)).square().mean().backward()
            try:
                optimizer.step()
            except ArithmeticError:
                minddp.abort_iteration(ddp)
    assert len(optimizers[1]._pieces) > 1
    assert optimizers[1].param_groups[0]["seen"] == {"steps": 4}
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in modules)))

    # What is frozen and has a gradient still is stepped, as by torch's optimizers; frozen on one rank alone, too.
    twins = Twins("sgd", find_unused_parameters=True)
    for number in range(4):
        twins.backward()
        if number == 1:
            for module in twins.modules:
                module.inner[0].requires_grad_(False)
        if number == 2 and rank == 1:
            for module in twins.modules:
                module.inner[1].weight.requires_grad_(False)
        for optimizer in (*twins.plain, twins.owned):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert all_alike(twins.modules[1].inner[0].weight)

    # Looked at on all ranks; numpy's numbers; settings that change after consolidation; wrapped again.
    twins = Twins("adamw")
    for optimizer in (*twins.plain, twins.owned):
        optimizer.param_groups[0]["lr"] = np.float64(0.02)
    twins.backward()
    twins.step()
    for module, optimizer in zip(twins.modules, (twins.plain[0], twins.owned)):
        for p in module.parameters():
            optimizer.state[p].get("exp_avg")  # which leaves an entry where there was none
    twins.compare_states()
    twins.plain[0].param_groups[0]["lr"] = twins.owned.param_groups[0]["lr"] = 0.005
    if rank == 0:
        assert twins.owned.state_dict()["param_groups"][0]["lr"] == 0.005
    again = minddp.DistributedDataParallel(twins.modules[1])
    with again.no_sync():
        again(twins.batch()).sum().backward()
    with pytest.raises(RuntimeError, match="this rank's alone"):
        twins.owned.step()


@pytest.mark.parametrize("joins", [True, False])
@on_ranks(2)
def test_a_step_that_ranks_could_not_take_together_is_refused_by_name(rank, world_size, joins):
    words = "inside of join\\(\\) a rank that has run out of data takes no steps"
    if not joins:
        words = "param_groups has other parameters than the ranks agreed on"
    twins = Twins("adamw")
    if not joins:
        del twins.owned.param_groups[0]["params"][0]
    with twins.ddps[1].join(enable=joins):
        twins.ddps[1](twins.batch()).sum().backward()
        with pytest.raises(RuntimeError, match=words if rank == 0 else ""):
            twins.owned.step()


def test_a_program_of_one_process_needs_no_wrapper():
    torch.manual_seed(0)
    modules = [Net(), Net()]
    modules[1].load_state_dict(modules[0].state_dict())
    plain = torch.optim.AdamW(modules[0].parameters(), lr=0.01)
    owned = Owned(modules[1], [(modules[1].parameters(), torch.optim.AdamW, {"lr": 0.01})])
    for _ in range(3):
        for module, optimizer in zip(modules, (plain, owned)):
            optimizer.zero_grad()
            module(torch.ones(2, 12)).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in modules)))
    assert_same(plain.state_dict(), owned.state_dict())
