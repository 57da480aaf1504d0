"""What a program's text says about a parameter's gradient: which forwards it comes from, and who holds it.

A label is an observation's: ``net0.parts.1.weight.grad``. A forward is (wrapper, way, whether it is synchronized).
A wrapper has its net's number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .program import Program

__all__ = [
    "asks_for_local", "ended_by_a_hook", "frozen", "holders", "kin", "left_by_join", "may_be_divided",
    "other_forward_waits", "under_no_sync",
]  # fmt: skip

Ways = list[tuple[int, str, bool]]


def _block(program: Program, net: int, index: int) -> tuple[int, int]:
    """The (net, block) that the block of ``net`` is: another one's, where it is the ``same``."""
    block = program["nets"][net]["blocks"][index]
    if block["kind"] != "same":
        return net, index
    return _block(program, block["net"], block["block"] % len(program["nets"][block["net"]]["blocks"]))


def _blocks(program: Program, net: int) -> set[tuple[int, int]]:
    return {_block(program, net, index) for index in range(len(program["nets"][net]["blocks"]))}


def holders(program: Program, label: str) -> set[int]:
    """The nets that hold the parameter of a label."""
    found = re.match(r"net(\d+)\.(?:parts\.(\d+)\.)?", label)
    assert found is not None, f"{label} is not of a parameter"
    net = int(found[1])
    if found[2] is None:
        return {net}
    part = _block(program, net, int(found[2]))
    return {n for n in range(len(program["nets"])) if part in _blocks(program, n)}


def kin(program: Program, net: int) -> set[int]:
    """The net and those that share a block with it."""
    own = _blocks(program, net)
    return {net} | {n for n in range(len(program["nets"])) if own & _blocks(program, n)}


def may_be_divided(program: Program, label: str) -> bool:
    """Whether torch's class may divide this gradient when it arrives, sent or not.

    It does where the gradient is sparse, or where a wrapper of a net that holds the parameter has views.
    """
    nets = holders(program, label)
    found = re.match(r"net(\d+)\.parts\.(\d+)\.", label)
    if found is not None:
        net, index = _block(program, int(found[1]), int(found[2]))
        if program["nets"][net]["blocks"][index].get("sparse"):
            return True
    given = [(w, spec["args"]) for w, spec in enumerate(program["wrappers"])]
    given += [(a["w"], a["args"]) for verb, a in program["steps"] if verb == "rewrap"]
    return any(w in nets and arguments.get("gradient_as_bucket_view") for w, arguments in given)


def _backwards(program: Program, step: int) -> Iterator[tuple[str, dict[str, Any], Ways]]:
    """The steps up to ``step`` that matter for whose a gradient is, each with the forwards it comes from."""
    outputs: dict[str, Ways] = {}
    made: set[str] = set()
    for verb, a in program["steps"][: step + 1]:
        ways: Ways = []
        if verb == "forward" and a.get("input", "x") not in {"x", *made}:
            continue  # as the interpreter does
        made |= {a["out"]} if verb == "forward" else set()
        if verb == "forward" and a.get("grad") is not False:
            ways = [(a.get("w", 0), a.get("via", "ddp"), a.get("sync") is not False)]
            ways += outputs.get(a.get("input", "x"), [])
        elif verb == "loss":
            ways = [way for name in a["of"] for way in outputs.get(name, [])]
        elif verb == "penalty":  # of gradients, and what it is added to
            ways = outputs.get(a["of"], []) + outputs.get(a.get("add", ""), [])
        elif verb in ("grad", "backward"):
            ways = outputs.get(a["loss"], [])
        if "out" in a and ways:
            outputs[a["out"]] = ways
        if verb in ("zero", "jacobian", "rewrap", "freeze") or (ways and verb in ("forward", "backward")):
            yield verb, a, ways


def asks_for_local(program: Program, step: int, label: str) -> bool:
    """Whether a gradient is meant to be local, of forwards under no_sync or past the wrapper: since zero_grad and the
    last backward that averages what there is. A loss of such a forward and of another one is averaged, and a backward
    past a wrapper whose forward waits for one."""
    local = False
    waiting: set[int] = set()
    nets = holders(program, label)
    for verb, a, ways in _backwards(program, step):
        if verb == "zero" and a["w"] in nets:
            local = False
        elif verb == "backward" and a.get("inputs") != "x":  # which comes to no parameter
            own = [way for way in ways if way[0] in nets]
            if own:
                local = all(sync is False or (via != "ddp" and w not in waiting) for w, via, sync in own)
            waiting -= {w for w, _, _ in ways}
        elif verb == "forward" and ways[0][1:] == ("ddp", True):
            waiting.add(ways[0][0])
    return local


def _with_a_hook_that_raises(program: Program) -> set[int]:
    """The wrappers of such parameters: backward ends early there."""
    return {a.get("w", 0) for verb, a in program["steps"] if verb == "hook" and a.get("fail")}


def other_forward_waits(program: Program, step: int, label: str) -> bool:
    """Whether a backward under no_sync since zero_grad found a forward of another wrapper of the parameter: of the
    wrapper before, which may be alive, or of another net that holds it."""
    waiting: set[int] = set()
    nets = holders(program, label)
    # Where one raises the forward may go on waiting.
    raising = _with_a_hook_that_raises(program)
    old: set[int] = set()
    frozen: set[int] = set()  # whose backward comes to no parameter
    found = False
    for verb, a, ways in _backwards(program, step):
        if verb == "jacobian" or (verb == "forward" and ways[0][1:] == ("ddp", True)):
            waiting.add(a.get("w", 0))
        elif verb == "rewrap":
            old |= waiting & {a.get("w", 0)}  # kept on purpose, or by a hook, an output, a cycle
        elif verb == "backward":
            others = {w for w in waiting if w in nets}
            own = [(w, sync) for w, _, sync in ways if w in nets]
            found = found or any(not sync and (w in old or others - {w}) for w, sync in own)
            if a.get("inputs") != "x":  # which comes to no parameter
                waiting -= {w for w, via, _ in ways if via == "ddp" and w not in raising | frozen}
        elif verb == "freeze" and a.get("p") == "all":
            (frozen.discard if a.get("value") else frozen.add)(a.get("w", 0))
        elif verb == "zero" and a["w"] in nets:
            found = False
    return found


def frozen(program: Program, step: int, label: str) -> bool:
    """Whether parameters of a net that holds this one were frozen before a step."""
    nets = holders(program, label)
    return any(verb == "freeze" and a["w"] in nets for verb, a in program["steps"][:step])


def ended_by_a_hook(program: Program, step: int, label: str) -> bool:
    """Whether a hook that raises may have ended a backward since zero_grad, and another wrapper of one of its
    parameters, of another net, may have brought what it left out."""
    nets = holders(program, label)
    raising = _with_a_hook_that_raises(program)
    ended = False
    for verb, a, ways in _backwards(program, step):
        if verb == "zero" and a["w"] in nets:
            ended = False
        elif verb == "backward" and a.get("inputs") != "x":
            ended = ended or any(w in raising and sync and w in nets for w, _, sync in ways)
    return ended and any(len(kin(program, net)) > 1 for net in nets)


def under_no_sync(program: Program, step: int, label: str) -> bool:
    """Whether the last backward to a parameter before a step was of a forward under no_sync, or ran under no_sync and
    past the wrapper."""
    nets = holders(program, label)
    last: list[bool] = []
    for verb, a, ways in _backwards(program, step):
        if verb == "backward" and a.get("inputs") != "x":
            inside = a.get("sync") is False
            own = [way for way in ways if way[0] in nets]
            last = [not sync or (inside and via != "ddp") for _, via, sync in own] or last
    return any(last)


def left_by_join(program: Program, step: int) -> bool:
    """Whether a join, which ends with each rank's last own batch in ``.grad``, is not followed by its zero_grad."""
    left: set[int] = set()
    for verb, a in program["steps"][:step]:
        if verb == "join":
            left.add(a.get("w", 0))
        elif verb == "zero":
            left.discard(a.get("w", 0))
    return bool(left)
