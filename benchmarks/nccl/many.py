"""Several ranks over NCCL: minddp beside torch's class, on a GPU each, on one GPU, or (over Gloo) on the CPU.

    python benchmarks/nccl/many.py control                # two ranks of one host are refused on one GPU; what works
    python benchmarks/nccl/many.py cases --ranks 2        # same program, same numbers; a case that hangs ends alone
    python benchmarks/nccl/many.py ends --how kill,late   # what the others do where a rank is killed, is late, ...
    python benchmarks/nccl/many.py profile                # overlap, launches and time of a step
    ... --device cpu                                      # the same over Gloo: a dry run without a GPU

`benchmarks/gpu_check.py --ranks N` and its calls D and E start this; `world.py` says how ranks share a GPU. The ranks
are processes of `rank.py`. Results are printed as they come; ``--output`` has those so far as JSON, at any moment.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from world import WAYS, Told, World, without_places

# In the order of what a first run on a card should answer. What may spoil the process comes last.
CASES = (
    "collectives", "default", "find_unused", "find_unused_views", "static_graph", "views", "no_sync", "no_sync_views",
    "join", "weighted", "summed", "bf16_hook", "fp16_hook", "builtin_fp16_hook", "powersgd_hook", "own_hook",
    "noop_hook", "optimizer_in_backward", "wire_int8", "wire_int8_views", "wire_bf16", "wire_fp16", "ordered",
    "ordered_any_plan", "sync_batchnorm", "mixed_dtypes", "side_stream", "two_streams", "two_wrappers", "late_rank",
    "no_host_wait", "new_group", "big_buckets", "lazy_memory", "retain_graph", "checkpoints", "autocast_scaler",
    "owned_adamw", "owned_muon", "owned_scaler", "mixed_precision", "bf16_model", "bf16_reduced_in_fp32", "sparse",
    "buffers", "functional", "mismatch", "sum_zeroed", "wire_launches", "sync_batchnorm_launches", "alignment",
    "capture",
)  # fmt: skip
ON_DEVICE = (
    "bf16_hook", "optimizer_in_backward", "side_stream", "two_streams", "late_rank", "no_host_wait", "sum_zeroed",
    "wire_launches", "sync_batchnorm_launches", "alignment", "capture",
)  # fmt: skip
HOWS = ("raise", "kill", "stay", "stop", "late", "differ")


def control(options: argparse.Namespace, told: Told) -> bool:
    """Two ranks of one host must be refused on one GPU; then the first way that works is written to ``--folder``."""
    found, refused = "", options.device == "cpu"
    ways = ["hostid"] if options.device == "cpu" else ["same-host", "hostid", "hostid-nocumem", "hostid-plain"]
    told.say(f"collectives of two ranks, until a way works: {', '.join(ways)}")
    for way in ways:
        if found:
            break
        begin = time.monotonic()
        world = World(["cases", "--cases", "collectives"], 2, way, options.device, options.folder / f"way-{way}")
        why = world.wait(options.limit / len(ways))
        if why:
            world.stacks()
        world.kill()
        answers = [line for rank in range(2) for line in world.answers(rank) if "ok" in line]
        works = len(answers) == 2 and all(line["ok"] for line in answers)
        seconds = f"{time.monotonic() - begin:5.1f} s"
        logs = world.log(0) + world.log(1, 4)
        if way == "same-host":
            refused = not works and any("Duplicate GPU" in line for line in [*logs, *(a["note"] for a in answers)])
            say = "refused, as it must be" if refused else "NOT REFUSED" if works else "failed otherwise"
            told.say(f"{way:15} {say}  {seconds}")
        else:
            told.say(f"{way:15} {'works' if works else 'no'}  {seconds}  {answers[0]['note'] if answers else why}")
            found = way if works else ""
        if not works and not (way == "same-host" and refused):
            for line in logs:
                told.say("      " + line)
    (options.folder / "way").write_text(found)
    told.facts |= {"refused": refused, "way": found}
    told.say(f"ranks share the device by {found}" if found else "no way works")
    return refused and bool(found)


def chosen_way(options: argparse.Namespace) -> str:
    """What was asked for; otherwise what ``control`` has found."""
    path = options.folder / "way"
    return options.way or (path.read_text() if path.exists() else "") or "hostid"


def cases(options: argparse.Namespace, told: Told) -> bool:
    """Every case, one after the other in the same ranks; after one that hangs or dies, the others in new ranks."""
    asked = options.cases.split(",") if options.cases else CASES
    left = [case for case in asked if options.device == "cuda" or case not in ON_DEVICE]
    way, begin, turn, passed, failed = chosen_way(options), time.monotonic(), 0, [], []
    told.facts |= {"way": way, "ranks": options.ranks, "passed": passed, "failed": failed, "not_reached": left}
    told.say(f"{len(left)} programs on {options.ranks} ranks, in this order: {', '.join(left)}")
    while left and time.monotonic() - begin < options.limit - 5:
        turn += 1
        folder = options.folder / f"cases-{options.ranks}-{turn}"
        world = World(["cases", "--cases", ",".join(left)], options.ranks, way, options.device, folder)
        take = functools.partial(_take_answers, world, options.ranks, left, passed, failed, told)
        why = world.wait(options.limit - (time.monotonic() - begin), options.stall, each=take)
        if why:
            world.stacks()
        codes = world.codes()
        world.kill()
        take()
        if left and time.monotonic() - begin < options.limit - 5:
            told.say(f"  HUNG   {left[0]:24} {why or codes}")
            for rank in range(options.ranks):
                for line in world.log(rank, 14):
                    told.say("      " + line)
            failed.append(left.pop(0))
    sums = f"{len(passed)} passed, {len(failed)} failed {failed}, {len(left)} not reached {left}"
    told.say(f"{options.ranks} ranks: {sums}, {time.monotonic() - begin:.0f} s")
    return not failed and not left


def _take_answers(
    world: World, ranks: int, left: list[str], passed: list[str], failed: list[str], told: Told
) -> None:
    """Moves what all ranks have answered from ``left``, and says it."""
    answers = [{line["case"]: line for line in world.answers(rank) if "ok" in line} for rank in range(ranks)]
    while left and all(left[0] in of_rank for of_rank in answers):
        name = left.pop(0)
        here = [of_rank[name] for of_rank in answers]
        ok = all(answer["ok"] for answer in here)
        wrong = [f"rank {rank}: {answer['note']}" for rank, answer in enumerate(here) if not answer["ok"]]
        (passed if ok else failed).append(name)
        note = here[0]["note"] if ok else " | ".join(wrong)
        told.facts.setdefault("cases", {})[name] = {"ok": ok, "note": without_places(note)[:700]}
        told.say(f"  {'ok    ' if ok else 'FAILED'} {name:24}{here[0]['seconds']:6.2f} s  {note[:700]}")


def profile(options: argparse.Namespace, told: Told) -> bool:
    told.say(f"a step on {options.ranks} ranks with torch's class and minddp's: what runs beside its collectives")
    folder = options.folder / f"profile-{options.ranks}"
    world = World(["profile"], options.ranks, chosen_way(options), options.device, folder)
    why = world.wait(options.limit)
    if why:
        world.stacks()
    codes = world.codes()
    world.kill()
    for line in world.answers(0):
        told.say("  " + line["note"])
    if why or any(codes):
        told.say(f"  not finished: {why or codes}")
        for rank in range(options.ranks):
            for line in world.log(rank):
                told.say("      " + line)
    return not why and not any(codes)


def ends(options: argparse.Namespace, told: Told) -> bool:
    """How the other ranks end, and after how many seconds: both classes, all ways of going wrong at the same time."""
    begin, way = time.monotonic(), chosen_way(options)
    worlds = {}
    told.say(f"in a step of {options.ranks} ranks one does this: {options.how}; with the classes {options.which}")
    for how in options.how.split(","):
        for which in options.which.split(","):
            command = ["ends", "--how", how, "--which", which]
            folder = options.folder / f"ends-{how}-{which}"
            worlds[how, which] = World(command, options.ranks, way, options.device, folder)
    for (how, which), world in worlds.items():
        # A stopped rank never ends by itself.
        those = range(options.ranks - (how == "stop"))
        why = world.wait(max(0.1, options.limit - (time.monotonic() - begin)), patient=True, ranks=those)
        if why:
            world.stacks()
        codes = world.codes()
        world.kill()
        told.say(f"  {how:7}{which:7} exit codes {codes} {why}")
        notes: dict[int, list[str]] = {}
        told.facts[f"{how} {which}"] = {"codes": codes, "told": notes}
        for rank in range(options.ranks):
            notes[rank] = [without_places(line["note"])[:420] for line in world.answers(rank)]
            explained = bool(notes[rank]) and (not why or codes[rank] is not None)
            log = [] if explained else world.log(rank, 6)
            for line in [*(f"rank {rank}: {note}" for note in notes[rank]), *log]:
                told.say("      " + line)
    return all(any(notes) for fact in told.facts.values() for notes in fact["told"].values())


def parse(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["control", "cases", "profile", "ends"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help="how ranks get their GPUs; none: what `control` has found")
    parser.add_argument("--cases", help="some of them, with commas")
    parser.add_argument("--how", default=",".join(HOWS), help="ends: how a rank goes wrong, with commas")
    parser.add_argument("--which", default="torch,minddp", help="ends: whose class")
    parser.add_argument("--limit", type=float, default=90, help="seconds for all of it")
    parser.add_argument("--stall", type=float, default=30, help="seconds without an answer that end a case")
    parser.add_argument("--folder", type=Path, help="for logs, and for what `control` has found")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.folder = options.folder or Path(tempfile.mkdtemp(prefix="minddp-ranks-"))
    options.folder.mkdir(parents=True, exist_ok=True)
    told = Told(options.output)
    programs: dict[str, Callable[[argparse.Namespace, Told], bool]] = {
        "control": control, "cases": cases, "profile": profile, "ends": ends,
    }  # fmt: skip

    def stop(*_: Any) -> None:  # the time of who started this is up: no rank outlives it
        for world in list(World.alive):
            world.kill()
        told.say("stopped: no time left")
        os._exit(124)

    signal.signal(signal.SIGTERM, stop)
    return 0 if programs[options.what](options, told) else 1


if __name__ == "__main__":
    sys.exit(main())
