"""Makes the results that README and docs name: all of them, on this machine, by one command.

    make lab ARGS=results                     # hours; --link needs root
    python benchmarks/all_results.py --list   # the commands
    python benchmarks/all_results.py wire     # those that name it

Each result file says which command made it, on which machine, and of which version. Afterwards `make docs` draws the
pages anew.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import harness

_TORCH = "--rounds 100 --inner 2 --variants torch,minddp"
_NEWEST = "torch-views-batched,torch-views-batched-lazy,minddp,minddp-views,minddp-shm,minddp-views-shm"

_WIRES = "minddp,minddp-int8,minddp-bf16,torch-bf16hook"
_QUICK, _SLOW = f"--variants torch,{_WIRES} --rounds 3 --fresh", f"--variants {_WIRES} --rounds 2 --steps 2 --fresh"

# By result file (a benchmark that writes several: one of them), the command that makes it.
COMMANDS = {
    "overhead": f"overhead.py --models many-small {_TORCH}",
    "overhead-large": "overhead.py --models mlp67,resnet50 --rounds 20 --inner 1 --variants torch,minddp",
    "overhead-torch-2.15": f"overhead.py --models many-small --rounds 100 --inner 2 --variants {_NEWEST} "
    "--baseline torch-views-batched",
    "memory": "memory.py",
    "owned": "owned.py",
    "buckets-mlp38-gloo-2ranks-1gbit": "bucket_size.py --models mlp38,gpt2-small --link 1gbit --impl minddp,torch "
    "--caps 0.5,1,2,4,8,16,25 --rounds 3 --steps 4 --fresh",
    "wire-mlp38-gloo-2ranks-1gbit": "wire.py --models mlp38 --link 1gbit --rounds 3 --fresh",
    "wire-mlp38-gloo-2ranks-100mbit": "wire.py --models mlp38 --link 100mbit --variants minddp-int8,minddp-bf16 "
    "--rounds 2 --steps 2 --fresh",
    "wire-mlp38-gloo-2ranks-10gbit": f"wire.py --models mlp38 --link 10gbit {_QUICK}",
    "wire-mlp38-gloo-2ranks-loopback": f"wire.py --models mlp38 {_QUICK}",
    "wire-gpt2-small-gloo-2ranks-100mbit": f"wire.py --models gpt2-small --link 100mbit {_SLOW}",
    "wire-gpt2-small-gloo-2ranks-1gbit": f"wire.py --models gpt2-small --link 1gbit {_QUICK}",
    "wire-gpt2-small-gloo-2ranks-10gbit": f"wire.py --models gpt2-small --link 10gbit {_QUICK}",
    "wire-gpt2-small-gloo-2ranks-loopback": f"wire.py --models gpt2-small {_QUICK}",
    "wire-mlp38-gloo-4ranks-1gbit": f"wire.py --models mlp38,gpt2-small --ranks 4 --link 1gbit {_SLOW}",
    "wire-learning": "wire.py --learning",
    "straggler": "straggler.py",
    "shm": "shm.py --model mlp67-light",
    "paper": "paper.py --models mlp38,gpt2-small --rounds 3 --link 1gbit",
    "simulate-mlp38": "simulate.py --model mlp38 --link 1gbit",
    **{f"gpu-check-{call.lower()}": f"gpu_check.py {call}" for call in "ABC"},  # takes a GPU
}
_ANOTHER_FILE = ("overhead-large", "overhead-torch-2.15")  # than the script's own
_WITH_NEWEST = ("overhead-torch-2.15",)
_FOLDER = Path(__file__).resolve().parent


def run(name: str) -> int:
    """Makes one result; the command's exit status."""
    script, *words = shlex.split(COMMANDS[name])
    words += ["--output", str(harness.RESULTS / f"{name}.json")] if name in _ANOTHER_FILE else []
    environment = {**os.environ, "MINDDP_RESULTS": str(harness.RESULTS)}
    print(f"--- {name}: python benchmarks/{COMMANDS[name]}", flush=True)
    python, folder = sys.executable, _FOLDER
    if name in _WITH_NEWEST:
        root = _FOLDER.parent
        newest = (root / "requirements-newest.txt").read_text().split("torch==")[1].strip()
        subprocess.run(["make", "-C", str(root), f"check-torch-{newest}", "TARGET=build"], check=True)
        python, folder = str(root / f".venv-{newest}/bin/python"), root / f"build/torch-{newest}/benchmarks"
    return subprocess.call([python, str(folder / script), *words], env=environment)


def main() -> int:
    """The command; its exit status."""
    parser = harness.parser(__doc__)
    parser.add_argument("only", nargs="*", help="parts of results' names (default: all)")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    arguments: argparse.Namespace = parser.parse_args()
    wanted = [name for name in COMMANDS if not arguments.only or any(part in name for part in arguments.only)]
    if arguments.list:
        print("\n".join(f"{name:34s} python benchmarks/{COMMANDS[name]}" for name in wanted))
        return 0
    failed = [name for name in wanted if run(name)]
    print(f"{len(wanted) - len(failed)} of {len(wanted)} results made. Failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    harness.run_main(main)
