"""Manual finalization of a backward, beside torch's class where the installed torch has it (2.15)."""

import copy
import functools
import inspect
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import minddp
from minddp import _C
from minddp.guards import times
from tests.faults.logged import logged
from tests.on_ranks import all_alike, on_ranks
from tests.programs.beside_torch import gradients, weights
from tests.ranks_pool import RankError, run_ranks, shutdown

TORCH = nn.parallel.DistributedDataParallel
TORCH_HAS_IT = hasattr(TORCH, "finalize_backward")
TORCH_HAS_IT_MIXED = TORCH_HAS_IT and torch.accelerator.is_available()  # it makes a stream, on the CPU too
OURS = minddp.DistributedDataParallel
CLASSES = [OURS] + [TORCH] * TORCH_HAS_IT
ALONE = {"bucket_cap_mb_list": [1e-6] * 2}  # every gradient has a bucket of its own
VIEWS = {"gradient_as_bucket_view": True}
LAZY = {"lazy_bucket_allocation": True}
UNUSED = {"find_unused_parameters": True}
MIXED = {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32)}


class Ahead(torch.autograd.Function):
    """What comes before the wrapped module: its backward runs after all of the module's gradients."""

    call = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Ahead.call is not None:
            Ahead.call()
        return grad


class Net(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.unused = nn.Linear(8, 8) if unused else None

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _wrap(ddp_class=OURS, net=None, manual=True, hook=None, **kwargs):
    """The wrapper of the same net each time; ``manual``: backwards wait for finalize_backward()."""
    torch.manual_seed(0)
    ddp = ddp_class(net or Net(unused="find_unused_parameters" in kwargs), **kwargs)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    if manual:
        ddp.require_manual_backward_finalization = True
    return ddp


def _sgd(ddp):
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _x(rank, ahead=False):
    x = torch.linspace(-1, 1, 16).view(2, 8) * (rank + 1)
    return Ahead.apply(x.requires_grad_()) if ahead else x


def _loss(ddp, x):
    return ddp(x).float().square().sum()


def _step(ddp, x, within=False):
    """A forward and a backward, which is finalized if it must be: after it, or in the backward of :class:`Ahead`."""
    loss = _loss(ddp, x)
    within = within and not ddp.should_finalize_after_backward
    Ahead.call = ddp.finalize_backward if within else None
    loss.backward()
    Ahead.call = None
    if not within and getattr(ddp, "require_manual_backward_finalization", False):
        ddp.finalize_backward()


def _assert_same(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


# ---- the same calls beside torch's class


def _outcome(call, *args):
    """The beginning of the error, or nothing."""
    try:
        call(*args)
    except RuntimeError as error:
        return " ".join(str(error).split()[:6])
    return None


class Transcript:
    """A wrapper, what was done with it, and what could be seen. An automatic one's backwards end by themselves."""

    def __init__(self, ddp, rank, manual):
        self.ddp, self.rank, self.manual, self.seen, self.grads = ddp, rank, manual, [], []
        for part in (self.before_and_after, self.no_sync, self.within, self.left_out, self.changed_back):
            part()

    def note(self, label, call, *args):
        if self.manual:
            self.seen.append((label, _outcome(call, *args)))

    def finalize(self, label):
        if self.manual:
            self.note(label, self.ddp.finalize_backward)

    def require(self, value):
        self.ddp.require_manual_backward_finalization = value

    def look(self, times=1):
        self.grads += [gradients(self.ddp)] * times

    def forward(self, ahead=False):
        return _loss(self.ddp, _x(self.rank, ahead))

    def before_and_after(self):
        self.finalize("not required")
        self.note("required", self.require, True)
        self.finalize("before forward")
        for _ in range(3):
            self.ddp.zero_grad()
            loss = self.forward()
            self.note("unchanged", self.require, True)
            self.note("changed after forward", self.require, False)
            self.finalize("before backward")
            loss.backward()
            self.note("changed before finalization", self.require, False)
            self.finalize("in time")
            self.look()
            self.finalize("twice")

    def no_sync(self):
        with self.ddp.no_sync():
            self.forward().backward()
            self.finalize("under no_sync")
        self.forward().backward()
        self.finalize("after no_sync")
        self.look()

    def within(self):
        for _ in range(2):
            self.ddp.zero_grad()
            if self.manual:
                Ahead.call = lambda: (self.finalize("within"), self.look(), self.finalize("twice within"))
            self.forward(ahead=True).backward()
            self.finalize("after within")
            self.look(1 if self.manual else 2)
        Ahead.call = None
        self.ddp.zero_grad()
        weight = self.ddp.module.layers[1].weight
        early = weight.register_hook(lambda grad: self.finalize("too early") or grad)
        self.forward().backward()
        early.remove()
        self.finalize("after too early")
        self.look()

    def left_out(self):
        self.ddp.zero_grad()
        self.forward().backward()
        self.note("forward before finalization", self.forward)
        with self.ddp.no_sync():
            self.note("no_sync forward before finalization", self.forward)
        with torch.no_grad():
            self.note("no_grad forward before finalization", self.forward)
        self.finalize("after these")
        self.look()

    def changed_back(self):
        self.note("no longer", self.require, False)
        self.ddp.zero_grad()
        self.forward().backward()
        self.look()
        self.finalize("no longer required")
        self.forward()
        self.note("forward without backward", self.require, True)
        self.forward().backward()
        self.note("after backward", self.require, True)
        with self.ddp.no_sync():
            loss = self.forward()
        self.note("after a local forward", self.require, False)
        loss.backward()


NOTHING = "finalize_backward() called but no gradient reduction"
NOT_REQUIRED = "finalize_backward() called but manual backward finalization"
UNFINISHED = "Expected to have finalized the prior"
EXPECTED = {
    **dict.fromkeys(["before forward", "before backward", "under no_sync"], NOTHING),
    **dict.fromkeys(["twice", "twice within", "after within"], NOTHING),
    **dict.fromkeys(["not required", "no longer required"], NOT_REQUIRED),
    **dict.fromkeys(["forward before finalization", "no_sync forward before finalization"], UNFINISHED),
    "too early": "finalize_backward() called before all DDP buckets",
}
TOO_LATE = {"changed after forward", "changed before finalization", "forward without backward"}
CASES = [
    {}, VIEWS, UNUSED, {"static_graph": True}, ALONE, {**ALONE, **VIEWS}, LAZY, {**LAZY, **VIEWS},
    {"bucket_cap_mb_list": [1e-6, 1]}, {"batched_grad_copy": True}, {"hook": default_hooks.allreduce_hook},
]  # fmt: skip


@on_ranks(1, 2, 3, timeout=900)
def test_the_same_calls_have_the_same_outcome(rank, world_size):
    """As in torch's class, error by error and gradient by gradient; gradients are those of automatic backwards."""
    for kwargs in CASES:
        ours = Transcript(_wrap(manual=False, **kwargs), rank, True)
        for label, error in ours.seen:
            assert (error is not None) == (label in EXPECTED or label in TOO_LATE), (kwargs, label, error)
            assert label not in EXPECTED or error == EXPECTED[label], (kwargs, label, error)
        for ddp_class, manual in [(OURS, False)] + [(TORCH, True)] * TORCH_HAS_IT:
            one = Transcript(_wrap(ddp_class, manual=False, **kwargs), rank, manual)
            for (label, mine), (_, other) in zip(ours.seen, one.seen, strict=manual):
                assert (mine is None) == (other is None), (kwargs, label, mine, other)
                assert label in TOO_LATE or mine == other, (kwargs, label, mine, other)
            for mine, other in zip(ours.grads, one.grads, strict=True):
                _assert_same(mine, other)


# ---- the numbers of automatic backwards


def _trained(ddp_class, rank, manual, within, **kwargs):
    ddp = _wrap(ddp_class, manual=manual, **kwargs)
    optimizer = _sgd(ddp)
    for _ in range(4):
        optimizer.zero_grad()
        _step(ddp, _x(rank, ahead=True), within)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in ddp.module.layers.parameters())
        optimizer.step()
    return weights(ddp)


def _with_batch_norm(ddp_class, rank, manual, within):
    torch.manual_seed(0)
    layers = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    return _joined(ddp_class, rank, manual, within, 3, net=minddp.convert_sync_batchnorm(nn.Sequential(*layers)))


def _joined(ddp_class, rank, manual, within, steps=None, **kwargs):
    ddp = _wrap(ddp_class, manual=manual, **kwargs)
    optimizer = _sgd(ddp)
    with ddp.join():
        for i in range(steps or 1 + 2 * rank):
            optimizer.zero_grad()
            _step(ddp, _x(rank, ahead=True) + i, within)
            optimizer.step()
    return weights(ddp)


def _side_by_side(ddp_class, rank, manual, within):
    """Two wrappers in one loss; of these, one or both are manual."""
    found = []
    for first_is, second_is in ((True, False), (False, True), (True, True)):
        first = _wrap(ddp_class, manual=manual and first_is)
        second = _wrap(ddp_class, manual=manual and second_is, **ALONE)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            second(first(_x(rank))).square().sum().backward()
            for ddp, value in ((second, second_is), (first, first_is)):
                if manual and value:
                    ddp.finalize_backward()
        found += gradients(first) + gradients(second)
    return found


def _cleared(ddp_class, rank, manual, within, **kwargs):
    """Gradients are cleared before they are averaged: they have been sent, or they are kept for that."""
    ddp = _wrap(ddp_class, manual=manual, **kwargs)
    grads = []
    for ahead in (False, True, True):
        ddp.zero_grad()
        _loss(ddp, _x(rank, ahead)).backward()
        if manual:
            ddp.zero_grad()
            ddp.finalize_backward()
        grads += gradients(ddp)
    return grads


BOTH, AFTER = (False, True), (False,)
# (program, its options, finalized after or within backward, whether torch's class has the options)
PROGRAMS = [
    *((_trained, kwargs, BOTH, TORCH_HAS_IT) for kwargs in ({}, ALONE, VIEWS, LAZY)),
    *((_trained, kwargs, BOTH, False) for kwargs in ({"static_graph": True}, UNUSED, {"reduction": "sum"})),
    *((_trained, kwargs, BOTH, False) for kwargs in ({"reduce_dtype": torch.float64}, {"check_finite": True})),
    (_trained, MIXED, AFTER, TORCH_HAS_IT_MIXED),
    *((_joined, kwargs, AFTER, TORCH_HAS_IT) for kwargs in ({}, UNUSED, LAZY)),
    (_with_batch_norm, {}, AFTER, False),
    (_side_by_side, {}, AFTER, TORCH_HAS_IT),
    *((_cleared, kwargs, AFTER, TORCH_HAS_IT) for kwargs in ({}, VIEWS, ALONE, {**ALONE, **VIEWS})),
]


@on_ranks(1, 2, 3, timeout=900)
def test_the_numbers_are_those_of_automatic_backwards(rank, world_size):
    """Finalized after backward, or within it, from what comes before the module."""
    for program, kwargs, ways, beside_torch in PROGRAMS:
        expected = program(OURS, rank, False, False, **kwargs)
        for within in ways:
            _assert_same(program(OURS, rank, True, within, **kwargs), expected)
            if beside_torch:
                tolerance = {"atol": 2e-2, "rtol": 2e-2} if kwargs is MIXED else {}
                _assert_same(program(TORCH, rank, True, within, **kwargs), expected, **tolerance)


# ---- each of these on two ranks


def _should_finalize(rank, world_size):
    """``should_finalize_after_backward`` is true in the first iteration, and with mixed precision."""
    seen = []
    for ddp_class in CLASSES:
        ddp = _wrap(ddp_class, manual=False)
        found = [ddp.should_finalize_after_backward]
        ddp.require_manual_backward_finalization = True
        for _ in range(3):
            loss = ddp(_x(rank)).sum()
            found.append(ddp.should_finalize_after_backward)
            loss.backward()
            ddp.finalize_backward()
        if ddp_class is OURS or TORCH_HAS_IT_MIXED:
            mixed = _wrap(ddp_class, manual=False, **MIXED)
            found.append(mixed.should_finalize_after_backward)
            mixed.require_manual_backward_finalization = True
            found.append(mixed.should_finalize_after_backward)
        seen.append(found)
    for found in seen:
        assert found == [False, True, False, False, False, True][: len(found)]


def _step_before_finalization(rank, world_size):
    """It raises, where torch's class steps on this rank's own gradients without a word."""
    ddp = _wrap()
    optimizer = _sgd(ddp)
    for _ in range(2):
        _loss(ddp, _x(rank)).backward()
        before = weights(ddp)
        with pytest.raises(RuntimeError, match="have finalized the prior backward pass"):
            optimizer.step()
        assert ddp.reducer.phase() == _C.Phase.LAUNCHED
        _assert_same(before, weights(ddp))
        ddp.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()


def _another_backward(rank, world_size):
    """Before finalization it raises: its gradients would be overwritten, or change what is being sent."""
    for how in ("same", "views", "local", "past"):
        ddp, reference = _wrap(gradient_as_bucket_view=how == "views"), _wrap(manual=False)
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                local = _loss(ddp, _x(rank)) if how == "local" else None
            loss = _loss(ddp, _x(rank))
            loss.backward(retain_graph=True)
            for _ in range(2):
                again = _loss(ddp.module, _x(rank)) if how == "past" else local if how == "local" else loss
                with pytest.raises(RuntimeError, match="variable ready only once.*another backward before it"):
                    again.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="before all DDP buckets were ready|have finalized"):
                ddp.finalize_backward()
            with pytest.raises(RuntimeError, match=r"ended with an exception.*abort_iteration"):
                ddp(_x(rank))
            minddp.abort_iteration(ddp)
        for one in (ddp, reference):
            one.zero_grad()
            _step(one, _x(rank))
        _assert_same(gradients(ddp), gradients(reference))
        loss = _loss(ddp, _x(rank))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="variable ready only once"):
            loss.backward()
        _loss(OURS(ddp.module), _x(rank)).backward()  # another wrapper is not held up


class Repeated(nn.Module):
    """Uses ``layer`` before and after what its caller can hook; each use has a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, twice):
        if twice:
            x = checkpoint(self.layer, x, use_reentrant=True)
        x = Ahead.apply(self.first(x))
        return checkpoint(self.layer, x, use_reentrant=True)


def _late_gradient(rank, world_size):
    """No optimizer steps on a gradient that comes after finalization."""
    ddp = _wrap(net=Repeated(), bucket_cap_mb_list=[1e-6])
    x = _x(rank).requires_grad_()

    def step(twice=False, within=False):
        loss = ddp(x, twice).sum()
        Ahead.call = ddp.finalize_backward if within else None
        try:
            loss.backward()
        finally:
            Ahead.call = None
        if not within:
            ddp.finalize_backward()

    step()
    step()
    with pytest.raises(RuntimeError, match="before all DDP buckets were ready"):  # `first` comes after `Ahead`
        step(within=True)
    minddp.abort_iteration(ddp)
    # Without `first` there is nothing to wait for: the second contribution comes after finalization.
    ddp.module.first.requires_grad_(False)
    minddp.refresh(ddp)
    for _ in range(2):
        ddp.zero_grad()
        step()
    step(twice=True, within=True)
    with pytest.raises(RuntimeError, match=r"gradients that were never averaged, of .*layer\.weight"):
        _sgd(ddp).step()
    ddp.zero_grad()
    step()
    _sgd(ddp).step()


def _exception_after_the_last_gradient(rank, world_size):
    """What was launched is finalized all the same, if that was before the exception or comes after it."""
    for finalized in (False, True):
        ddp, reference = _wrap(), _wrap(manual=False)

        def fail(ddp=ddp, finalized=finalized):
            if finalized:
                ddp.finalize_backward()
            raise ValueError("planned")

        _step(ddp, _x(rank))
        _step(ddp, _x(rank))
        for _ in range(2):
            ddp.zero_grad()
            reference.zero_grad()
            Ahead.call = fail
            with pytest.raises(ValueError, match="planned"):
                _loss(ddp, _x(rank, ahead=True)).backward()
            Ahead.call = None
            if not finalized:
                ddp.finalize_backward()
            _step(reference, _x(rank))
            _assert_same(gradients(ddp), gradients(reference))


def _remade(rank, world_size):
    """The switch survives copies, and what makes the reducer anew."""
    ddp = _wrap()
    assert not OURS(Net()).require_manual_backward_finalization
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert other.require_manual_backward_finalization
        _step(other, _x(rank))
    builtin = functools.partial(ddp._register_builtin_comm_hook, dist.BuiltinCommHookType.ALLREDUCE)
    for remake in (functools.partial(minddp.refresh, ddp), ddp._set_static_graph, builtin):
        remake()
        assert ddp.require_manual_backward_finalization
        for _ in range(2):
            ddp.zero_grad()
            _loss(ddp, _x(rank)).backward()
            assert ddp.reducer.phase() == _C.Phase.LAUNCHED
            ddp.finalize_backward()
        if remake not in (ddp._set_static_graph, builtin):
            ddp.__dict__["_config"] = ddp._minddp_averager.config
            ddp._minddp_averager.rebuild()  # so that no iteration is behind it


def _weight_for_the_next(rank, world_size):
    """A weight that is added before finalization is the next backward's."""
    ddp, reference = _wrap(reduction="weighted"), _wrap(manual=False, reduction="weighted")
    minddp.add_weight(ddp, 1 + rank)
    for i in range(3):
        ddp.zero_grad()
        reference.zero_grad()
        _loss(ddp, _x(rank)).backward()
        minddp.add_weight(ddp, 2 * rank + i)
        minddp.add_weight(ddp, 1)
        ddp.finalize_backward()
        minddp.add_weight(reference, 1 + rank if i == 0 else 2 * rank + i)
        _step(reference, _x(rank))
        _assert_same(gradients(ddp), gradients(reference))


def _every_parameter_delayed(rank, world_size):
    """Then manual finalization is refused. Torch's class, where it has that, does not take such a module."""
    module = Net()
    delayed = {"delay_all_reduce_named_params": list(module.named_parameters())}
    ddp = _wrap(OURS, module, False, param_to_hook_all_reduce=module.layers[0].weight, **delayed)
    ddp.require_manual_backward_finalization = False
    required = _outcome(setattr, ddp, "require_manual_backward_finalization", True)
    found = (required, _outcome(ddp.finalize_backward), ddp.should_finalize_after_backward)
    assert found == (*("Manual backward finalization is not supported",) * 2, False)


def _not_finite(rank, world_size):
    ddp = _wrap(check_finite=True)
    _step(ddp, _x(rank) * (float("nan") if rank == 1 else 1.0))
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight.* on rank 1"):
        _sgd(ddp).step()


def _trace_is_whole(rank, world_size):
    ddp = _wrap()
    for within in (False, False, True):
        _step(ddp, _x(rank, ahead=True), within)
        step = ddp.reducer.last_step()
        assert step["backward_begin_ns"] <= step["backward_end_ns"] <= step["finalize_end_ns"]


def _failed_future(rank, world_size):
    """A future fails, and so does each finalization. What was waited for before is not waited for again."""

    def hook(state, bucket):
        future = torch.futures.Future()
        if bucket.index() == 1:
            future.set_exception(ValueError("not this one"))
        else:
            future.set_result(bucket.buffer())
        return future

    ddp = _wrap(hook=hook, **ALONE)
    _loss(ddp, _x(rank)).backward()
    for _ in range(2):
        with pytest.raises(Exception, match="not this one|ValueError"):
            ddp.finalize_backward()
    minddp.abort_iteration(ddp)


def _second_wrapper(rank, world_size):
    """A second wrapper of the module leaves a pending finalization as it is."""
    for finalizes in (True, False):
        ddp = _wrap()
        optimizer = _sgd(ddp)
        _loss(ddp, _x(rank)).backward()
        other = OURS(ddp.module)
        if not finalizes:
            with pytest.raises(RuntimeError, match="finalize"):
                optimizer.step()
        ddp.finalize_backward()
        optimizer.step()
        del other
        assert all_alike(*weights(ddp))


CHECKS = [
    _should_finalize, _step_before_finalization, _another_backward, _late_gradient,
    _exception_after_the_last_gradient, _remade, _weight_for_the_next, _every_parameter_delayed, _failed_future,
    _not_finite, _trace_is_whole, _second_wrapper,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_on_two_ranks(check):
    run_ranks(check, 2)


# ---- failures, joins and slow ranks


def _hook_raises(rank, world_size):
    def hook(state, bucket):
        if rank == 1:
            raise ValueError("planned on rank 1")
        return default_hooks.allreduce_hook(None, bucket)

    _step(_wrap(hook=hook), _x(rank))


def _joins_while_pending(rank, world_size):
    ddp = _wrap()
    with ddp.join():
        for i in range(1 + 2 * rank):
            if i:
                ddp.finalize_backward()
            _loss(ddp, _x(rank)).backward()
        if rank:
            ddp.finalize_backward()


PENDING = ("Expected to have finalized", "rank 0 will not take part")


@pytest.mark.parametrize("run, says", [(_hook_raises, ("planned on rank 1",)), (_joins_while_pending, PENDING)])
def test_ranks_learn_of_anothers_failure(run, says):
    """A rank that waits in finalize_backward(), and one whose peer has joined before it has finalized."""
    try:
        with pytest.raises(RankError) as caught:
            run_ranks(run, 2)
    finally:
        shutdown()
    for rank, text in enumerate(says):
        assert text in caught.value.failures[rank]
    assert run is not _hook_raises or "finalize_backward" in caught.value.failures[0]


@times.faster(0.006)
def _slow_between(rank, world_size):
    with logged() as said:
        ddp = _wrap()
        for i in range(5):
            _loss(ddp, _x(rank)).backward()
            if rank == 1 and i == 3:
                time.sleep(0.9)  # three warnings
            ddp.finalize_backward()
    return said


def test_work_before_finalization_is_the_programs_own_time():
    said, of_rank_1 = run_ranks(_slow_between, 2)
    assert any("is between iterations 4 and 5" in text for text in said), said
    # On a busy machine rank 1 may be seen elsewhere, too: in a backward.
    lines, first = inspect.getsourcelines(_slow_between)
    asleep = first + next(i for i, line in enumerate(lines) if "sleep" in line)
    assert not any(f":{asleep} in" in text and "backward" in text.partition("(")[2] for text in said), said
    assert not any("is between iterations" in text for text in of_rank_1), "rank 0 was waiting"
