"""Programs with classes of their own: wrappers that override forward's steps, modules with odd named_parameters().

The same numbers as with torch's class.
"""

from __future__ import annotations

import copy
import logging
import types
import unittest.mock
import warnings

import pytest
import torch
from torch import nn

import minddp
from tests.faults.logged import logged
from tests.on_ranks import all_alike, on_ranks
from tests.programs import beside_torch
from tests.programs.beside_torch import MODES, batch, those_that_differ
from tests.ranks_pool import run_ranks


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 2)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def trained(ddp, rank, steps=3):
    """With gradients and weights of what the module does not name, too."""
    parameters = [*ddp.module.a.parameters(), *ddp.module.b.parameters()]
    return beside_torch.trained(ddp, rank, steps, parameters=parameters)


# --- steps of forward that are the program's own


def overrides_all(cls, rank, **args):
    class Own(cls):
        def _pre_forward(self, *inputs, **kwargs):
            (x,), kwargs = super()._pre_forward(*inputs, **kwargs)
            return (x + 1,), kwargs

        def _run_ddp_forward(self, *inputs, **kwargs):
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

        def _post_forward(self, output):
            return 3 * super()._post_forward(output)

    return trained(Own(Two(), **args), rank)


def patches_the_instance(cls, rank, **args):
    ddp = cls(Two(), **args)
    before, after = ddp._pre_forward, ddp._post_forward
    ddp._pre_forward = lambda *inputs, **kwargs: before(inputs[0] + 1, **kwargs)
    ddp._post_forward = types.MethodType(lambda self, output: 2 * after(output), ddp)
    return trained(ddp, rank)


def patches_the_class(cls, rank, **args):
    """As mmcv's MMDistributedDataParallel and its forks: it calls the module itself."""

    class Own(cls):
        pass

    ddp = Own(Two(), **args)
    seen = trained(ddp, rank, steps=1)
    Own._run_ddp_forward = lambda self, x: 2 * self.module(x)
    return seen + trained(ddp, rank)


def calls_the_steps(cls, rank, **args):
    """A forward of its own, of torch's steps."""

    class Own(cls):
        def forward(self, *inputs, **kwargs):
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(2 * self._run_ddp_forward(*inputs, **kwargs))

    return trained(Own(Two(), **args), rank)


# --- parameters as a module tells them


def twice_told(cls, rank, **args):
    class Own(Two):
        def named_parameters(self, *arguments, **options):
            yield from super().named_parameters(*arguments, **options)
            yield "again", self.a.weight

    return trained(cls(Own(), **args), rank)


class Hides(Two):
    def named_parameters(self, prefix="", recurse=True):
        yield from (pair for pair in nn.Module.named_parameters(self, prefix, recurse) if "b." not in pair[0])


def hidden_child(cls, rank, **args):
    return trained(cls(Hides(), **args), rank)


def told_by_a_child(cls, rank, **args):
    """A child that tells of a parameter which is registered nowhere."""

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 8)
            self.hidden = [nn.Parameter(torch.ones(()))]

        def named_parameters(self, *arguments, **options):
            yield from super().named_parameters(*arguments, **options)
            yield "hidden", self.hidden[0]

        def forward(self, x):
            return super().forward(x) * self.hidden[0]

    net = Two()
    net.a = Scaled()
    return trained(cls(net, **args), rank)


def scripted(cls, rank, **args):
    net = Two()
    net.a = torch.jit.script(net.a)
    return trained(cls(net, **args), rank)


def scripted_whole(cls, rank, **args):
    return trained(cls(torch.jit.script(Two()), **args), rank)


# --- names of the program's own


def names_of_its_own(cls, rank, **args):
    class Own(cls):
        def __init__(self, module, **args):
            super().__init__(module, **args)
            self._engine, self._config, self._wrapped, self._delayed = object(), {}, True, False
            self._has_joined, self.check_finite, self.has_comm_hook = True, True, True
            self.device, self.parameter_names, self.bucket_plan = torch.device("cpu"), ["a"], None

        def _move_inputs(self, one_batch):
            raise AssertionError("it is the program's own")

    net = Two()
    net.a = nn.Sequential(nn.BatchNorm1d(4), net.a)
    ddp = Own(net, **args)
    assert ddp.parameter_names == ["a"] and ddp._has_joined is True
    return [*trained(ddp, rank), *(buffer.clone() for buffer in net.buffers())]


class WeightDropout(nn.Module):
    """fastai's: the inner layer gets another tensor in a parameter's place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.raw = nn.Parameter(self.inner.weight.detach().clone())
        del self.inner._parameters["weight"]
        self.a = self.inner

    def forward(self, x):
        self.inner._parameters["weight"] = self.raw * 0.5
        return self.b(self.inner(x).tanh())


def weight_dropout(cls, rank, **args):
    net = WeightDropout()
    parameters = [net.raw, net.inner.bias, *net.b.parameters()]
    return beside_torch.trained(cls(net, **args), rank, parameters=parameters)


# --- closures


class Reads(torch.optim.SGD):
    """Its step reads what the closure carries, and whether it is the one of before."""

    cached, same = None, 0

    def step(self, closure):
        self.same += closure is self.cached
        self.cached = closure
        loss = closure()
        super().step()
        return loss * closure.scale


def closures(cls, rank, **args):
    ddp, seen = cls(Two(), **args), []
    optimizer = Reads(ddp.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = ddp(batch(rank, len(seen))).square().sum()
        loss.backward()
        closure.scale = 2.0
        return loss.detach()

    for _ in range(3):
        seen.append(optimizer.step(closure))
    return [*seen, torch.tensor(optimizer.same), *(p.detach() for p in ddp.parameters())]


# --- gradients that a program holds


def held_gradients(cls, rank, **args):
    """A list of `.grad`, taken after the first backward."""
    ddp, seen = cls(Two(), **args), []
    ddp(batch(rank)).square().sum().backward()
    held = [p.grad for p in ddp.parameters()]
    for i in range(3):
        torch._foreach_zero_(held)
        ddp(batch(rank, i)).square().sum().backward()
        seen += [gradient.clone() for gradient in held]
    return seen


# --- steps that are tried again


def retried(cls, rank, **args):
    ddp = cls(Two(), **args)
    optimizer, tries = torch.optim.SGD(ddp.parameters(), 0.1), []

    def fails_once(*_):
        tries.append(0)
        if rank == 1 and len(tries) == 2:
            raise OSError("busy")

    optimizer.register_step_pre_hook(fails_once)
    for i in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, i)).square().sum().backward()
        for _ in range(2):
            try:
                optimizer.step()
                break
            except OSError:
                pass
    return [p.detach() for p in ddp.parameters()]


def writes_steps_anew(cls, rank, **args):
    """As forks of torch's class do; with attributes of their own under names that are torch's."""

    class Own(cls):
        def __init__(self, module, num_iterations):
            super().__init__(module, **args)
            self.num_iterations = num_iterations

        def _run_ddp_forward(self, *inputs, **kwargs):
            if self._use_python_reducer:
                raise AssertionError("torch's is not asked for")
            with self._inside_ddp_forward():
                assert nn.parallel.DistributedDataParallel._get_active_ddp_module() is self
                return self.num_iterations * self.module(*inputs, **kwargs)

    ddp = Own(Two(), 3)
    seen = trained(ddp, rank)
    return [*seen, torch.tensor(ddp.num_iterations)]


def a_bucket_for_each_gradient(cls, rank, **args):
    return trained(cls(Two(), **{**args, "bucket_cap_mb": 0 if torch.__version__ >= "2.12" else 1e-6}), rank)


def another_module_in_its_place(cls, rank, **args):
    """An average of the weights, for an evaluation: its buffers are broadcast then."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    ddp = cls(module, **args)
    other = copy.deepcopy(module)
    other[1].running_mean.fill_(rank)
    ddp(batch(rank)).square().sum().backward()
    ddp.module = other
    ddp.eval()
    with torch.no_grad():
        ddp(batch(rank))
    ddp.module = module
    return [*module.buffers(), *other.buffers()]


def a_schedule_of_its_own(cls, rank, **args):
    """An engine's: the class says of each forward whether its backward is synchronized."""

    class Own(cls):
        micro = 0

        @property
        def require_backward_grad_sync(self):
            return self.micro % 2 == 1

        @require_backward_grad_sync.setter
        def require_backward_grad_sync(self, value):
            pass

    ddp = Own(Two(), **args)
    seen = []
    for i in range(4):
        ddp.micro = i + 1  # the first one synchronizes
        ddp(batch(rank, i)).square().sum().backward()
        seen += [p.grad.clone() for p in ddp.parameters()]
    return seen


def defaults_of_the_class(cls, rank, **args):
    """Torch's class has attributes of the instance under these names."""

    class Own(cls):
        logger = logging.getLogger("own")
        require_backward_grad_sync = False

    ddp = Own(Two(), **args)
    with ddp.join():
        seen = trained(ddp, rank)
    with unittest.mock.patch.object(ddp, "require_backward_grad_sync", False):
        ddp(batch(rank)).square().sum().backward()
    with ddp.no_sync():
        ddp.module(batch(rank)).square().sum().backward()  # before a forward of the wrapper's
        torch.optim.SGD(ddp.parameters(), 0.1).step()
    with unittest.mock.patch.object(Own, "require_backward_grad_sync", 0, create=True):
        ddp(batch(rank)).square().sum().backward()
    name = {"new_callable": unittest.mock.PropertyMock, "return_value": False, "create": True}
    with unittest.mock.patch.object(Own, "require_backward_grad_sync", **name):
        ddp(batch(rank)).square().sum().backward()
    other = cls(Two(), **args)
    other(batch(rank)).square().sum().backward()  # with a static graph torch's class needs that
    with unittest.mock.patch.object(other, "require_backward_grad_sync", False):
        other(batch(rank)).square().sum().backward()
    return [*seen, *trained(ddp, rank), *trained(other, rank)]


class _Told(nn.Module):
    """Registers nothing."""

    def __init__(self):
        super().__init__()
        two = Two()
        self.layers = [two.a, two.b]

    def named_parameters(self, *args, **kwargs):
        for i, layer in enumerate(self.layers):
            yield from layer.named_parameters(prefix=str(i))

    def forward(self, x):
        return self.layers[1](self.layers[0](x).tanh())


def all_told_and_none_registered(cls, rank, **args):
    module = _Told()
    return beside_torch.trained(cls(module, **args), rank)


class _Table(nn.Embedding):
    def parameters(self):
        return iter([self.weight])


def a_table_with_parameters_of_its_own(cls, rank, **args):
    torch.manual_seed(0)
    ddp = cls(_Table(5, 2, sparse=True), **args)
    ddp(torch.tensor([rank, 3])).square().sum().backward()
    return [ddp.module.weight.grad.to_dense()]


class _Named(Two):
    """Has names that are functions of minddp's package, too."""

    last_step, reduction, add_weight = 7, "none", None

    def report(self):
        return self.grad_norm(2) + len(self.parameter_names) + self.last_step

    def grad_norm(self, power):
        return sum(p.grad.norm(power).item() for p in self.parameters())

    @property
    def parameter_names(self):
        return [name for name, _ in self.named_parameters()]


def unknown_names_are_the_modules(cls, rank, **args):
    class Passes(cls):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    class Further(Passes):
        pass

    if cls is minddp.DistributedDataParallel:
        args = {**args, "check_replicas_every": 1}
    ddp = Further(_Named(), **args)
    seen = trained(ddp, rank)
    said = f"{ddp.report():.4f} {ddp.reduction} {ddp.last_step} {ddp.add_weight} {ddp.parameter_names}"
    return [*seen, torch.tensor(list(said.encode()))]


def all_modules_are_asked(cls, rank, **args):
    """For a name that is a function of minddp's package: the wrapper has none."""
    ddp = cls(_Named(), **args)
    seen = trained(ddp, rank)
    return [*seen, torch.tensor([len([m for m in ddp.modules() if hasattr(m, name)]) for name in ASKED])]


ASKED = ["report", "last_step", "add_weight", "reduction", "parameter_names", "refresh"]
STEPS = [writes_steps_anew, a_bucket_for_each_gradient, another_module_in_its_place, overrides_all]
STEPS += [patches_the_instance, patches_the_class, calls_the_steps, a_schedule_of_its_own, defaults_of_the_class]
PARAMETERS = [twice_told, hidden_child, told_by_a_child, scripted, scripted_whole, weight_dropout]
PARAMETERS += [all_told_and_none_registered, a_table_with_parameters_of_its_own]
OBJECTS = [names_of_its_own, unknown_names_are_the_modules, all_modules_are_asked, closures, retried]
HELD = {name: MODES[name] for name in ("default", "find_unused")}
HELD["find_unused, views"] = {**MODES["find_unused"], **MODES["views"]}


@pytest.mark.parametrize("programs", [STEPS, PARAMETERS, OBJECTS], ids=["steps", "parameters", "objects"])
def test_the_numbers_are_torchs(programs):
    assert not those_that_differ(programs, 2, MODES)


def test_gradients_that_are_held():
    """Torch makes no views anew where it looks for unused parameters."""
    assert not those_that_differ([held_gradients], 2, HELD)


@on_ranks(2)
def test_a_hidden_child_starts_as_rank_0s(rank, world_size):
    net = Hides()
    with torch.no_grad():
        net.b.weight.add_(rank)
    ddp = minddp.DistributedDataParallel(net)
    minddp.check_replicas(ddp)
    assert ddp._minddp_wrapped.names == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert all_alike(net.b.weight)


class Secret(nn.Linear):
    """Tells nobody of its weight."""

    def named_parameters(self, prefix="", recurse=True):
        yield from (pair for pair in super().named_parameters(prefix, recurse) if "weight" not in pair[0])


class HidesModules(Two):
    """Torch's class asks named_modules()."""

    def __init__(self):
        super().__init__()
        self.b = Secret(8, 2)

    def named_parameters(self, prefix="", recurse=True):
        yield "a.weight", self.a.weight

    def named_modules(self, *arguments, **options):
        yield from (pair for pair in super().named_modules(*arguments, **options) if pair[0] != "a")


@on_ranks(1)
def test_what_trains_and_is_told_by_nobody_is_named(rank, world_size):
    with warnings.catch_warnings(), logged() as texts:
        warnings.simplefilter("error")  # with torch's class this program runs
        ddp = minddp.DistributedDataParallel(HidesModules())
        minddp.DistributedDataParallel(Hides())
    assert ddp._minddp_wrapped.names == ["a.weight", "b.bias"]
    [text] = texts
    assert "'a.bias', 'b.weight'" in text and "not averaged" in text


# --- names, submodules and copies of the program's own


def _a_submodule_with_a_wrapper(rank, world_size, cls):
    """Hung into the module after that was wrapped: its gradients are averaged by its own wrapper."""
    module = Two()
    ddp = cls(module)
    ddp(batch(rank)).sum().backward()
    module.probe = cls(nn.Linear(2, 1))
    out = ddp(batch(rank, 1))
    out.sum().backward()
    module.probe(out.detach()).sum().backward()
    return module.probe.module.weight.grad


def _tied_and_half_ignored(rank, world_size, cls):
    """Ignored by one of its two names, and by the one name of a module that stands in two places."""
    module = Two()
    module.other, module.alone = nn.Linear(4, 8), nn.Linear(8, 2)
    module.other.weight = module.a.weight
    module.again = module.alone
    module.forward = lambda x: module.b(module.a(x)) + module.alone(module.other(x))
    cls._set_params_and_buffers_to_ignore_for_model(module, ["a.weight", "alone.weight"])
    ddp = cls(module)
    ddp(batch(rank)).square().sum().backward()
    return [p.grad for p in module.parameters()]


class _Behind(nn.Module):
    """Torch's class calls super()."""

    def __init__(self):
        super().__init__()
        self.called = ["__init__"]

    def train(self, mode=True):
        self.called.append("train")
        super().train(mode)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.called += ["__setstate__", torch.distributed.get_rank(self.process_group)]


def _a_module_behind(rank, world_size, cls):
    class Own(cls, _Behind):
        pass

    own = Own(Two())
    other = copy.deepcopy(own)
    other(batch(rank)).sum().backward()
    return own.train() is own, own.called, other.called, other.module.a.weight.grad


@pytest.mark.parametrize("program", [_a_submodule_with_a_wrapper, _tied_and_half_ignored, _a_module_behind])
def test_what_is_the_programs_own(program):
    classes = nn.parallel.DistributedDataParallel, minddp.DistributedDataParallel
    theirs, ours = (run_ranks(program, 2, cls) for cls in classes)
    assert str(ours) == str(theirs)
