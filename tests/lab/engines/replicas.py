"""docs/torchft.md's program: one replica group is killed, the other goes on, the first comes back with its state.

The weights are those of one process that averages, in each step, over the groups that took part in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import statistics
import sys
from pathlib import Path

import torch

from tests.lab.engines.processes import ROOT, EngineError, Processes
from tests.ranks_pool import free_port

PAGE = ROOT / "docs" / "torchft.md"
STEPS, ALONE, SECONDS = 100, 5, 300.0
_LINE = re.compile(r"^(\w) step (\d+) groups (\d+) ([\d.]+) s$", re.MULTILINE)


def missing() -> str | None:
    return None if importlib.util.find_spec("torchft") else "torchft is not installed: pip install torchft"


def run(folder: Path) -> str:
    """A line for the table.

    Raises:
        AssertionError: a group did not go on or come back, or the weights differ.
    """
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    folder.mkdir()
    (folder / "replica.py").write_text(program)
    port = free_port()
    with Processes(folder) as processes:

        def start(name: str) -> int:
            """A replica group; its name begins with the group's."""
            variables = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "STEPS": str(STEPS), "PAUSE": "0.3"}
            return processes.start(name, [sys.executable, "replica.py", name[0]], **variables).pid

        def lines(name: str) -> list[tuple[str, ...]]:
            path = folder / f"{name}.log"
            return _LINE.findall(path.read_text()) if path.exists() else []

        command = shlex.split(re.search(r"^    (torchft_lighthouse .*)$", PAGE.read_text(), re.MULTILINE)[1])
        processes.start("lighthouse", [word.replace("29510", str(port)) for word in command])
        start("a")  # first, so that it has the state that counts
        processes.wait_until("a step of the first group", lambda: bool(lines("a")), SECONDS)
        lost = start("b")
        processes.wait_until("the third step of the second group", lambda: len(lines("b")) >= 3, SECONDS)
        os.kill(lost, signal.SIGKILL)
        killed = len(lines("a"))
        processes.wait_until("steps without the lost group", lambda: len(lines("a")) >= killed + ALONE, SECONDS)
        start("b-again")
        processes.wait(SECONDS, but=("lighthouse", "b"))
        taken = lines("a")
    weights = [torch.load(folder / f"{group}.pt")["model"] for group in "ab"]
    return _judged(taken, killed, weights)


def _judged(taken: list[tuple[str, ...]], killed: int, weights: list[dict[str, torch.Tensor]]) -> str:
    groups = {int(step): int(count) for _, step, count, _ in taken}
    if sorted(groups) != list(range(STEPS)):
        raise EngineError(f"the group that went on has taken these steps: {sorted(groups)}")
    alone = [step for step, count in groups.items() if count == 1 and step >= killed - 1]
    if len(alone) < ALONE or groups[STEPS - 1] != 2:
        raise EngineError(f"groups by step: {groups}")
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), f"{name} differs between the groups"
    torch.testing.assert_close(dict(weights[0]), _in_one_process(groups))
    seconds = {int(step): float(text) for _, step, _, text in taken}
    both, one = (
        statistics.median(seconds[step] for step, found in groups.items() if found == count and step not in alone[:1])
        for count in (2, 1)
    )
    return (
        f"the same bits in both groups; a step {1e3 * both:.0f} ms with two, {1e3 * one:.0f} ms with one, "
        f"{seconds[alone[0]]:.1f} s where the group was lost; steps {alone[0]} to {alone[-1]} alone"
    )


def _in_one_process(groups: dict[int, int]) -> dict[str, torch.Tensor]:
    """The program's weights, by averages over the groups that took part."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in "ab"[: groups[step]]:
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + ord(group)))
            (model(batch).square().mean() / groups[step]).backward()
        optimizer.step()
    return dict(model.state_dict())
