"""Lets a tutorial run from a fresh clone: finds minddp beside this folder, and builds its extension the first time.

Where minddp is installed, nothing happens. Several ranks that start at once build once.
"""

import fcntl
import importlib.util
import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def is_built() -> bool:
    return any((ROOT / "minddp" / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def find_minddp() -> None:
    if importlib.util.find_spec("minddp") is None:
        sys.path.insert(0, str(ROOT))
        # For the processes that this one starts.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    spec = importlib.util.find_spec("minddp")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != ROOT or is_built():
        return
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built():
            return
        print("minddp's extension is not built yet: building it, once. This takes a few minutes.", file=sys.stderr)
        status = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT).returncode
    if status:
        sys.exit("the extension could not be built; docs/install.md says what it needs")


find_minddp()
