"""``python -m tests.pains``: runs every pain with both classes, and writes docs/pains.md."""

from __future__ import annotations

import sys

import minddp.testing
from tests import forked

from . import outcome
from .page import PAGE, page
from .programs import PAINS


def main() -> int:
    minddp.testing.start_rank = forked.start_rank
    found = []
    for index, pain in enumerate(PAINS):
        torchs, ours = (outcome.run(index, which) for which in outcome.CLASSES)
        print(
            f"{pain.title}\n   torch   {torchs.kind}: {torchs.text}\n   minddp  {ours.kind}: {ours.text}", flush=True
        )
        found.append((torchs, ours))
    PAGE.write_text(page(found))
    return any((a.kind, b.kind) != (pain.torch, pain.ours) for pain, (a, b) in zip(PAINS, found))


if __name__ == "__main__":
    sys.exit(main())
