"""``docs/pains.md``, from how each pain has ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from .outcome import LIMIT, Outcome
from .programs import PAINS, WORLD, Pain

TORCH = ".".join(torch.__version__.split(".")[:2])
PAGE = Path(__file__).resolve().parents[3] / "docs" / "pains.md"

_HEAD = f"""# Pain points

`make lab ARGS=pains` writes this page, and fails if a program ends in another way. Each row is a program of a few
lines (`tests/lab/pains/programs.py`). It ran on {WORLD} ranks with the class of torch {TORCH} and with minddp's. The
cells say how it ended. "Waits" means that nothing was reported on a rank for {LIMIT:.0f} seconds. The numbers are
issues of [PyTorch's](https://github.com/pytorch/pytorch/issues).
"""


def page(found: Sequence[tuple[Outcome, Outcome]]) -> str:
    """The page's text; ``found``: how each pain ended with torch's class, and with ours."""
    rows = [_row(pain, torchs, ours) for pain, (torchs, ours) in zip(PAINS, found, strict=True)]
    return "\n".join([_HEAD, "| | torch | minddp |", "| --- | --- | --- |", *rows, ""])


def _row(pain: Pain, torchs: Outcome, ours: Outcome) -> str:
    issues = f" ({', '.join(f'#{number}' for number in pain.issues)})" if pain.issues else ""
    title = re.sub(r"\b(optimizer\.step\(\)|ddp[.\w]*\(x\)|\w+_\w+(=-?\d+)?)", r"`\1`", pain.title)
    return f"| {title}{issues} | {_cell(torchs)} | {_cell(ours)} |"


def _cell(outcome: Outcome) -> str:
    return outcome.text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
