"""One engine here; ``make lab ARGS=engines`` runs all of them by the same functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.engines.engines import ENGINES, by_slurm, reference
from tests.lab.engines.judging import verdict
from tests.lab.engines.page import blocks, headings


@pytest.mark.all
def test_slurms_variables_end_with_the_weights_of_torchs_class(tmp_path: Path) -> None:
    engine = next(engine for engine in ENGINES if engine.run is by_slurm)
    whole = reference(tmp_path / "whole", engine.ranks)
    report = engine.run(tmp_path / "slurm")
    assert verdict(engine, report, whole) == "the same bits"
    with pytest.raises(AssertionError, match="weights differ"):
        verdict(engine, report | {"weights": [*report["weights"][:-1], 1.0]}, whole)
    with pytest.raises(AssertionError, match="trained by"):
        verdict(engine, report | {"class": whole["class"]}, whole)


def test_each_block_of_the_page_is_run_by_an_engine() -> None:
    run = {
        "torchrun, one machine": 1,
        "torchrun, several machines": 1,
        "SLURM": 1,
        "Kubernetes": 1,
        "Containers": 0,  # tests/shm/test_containers.py
        "mpirun": 1,
        "Ray Train": 3,
        "Processes that the program starts": 0,  # test_install.py, test_startup.py
    }
    assert {heading: len(blocks(heading)) for heading in headings()} == run
