"""Pictures made from the code: SVG that takes its text's colour from the page, so that it can be read in the dark.

Each function returns one picture. What it shows is read from the sources, or computed by the package itself: the
phases from `reducer.h`, the buckets by `assign_buckets`, the launches by the rule that the reducer follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .layout import ROOT

BLUE, ORANGE, GREEN, RED, GREY = "#3d84d6", "#d98a3d", "#3f9d5c", "#d15858", "#8a8f98"
COLOURS = [BLUE, ORANGE, GREEN, "#9067c6", "#c2607f"]


def svg(width: int, height: int, parts: Sequence[str], says: str) -> str:
    return (
        f'<figure class="drawing"><svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(says)}">{"".join(parts)}</svg></figure>'
    )


def words(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, colour: str, opacity: float = 0.3, dash: bool = False
) -> str:
    dashes = ' stroke-dasharray="4 3"' if dash else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}"{dashes}/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, width: float = 1.5, dash: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"'
        f"{f' stroke-dasharray={dash!r}' if dash else ''}/>"
    )


def arrow(path: str, tip: tuple[float, float], turn: float, colour: str = GREY) -> str:
    x, y = tip
    place = f"translate({x:.1f},{y:.1f}) rotate({turn})"
    head = f'<path d="M0,0 L-9,-4.5 L-9,4.5 Z" fill="{colour}" transform="{place}"/>'
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{head}'


# --- the phases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    begins: tuple[str, ...]  # phases; empty: any
    end: str  # a phase; empty: an error only
    why: str
    text: str
    group: str  # the line above the list that it stands in


def phases_and_moves() -> tuple[list[str], list[Move]]:
    """The enum of iteration.h, and the moves that reducer.h's first comment lists, the normal ones first."""
    folder = ROOT / "csrc" / "reducer"
    enum = re.search(r"enum class Phase \{([^}]*)\}", (folder / "iteration.h").read_text())
    header = re.sub(r"\n// {8,}(?=\S)", " ", (folder / "reducer.h").read_text())  # a move may take two lines
    lists = re.findall(r"([^.\n]+):\n//\n((?:^//   .+? -- .*? --> .*\n)+)", header, re.MULTILINE)
    if enum is None or not lists:
        raise ValueError("csrc/reducer: no enum class Phase in iteration.h, or no list of its moves in reducer.h")
    names = [name.strip() for name in enum[1].split(",")]
    moves = []
    for group, rows in lists:
        for begin, why, end in re.findall(r"^//   (.+?) -- (.*?) --> (.*)$", rows, re.MULTILINE):
            begins, ends = ([name for name in re.findall(r"\bk\w+", side) if name in names] for side in (begin, end))
            text = f"{begin}: {why} → {end}"
            moves.append(Move(tuple(begins), ends[0] if ends else "", why, text, group.strip("/ ")))
    return names, moves


def phases() -> str:
    """The normal iteration as arrows, everything else as lines of text."""
    _, moves = phases_and_moves()
    normal = [move for move in moves if move.group == moves[0].group]
    order = list(dict.fromkeys(name for move in normal for name in (*move.begins, move.end)))
    width, gap, top = 130, 330, 70
    place = {name: 60 + index * (width + gap) for index, name in enumerate(order)}
    parts = []
    for index, (name, x) in enumerate(place.items()):
        parts += [box(x, top, width, 64, COLOURS[index]), words(x + width / 2, top + 38, name, 16, "middle", "bold")]
    for move in normal:
        parts += _phase_arrow(place[move.begins[0]], place[move.end], width, top, move.why)
    y, group = top + 140, moves[0].group
    for move in moves[len(normal) :]:
        if move.group != group:
            y, group = y + 12, move.group
            parts.append(words(20, y, f"{group}:", 14, weight="bold"))
            y += 22
        parts.append(words(36, y, move.text, 13))
        y += 20
    return svg(960, y, parts, "The moves of a normal iteration, and a list of the others")


def _phase_arrow(begin: float, end: float, width: float, top: float, why: str) -> list[str]:
    """To the right above the middle, to the left below it; a move that stays is a loop above its box."""
    head, _, rest = why.partition("; ")
    if begin == end:
        a, b = begin + 0.3 * width, begin + 0.7 * width
        path = f"M{a:.1f},{top} C{a:.1f},{top - 44} {b:.1f},{top - 44} {b:.1f},{top}"
        return [arrow(path, (b, top), 90), words((a + b) / 2, top - 42, why, 13, "middle")]
    right = end > begin
    a, b, y = (begin + width, end, top + 20) if right else (begin, end + width, top + 46)
    text = words((a + b) / 2, y + (-8 if right else 18), head, 13, "middle")
    below = [words((a + b) / 2, y + 34, rest, 13, "middle")] if rest else []
    return [arrow(f"M{a:.1f},{y} L{b:.1f},{y}", (b, y), 0 if right else 180), text, *below]


# --- two ranks, one order of launches --------------------------------------------------------------------------

# When each bucket's last gradient is there, by rank: on rank 1 bucket 2 is complete before bucket 1.
READY = [[1.0, 2.2, 3.6, 5.0], [1.4, 4.2, 2.6, 5.4]]
TRANSFER = 1.1


def launches(ready: Sequence[float]) -> list[float]:
    """The reducer's rule: a bucket leaves when it is complete and all before it have left."""
    found: list[float] = []
    for moment in ready:
        found.append(max([moment, *found[-1:]]))
    return found


def transfers(by_rank: Sequence[Sequence[float]], seconds: float) -> list[tuple[float, float]]:
    """(begin, end) of each collective: all ranks have launched it, and the one before is over."""
    found: list[tuple[float, float]] = []
    for moments in zip(*by_rank):
        begin = max([*moments, *(end for _, end in found[-1:])])
        found.append((begin, begin + seconds))
    return found


def launch_order() -> str:
    left, scale, row = 90, 88, 112
    leave = [launches(ready) for ready in READY]
    moved = transfers(leave, TRANSFER)
    parts = []
    for rank, ready in enumerate(READY):
        y = 30 + rank * row
        parts += [words(8, y + 20, f"rank {rank}", 14, weight="bold"), words(8, y + 40, "backward", 12)]
        parts.append(box(left, y + 24, scale * max(ready), 22, GREY, 0.15))
        for bucket, moment in enumerate(ready):
            x = left + scale * moment
            parts.append(line(x, y + 18, x, y + 46, COLOURS[bucket], 3))
            parts.append(words(x, y + 14, f"{bucket} complete", 11, "middle"))
            if leave[rank][bucket] > moment:
                later = left + scale * leave[rank][bucket]
                parts.append(line(x, y + 60, later, y + 60, COLOURS[bucket], 2, "3 3"))
                parts.append(words((x + later) / 2, y + 74, f"{bucket} waits for {bucket - 1}", 11, "middle"))
        for bucket, moment in enumerate(leave[rank] if rank == len(READY) - 1 else []):
            parts.append(
                line(left + scale * moment, y + 60, left + scale * moved[bucket][0], y + row, COLOURS[bucket])
            )
    y = 30 + 2 * row
    parts.append(words(8, y + 16, "allreduce", 14, weight="bold"))
    for bucket, (begin, end) in enumerate(moved):
        parts.append(box(left + scale * begin, y, scale * (end - begin), 24, COLOURS[bucket]))
        parts.append(words(left + scale * (begin + end) / 2, y + 17, f"bucket {bucket}", 12, "middle"))
    width = left + int(scale * moved[-1][1]) + 20
    parts.append(words(width - 20, y + 42, "time →", 12, "end"))
    return svg(width, y + 48, parts, "Two ranks complete buckets in different orders and launch them in one order")


# --- threads -------------------------------------------------------------------------------------------------


def threads() -> str:
    left, scale = 150, 60
    # (lane, begin, end, colour, text): one step; buckets 0 and 1 are launched while backward runs.
    spans = [
        (0, 0.0, 2.6, GREY, "forward"),
        (0, 2.6, 9.6, GREY, "loss.backward() does not return yet"),
        (0, 9.6, 10.8, GREY, "step()"),
        (1, 2.8, 4.0, BLUE, "layer 3"),
        (1, 4.0, 5.2, BLUE, "layer 2"),
        (1, 5.2, 6.4, BLUE, "layer 1"),
        (1, 6.4, 9.6, GREEN, "finish_backward: wait, unpack"),
        (2, 4.0, 5.4, ORANGE, "bucket 0"),
        (2, 5.4, 6.8, ORANGE, "bucket 1"),
        (2, 6.8, 8.4, ORANGE, "bucket 2"),
    ]
    lanes = ["your script", "autograd", "process group"]
    parts = [words(8, 38 + 56 * lane, name, 14, weight="bold") for lane, name in enumerate(lanes)]
    for lane, begin, end, colour, text in spans:
        x, width = left + scale * begin, scale * (end - begin)
        parts += [box(x, 18 + 56 * lane, width, 30, colour), words(x + width / 2, 37 + 56 * lane, text, 12, "middle")]
    for moment in (4.0, 5.2, 6.4):
        x = left + scale * moment
        parts.append(arrow(f"M{x},{104} L{x},{130}", (x, 130), 90, RED))
    parts.append(words(left + scale * 2.4, 122, "pack, launch", 12, "end"))
    x = left + scale * 9.6
    parts.append(arrow(f"M{x},{74} L{x},{49}", (x, 49), -90, RED))
    return svg(left + int(scale * 10.8) + 10, 190, parts, "Which thread runs what in a step")


# --- bucket memory -----------------------------------------------------------------------------------------------


def bucket_memory() -> str:
    """Three layers of a small net, cut by the package's own rule, with a cap of 6 kB."""
    from minddp.buckets import assign_buckets

    names, sizes = [], []
    for layer in range(3):
        names += [f"{layer}.weight", f"{layer}.bias"]
        sizes += [32 * 32 * 4, 32 * 4]
    buckets = assign_buckets(sizes, [0] * len(sizes), list(reversed(range(len(sizes)))), [6000])
    scale, left, parts = 0.055, 120, []
    for number, bucket in enumerate(buckets):
        y, offset = 30 + 116 * number, 0.0
        parts += [words(8, y + 18, f"bucket {number}", 14, weight="bold"), words(8, y + 78, ".grad of", 12)]
        for index in bucket:
            width = sizes[index] * scale
            x = left + offset
            parts.append(box(x, y, width, 28, COLOURS[number]))
            parts.append(box(x + (0 if width < 20 else 2), y + 60, max(width - 4, 5), 28, GREY, 0.2, dash=True))
            parts.append(line(x + width / 2, y + 58, x + width / 2, y + 30, GREY, 1, "2 3"))
            if width > 20:
                parts.append(words(x + width / 2, y + 79, names[index], 12, "middle"))
                parts.append(words(x + width / 2, y + 18, f"{sizes[index]:,} bytes", 11, "middle"))
            offset += width
        small = [names[index] for index in bucket if sizes[index] * scale < 20]
        parts.append(words(left + offset + 12, y + 79, "and " + ", ".join(small), 12) if small else "")
    return svg(800, 30 + 116 * len(buckets), parts, "Gradients lie one after another in a bucket's buffer")


# --- ring allreduce ------------------------------------------------------------------------------------------------


def ring_steps(ranks: int) -> list[list[list[set[int]]]]:
    """By step, rank and chunk: whose gradients are in it. First sums travel, then results."""
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    steps = [[[set(chunk) for chunk in chunks] for chunks in held]]
    for step in range(2 * (ranks - 1)):
        sent = []
        for rank in range(ranks):
            chunk = (rank - step) % ranks if step < ranks - 1 else (rank + 1 - (step - ranks + 1)) % ranks
            sent.append((rank, chunk, set(held[rank][chunk])))
        for rank, chunk, content in sent:
            target = (rank + 1) % ranks
            held[target][chunk] = held[target][chunk] | content if step < ranks - 1 else content
        steps.append([[set(chunk) for chunk in chunks] for chunks in held])
    return steps


def ring() -> str:
    ranks = 3
    steps = ring_steps(ranks)
    cell, left, parts = 26, 90, []
    for number, by_rank in enumerate(steps):
        x = left + number * (ranks * cell + 46)
        head = "start" if number == 0 else f"sum {number}" if number < ranks else f"copy {number - ranks + 1}"
        parts.append(words(x + ranks * cell / 2, 20, head, 13, "middle"))
        for rank, chunks in enumerate(by_rank):
            y = 34 + rank * 44
            for chunk, content in enumerate(chunks):
                whole = len(content) == ranks
                colour = GREEN if whole else BLUE
                parts.append(box(x + chunk * cell, y, cell, cell, colour, 0.15 + 0.25 * len(content)))
                parts.append(words(x + (chunk + 0.5) * cell, y + 17, str(len(content)), 12, "middle"))
    for rank in range(ranks):
        parts.append(words(8, 34 + rank * 44 + 18, f"rank {rank}", 14, weight="bold"))
    width, y = left + len(steps) * (ranks * cell + 46), 34 + ranks * 44 + 14
    says = "A rank sends to the one below it, the last one to the first. Green: a chunk is whole."
    parts.append(words(left, y, says, 13))
    return svg(width, y + 14, parts, "Ring allreduce on three ranks: whose numbers each chunk holds")


DRAWINGS: dict[str, Callable[[], str]] = {
    "phases": phases,
    "launch_order": launch_order,
    "threads": threads,
    "bucket_memory": bucket_memory,
    "ring": ring,
}


def every_drawing() -> dict[str, str]:
    return {name: draw() for name, draw in DRAWINGS.items()}
