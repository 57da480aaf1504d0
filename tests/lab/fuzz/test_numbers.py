"""What the verdict excuses, and what it does not: made-up runs of two ranks."""

import numpy as np
import pytest

from .compare import judge

LOCAL, AVERAGED, NONE = (1.0, 3.0), (2.0, 2.0), (None, None)
WEIGHT, BIAS, OTHER = "net0.parts.0.weight.grad", "net0.parts.0.bias.grad", "net1.parts.0.weight.grad"
BOTH = {WEIGHT: AVERAGED, BIAS: AVERAGED, OTHER: AVERAGED}
LEFT = {**BOTH, WEIGHT: LOCAL}


def _judged(steps, theirs, ours):
    """The verdict where the runs saw this (label: each rank's value) in a backward, and in the ``steps`` after it."""
    start = [["forward", {"out": "o"}], ["loss", {"of": ["o"], "out": "l"}], ["backward", {"loss": "l"}]]
    nets, wrappers = [{"blocks": [{"kind": "linear"}]}] * 2, [{"args": {}}] * 2
    program = {"world": 2, "nets": nets, "wrappers": wrappers, "optimizers": [], "steps": start + steps}

    def results(seen):
        for rank in range(2):
            observations = [
                (step, label, values[rank] if values[rank] is None else np.array(values[rank]))
                for step, labels in enumerate(seen, 2)
                for label, values in labels.items()
            ]
            yield {"observations": observations, "end": "ok", "at": len(start + steps), "error": "", "left_over": ""}

    return judge(program, list(results(theirs)), list(results(ours)))


@pytest.mark.parametrize("label, excused", [(WEIGHT, True), (BIAS, False), (OTHER, False)])
def test_what_torch_leaves_local_may_be_the_mean_and_nothing_else_may_differ(label, excused):
    forward = ["forward", {"out": "p"}]
    assert (_judged([], [{**BOTH, label: LOCAL}], [BOTH]) is None) and _judged([], [LEFT], [BOTH]) is None
    assert _judged([], [LEFT], [{**BOTH, label: (2.5, 2.5)}]).what == "a gradient"
    later = _judged([forward], [LEFT, LEFT], [BOTH, {**BOTH, label: (7.0, 7.0)}])
    assert (later is None) == excused  # until they are the same again


def test_what_is_made_of_such_a_gradient_differs_too():
    clip = ["clip", {"w": 0, "max": 0.5}]
    scaled = [{"norm": (3.0, 4.0), WEIGHT: (0.3, 0.8)}, {"norm": (5.0, 5.0), WEIGHT: (0.4, 0.4)}]
    assert _judged([clip], [LEFT, scaled[0]], [BOTH, scaled[1]]) is None
    assert _judged([clip], [BOTH, {"norm": (3.0, 4.0)}], [BOTH, {"norm": (5.0, 5.0)}]).what == "a value"


def test_once_the_same_again_it_is_compared_again():
    steps = [["zero", {"w": 0}], ["forward", {"out": "p"}]]
    found = _judged(steps, [LEFT, {WEIGHT: NONE}, BOTH], [BOTH, {WEIGHT: NONE}, {**BOTH, WEIGHT: (7.0, 7.0)}])
    assert found.step == 4 and found.what == "a gradient"
