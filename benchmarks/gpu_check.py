"""Does the CUDA half work, over several ranks too, and what does it cost? On a machine with one GPU or more.

    python benchmarks/gpu_check.py --ranks 2         # minddp beside torch's class on 2 ranks: three minutes, to paste
    python benchmarks/gpu_check.py --plan            # what each call does, how long it may take, what it leaves
    python benchmarks/gpu_check.py A --results OUT   # or: make gpu-check ARGS="A --results OUT"
    python benchmarks/gpu_check.py B --results OUT2 --carry OUT
    python benchmarks/gpu_check.py D E --dry         # what can be tried of them on the CPU; CI does

A  every mode beside a group that ends late, the kernel's tests, also under compute-sanitizer, the reducer's tests
B  late collectives, memory, what a step launches and waits for, graphs, SyncBatchNorm, functional, GradScaler
C  what minddp adds to a step beside torch's class, traces of a step, and packing beside a copy of the device
D  two ranks over NCCL on one GPU, as two hosts: numbers beside torch's class, lost and late ranks
E  the same with four ranks, a profile, and PyTorch's own tests of two ranks with both classes

``--ranks N`` takes a GPU for each rank where there are N, otherwise one GPU for all of them; its first line says
which. Where there is no GPU, the ranks are on the CPU. It prints no host name, address or path. A to C take one GPU.

Each call begins with a build, which does nothing where the extension is current. Made for a machine that is lent
for the length of a command, and may have Python, torch and the CUDA toolkit alone. Before the first call, on a
machine with a network:

    pip install --target build/gpu-tools "setuptools>=77" ninja numpy pytest pytest-timeout

What lies there is found by all that a call starts. A call leaves one folder of at most 8 files (``--results``): a
table, its numbers by part with the digest of the sources, the extension with its record, and in call C traces of a
step. ``--carry`` is such a folder of a call before: its extension is taken where there is none, and what it has
passed is not done again. What goes to benchmarks/results names its commit: a changed tree is refused there, and a
copy without git needs ``--commit``.

Each part is a process of its own with a limit of its own: one that fails or hangs ends no other. It says first what
it does. When its time is up, or the call is ended, what it has found stays; where the end is sudden, in a file
``-unfinished.json``. ``--again`` does again what has passed. Nothing of minddp is imported: it need not be built.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import provenance
from provenance import RESULTS, ROOT
from result_json import as_json

TOOLS = ROOT / "build" / "gpu-tools"
PACKAGE = ROOT / "minddp"
CALL_SECONDS = {"A": 480, "B": 480, "C": 480, "D": 300, "E": 270}
RANKS_SECONDS = 480  # of --ranks: a build and three minutes
CPU_PATIENCE = 3  # limits are a GPU machine's
MOST_FILES = 8


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        what: it does, in words.
        seconds: after which it is killed.
        command: pytest's arguments, or the name of a measurement of ``gpu_measure.py``.
        tool: what runs it; "ranks": a program of `benchmarks/nccl`, whose output is shown as it comes.
        on_cpu: whether it makes sense without a GPU.
        dry: further arguments there.
        files: what it leaves beside the table and the numbers.
        beside_build: whether it needs no extension, and runs while that is built.
    """

    what: str
    seconds: int
    command: tuple[str, ...]
    tool: str = "pytest"
    on_cpu: bool = False
    dry: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    beside_build: bool = False


BUILT = ("_*.so", "_build.json")
BUILD = Part("the extension with CUDA, where it is not current", 200, ("build",), "measure", True, files=BUILT)
TRACES = tuple(f"trace-{variant}.json.gz" for variant in ("torch", "minddp", "minddp-views"))
KERNEL = "tests/cuda/test_cuda_scaled_copy.py"
BLOCKS = "tests/cuda/test_cuda_quantization.py"
FEW = (KERNEL, BLOCKS, "-k", "gpu and (in_place or special or complex or bits)", "--timeout=150")
SYNC_BATCH_NORM = "tests/sync_batchnorm/test_sync_batchnorm.py::test_equals_batch_norm_over_the_whole_batch"
STEPS = "tests/cuda/test_cuda_steps.py"
CONTROL = ("many", "control")
STOP = threading.Event()  # this process is to end


def _ranks(what: str, seconds: int, *command: str) -> Part:
    return Part(what, seconds, command, "ranks", on_cpu=True, beside_build=command == CONTROL)


def _conform(impl: str) -> Part:
    what = f"PyTorch's tests with {impl}'s class, the most telling first"
    return Part(what, 70, ("conform", "--impl", impl, "--jobs", "4"), "ranks", on_cpu=True, dry=("--telling",))


CALLS: dict[str, dict[str, Part]] = {
    "A": {
        "build": BUILD,
        "late group": Part("every mode, with all-reduces that end late", 50, ("tests/cuda/test_cuda_late_group.py",)),
        "kernel": Part("the copy's kernel against ATen's arithmetic", 50, (KERNEL,), on_cpu=True),
        "memcheck": Part("the kernels' accesses, by compute-sanitizer", 60, FEW, "memcheck"),
        "initcheck": Part("the same for memory that nobody wrote", 60, FEW, "initcheck"),
        "reducer": Part("gradients by NCCL and Gloo, streams", 60, ("tests/cuda/test_cuda_ddp.py",)),
    },
    "B": {
        "build": BUILD,
        "late": Part("hooks on side streams that end late: exactly 3 times", 60, (STEPS, "-k", "late")),
        "memory": Part("what lives on after zero_grad", 40, (STEPS, "-k", "memory")),
        "profile": Part("what a step launches, copies and waits for", 60, (STEPS, "-k", "profile")),
        "capture": Part("steps captured in graphs, replayed", 60, (STEPS, "-k", "captured")),
        "batch norm": Part("SyncBatchNorm over the whole batch", 50, (SYNC_BATCH_NORM,)),
        "functional": Part("differentiable collectives", 60, ("tests/cuda/test_functional_cuda.py",)),
        "wires": Part("wire= and ordered= have the CPU's bits", 90, (BLOCKS,), on_cpu=True),
        "scaler": Part("GradScaler beside the bare module", 40, (STEPS, "-k", "scaler")),
    },
    "C": {
        "build": BUILD,
        "many-small": Part("what 400 small parameters cost, beside torch", 80, ("many-small",), "measure", True),
        "traces": Part("a step of GPT-2, as Chrome traces", 40, ("traces",), "measure", files=TRACES),
        "resnet50": Part("ResNet-50, 256 images of 224 px, AMP", 60, ("resnet50-224",), "measure"),
        "gpt2": Part("GPT-2, 8 x 1,024 tokens", 60, ("gpt2-1024",), "measure"),
        "7B layers": Part("four layers as those of a 7B model", 110, ("layers-7b",), "measure"),
        "bandwidth": Part("packing and unpacking beside a copy", 40, ("bandwidth",), "measure", True),
        "blocks": Part("packing as 8-bit codes beside packing", 40, ("blocks",), "measure", True),
        "wire": Part("GPT-2 with gradients in fewer bytes", 50, ("wire",), "measure", True),
    },
    "D": {
        "build": BUILD,
        "control": _ranks("one host id is refused; which way works", 60, *CONTROL),
        "2 ranks": _ranks("same program, same numbers", 110, "many", "cases", "--ranks", "2"),
        "lost": _ranks("a rank raises, is killed, is stopped", 40, "many", "ends", "--how", "raise,kill,stop"),
        "late": _ranks("a rank raises and stays, is late, differs", 40, "many", "ends", "--how", "stay,late,differ"),
    },
    "E": {
        "build": BUILD,
        "4 ranks": _ranks("same program, same numbers", 75, "many", "cases", "--ranks", "4"),
        "profile": _ranks("what of a step runs beside NCCL", 45, "many", "profile"),
        "torch": _conform("torch"),
        "minddp": _conform("minddp"),
    },
}


def ranks_call(ranks: int) -> dict[str, Part]:
    """What ``--ranks`` runs."""
    count = ("--ranks", str(ranks))
    return {
        "build": BUILD,
        "cases": _ranks("same program, same numbers", 100, "many", "cases", *count),
        "ends": _ranks("a rank raises, is killed, is late", 40, "many", "ends", "--how", "raise,kill,late", *count),
        "profile": _ranks("what of a step runs beside NCCL", 35, "many", "profile", *count),
    }


def parts_of(call: str) -> dict[str, Part]:
    """Those of a call of :data:`CALLS`; "3ranks" is what ``--ranks 3`` runs."""
    return CALLS[call] if call in CALLS else ranks_call(int(call.removesuffix("ranks")))


def files(call: str) -> list[str]:
    """What a call leaves in its folder."""
    stem = f"gpu-check-{call.lower()}"
    return [f"{stem}.json", f"{stem}.txt", *(file for part in parts_of(call).values() for file in part.files)]


def plan() -> str:
    """The calls as text."""
    lines = []
    for call in [*CALLS, "2ranks"]:
        parts = parts_of(call)
        seconds = sum(part.seconds for part in parts.values() if part is not BUILD)
        name = call if call in CALLS else "--ranks 2"
        lines.append(f"{name}  at most {seconds} s, and {BUILD.seconds} s where it builds")
        for name, part in parts.items():
            lines.append(f"   {name:12}{part.seconds:5} s  {part.what}")
        lines.append(f"   leaves {', '.join(files(call))}")
    return "\n".join(lines)


def take_build(carry: Path | None) -> None:
    """The extension of a call before, where there is none: this may be another machine, or another copy."""
    if carry is None or list(PACKAGE.glob("_*.so")) or not (carry / "_build.json").exists():
        return
    for file in [*carry.glob("_*.so"), carry / "_build.json"]:
        shutil.copy2(file, PACKAGE)


def leave_build(folder: Path) -> None:
    """For the call after this one."""
    for file in [*PACKAGE.glob("_*.so"), *PACKAGE.glob("_build.json")]:
        if file.resolve().parent != folder.resolve():
            shutil.copy2(file, folder)


def environment_of(part: Part) -> dict[str, str]:
    """One rank alone goes through NCCL, as it does in torch's class: like is compared with like."""
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    more = {"MINDDP_ALWAYS_REDUCE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{TOOLS}", "PATH": path}
    if part.tool in ("memcheck", "initcheck"):
        more["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else a tensor's end is no allocation's
    if part.tool == "ranks":
        del more["MINDDP_ALWAYS_REDUCE"]  # there are several
    return {**os.environ, **more}


def run_part(part: Part, device: str, seconds: float, output: Path, way: str = "") -> dict[str, Any]:
    """One part's result: ``ok``, and what it said or measured. Its files lie beside ``output``.

    ``way``: how several ranks get their GPUs, of ``benchmarks/nccl/world.py``.
    """
    environment = environment_of(part)
    with tempfile.TemporaryDirectory(prefix="minddp-gpu-check-") as folder:
        answer = Path(folder) / "answer.json"
        if part.tool == "ranks":  # it has what was found so far, and outlives this process
            answer = output.with_name(f"{output.stem}-unfinished.json")
            answer.unlink(missing_ok=True)
        command = _command(part, device, answer, output.parent)
        if part.tool == "ranks":
            command += ["--limit", f"{max(10, seconds - 8):.0f}", *(["--way", way] if way else [])]
        begin = time.monotonic()
        code, told = _run(command, environment, seconds, show=part.tool == "ranks")
        result: dict[str, Any] = {"ok": code == 0, "seconds": round(time.monotonic() - begin, 1)}
        if code is None:
            result["error"] = "stopped" if STOP.is_set() else f"killed after {seconds:.0f} s"
        elif code != 0:
            result["error"] = told[-3000:]
        if answer.exists():
            result["measured"] = json.loads(answer.read_text())
            answer.unlink()
        elif part.tool not in ("measure", "ranks"):
            result["closing"] = closing(told)
            result["failed"] = re.findall(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
            if " passed" not in result["closing"]:  # all skipped is nothing proven
                result["ok"] = False
        return result


def closing(output: str) -> str:
    """pytest's last line; compute-sanitizer writes one of its own after it."""
    lines = output.strip().splitlines() or ["no output"]
    theirs = re.compile(r"\d+ (passed|failed|skipped|errors?)\b.* in \d")
    return next((line for line in reversed(lines) if theirs.search(line)), lines[-1])


def _command(part: Part, device: str, answer: Path, folder: Path) -> list[str]:
    if part.tool == "measure":
        script = str(ROOT / "benchmarks" / "gpu_measure.py")
        where = ["--output", str(answer), "--folder", str(folder)]
        return [sys.executable, script, *part.command, "--device", device, *where]
    if part.tool == "ranks":
        script, *arguments = part.command
        path = str(ROOT / "benchmarks" / "nccl" / f"{script}.py")
        dry = part.dry if device == "cpu" else ()
        return [sys.executable, path, *arguments, *dry, "--device", device, "--output", str(answer)]
    tests = [sys.executable, "-m", "pytest", "-rf", "--tb=short", *part.command]
    if part.tool == "pytest":
        return tests
    return ["compute-sanitizer", "--tool", part.tool, "--target-processes", "all", "--error-exitcode", "9", *tests]


def _run(
    command: list[str], environment: dict[str, str], seconds: float, show: bool = False
) -> tuple[int | None, str]:
    """(exit code, output); no code where the time was up, and all that it started is killed.

    ``show``: whether its output is printed as it comes, too.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        to = subprocess.PIPE if show else output
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=to, stderr=subprocess.STDOUT, start_new_session=True,
                text=True, errors="replace",
            )  # fmt: skip
        except FileNotFoundError:
            return 127, f"{command[0]} is not installed"
        shown = threading.Thread(target=_show, args=(process.stdout, output))
        shown.start()
        try:
            if (code := _wait(process, seconds)) is None:
                process.terminate()  # what starts ranks in sessions of their own ends them
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived it
            process.wait()
            shown.join()
        output.seek(0)
        return code, output.read()


def _wait(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Its exit code; None where the time is up, or this process is to end."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline and not STOP.wait(0.05):
        pass
    return process.poll()


def _show(lines: IO[str] | None, output: IO[str]) -> None:
    for line in lines or ():
        print(line, end="", flush=True)
        output.write(line)


def sources() -> str:
    """What was passed before counts for the same sources only."""
    digest = hashlib.sha256()
    for folder in ("benchmarks", "csrc", "minddp", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def passed_before(output: Path, carry: Path | None, now: str, device: str) -> dict[str, Any] | None:
    """What a call has left, here or in the folder carried, for the same sources on the same kind of device."""
    for path in [output, *([] if carry is None else [carry / output.name])]:
        if path.exists():
            result = dict(json.loads(path.read_text()))
            if (result.get("sources"), result.get("device")) == (now, device):
                return result
    return None


def run_call(
    call: str, gpu: str, output: Path, again: bool, carry: Path | None = None, gpus: int = 1, commit: str = ""
) -> bool:
    """Runs what has not passed; writes after each part. Whether all passed.

    ``gpu``: its name, with torch's release, or empty; ``gpus``: how many there are; ``commit``: that of the sources.
    """
    device = "cuda" if gpu else "cpu"
    take_build(carry)
    output.parent.mkdir(parents=True, exist_ok=True)
    parts = {name: part for name, part in parts_of(call).items() if device == "cuda" or part.on_cpu}
    ranks = 0 if call in CALLS else int(call.removesuffix("ranks"))
    if device == "cpu" and any(part.tool == "ranks" for part in parts.values()) and list(PACKAGE.glob("_*.so")):
        parts.pop("build", None)  # `make` has built it, and others may be using it
    result: dict[str, Any] = {"benchmark": "gpu_check", "call": call, "device": device, "parts": {}}
    result |= {"gpu": gpu, "where": where(ranks, gpu, gpus), "sources": sources()}
    result["commit"] = commit
    if not again:
        result = {**(passed_before(output, carry, result["sources"], device) or result), "commit": commit}
    print(heading(result), flush=True)
    patience = 1 if device == "cuda" else CPU_PATIENCE
    deadline = time.monotonic() + CALL_SECONDS.get(call, RANKS_SECONDS) * patience
    way = way_found(output.parent, carry) if not ranks else "devices" if gpus >= ranks else "hostid"
    ahead = ThreadPoolExecutor(1)
    early = {
        name: ahead.submit(run_part, part, device, part.seconds * patience, output)
        for name, part in parts.items()
        if part.beside_build and not result["parts"].get(name, {}).get("ok")
    }
    for name, part in parts.items():
        if name != "build" and result["parts"].get(name, {}).get("ok"):  # which may be another machine's
            print(f"{call} {name}: passed before")
            continue
        left = min(part.seconds * patience, deadline - time.monotonic())
        if left < 5 or STOP.is_set():
            print(f"{call} {name}: no time left; call {call} once more")
            continue
        print(f"{call} {name}: {part.what}; at most {left:.0f} s …", flush=True)
        done = early[name].result() if name in early else run_part(part, device, left, output, way)
        result["parts"][name] = {**done, "sources": result["sources"]}
        way = way_found(output.parent, carry, result) if part.command == CONTROL else way
        if name == "build":
            leave_build(output.parent)
        result["date"] = time.strftime("%Y-%m-%d")
        write(output, as_json(result) + "\n")
        write(output.with_suffix(".txt"), table(result) + "\n")
    print(table(result, measured=not any(part.tool == "ranks" for part in parts.values())))
    return all(result["parts"].get(name, {}).get("ok") for name in parts)


def write(path: Path, text: str) -> None:
    """The whole file, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def where(ranks: int, gpu: str, gpus: int) -> str:
    """Where a call runs; ``ranks``: how many were asked for, 0 in the calls for one GPU."""
    if not gpu:
        return f"{ranks} ranks over Gloo on the CPU" if ranks else "the CPU"
    if not ranks:
        return gpu
    how = f"{ranks} GPUs" if gpus >= ranks else f"one GPU, as {ranks} hosts"
    return f"{ranks} ranks over NCCL on {how}: {gpu}"


def heading(result: dict[str, Any]) -> str:
    return f"gpu-check {result['call']} on {result['where']}, commit {result.get('commit') or 'unknown'}"


def way_found(folder: Path, carry: Path | None, result: dict[str, Any] | None = None) -> str:
    """The way in which ranks can share this GPU, that call D has found now or before; empty: none is known."""
    for path in [folder / "gpu-check-d.json", *([] if carry is None else [carry / "gpu-check-d.json"])]:
        if result is None and path.exists():
            result = json.loads(path.read_text())
    control = (result or {"parts": {}})["parts"].get("control", {})
    return str(control.get("measured", {}).get("way", ""))


def table(result: dict[str, Any], measured: bool = True) -> str:
    """One call's result as text, with what its parts have measured."""
    lines = [heading(result)]
    for name, part in result["parts"].items():
        said = part.get("closing") or part.get("error", "").strip().rpartition("\n")[2]
        lines.append(f"{'ok    ' if part['ok'] else 'FAILED'} {name:12}{part['seconds']:7.1f} s  {said}".rstrip())
        lines += [f"         {test}" for test in part.get("failed", [])]
        if measured:
            lines += ["         " + line for line in part.get("measured", {}).get("table", [])]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("calls", nargs="*", choices=[*CALLS, []], help="which calls; none: all, without --ranks")
    parser.add_argument("--ranks", type=int, metavar="N", help="N ranks beside torch's class")
    parser.add_argument("--plan", action="store_true", help="say what each call does, and end")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--dry", action="store_true", help="on the CPU, also where there is a GPU")
    parser.add_argument("--commit", default="", help="that of the sources, where no git can say it")
    parser.add_argument("--results", type=Path, help="folder for all that it leaves (on a GPU: benchmarks/results)")
    parser.add_argument("--carry", type=Path, help="the folder that a call before has left")
    return parser.parse_args(argv)


def gpus_here() -> tuple[str, int]:
    """``NVIDIA H200, torch 2.11.0+cu130``, and how many GPUs there are; empty where there is none. Asked in another
    process: this one needs no torch."""
    code = (
        "import torch; torch.cuda.is_available() and "
        "print(torch.cuda.get_device_name(), torch.__version__, torch.cuda.device_count(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        return "", 0
    name, torch, count = done.stdout.strip().split("|")
    return f"{name}, torch {torch}", int(count)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.plan:
        print(plan())
        return 0
    gpu, gpus = ("", 0) if arguments.dry else gpus_here()
    folder = arguments.results
    if folder is None:
        folder = RESULTS if gpu else Path(tempfile.mkdtemp(prefix="minddp-gpu-check-"))
    if why := provenance.why_not(folder, arguments.commit):
        print(f"gpu-check: {why} (--results)", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())  # parts leave what they have
    commit = provenance.commit() or arguments.commit
    calls = arguments.calls or ([] if arguments.ranks else list(CALLS))
    outcomes = [
        run_call(call, gpu, folder / f"gpu-check-{call.lower()}.json", arguments.again, arguments.carry, gpus, commit)
        for call in [*calls, *([f"{arguments.ranks}ranks"] if arguments.ranks else [])]
    ]
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name
    print(f"written: gpu-check-*.json and .txt in {shown}")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
