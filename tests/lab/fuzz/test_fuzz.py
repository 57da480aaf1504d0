"""Drawn programs train the same with ours as with torch's class; and what differs is found, shrunk and judged.

``MINDDP_PROGRAMS`` sets how many programs are drawn (default 300), ``MINDDP_SEED`` from what.
"""

import os

import pytest
import torch

from .hunt import Hunt

PROGRAMS = int(os.environ.get("MINDDP_PROGRAMS", "300"))
PARTS = 4
SEED = int(os.environ.get("MINDDP_SEED", "10"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_programs_train_the_same(part):
    """Each of pytest's workers takes parts."""
    hunt = Hunt(PARTS * SEED + part, PROGRAMS // PARTS, worlds=(2, 3) if part == 0 else (2,), shrink_seconds=15)
    assert not list(hunt.run()), hunt.report()
    assert hunt.done == PROGRAMS // PARTS


class ScalesOne(torch.nn.parallel.DistributedDataParallel):
    """The last parameter's gradient is one percent too large."""

    def __init__(self, module, **arguments):
        super().__init__(module, **arguments)
        last = [p for p in module.parameters() if p.requires_grad][-1]
        last.register_hook(lambda grad: None if grad is None else grad * 1.01)


@pytest.mark.timeout(1800)
def test_a_planted_fault_is_found_and_shrunk():
    """Three steps are the smallest program; on a busy machine hypothesis ends earlier, after five minutes."""
    finding = next(Hunt(2, 40, candidate=f"{__name__}:ScalesOne", shrink_seconds=600).run())
    assert finding.difference.kind == "numbers" and finding.steady
    verbs = [verb for verb, _ in finding.program["steps"]]
    assert {"forward", "loss", "backward"} <= set(verbs) and len(verbs) <= 6, finding.text()
    assert len(finding.program["wrappers"]) == 1
