"""The first page's programs, as a reader takes them from it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.on_ranks import all_alike, on_ranks
from tests.ranks_pool import free_port

ROOT = Path(__file__).resolve().parents[2]
TRAIN, SPAWN, *FRAGMENTS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "first.md").read_text(), re.DOTALL)
MAIN = 'if __name__ == "__main__":\n    train()\n'


def _run(command, tmp_path):
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank [01], epoch [0-2]: loss \d", done.stdout)) == 6, done.stdout


def test_by_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").write_text(TRAIN)
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    _run(["-m", "torch.distributed.run", "--nproc-per-node", "2", *where, "train.py"], tmp_path)


def test_by_spawn(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert MAIN in TRAIN
    (tmp_path / "train.py").write_text(TRAIN.replace(MAIN, SPAWN.replace("29500", str(free_port()))))
    _run(["train.py"], tmp_path)


@pytest.mark.parametrize(
    "text, batches", list(zip(FRAGMENTS, [(8, 8), (5, 2)], strict=True)), ids=["no_sync", "join"]
)
@on_ranks(2)
def test_fragments(rank, world_size, text, batches):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    names = {"nn": torch.nn}
    exec("from minddp import DistributedDataParallel", names)
    names["model"] = names["DistributedDataParallel"](model)
    names["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
    names["loader"] = [(torch.randn(4, 8) + rank, torch.ones(4, 1)) for _ in range(batches[rank])]
    before = model.weight.detach().clone()
    exec(text, names)
    assert not torch.equal(model.weight, before)
    assert all_alike(model.weight)
