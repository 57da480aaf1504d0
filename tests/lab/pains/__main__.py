"""``make lab ARGS=pains``: runs every pain with both classes, writes docs/pains.md, fails if one ends otherwise."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from tests import forked, ranks_pool

from .outcome import CLASSES, LIMIT, Outcome, run
from .programs import PAINS, WORLD, Pain

TORCH = ".".join(torch.__version__.split(".")[:2])
PAGE = Path(__file__).resolve().parents[3] / "docs" / "pains.md"
HEAD = f"""# Pain points

`make lab ARGS=pains` writes this page, and fails if a program ends in another way. Each row is a program of a few
lines (`tests/lab/pains/programs.py`). It ran on {WORLD} ranks with the class of torch {TORCH} and with minddp's. The
cells say how it ended. "Waits" means that nothing was reported on a rank for {LIMIT:.0f} seconds. The numbers are
issues of [PyTorch's](https://github.com/pytorch/pytorch/issues).
"""


def main() -> int:
    ranks_pool.start_rank = forked.start_rank
    rows, failed = [HEAD, "| | torch | minddp |", "| --- | --- | --- |"], 0
    for index, pain in enumerate(PAINS):
        torchs, ours = (run(index, which) for which in CLASSES)
        print(f"{pain.title}\n   torch   {torchs}\n   minddp  {ours}", flush=True)
        if (torchs.kind, ours.kind) != (pain.torch, pain.ours) or not re.search(pain.says, ours.text):
            print(f"   expected {pain.torch}, and {pain.ours}: {pain.says}", flush=True)
            failed += 1
        rows.append(row(pain, torchs, ours))
    PAGE.write_text("\n".join([*rows, ""]))
    return failed > 0


def row(pain: Pain, *outcomes: Outcome) -> str:
    """The page's row: how the pain ended with torch's class, and with minddp's."""
    title = re.sub(r"\b(optimizer\.step\(\)|ddp[.\w]*\(x\)|\w+_\w+(=-?\d+)?)", r"`\1`", pain.title)
    issues = f" ({', '.join(f'#{number}' for number in pain.issues)})" if pain.issues else ""
    cells = [each.text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;") for each in outcomes]
    return f"| {title}{issues} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
