"""Loading the extension: only into the torch it was built against, and with errors that say what to do."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import minddp
from minddp import _extension


def fake_build(monkeypatch: pytest.MonkeyPatch, extension: Path) -> None:
    """Makes ``extension`` (which need not exist) what an import of minddp._C would find."""
    spec = importlib.machinery.ModuleSpec("minddp._C", None, origin=str(extension))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_the_record_is_of_this_build() -> None:
    record = _extension.build_record()
    assert record["torch"] == torch.__version__
    text = minddp.__config__()
    for part in (record["version"], record["torch"], record["compiler"], Path(minddp.__file__).parent):
        assert str(part) in text
    assert ("cuda: no" in text) == (record["cuda"] is None)


def test_another_torch_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_build(monkeypatch, tmp_path / "_C.so")
    (tmp_path / "_build.json").write_text(json.dumps({"torch": "2.12.1+cu130"}))
    with pytest.raises(ImportError, match=r"built against torch 2\.12\.1\+cu130, but torch") as caught:
        _extension.load()
    assert torch.__version__ in str(caught.value)
    assert "pip install --no-build-isolation" in str(caught.value)


def test_a_linked_extension_keeps_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Checkouts may share one build by a symbolic link to the extension alone."""
    real, link = tmp_path / "built" / "_C.so", tmp_path / "_C.so"
    real.parent.mkdir()
    real.touch()
    link.symlink_to(real)
    (real.parent / "_build.json").write_text(json.dumps({"torch": "1.0"}))
    fake_build(monkeypatch, link)
    assert _extension.build_record() == {"torch": "1.0"}


def test_without_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="not built for this Python"):
        _extension.load()
    monkeypatch.undo()
    fake_build(monkeypatch, tmp_path / "_C.so")
    with pytest.raises(ImportError, match="no record of its build"):
        _extension.load()


def test_unbuilt_sources_say_which_package_they_hide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = tmp_path / "site" / "minddp"
    installed.mkdir(parents=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", [str(Path(minddp.__file__).parents[1]), str(installed.parent)])
    with pytest.raises(ImportError, match=r"not built for this Python\. Build it"):  # no extension lies there either
        _extension.load()
    (installed / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    with pytest.raises(ImportError) as caught:
        _extension.load()
    assert f"hide the minddp that is installed in {installed}: run `python -P`" in str(caught.value)
    assert "Build it" not in str(caught.value)  # it is built: a second time would not help


def test_an_extension_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("undefined symbol: _ZN2at")

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"does not load \(undefined symbol: _ZN2at\)"):
        _extension.load()


def test_a_build_without_shared_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where csrc/shm is left out: not on Linux, or with MINDDP_SHM=0."""
    monkeypatch.setattr(minddp.shm, "_load", lambda: None)
    assert not minddp.shm.is_available()
    with pytest.raises(RuntimeError, match='rank 0 could not join .* built without the backend "shm"'):
        minddp.shm._create(torch.distributed.HashStore(), 0, 1, timedelta(seconds=60))


PROGRAM = """
import atexit
import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def hooks():
    tables = [
        modules._global_parameter_registration_hooks, modules._global_module_registration_hooks,
        modules._global_buffer_registration_hooks, modules._global_forward_hooks,
        modules._global_forward_pre_hooks, modules._global_backward_hooks,
        optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks,
    ]
    return sum(map(len, tables))

before, backends, ends = hooks(), set(dist.Backend.backend_list), atexit._ncallbacks()
import minddp
print(hooks() - before, sorted(set(dist.Backend.backend_list) - backends), atexit._ncallbacks() > ends)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
minddp.DistributedDataParallel(torch.nn.Linear(1, 1))
print(hooks() > before)
dist.destroy_process_group()
"""


def test_import_does_what_it_says() -> None:
    """To a process, by the package's docstring."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["0 ['auto', 'shm'] True", "True"], done.stdout + done.stderr
