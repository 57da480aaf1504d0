"""Bad input: the same error on every rank, within seconds, and a group that still works afterwards."""

import re
import types

import numpy
import pytest
import torch
import torch.distributed as dist

from minddp import DistributedDataParallel, messages
from minddp import functional as F
from minddp.functional import control
from minddp.functional.agreement import Call, agree, message
from tests.on_ranks import on_ranks
from tests.ranks.own_group import OwnGroup, made_by_hand
from tests.ranks_pool import run_ranks


def _error(program):
    """The text of what ``program`` raises here, after which the group must work."""
    try:
        program()
    except F.CollectiveError as error:
        text = str(error)
    else:
        text = "nothing raised"
    assert F.all_reduce(torch.ones(2)).tolist() == [dist.get_world_size()] * 2
    return text


def _same_on_every_rank(texts):
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, texts)
    assert all(theirs == texts for theirs in everyones)
    return texts


@on_ranks(2, 3)
def test_calls_that_differ(rank, size):
    odd = rank == size - 1
    x = torch.ones(2, 3)
    texts = {
        "the shape": _error(lambda: F.all_reduce(x.t() if odd else x)),
        "the dtype": _error(lambda: F.all_reduce(x.double() if odd else x)),
        "the dtype ": _error(lambda: F.all_reduce(x.int() if odd else x.requires_grad_())),
        "the number of dimensions": _error(lambda: F.all_gather(x[0] if odd else x)),
        "the shape ": _error(lambda: F.all_gather(x[:, :2] if odd else x)),
        "the op": _error(lambda: F.all_reduce(x, "max" if odd else "min")),
        "the kind of loss": _error(lambda: F.all_reduce(x, loss="replicated" if odd else "per_rank")),
        "the root rank": _error(lambda: F.broadcast(x, 1 if odd else 0)),
        "which collective comes now": _error(lambda: F.all_gather(x) if odd else F.all_reduce(x)),
        "the splits": _error(lambda: F.reduce_scatter(x[:, 0], splits=[2 * odd, 2 - 2 * odd] + [0] * (size - 2))),
        "whether gradients are recorded": _error(lambda: _no_grad_on(odd, x)),
    }
    for what, text in _same_on_every_rank(texts).items():
        assert f"do not agree on {what.strip()}" in text
        assert f"rank {size - 1}: " in text


def _no_grad_on(odd, x):
    with torch.set_grad_enabled(not odd):
        F.all_reduce(x.detach().requires_grad_())


@on_ranks(2, 3)
def test_arguments_that_are_wrong_on_one_rank_or_all(rank, size):
    x = torch.ones(size + 1)
    integers = x.int()
    one = rank == 0  # some mistakes are made by rank 0 alone
    texts = {
        "op='median' is not one of": _error(lambda: F.all_reduce(x, "median" if one else "sum")),
        "op=.*BAND.* is not one of": _error(lambda: F.all_reduce(x, dist.ReduceOp.BAND)),
        "an average of integers": _error(lambda: F.all_reduce(integers, "avg")),
        "bools are not added": _error(lambda: F.all_reduce(x > 0)),
        "8-bit floats": _error(lambda: F.all_reduce(x.to(torch.float8_e5m2))),
        "complex numbers have no order": _error(lambda: F.reduce(x + 1j, 0, "min")),
        "loss='mine' is not one of": _error(lambda: F.all_gather(x, loss="mine" if one else "per_rank")),
        "loss='mine' is not one": _error(lambda: F.broadcast(x, loss="mine")),
        "src=7 is outside the group": _error(lambda: F.broadcast(x, 7)),
        "dst=-1 is outside the group": _error(lambda: F.reduce(x, -1 if one else 0)),
        "global_src=9 is outside the group": _error(lambda: F.scatter(x, global_src=9)),
        "not both": _error(lambda: F.gather(x, 0, global_dst=0)),
        "x must be a tensor, not float": _error(lambda: F.all_reduce(1.5 if one else x)),
        "x must be dense": _error(lambda: F.all_reduce(x.to_sparse())),
        "do not divide into": _error(lambda: F.reduce_scatter(x)),
        "do not divide into .* input_splits": _error(lambda: F.all_to_all(x)),
        "add up to": _error(lambda: F.scatter(x, splits=[1] * size)),
        "no rows to split": _error(lambda: F.reduce_scatter(x[0])),
        "a list needs one tensor for each": _error(lambda: F.all_to_all([x])),
        "must share dtype": _error(lambda: F.reduce_scatter([x] * (size - 1) + [integers])),
        "a list brings its own": _error(lambda: F.scatter([x] * size, splits=[1] * size)),
        "does not give this rank its": _error(lambda: F.all_gather(x, sizes=[size + 1 - one] * size)),
        "x is None on rank src": _error(lambda: F.broadcast(None)),
        "must be .* counts": _error(lambda: F.all_to_all(x[:size], None, [1])),
        "rank 1 .* output_splits=.* rows": _error(lambda: F.all_to_all(x[:size], None, [1 + rank] * size)),
    }
    many = torch.ones([1] * 16)
    assert torch.equal(F.all_reduce(many), many * size)
    for pattern, text in _same_on_every_rank(texts).items():
        assert re.search(pattern, text), (pattern, text)


class _Breaks:
    """An argument that raises where it is looked at."""

    def __iter__(self):
        raise RuntimeError("this sequence is broken")

    def __eq__(self, other):
        raise RuntimeError("this one has no equal")

    __hash__ = None


def _bad_arguments_of_one_rank(rank, size):
    one = rank == size - 1  # and the others' calls are right
    x, even = torch.ones(size + 1), torch.ones(size)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(size + 1), torch.ones(size + 1))
        texts = {
            "x carries a forward-mode tangent": _error(lambda: F.all_reduce(dual if one else x)),
            "forward-mode tangent": _error(lambda: F.all_gather(dual if one else x)),
        }
    wrong_root = 0 if one else size - 1
    return texts | {
        "op=.*_Breaks.* is not one of": _error(lambda: F.all_reduce(x, _Breaks() if one else "sum")),
        "loss=tensor.* is not one of": _error(lambda: F.all_reduce(x, loss=x if one else "per_rank")),
        "op=tensor.* is not one of": _error(lambda: F.all_reduce(x, x if one else "sum")),
        "this sequence is broken": _error(lambda: F.reduce_scatter(even, splits=_Breaks() if one else [1] * size)),
        "one whole number for each": _error(lambda: F.reduce_scatter(even, splits=[1.0] * size if one else None)),
        "splits='.*' must hold": _error(lambda: F.scatter(even, size - 1, splits="1" * size if one else None)),
        "input_splits=7 must": _error(lambda: F.all_to_all(even, 7 if one else [1] * size)),
        "output_splits=.* counts": _error(lambda: F.all_to_all(even, None, [2**70] * size if one else None)),
        "output_splits=.* whole": _error(lambda: F.all_to_all(even, None, [0.5] * size if one else None)),
        "sizes=.* does not give": _error(lambda: F.all_gather(even, sizes=[] if one else [size] * size)),
        "sizes=.* whole number": _error(lambda: F.all_gather(even, sizes=["1"] * size if one else [size] * size)),
        "src=1.5 is outside": _error(lambda: F.broadcast(x, 1.5 if one else 0)),
        "x must be dense": _error(lambda: F.scatter(even.to_sparse() if one else even, 0)),
        "x must be dense ": _error(lambda: F.broadcast(x.to_sparse() if one else x, wrong_root * 0)),
        "x must be a tensor": _error(lambda: F.scatter("rows" if one else None, size - 1)),
    }


@pytest.mark.parametrize("checks", ["1", "0"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_arguments_that_are_wrong_on_one_rank_raise_on_every_rank(world_size, checks):
    """With the checks off still, where the ranks have to learn from each other."""
    if checks == "0":
        results = run_ranks(_learned_from_each_other, world_size, env={"MINDDP_CHECK_COLLECTIVES": checks})
    else:
        results = run_ranks(_bad_arguments_of_one_rank, world_size)
    for pattern, text in results[0].items():
        assert re.search(pattern.strip(), text), (pattern, text)
        assert f"rank {world_size - 1}: " in text
    assert all(result == results[0] for result in results)


def _learned_from_each_other(rank, size):
    one, even = rank == size - 1, torch.ones(size)
    return {
        "x must be dense": _error(lambda: F.all_gather(even.to_sparse() if one else even)),
        "x must be a tensor": _error(lambda: F.gather(None if one else even)),
        "this sequence is broken": _error(lambda: F.scatter(even, size - 1, splits=_Breaks() if one else None)),
        "input_splits=7 must": _error(lambda: F.all_to_all(even, 7 if one else [1] * size)),
    }


@on_ranks(2, 3)
def test_an_argument_that_does_not_exist_is_told_to_the_other_ranks(rank, size):
    """A misspelt keyword on one rank is a TypeError there, and told to the others."""
    group = dist.new_group()
    if rank == 0:
        with pytest.raises(TypeError, match="unexpected keyword argument 'opp'"):
            F.all_reduce(torch.ones(1), group=group, opp="sum")
        with pytest.raises(TypeError, match="missing .* 'x'"):
            F.all_reduce()
        with pytest.raises(TypeError, match="Tensor"):  # not ours: nothing is told
            F.all_reduce(torch.ones(1)) + object()
    else:
        assert "rank 0: got an unexpected" in _error_of(lambda: F.all_reduce(torch.ones(1), group=group)).replace(
            "all_reduce() ", ""
        )
        _error_of(lambda: F.all_reduce(torch.ones(1)))
        F.all_reduce(torch.ones(1))
    assert F.all_reduce(torch.ones(1), group=group).item() == size


@on_ranks(2, 3)
def test_numpys_integers_are_counts_and_ranks(rank, size):
    """NumPy's integers are numbers like others."""
    n = numpy.int64
    x = torch.arange(float(size)) + rank
    assert F.broadcast(x, n(1)).tolist() == (torch.arange(float(size)) + 1).tolist()
    assert F.reduce_scatter(x, splits=numpy.ones(size, dtype=numpy.int32)).numel() == 1
    assert F.all_gather(x, sizes=[n(size)] * size).numel() == size * size
    assert F.all_to_all(x, [n(1)] * size, [n(1)] * size).numel() == size


@on_ranks(2, 3)
def test_forward_mode_and_transforms_raise_instead_of_losing_derivatives(rank, size):
    """No transform may see a zero where there is a derivative."""
    forward_ad = torch.autograd.forward_ad
    x = torch.ones(2)
    texts = []
    for collective in (F.all_reduce, F.all_gather, F.broadcast, F.reduce, F.gather):
        texts.append(_error(lambda: torch.func.jvp(collective, (x,), (x,))))
        texts.append(_error(lambda: torch.func.jacfwd(collective)(x)))
        texts.append(_error(lambda: torch.func.grad(lambda t: collective(t).sum())(x)))
        texts.append(_error(lambda: torch.func.vmap(collective)(x)))
        for requires_grad in (False, True):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x.clone().requires_grad_(requires_grad), x.clone())
                texts.append(_error(lambda: collective(dual)))
                collective(x)  # and one without a tangent goes on working
    assert all("torch.func transform" in text or "forward-mode tangent" in text for text in texts), texts
    with forward_ad.dual_level():  # a tangent that comes in only on the way back
        leaf = x.clone().requires_grad_()
        y = F.all_reduce(leaf)
        weight = forward_ad.make_dual(x.clone(), x.clone())
        text = _error(lambda: torch.autograd.grad((y * weight).sum(), leaf))
    assert "the gradient in SumToAll carries a forward-mode tangent" in text


@on_ranks(2)
def test_what_is_no_group_is_named(rank, size):
    destroyed = dist.new_group()
    dist.barrier(destroyed)  # all have connected
    dist.destroy_process_group(destroyed)
    for group, error, text in [
        (torch.ones(1), TypeError, "minddp.functional: group must be a torch.distributed.ProcessGroup, .* tensor"),
        ("gloo", TypeError, "minddp.functional: group must be .* 'gloo'"),
        (destroyed, RuntimeError, "minddp.functional: group .* was destroyed"),
    ]:
        with pytest.raises(error, match=text):
            F.all_reduce(torch.ones(1), group=group)


@on_ranks(2)
def test_a_rank_outside_the_group_is_told_so(rank, size):
    group = dist.new_group([0])
    x = torch.ones(1)
    if rank == 0:
        assert F.all_reduce(x, group=group).item() == 1
    else:
        outside = "rank 1 (of the default group) is outside the group"
        assert outside in _error_of(lambda: F.all_reduce(x, group=group))


@on_ranks(2)
def test_a_group_that_torchs_tables_do_not_hold_is_told_so(rank, size):
    without_hash = type("WithoutHash", (OwnGroup,), {"__hash__": None})
    for group in (OwnGroup("own"), without_hash("without hash"), made_by_hand()):
        told = f"torch.distributed has no table of group, a {type(group).__name__} of the program's own: pass one"
        assert told in _error_of(lambda group=group: F.all_reduce(torch.ones(1), group=group))


@on_ranks(2, 3)
def test_calls_that_are_alike_gather_nothing(rank, size):
    """What a rank is told then does not grow with the number of ranks: a digest, and counts of rows of its own."""
    x = torch.ones(size, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "gather_objects", lambda value, group: pytest.fail(f"gathered {value}"))
        F.all_reduce(x.requires_grad_(rank == 0))
        F.all_gather(x)
        F.all_gather(torch.ones(rank, 2), sizes=range(size))
        F.gather(x, 1)
        F.reduce_scatter(x, splits=[0] * (size - 1) + [size])
        F.broadcast(x, 1)
        F.all_to_all(x)
        assert F.all_to_all(torch.full((rank + 1, 2), rank), [0] * (size - 1) + [rank + 1]).shape[0] == (
            size * (size + 1) // 2 if rank == size - 1 else 0
        )
        F.all_to_all(x, [1] * size, [1] * size)
        F.all_reduce(x, loss="replicated").sum().backward()


def _error_of(program):
    with pytest.raises(F.CollectiveError) as caught:
        program()
    return str(caught.value)


@on_ranks(2, 3)
def test_a_group_that_cannot_reach_the_device_says_so_on_every_rank(rank, size):
    """What NCCL is to a CPU tensor: the headers go through a Gloo group of the same ranks."""
    group = dist.new_group(backend="cuda:gloo")
    with pytest.MonkeyPatch.context() as patch:  # there is no device on which they could agree to make it
        patch.setattr(control, "gather_objects", lambda value, group: [value] * size)
        text = _error_of(lambda: F.all_reduce(torch.ones(1), group=group))
    words = "every rank: all_reduce: x is on cpu, which the group's backend"
    assert words in _same_on_every_rank(text)


def test_without_a_process_group():
    with pytest.raises(F.CollectiveError, match="init_process_group"):
        F.all_reduce(torch.ones(1))


@on_ranks(2, 3)
def test_a_loss_that_is_called_replicated_and_is_not(rank, size):
    texts = []
    for collective in (F.all_reduce, F.all_gather, F.broadcast):
        x = torch.ones(2, requires_grad=True)
        y = (rank + 2) * collective(x, loss="replicated")
        texts.append(_error(lambda y=y: y.sum().backward()))
    assert all('use loss="per_rank"' in text for text in _same_on_every_rank(texts))


def _other_call(rank, group):
    (F.all_reduce if rank == 0 else F.all_gather)(torch.ones(2), group=group)


def _backward_beside_a_call(rank, group):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    loss = ddp(torch.ones(2, 2)).sum()
    if rank == 0:
        loss.backward()
    else:
        F.all_gather(torch.ones(3), group=group)


@pytest.mark.parametrize("program", [_other_call, _backward_beside_a_call])
@on_ranks(2, env={"MINDDP_CHECK_COLLECTIVES": "0"})
def test_torchs_debug_mode_names_a_wrong_order(rank, size, program):
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL
    with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
        program(rank, dist.new_group())
    dist.set_debug_level(before)  # the next test's class of torch would look for a group's wrapper that is not there


@on_ranks(2)
def test_another_librarys_bytes_are_recognized(rank, size):
    """Other numbers in the place of a digest, then what is no call, or no JSON, in the place of a call."""
    for bytes_of_another in (b"[7]", b"\xff\x00"):
        if rank == 0:
            with pytest.raises(F.CollectiveError, match="another library's collective"):
                agree(Call("all_reduce"), dist.group.WORLD)
        else:
            dist.all_reduce(torch.tensor([7, 7, 0, 0]), dist.ReduceOp.MAX)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(messages.json, "dumps", lambda value: types.SimpleNamespace(encode=lambda: value))
                patch.setattr(messages.json, "loads", lambda data: data)
                messages.gather_objects(bytes_of_another, dist.group.WORLD)


def test_the_text_puts_ranks_that_say_the_same_together():
    text = message("the op", ["sum", "max", "sum"])
    assert text.splitlines()[1:] == ["  ranks 0, 2: sum", "  rank 1: max"]
    assert message("arguments", ["bad", "bad"]).endswith("  every rank: bad")
