"""``make lab ARGS="RIG [arguments]"``: runs one rig. ``make lab ARGS="RIG --help"`` shows its arguments."""

from __future__ import annotations

import os
import sys

# What follows `python` on the command line, and what the rig does.
RIGS = {
    "fuzz": ("-m tests.lab.fuzz", "trains programs drawn at random with torch's class and with minddp's"),
    "faults": ("-m tests.lab.faults", "gives one rank a fault at each place of training"),
    "hosts": ("-m tests.lab.hosts", "two hosts of three ranks: what survivors say of a fault on one of them"),
    "kills": ("-m tests.lab.kills", "kills ranks at random under torchrun's restarts"),
    "soak": ("-m tests.lab.soak", "trains through many wrappers: memory, threads and files must not grow"),
    "engines": ("-m tests.lab.engines", "runs one script under torchrun, Ray, SLURM's variables, mpirun"),
    "sanitize": ("-m tests.lab.sanitize", "runs the C++ under ThreadSanitizer, AddressSanitizer and UBSan"),
    "conformance-shm": ("-m tests.lab.transport", "runs PyTorch's tests of process groups with shared memory"),
    "streams": ("-m pytest tests/lab/streams", "runs whole steps on a device with streams, in random legal orders"),
    "mutate": ("-m tests.lab.mutate", "plants faults at random places in a copy; lists those that no test catches"),
    "libraries": ("-m tests.lab.libraries", "trains with libraries around DDP, and runs the tests that they ship"),
    "package": ("-m pytest tests/lab/package", "builds sdist and wheel, and installs them in empty environments"),
    "pains": ("-m tests.lab.pains", "runs what hurts users of torch's class with both classes; writes docs/pains.md"),
    "results": ("benchmarks/all_results.py", "makes every result that README and docs name anew: hours"),
    "overhead": ("benchmarks/overhead.py", "measures a step beside torch's class"),
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in RIGS:
        print(__doc__)
        print(*(f"  {rig:16} {what}" for rig, (_, what) in RIGS.items()), sep="\n")
        if name in ("", "-h", "--help"):
            return 0
        print(f"there is no rig {name!r}", file=sys.stderr)
        return 2
    if name not in ("results", "overhead"):  # which choose the number of threads themselves
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *RIGS[name][0].split(), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
