"""A program: plain data (JSON) that says what one training script does.

A program is a dict:

``world``, ``seed``
    How many ranks; what every random number is made from.
``nets``
    Models, each ``{"blocks": [block, ...], "out": "tensor" | "tuple" | ..., "tells": ...}``; see ``nets.py``.
``wrappers``
    One for each net, ``{"args": {constructor arguments}}``; ``process_group: "own"`` stands for a new group of all
    ranks. With ``own``: of a class of the program's, see ``own.py``.
``optimizers``
    ``{"kind": "sgd" | "adam", "of": [wrapper, ...]}``.
``dtype``
    Of parameters and inputs that say none themselves: ``float32`` (the default) or ``float64``.
``steps``
    ``[verb, {arguments}]``; each verb has a method ``do_...`` in ``interpreter.Run``. Of a step with ``ranks`` these
    ranks alone run it.

What always holds: a step that names a variable which does not exist (its maker was left out or failed) is skipped, on
both classes alike, so that any sublist of ``steps`` is a program too.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Program", "listing", "to_json"]

Program = dict[str, Any]


def to_json(program: Program) -> str:
    """What the patterns of ``differences.toml`` are looked for in."""
    return json.dumps(program, separators=(",", ":"))


def listing(program: Program) -> str:
    """The program as JSON with a line for each net, wrapper, optimizer and step."""
    parts = []
    for name, value in program.items():
        lines = ",".join(f"\n  {json.dumps(one)}" for one in value) if isinstance(value, list) else ""
        parts.append(f'"{name}": ' + (f"[{lines}]" if lines else json.dumps(value)))
    return "{" + ",\n ".join(parts) + "}"
