"""How far can a prediction be trusted? What ``minddp.report(ddp)`` predicts, beside what is then measured.

    python benchmarks/advice.py                                   # three models, three links; needs root
    python benchmarks/advice.py --models mlp38 --links loopback

For each model and link: the default arguments, the best uniform cap, ``bucket_cap_mb="auto"`` and ``wire=``, in
turns; and after each turn what the report of the default's steps in it predicts for each. Of both, the medians of
all turns. A prediction is the step from forward's begin to the averages, as it is measured. "Two alike": how much
two wrappers with the default arguments differ, measured in the same way: what this machine cannot tell apart. The
report names the quickest prediction if it saves 3 %, and else the present arguments. It was right if what it names
was the quickest choice, or within 2 % of it, or within what two alike differ by. No optimizer runs.

Result: advice.json in --output.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import harness
from harness import Ranks

import minddp
from minddp import DistributedDataParallel
from minddp.launching.advise import Choice, Loss, measure, predict
from minddp.launching.tune import tune
from minddp.straggler import Advice, Prediction

MODELS = ("mlp38", "gpt2-small", "resnet50")
LINKS = ("1gbit", "10gbit", "loopback")
_ROUNDS, _STEPS = 10, 32  # of a turn, in each round three steps; that a report is of
_CLOSE = 0.02  # behind the quickest
TOLERANCE = 0.10  # of what was measured, for a prediction


def try_choices(
    rank: int, world_size: int, model: str, seconds: float
) -> tuple[list[tuple[str, float, float]], float]:
    """Each choice, as it is passed; the seconds that were predicted, and measured. How much two alike differ."""
    import torch
    from models import workload

    work = workload(model, torch.device("cpu"), rank)
    alike = [Choice({}, 0.0), Choice({}, 0.0)]
    wrappers = [DistributedDataParallel(copy.deepcopy(work.module)) for _ in alike]
    measure(alike, wrappers, work.call, _ROUNDS)
    turns = math.ceil(seconds / (3 * _ROUNDS * alike[0].measured_seconds))  # the same on all ranks
    one, other = _medians(alike, wrappers, work.call, turns)[1]
    default = wrappers[0]
    choices = predict(default, _STEPS)
    wrappers = [default]
    for choice in choices[1:]:
        wrappers.append(DistributedDataParallel(copy.deepcopy(work.module), **choice.arguments))
        if choice.arguments.get("bucket_cap_mb") == "auto":
            tune(wrappers[-1], work.call)
    predicted, measured = _medians(choices, wrappers, work.call, turns)
    found = list(zip([choice.text for choice in choices], predicted, measured, strict=True))
    return found, abs(one - other) / min(one, other)


def _medians(
    choices: Sequence[Choice], wrappers: Sequence[DistributedDataParallel], loss: Loss, turns: int
) -> tuple[list[float], list[float]]:
    """What is predicted for each, from the first one's steps in each turn; and what is measured."""
    predicted: list[list[float]] = []
    measured: list[list[float]] = []
    for _ in range(turns):
        measure(choices, wrappers, loss, _ROUNDS)
        measured.append([choice.measured_seconds for choice in choices])
        advice = minddp.report(wrappers[0], _STEPS).advice
        assert advice is not None
        again = {prediction.name: prediction.seconds for prediction in (*advice.caps, *advice.others)}
        predicted.append([again.get(choice.text.replace("'", '"'), advice.present.seconds) for choice in choices])
    medians = [[statistics.median(each) for each in zip(*found, strict=True)] for found in (predicted, measured)]
    return medians[0], medians[1]


class Judged(NamedTuple):
    """A model over a link.

    Attributes:
        error: the largest of a prediction, as a part of what was measured.
        named: the choice that the report names.
        behind: how much longer it took than the quickest, as a part of that.
        right: whether that is close enough.
    """

    error: float
    named: str
    behind: float
    right: bool


def judge(choices: list[tuple[str, float, float]], alike: float) -> Judged:
    """How good the predictions were; the first of ``choices`` is the default."""
    error = max(abs(predicted / seconds - 1) for _, predicted, seconds in choices)
    measured = {name: seconds for name, _, seconds in choices}
    present, *others = (Prediction(name, 0, seconds) for name, seconds, _ in choices)
    named = (Advice(measured[present.name], present, tuple(others)).best() or present).name
    behind = measured[named] / min(measured.values()) - 1
    return Judged(error, named, behind, behind <= max(_CLOSE, alike))


def show(title: str, choices: list[tuple[str, float, float]], alike: float) -> None:
    """Prints a model's choices over one link."""
    judged = judge(choices, alike)
    print(
        f"{title}: largest error {judged.error:.1%}; named: {judged.named}, {judged.behind:.1%} behind the quickest "
        f"({'right' if judged.right else 'WRONG'}); two alike differ by {alike:.1%}",
        flush=True,
    )
    for name, predicted, measured in choices:
        off = predicted / measured - 1
        print(f"    {name:24} predicted {1e3 * predicted:7.1f} ms   measured {1e3 * measured:7.1f} ms   {off:+6.1%}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=list(MODELS), help="see benchmarks/models.py")
    parser.add_argument("--links", type=harness.names, default=list(LINKS), help="bandwidths, or loopback")
    parser.add_argument("--seconds", type=float, default=8, help="for which a choice is measured, about")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "advice.json")
    arguments: argparse.Namespace = parser.parse_args()
    found: dict[str, list[tuple[str, float, float]]] = {}
    alike: dict[str, float] = {}
    facts: dict[str, Any] = {"command": harness.command(), "machine": harness.machine()}
    for link in arguments.links:
        for model in arguments.models:
            case = f"{model}, {link}"
            with Ranks(2, link=None if link == "loopback" else link) as ranks:
                found[case], alike[case] = ranks.run(try_choices, model, arguments.seconds)[0]
            show(case, found[case], alike[case])
            # An interrupted run keeps what it has.
            harness.write_json(arguments.output, {**facts, "choices": found, "alike": alike})
    judged = [judge(choices, alike[case]) for case, choices in found.items()]
    close, right = sum(each.error <= TOLERANCE for each in judged), sum(each.right for each in judged)
    print(f"of {len(judged)}: within {TOLERANCE:.0%} {close}; the best choice named {right}")


if __name__ == "__main__":
    harness.run_main(main)
