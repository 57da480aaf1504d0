"""Makes a program that shows a difference small: delta debugging over its data.

What always holds: the result shows a difference with the same signature as the program given.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["shrink"]

Program = dict[str, Any]


def _without_steps(program: Program) -> Iterator[Program]:
    count = len(program["steps"])
    width = max(count // 2, 1)
    while width:
        for start in range(count - width, -1, -width):
            smaller = copy.deepcopy(program)
            del smaller["steps"][start : start + width]
            yield smaller
        width //= 2


def _without_wrapper(program: Program) -> Iterator[Program]:
    last = len(program["wrappers"]) - 1
    if last == 0:
        return
    smaller = copy.deepcopy(program)
    smaller["wrappers"].pop()
    smaller["nets"].pop()
    smaller["optimizers"] = [
        {**o, "of": [w for w in o["of"] if w != last]} for o in smaller["optimizers"] if o["of"] != [last]
    ]
    yield smaller


def _simpler_parts(program: Program) -> Iterator[Program]:
    for i, net in enumerate(program["nets"]):
        for j in range(len(net["blocks"])):
            if len(net["blocks"]) > 1:
                smaller = copy.deepcopy(program)
                del smaller["nets"][i]["blocks"][j]
                yield smaller
            if net["blocks"][j]["kind"] != "scale":
                smaller = copy.deepcopy(program)
                smaller["nets"][i]["blocks"][j] = {"kind": "scale"}
                yield smaller
        for name in {"out", "tells"} & set(net):
            smaller = copy.deepcopy(program)
            del smaller["nets"][i][name]
            yield smaller
    for i, wrapper in enumerate(program["wrappers"]):
        if "own" in wrapper:
            smaller = copy.deepcopy(program)
            del smaller["wrappers"][i]["own"]
            yield smaller
        for name in wrapper.get("args", {}):
            smaller = copy.deepcopy(program)
            del smaller["wrappers"][i]["args"][name]
            yield smaller
    for i, optimizer in enumerate(program["optimizers"]):
        if optimizer["kind"] != "sgd":
            smaller = copy.deepcopy(program)
            smaller["optimizers"][i]["kind"] = "sgd"
            yield smaller


def _simpler_steps(program: Program) -> Iterator[Program]:
    needed = {"out", "of", "loss", "w", "opt", "kind", "hook", "how", "batches", "via"}
    for i, (_, arguments) in enumerate(program["steps"]):
        for name, value in arguments.items():
            if name not in needed:
                smaller = copy.deepcopy(program)
                del smaller["steps"][i][1][name]
                yield smaller
            elif name == "of" and isinstance(value, list) and len(value) > 1:
                for j in range(len(value)):
                    smaller = copy.deepcopy(program)
                    del smaller["steps"][i][1]["of"][j]
                    yield smaller


def shrink(program: Program, shows: Callable[[Program], bool], seconds: float = 60.0) -> Program:
    """The smallest program found for which ``shows`` still holds, in at most about ``seconds``."""
    end = time.monotonic() + seconds
    changed = True
    while changed:
        changed = False
        for smaller_ones in (_without_steps, _without_wrapper, _simpler_parts, _simpler_steps):
            again = True
            while again:
                again = False
                for smaller in smaller_ones(program):
                    if time.monotonic() > end:
                        return program
                    if shows(smaller):
                        program, again, changed = smaller, True, True
                        break
    return program
