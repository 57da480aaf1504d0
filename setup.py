"""Builds ``minddp._C`` and ``minddp._shm`` against the torch that is installed; pyproject.toml declares the rest.

The core is csrc/reducer, csrc/copy and csrc/bindings.cpp. Every other folder of csrc is a companion's. If
it is there, it is compiled along, and binds itself into ``minddp._C``. csrc/shm becomes ``minddp._shm``.

A wheel says which torch it is for, in its version (``0.2.0+torch2.13.0.cpu``) and in what it requires
(``torch==2.13.0``), since the extension loads into no other. A distribution of the sources names none.

The CUDA sources are compiled when torch has CUDA and nvcc is found; ``MINDDP_CUDA=0`` leaves them out and
``MINDDP_CUDA=1`` insists on them. What was chosen is recorded beside the extension in ``_build.json``,
which ``minddp/_extension.py`` checks before it loads the extension.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup

OLDEST_SETUPTOOLS = 77  # the first that knows pyproject.toml's `license` as it is written there
OLDEST_TORCH = (2, 11)
OLDEST_GPU = (7, 0)  # nvcc 13 compiles for none that is older
BUILD_TOOLS = 'pip install "setuptools>=77" wheel ninja'

# Without build isolation nobody has compared these with pyproject.toml's build requirements.
if int(setuptools.__version__.partition(".")[0]) < OLDEST_SETUPTOOLS:
    sys.exit(f"minddp needs setuptools {OLDEST_SETUPTOOLS} or newer, here is {setuptools.__version__}: {BUILD_TOOLS}")
try:
    import torch
    import torch.distributed.rpc
    from torch.utils import cpp_extension
except ImportError:
    sys.exit(
        "minddp is compiled against the torch that you use: install torch first (pip install torch), then "
        f"{BUILD_TOOLS}, then build with `pip install --no-build-isolation .`"
    )
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    sys.exit(f"minddp needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, here is torch {torch.__version__}")

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "minddp/__init__.py").read_text(), re.MULTILINE)[1]
CXX_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]
# Some compilers link their C++ library statically. Beside torch's, it must stay inside: two of one name are taken for
# one, and whatever formats a number then may crash.
LINK_FLAGS = ["-Wl,--exclude-libs,ALL"] if sys.platform == "linux" else []
# Most of a compilation is torch's headers, so files that include the same of them are compiled at once: in the first
# unit whose pattern matches a file's path, from csrc on. Anonymous namespaces are a unit's, not a file's.
LOOPS = r"copy/|wire/block_quantization"
UNITS = {"shm": "shm/", "bindings": r"(\w+/)?bindings", "loops": LOOPS, "reducer": ""}
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden"]


def sources(*patterns: str) -> list[str]:
    """Paths relative to the root, as setuptools wants them, in a stable order."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def use_cuda() -> bool:
    """Whether the CUDA sources are built; an override that cannot be met ends the build."""
    choice = os.environ.get("MINDDP_CUDA", "")
    if choice not in ("", "0", "1"):
        sys.exit(f"MINDDP_CUDA is {choice!r}: set it to 0 (leave CUDA out), 1 (insist on it), or unset it")
    if choice == "0":
        return False
    missing = []
    if torch.version.cuda is None:
        missing.append(f"torch {torch.__version__} has no CUDA")
    if nvcc() is None:
        missing.append("nvcc is not in CUDA_HOME, on PATH or in /usr/local/cuda")
    if missing and choice == "1":
        sys.exit(f"MINDDP_CUDA=1 cannot be met: {' and '.join(missing)}")
    return not missing


def use_shm() -> bool:
    """Whether the shared-memory transport is built: its memory files are found through /proc, which Linux has."""
    return sys.platform == "linux" and os.environ.get("MINDDP_SHM", "1") != "0"


def nvcc() -> str | None:
    home = cpp_extension.CUDA_HOME
    return None if home is None else shutil.which("nvcc", path=os.path.join(home, "bin"))


def toolkit_headers() -> list[str]:
    """The CUDA toolkit's headers: nvcc's own first, which must be of its release, and then those that come with
    torch's wheels: a toolkit with nvcc alone lacks the libraries'."""
    steps = subprocess.run([nvcc(), "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    own = re.findall(r'^#\$ INCLUDES="-I([^" ]+)', steps, re.MULTILINE)
    site = Path(torch.__file__).parent.parent
    return own + [str(path) for path in sorted(site.glob("nvidia/*/include"))]


def cuda_archs() -> str:
    """The architectures compiled for: the variable's, else the GPUs in sight, else torch's own.

    The kernel uses no architecture's own features: the ``a`` of torch's ``sm_90a`` is left out, and the newest is
    compiled to PTX, too, for GPUs that come after it.
    """
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return archs
    seen = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    own = re.findall(r"\bsm_(\d+)(\d)[a-z]?\b", torch._C._cuda_getArchFlags() or "")
    for found in (seen, {(int(major), int(minor)) for major, minor in own}):
        if archs := ";".join(f"{major}.{minor}" for major, minor in sorted(found) if (major, minor) >= OLDEST_GPU):
            return f"{archs}+PTX"
    sys.exit(
        f"minddp's CUDA sources need a GPU of capability 7.0 or newer; torch {torch.__version__} has code for none: "
        "leave them out with MINDDP_CUDA=0, or name architectures in TORCH_CUDA_ARCH_LIST"
    )


def extensions(cuda: bool) -> list[Extension]:
    """``minddp._C``, of all of csrc but csrc/shm; and ``minddp._shm``, of that."""
    files = [file for file in sources("csrc/**/*.cpp") if "/cuda/" not in file and not file.startswith("csrc/shm/")]
    arguments: dict[str, Any] = {
        "include_dirs": [str(ROOT / "csrc")],
        "define_macros": [("MINDDP_WITH_RPC", "1")] if torch.distributed.rpc.is_available() else [],
        "extra_compile_args": {"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        "extra_link_args": LINK_FLAGS,
        "depends": sources("csrc/**/*.h", "csrc/**/*.cuh", "csrc/**/*.cpp"),
    }
    shm = sources("csrc/shm/*.cpp") if use_shm() else []
    found = [cpp_extension.CppExtension("minddp._shm", [*shm, "csrc/copy/reduce.cpp"], **arguments)] if shm else []
    if not cuda:
        return [cpp_extension.CppExtension("minddp._C", files, **arguments), *found]
    os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
    arguments["include_dirs"] = arguments["include_dirs"] + toolkit_headers()
    arguments["define_macros"] = [*arguments["define_macros"], ("MINDDP_WITH_CUDA", "1")]
    files += sources("csrc/*/cuda/*.cpp", "csrc/*/cuda/*.cu")
    extension = cpp_extension.CUDAExtension("minddp._C", files, **arguments)
    # torch's wheels carry libcudart.so.13 without the unversioned name that -lcudart looks for. It is
    # loaded with torch all the same, and found through libc10_cuda, which needs it too.
    if not any((Path(folder) / "libcudart.so").exists() for folder in extension.library_dirs):
        extension.libraries.remove("cudart")
    return [extension, *found]


def units(extension: Extension, folder: Path) -> list[str]:
    """The extension's sources as they are compiled: those outside of cuda folders through a file for each of
    :data:`UNITS`."""
    members: dict[str, list[str]] = {}
    apart = [file for file in extension.sources if "/cuda/" in file]
    for file in sorted(set(extension.sources) - set(apart)):
        name = next(name for name, pattern in UNITS.items() if re.match(pattern, file.removeprefix("csrc/")))
        members.setdefault("shm" if extension.name == "minddp._shm" else name, []).append(file)
    for name, theirs in members.items():
        path, text = folder / f"{name}.cpp", "".join(f'#include "{ROOT / file}"\n' for file in theirs)
        if not path.exists() or path.read_text() != text:  # otherwise it is as old as it was, for ninja
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return [str(folder / f"{name}.cpp") for name in members] + apart


def compiler() -> str:
    command = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return command
    return answer.stdout.splitlines()[0]


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, which compiles in parallel through ninja, and the record of what was built."""

    def run(self) -> None:
        os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
        super().run()
        # After build_ext has put the extension into its place: the sources' folder for --inplace and
        # editable installs, the build folder otherwise.
        built = Path(self.get_ext_fullpath("minddp._C"))
        built.with_name("_build.json").write_text(json.dumps(self.record(), indent=1) + "\n")

    def build_extensions(self) -> None:
        for extension in self.extensions:
            extension.sources = units(extension, Path(self.build_temp))
        super().build_extensions()

    def record(self) -> dict[str, str | None]:
        cuda = any(name == "MINDDP_WITH_CUDA" for name, _ in self.extensions[0].define_macros)
        return {
            "version": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": compiler(),
            "flags": " ".join(CXX_FLAGS),
            "cuda": torch.version.cuda if cuda else None,
            "cuda_archs": os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else None,
        }


def version_and_requirements() -> dict[str, Any]:
    """What the distribution is called and wants; the one of sources neither names nor wants this very torch."""
    if "sdist" in sys.argv[1:]:
        return {"version": VERSION, "install_requires": [f"torch>={'.'.join(map(str, OLDEST_TORCH))}", "numpy"]}
    number = torch.__version__.partition("+")[0]
    local = re.sub("[^0-9a-zA-Z]+", ".", torch.__version__)
    return {"version": f"{VERSION}+torch{local}", "install_requires": [f"torch=={number}", "numpy"]}


setup(ext_modules=extensions(use_cuda()), cmdclass={"build_ext": BuildExtension}, **version_and_requirements())
