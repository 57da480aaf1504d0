"""What the verdict excuses, and what it does not: made-up runs of two ranks."""

import numpy as np
import pytest

from .compare import judge, meant
from .origins import asks_for_local, ended_by_a_hook, holders, kin, may_be_divided, other_forward_waits

LOCAL, AVERAGED = (1.0, 3.0), (2.0, 2.0)
WEIGHT, BIAS, OTHER = "net0.parts.0.weight.grad", "net0.parts.0.bias.grad", "net1.parts.0.weight.grad"


def _program(*steps, args=None, blocks=({"kind": "linear"},), more=()):
    nets = [{"blocks": list(blocks)}, {"blocks": [{"kind": "linear"}, *more]}]
    wrappers = [{"net": 0, "args": args or {}}, {"net": 1, "args": {}}]
    return {"world": 2, "seed": 0, "nets": nets, "wrappers": wrappers, "optimizers": [], "steps": list(steps)}


def _runs(program, *by_step):
    """One run's results: for each step {label: one value for each rank}."""
    results = []
    for rank in range(2):
        observations = [
            (step, label, values[rank] if values[rank] is None else np.array(values[rank]))
            for step, seen in enumerate(by_step)
            for label, values in seen.items()
        ]
        results.append({"observations": observations, "end": "ok", "at": len(program["steps"]), "error": ""})
    return results


FORWARD, LOSS = ["forward", {"out": "o"}], ["loss", {"of": ["o"], "out": "l"}]
BACKWARD, CLIP = ["backward", {"loss": "l"}], ["clip", {"w": 0}]
START = (FORWARD, LOSS, BACKWARD)


def _judged(steps, theirs, ours, **program):
    """The verdict where the runs saw this in the steps after ``START``'s first two."""
    made = _program(*START, *steps, **program)
    return judge(made, _runs(made, {}, {}, *theirs), _runs(made, {}, {}, *ours))


def test_what_torch_leaves_local_may_be_the_mean():
    assert _judged([], [{WEIGHT: LOCAL}], [{WEIGHT: AVERAGED}]) is None
    assert _judged([], [{WEIGHT: LOCAL}], [{WEIGHT: (2.5, 2.5)}]).what == "a gradient"


def test_beside_it_all_else_is_held_to_torch():
    """By the gradient: not by the net, and in later steps too."""
    seen = {WEIGHT: AVERAGED, BIAS: AVERAGED, OTHER: AVERAGED}
    for label in (BIAS, OTHER):
        wrong = {**seen, label: (7.0, 7.0)}
        assert _judged([CLIP], [{**seen, WEIGHT: LOCAL}, {OTHER: AVERAGED}], [seen, {OTHER: (7.0, 7.0)}]) is not None
        assert _judged([FORWARD], [{**seen, WEIGHT: LOCAL}] * 2, [seen, wrong]).what == "a gradient"
        assert _judged([FORWARD], [{**seen, WEIGHT: LOCAL}] * 2, [seen, seen]) is None


def test_what_is_made_of_it_differs_too():
    theirs, ours = {WEIGHT: LOCAL, BIAS: AVERAGED}, {WEIGHT: AVERAGED, BIAS: AVERAGED}
    clipped = {"norm": (3.0, 4.0), WEIGHT: (0.3, 0.8), BIAS: (0.6, 0.5)}, {"norm": (5.0, 5.0), WEIGHT: (0.4, 0.4)}
    clipped[1][BIAS] = (0.4, 0.4)
    assert _judged([CLIP], [theirs, clipped[0]], [ours, clipped[1]]) is None
    assert _judged([CLIP], [theirs, {"norm": (3.0, 4.0)}], [theirs, {"norm": (5.0, 5.0)}]) is not None


def test_once_the_same_again_it_is_compared_again():
    none, wrong = {WEIGHT: (None, None)}, {WEIGHT: (7.0, 7.0)}
    steps = [["zero", {"w": 0}], FORWARD]
    found = _judged(steps, [{WEIGHT: LOCAL}, none, {WEIGHT: AVERAGED}], [{WEIGHT: AVERAGED}, none, wrong])
    assert found.step == 4 and found.what == "a gradient"


def test_terms_in_another_order_differ_by_rounding():
    """Also in what comes of them; a gradient that was the same all along differs by nothing."""
    stepped, near = {"net0.parts.0.weight": (0.5, 0.5)}, {"net0.parts.0.weight": (0.5 + 1e-7, 0.5 + 1e-7)}
    theirs, steps = [{WEIGHT: LOCAL}, {WEIGHT: AVERAGED}, stepped], [BACKWARD, FORWARD]
    for second, verdict in ((2.0 + 1e-6, True), (2.01, False)):
        ours = [{WEIGHT: AVERAGED}, {WEIGHT: (second, second)}, near]
        assert (_judged(steps, theirs, ours) is None) == verdict
    same = [{WEIGHT: AVERAGED}, {WEIGHT: AVERAGED}]
    assert _judged(steps, [*same, stepped], [*same, near]).what == "a parameter"
    assert _judged(steps, theirs, [*same, near]).what == "a parameter"  # nor one that is the same again to the bit


@pytest.mark.parametrize(
    "args, blocks, expected",
    [
        ({}, [{"kind": "linear"}], False),
        ({"gradient_as_bucket_view": True}, [{"kind": "linear"}], True),
        ({}, [{"kind": "embedding", "sparse": True}], True),
        ({}, [{"kind": "linear"}, {"kind": "embedding", "sparse": True}], False),
    ],
)
def test_divided_is_asked_of_the_gradient(args, blocks, expected):
    program = _program(args=args, blocks=blocks)
    assert may_be_divided(program, "net0.parts.0.weight.grad") == expected
    assert not may_be_divided(program, "net1.parts.0.weight.grad")


def test_a_shared_block_has_two_holders():
    program = _program(more=[{"kind": "same", "net": 0, "block": 0}])
    assert holders(program, WEIGHT) == holders(program, "net1.parts.1.weight.grad") == {0, 1}
    assert holders(program, OTHER) == {1} and kin(program, 0) == {0, 1}


def test_another_nets_backward_and_zero_say_nothing():
    aside = ["forward", {"out": "n", "w": 1, "sync": False}]
    other = [aside, ["loss", {"of": ["n"], "out": "m"}], ["backward", {"loss": "m"}]]
    program = _program(*START, *other, ["zero", {"w": 0}])
    assert not asks_for_local(program, 5, WEIGHT) and asks_for_local(program, 5, OTHER)
    assert asks_for_local(program, 6, OTHER)


def test_a_penalty_comes_from_the_forward_it_is_of():
    under = ["forward", {"out": "o", "sync": False}]
    grad, penalty = ["grad", {"loss": "l", "out": "g"}], ["penalty", {"of": "g", "out": "p"}]
    program = _program(under, LOSS, grad, penalty, ["backward", {"loss": "p"}])
    assert asks_for_local(program, 4, WEIGHT)


def test_a_mean_of_nothing_is_zero_where_the_parameter_is_frozen():
    nothing, zero = [{WEIGHT: (None, None)}], [{WEIGHT: (0.0, 0.0)}]
    freeze = ["freeze", {"w": 0}]
    for steps, ours, what in (
        ([freeze], zero, None),
        ([], zero, "a gradient"),
        ([["freeze", {"w": 1}]], zero, "a gradient"),
        ([freeze], [{WEIGHT: (0.0, 1.0)}], "a gradient"),
    ):
        made = _program(*steps, *START)
        before = [{}] * (2 + len(steps))
        found = judge(made, _runs(made, *before, *nothing), _runs(made, *before, *ours))
        assert (found and found.what) == what


@pytest.mark.parametrize(
    "torchs, what", [(AVERAGED, "while another wrapper's forward waits"), ((9.0, 9.0), "gradient$")]
)
def test_an_old_wrappers_forward_excuses_its_average_alone(torchs, what):
    steps = FORWARD, ["rewrap", {"w": 0}], ["forward", {"out": "o", "sync": False}], LOSS, BACKWARD
    program = _program(*steps)
    assert other_forward_waits(program, 4, WEIGHT) and not other_forward_waits(program, 4, OTHER)
    runs = [_runs(program, {}, {}, {}, {}, {WEIGHT: values}) for values in (torchs, LOCAL)]
    found = judge(program, *runs)
    assert found.what.endswith(what.removesuffix("$"))
    assert (meant(program, found) is None) == what.endswith("$")


def test_a_backward_that_a_hook_ended_is_told_by_the_gradient():
    """Of the net whose hook raises, where another net shares a block with it, until zero_grad."""
    hook = ["hook", {"w": 0, "kind": "tensor", "p": 0, "fail": 1}]
    steps = [FORWARD, LOSS, BACKWARD]
    shared = {"more": ({"kind": "same", "net": 0, "block": 0},)}
    program = _program(hook, *steps, **shared)
    assert ended_by_a_hook(program, 3, WEIGHT) and not ended_by_a_hook(program, 3, OTHER)
    assert not ended_by_a_hook(_program(hook, *steps), 3, WEIGHT)
    assert not ended_by_a_hook(_program(*steps, **shared), 2, WEIGHT)
    assert not ended_by_a_hook(_program(hook, *steps, ["zero", {"w": 0}], **shared), 4, WEIGHT)
    made = _program(*steps, hook, **shared)
    runs = [_runs(made, {}, {}, {WEIGHT: values}) for values in (AVERAGED, LOCAL)]
    assert judge(made, *runs).what == "a gradient of a backward that a hook ended, averaged"
    assert judge(made, *runs[::-1]) is None


def _refuses(made, results, step):
    """Those results, where each rank raises at ``step`` instead of going on."""
    text = "optimizer.step() on rank 0 would use gradients that were never averaged, of ['parts.0.weight']: …"
    for result in results:
        result |= {"end": "raised", "at": step, "error": f"RuntimeError: {text}"}
        result["observations"] = [seen for seen in result["observations"] if seen[0] < step]
    return results


@pytest.mark.parametrize(("gradient", "excused"), [(LOCAL, True), (AVERAGED, False)])
def test_a_refused_step_is_right_where_torchs_gradients_differ(gradient, excused):
    """Their parameters may be the same all the same, as after Adam's first step."""
    made = _program(*START, ["step", {"opt": 0}])
    made["optimizers"] = [{"kind": "adam", "of": [0]}]
    stepped = {WEIGHT: gradient, OTHER: LOCAL, "net0.parts.0.weight": (0.5, 0.5)}
    seen = {}, {}, {WEIGHT: gradient}, stepped
    difference = judge(made, _runs(made, *seen), _refuses(made, _runs(made, *seen), 3))
    assert (difference is None) == excused
    assert excused or difference.kind == "raises"
