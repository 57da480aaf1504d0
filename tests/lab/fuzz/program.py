"""A program: plain data (JSON) that says what one training script does, and its readable listing.

A program is a dict:

``world``, ``seed``
    How many ranks; what every random number is made from.
``nets``
    Models, each ``{"blocks": [block, ...], "out": "tensor" | "tuple" | ..., "tells": ...}``; see ``nets.py``.
``wrappers``
    ``{"net": index, "args": {constructor arguments}}``; ``process_group: "own"`` stands for a new group of all ranks.
    With ``own``: of a class of the program's, see ``own.py``.
``optimizers``
    ``{"kind": "sgd" | "adam", "of": [wrapper, ...]}``.
``dtype``
    Of parameters and inputs that say none themselves: ``float32`` (the default) or ``float64``.
``steps``
    ``[verb, {arguments}]``. Any step may have ``ranks``: only these ranks run it.

What always holds: a step that names a variable which does not exist (its maker was removed or failed) is skipped, on
both classes alike, so that any sublist of ``steps`` is a program too.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["VERBS", "listing", "size", "to_json"]

# verb: its form in a listing. A missing argument reads as the default that the interpreter gives it.
VERBS = {
    "forward": "{out} = {call}",
    "loss": "{out} = loss({of}, head={head!r}{fail})",
    "penalty": "{out} = {add} + 0.1 * sum(g.pow(2).sum() for g in {of})",
    "backward": "{loss}.backward({options})",
    "grad": "{out} = autograd.grad({loss}, {wrt}{options})",
    "jacobian": "autograd.functional.jacobian({w}, x)",
    "func_grad": "torch.func.grad(lambda p: functional_call({w}, p, x))(parameters)",
    "zero": "{w}.zero_grad(set_to_none={to_none})",
    "clip": "clip_grad_norm_({w}.parameters(), {max})",
    "scale_grad": "for p in {w}.parameters(): p.grad *= {by}",
    "step": "optimizer{opt}.step()",
    "freeze": "{w}: parameter {p}.requires_grad_({value})",
    "hook": "{w}: {kind} hook on parameter {p} reads .grad of {read}{fail}",
    "unhook": "remove every hook",
    "move_grad": "{w}: post_accumulate hook on parameter {p}: {how} its .grad",
    "join": "with {w}.join(divide_by_initial_world_size={divide}): train {batches} batches with optimizer{opt}",
    "rewrap": "{w} = DDP({w}.module{args}){keep}",
    "deepcopy": "{w} = deepcopy({w})",
    "pickle": "{w} = pickle.loads(pickle.dumps({w}))",
    "state_dict": "{w}.load_state_dict({w}.state_dict())",
    "comm_hook": "{w}.register_comm_hook(group, {hook})",
    "drop": "del {out}",
}  # fmt: skip


def _arguments(values: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in values.items())


def _wrapper(a: dict[str, Any]) -> str:
    return f"ddp{a.get('w', 0)}"


def _forward(a: dict[str, Any]) -> str:
    via = {"ddp": "{}({})", "module": "{}.module({})", "functional": "functional_call({}, parameters, {})"}
    x = a.get("input", "x")
    x += ".requires_grad_()" if a.get("xgrad") else ""
    call = via[a.get("via", "ddp")].format(_wrapper(a), x)
    notes = [
        "in eval" if a.get("eval") else "",
        "under no_grad" if a.get("grad") is False else "",
        "under no_sync" if a.get("sync") is False else "",
        "raises inside, caught" if a.get("fail") else "",
    ]
    return call + "".join(f"  # {note}" for note in notes if note)


def _step_line(verb: str, a: dict[str, Any]) -> str:
    words: dict[str, Any] = {"max": 1.0, "by": 0.5, "to_none": True, "head": "both", "p": 0, "opt": 0, "read": "all"}
    words |= {"divide": True, "value": False, "out": "_", "add": "0", "args": "", **a, "w": _wrapper(a)}
    words["fail"] = ", raises, caught" if a.get("fail") else ""
    if verb == "forward":
        words["call"] = _forward(a)
    if verb == "loss":
        words["of"] = " + ".join(a["of"])
    if verb == "backward":
        inputs = {"x": "inputs=[x]", "params": "inputs=ddp0.parameters()"}.get(a.get("inputs"), "")
        flags = [f"{name}=True" for name in ("retain_graph", "create_graph") if a.get(name)]
        words["options"] = ", ".join([inputs] * bool(inputs) + flags)
    if verb == "grad":
        words["wrt"] = "x" if a.get("wrt", "x") == "x" else f"{_wrapper(a)}.parameters()"
        words["options"] = "".join(f", {name}=True" for name in ("retain_graph", "create_graph") if a.get(name))
    if verb == "rewrap":
        words["args"] = _arguments(a.get("args", {}))
        words["keep"] = "  # the old wrapper stays alive" if a.get("keep") else ""
    line = VERBS[verb].format(**words)
    if verb == "backward" and a.get("sync") is False:
        line += "  # under no_sync"
    return line


def listing(program: dict[str, Any]) -> str:
    """The program as lines that read like the script it stands for."""
    lines = [f"# {program['world']} ranks, seed {program['seed']}"]
    for i, net in enumerate(program["nets"]):
        blocks = ", ".join(
            block["kind"] + "".join(f" {k}={v}" for k, v in block.items() if k != "kind") for block in net["blocks"]
        )
        tells = f"  # named_parameters() {net['tells']}" if "tells" in net else ""
        lines.append(f"net{i} = Net([{blocks}], out={net.get('out', 'tensor')!r}){tells}")
    for i, wrapper in enumerate(program["wrappers"]):
        own = f"  # of a class of its own: {wrapper['own']}" if "own" in wrapper else ""
        lines.append(f"ddp{i} = DDP(net{wrapper['net']}{_arguments(wrapper.get('args', {}))}){own}")
    for i, optimizer in enumerate(program["optimizers"]):
        of = " + ".join(f"ddp{w}" for w in optimizer["of"])
        lines.append(f"optimizer{i} = {optimizer['kind'].upper()}(parameters of {of})")
    for verb, a in program["steps"]:
        only = f"if rank in {a['ranks']}: " if a.get("ranks") is not None else ""
        lines.append(only + _step_line(verb, a))
    return "\n".join(lines)


def size(program: dict[str, Any]) -> int:
    """What the shrinker makes smaller: the length of the program as JSON, steps counting most."""
    return 1000 * len(program["steps"]) + len(to_json(program))


def to_json(program: dict[str, Any]) -> str:
    return json.dumps(program, separators=(",", ":"))
