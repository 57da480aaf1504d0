"""How far can a prediction be trusted? What ``ddp.report()`` predicts, beside what is then measured.

    python benchmarks/advice.py                                   # three models, three links; needs root
    python benchmarks/advice.py --models mlp38 --links loopback

For each model and link: the default arguments, the best uniform cap, ``bucket_cap_mb="auto"`` and ``wire=``, in
turns; then what the report of the default's steps in these turns predicts for each. A prediction is the step from
forward's begin to the averages, as it is measured. "Named": the choice predicted to be the quickest is the one that
was, or within 2 % of it. "Two alike": how much two wrappers with the default arguments differ, measured in the same
way: what this machine cannot tell apart. No optimizer runs.

Result: advice.json in --output.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import harness
from harness import Ranks

MODELS = ("mlp38", "gpt2-small", "resnet50")
LINKS = ("1gbit", "10gbit", "loopback")
_STEPS = 20  # that a report is of
_CLOSE = 1.02


def try_choices(
    rank: int, world_size: int, model: str, rounds: int
) -> tuple[list[tuple[str, float, float]], float]:
    """Each choice, as it is passed; the seconds that were predicted, and measured. How much two alike differ."""
    import torch
    from models import workload

    from minddp import DistributedDataParallel
    from minddp.launching.advise import Choice, measure, predict
    from minddp.launching.tune import tune

    work = workload(model, torch.device("cpu"), rank)
    alike = [Choice({}, 0.0), Choice({}, 0.0)]
    wrappers = [DistributedDataParallel(copy.deepcopy(work.module)) for _ in alike]
    measure(alike, wrappers, work.call, rounds)
    one, other = (choice.measured_seconds for choice in alike)
    default = wrappers[0]
    choices = predict(default, _STEPS)
    wrappers = [default]
    for choice in choices[1:]:
        wrappers.append(DistributedDataParallel(copy.deepcopy(work.module), **choice.arguments))
        if choice.arguments.get("bucket_cap_mb") == "auto":
            tune(wrappers[-1], work.call)
    measure(choices, wrappers, work.call, rounds)
    # The machine was another one some minutes ago: the default's steps beside the others' are those to predict from.
    # The best cap may be another one now; then its first prediction stands.
    again = {choice.text: choice.predicted_seconds for choice in predict(default, _STEPS)}
    found = [
        (choice.text, again.get(choice.text, choice.predicted_seconds), choice.measured_seconds)
        for choice in choices
    ]
    return found, abs(one - other) / min(one, other)


def judge(choices: list[tuple[str, float, float]]) -> tuple[float, bool]:
    """The largest error of a prediction, as a part of what was measured; whether the best choice was named."""
    named = min(choices, key=lambda choice: choice[1])
    quickest = min(measured for *_, measured in choices)
    return max(abs(predicted / measured - 1) for _, predicted, measured in choices), named[2] <= _CLOSE * quickest


def show(title: str, choices: list[tuple[str, float, float]], alike: float) -> None:
    """Prints a model's choices over one link."""
    error, named = judge(choices)
    verdict = "named" if named else "NOT named"
    print(f"{title}: largest error {error:.1%}, best choice {verdict}; two alike differ by {alike:.1%}", flush=True)
    for name, predicted, measured in choices:
        off = predicted / measured - 1
        print(f"    {name:24} predicted {1e3 * predicted:7.1f} ms   measured {1e3 * measured:7.1f} ms   {off:+6.1%}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.names, default=list(MODELS), help="see benchmarks/models.py")
    parser.add_argument("--links", type=harness.names, default=list(LINKS), help="bandwidths, or loopback")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "advice.json")
    arguments: argparse.Namespace = parser.parse_args()
    found: dict[str, list[tuple[str, float, float]]] = {}
    alike: dict[str, float] = {}
    facts: dict[str, Any] = {"command": harness.command(), "machine": harness.machine()}
    for link in arguments.links:
        for model in arguments.models:
            case = f"{model}, {link}"
            with Ranks(2, link=None if link == "loopback" else link) as ranks:
                found[case], alike[case] = ranks.run(try_choices, model, arguments.rounds)[0]
            show(case, found[case], alike[case])
            # An interrupted run keeps what it has.
            harness.write_json(arguments.output, {**facts, "choices": found, "alike": alike})
    judged = [judge(choices) for choices in found.values()]
    close = sum(error <= 0.10 for error, _ in judged)
    print(f"within 10 %: {close} of {len(judged)}; best choice named: {sum(named for _, named in judged)}")


if __name__ == "__main__":
    harness.run_main(main)
