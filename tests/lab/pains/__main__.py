"""``make lab ARGS=pains``: runs every pain with both classes, writes docs/pains.md, fails if one ends otherwise."""

from __future__ import annotations

import re
import sys

import minddp.testing
from tests import forked

from . import outcome
from .outcome import Outcome
from .page import PAGE, page
from .programs import PAINS, Pain


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
    ended = {pain: ends for pain, ends in zip(PAINS, found, strict=True) if not _as_expected(pain, *ends)}
    for pain, ends in ended.items():
        print(f"{pain.title}: expected {(pain.torch, pain.ours)} and {pain.says!r}, ended as {ends}", file=sys.stderr)
    return len(ended) > 0


def _as_expected(pain: Pain, torchs: Outcome, ours: Outcome) -> bool:
    return (torchs.kind, ours.kind) == (pain.torch, pain.ours) and re.search(pain.says, ours.text) is not None


if __name__ == "__main__":
    sys.exit(main())
