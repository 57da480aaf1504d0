"""What people install: a source distribution and a wheel, each in an environment that had nothing before.

By the commands that README.md gives. One build, of some two minutes on two cores; pip fetches torch twice.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import minddp

ROOT = Path(__file__).resolve().parents[3]
TORCH = torch.__version__.partition("+")[0]
WHEEL_VERSION = f"{minddp.__version__}+torch{re.sub('[^0-9a-zA-Z]+', '.', torch.__version__)}"


class Environment:
    """A virtual environment; commands run in a folder that has nothing to do with the sources."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        self.bin = folder / "bin"
        self.elsewhere = folder.with_name(f"{folder.name}-cwd")
        self.elsewhere.mkdir()

    def call(self, program: str, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs ``program`` of the environment, which sees nothing of this process's own packages."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.run(
            [str(self.bin / program), *words],
            cwd=cwd or self.elsewhere,
            env={**kept, "PATH": f"{self.bin}{os.pathsep}{kept['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )

    def check(self, program: str, *words: str, cwd: Path | None = None) -> str:
        done = self.call(program, *words, cwd=cwd)
        assert done.returncode == 0, f"{program} {' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as git has them, with nothing built among them."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    assert not list(folder.glob("minddp/*.so"))
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Has torch and what README.md asks for besides."""
    environment = Environment(tmp_path_factory.mktemp("environments") / "builder")
    environment.check("pip", "install", "-q", f"torch=={TORCH}", "setuptools>=77", "wheel", "ninja")
    return environment


@pytest.fixture(scope="module")
def sdist(builder: Environment, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    builder.check("python", "-c", code, cwd=checkout)
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel(builder: Environment, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    builder.check("pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), str(sdist))
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An empty environment in which the wheel alone was asked for."""
    environment = Environment(tmp_path_factory.mktemp("environments") / "user")
    environment.check("pip", "install", "-q", str(wheel))
    return environment


def test_the_source_distribution_is_for_any_torch(sdist: Path) -> None:
    assert sdist.name == f"minddp-{minddp.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        described = archive.extractfile(f"minddp-{minddp.__version__}/PKG-INFO").read().decode()
    stubs = {"minddp/_C/__init__.pyi", "minddp/_C/guards.pyi", "minddp/_shm.pyi"}
    assert {"LICENSE", "setup.py", "csrc/bindings.cpp", "csrc/copy/cuda/scaled_copy.cu", *stubs} <= names
    assert not [name for name in names if name.endswith((".so", "_build.json"))]
    assert "\nRequires-Dist: torch>=2.11\n" in described


def test_the_wheel_says_which_torch_it_is_for(wheel: Path) -> None:
    assert wheel.name.startswith(f"minddp-{WHEEL_VERSION}-cp{sys.version_info.major}{sys.version_info.minor}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = archive.read(f"minddp-{WHEEL_VERSION}.dist-info/METADATA").decode()
    assert f"\nRequires-Dist: torch=={TORCH}\n" in described
    assert "\nLicense-Expression: BSD-3-Clause\n" in described
    assert f"minddp-{WHEEL_VERSION}.dist-info/licenses/LICENSE" in names
    assert {"minddp/_build.json", "minddp/py.typed"} <= set(names)
    assert [name.partition("/")[0] for name in names if not name.startswith("minddp")] == []


def trains_on_two_ranks(environment: Environment) -> None:
    printed = environment.check("minddp", "doctor")
    assert f"package: {environment.bin.parent}" in printed
    assert "gloo, 2 ranks: ok, the same gradients" in printed
    assert "shm, 2 ranks: ok, the same gradients" in printed


def test_the_wheel_in_an_empty_environment(user: Environment) -> None:
    assert "No broken requirements found" in user.check("pip", "check")
    assert f"minddp {WHEEL_VERSION}" in re.sub(" +", " ", user.check("pip", "list"))
    trains_on_two_ranks(user)


def test_the_source_distribution_in_an_empty_environment(builder: Environment, wheel: Path) -> None:
    """``pip install --no-build-isolation SDIST`` is these two steps in one."""
    builder.check("pip", "install", "-q", str(wheel))
    trains_on_two_ranks(builder)


def test_the_command_runs_an_unmodified_program(user: Environment) -> None:
    program = user.elsewhere / "train.py"
    program.write_text("import torch\nprint(torch.nn.parallel.DistributedDataParallel.__module__)\n")
    assert user.check("minddp", "run", "train.py") == "minddp.ddp\n"
    launch = ("--standalone", "--nproc-per-node=2", "-m", "minddp", "run", "train.py")
    assert user.check("torchrun", *launch) == 2 * "minddp.ddp\n"


def test_in_the_clones_root_the_installed_package_is_one_option_away(user: Environment, checkout: Path) -> None:
    done = user.call("python", "-m", "minddp", "doctor", cwd=checkout)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: minddp's extension is not built")
    assert f"installed in {user.bin.parent}" in last
    assert "gloo, 2 ranks: ok" in user.check("python", "-P", "-m", "minddp", "doctor", cwd=checkout)


def test_a_build_in_isolation_says_what_to_do(user: Environment, checkout: Path) -> None:
    done = user.call("pip", "install", ".", cwd=checkout)
    assert done.returncode != 0
    assert "then build with `pip install --no-build-isolation .`" in done.stdout + done.stderr


@pytest.mark.parametrize("other", ["2.11.0", "2.99.0"])
def test_another_torch_ends_in_one_sentence(user: Environment, wheel: Path, other: str) -> None:
    """What ``pip install torch==OTHER`` leaves: a torch of another version beside the extension."""
    version = next(user.bin.parent.glob("lib/python*/site-packages/torch/version.py"))
    text = version.read_text()
    try:
        version.write_text(text.replace(torch.__version__, other))
        done = user.call("python", "-c", "import minddp")
    finally:
        version.write_text(text)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: minddp in ")
    assert f"was built against torch {torch.__version__}, but torch {other} is" in last
    assert "rebuild that minddp for this torch" in last
