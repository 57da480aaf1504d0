"""The report of a bucket sweep: table, CSV, plot, self-contained HTML."""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import BenchmarkError, Spread, spread
from models import MODELS
from sweep import LOCAL, RAW, Point, Sweep

COLORS = {
    "minddp": "#1b6ca8", "torch": "#d1495b", "naive": "#9a7b4f", "flat": "#e08e2b", "per-parameter": "#7b5ea7",
    RAW: "#2a9d8f", LOCAL: "#555b66",
}  # fmt: skip
LABELS = {RAW: "collectives alone", LOCAL: "no communication"}
OPTIMUM = Point("minddp", "optimum")


@dataclass(frozen=True)
class Summary:
    """Step times by point (seconds), and the claims that follow from them."""

    times: dict[Point, Spread]
    sweep: Sweep

    def curve(self, variant: str) -> list[tuple[float, Spread]]:
        """(cap in MiB, step time) of one variant's uniform caps, in order."""
        return sorted(
            (float(point.cap_mb), time)
            for point, time in self.times.items()
            if point.variant == variant and isinstance(point.cap_mb, (int, float)) and not point.option
        )

    def variants(self) -> list[str]:
        """All implementations measured, the floors left out."""
        return [name for name in COLORS if name not in LABELS and any(p.variant == name for p in self.times)]

    def best(self, variant: str) -> tuple[float, Spread] | None:
        """The uniform cap with the shortest median step."""
        return min(self.curve(variant), key=lambda pair: pair[1].median, default=None)

    def bucket_bytes(self, point: Point) -> list[int]:
        return self.sweep.facts.get(point.key, {}).get("bucket_bytes") or []


def summarize(sweep: Sweep) -> Summary:
    """Medians over rounds; a round's time is the median of its visit's steps."""
    by_point: dict[str, list[float]] = {}
    for visit in sweep.visits:
        by_point.setdefault(visit["point"], []).append(statistics.median(visit["seconds"]))
    if not by_point:
        raise BenchmarkError(f"{sweep.path}: nothing has been measured yet")
    times = {point: spread(by_point[key]) for key, point in sweep.points.items() if key in by_point}
    return Summary(times, sweep)


def write(sweep: Sweep) -> None:
    """Prints the table and writes .csv, .svg, .png and .html beside the sweep's .json."""
    if not sweep.visits:
        print(f"{sweep.settings['model']}: nothing measured yet")
        return
    summary = summarize(sweep)
    print_table(summary)
    for line in findings(summary):
        print(f"  {line}")
    harness.write_text(sweep.path.with_suffix(".csv"), as_csv(sweep))
    picture = draw(summary, [sweep.path.with_suffix(".png"), sweep.path.with_suffix(".svg")])
    harness.write_text(sweep.path.with_suffix(".html"), as_html(summary, picture))
    print(f"written: {sweep.path.with_suffix('')}.{{json,csv,svg,png,html}}")


# ---- words and tables


def title(summary: Summary) -> str:
    s = summary.sweep.settings
    link = f"over {s['link']} links" if s["link"] else "on loopback"
    return f"{s['model']}, {s['ranks']} ranks, {s['engine']} {link}"


def sentence(summary: Summary) -> str:
    """The plot's title: which size was best, and what it says beside the default."""
    if too_noisy(summary) or (best := summary.best("minddp")) is None:
        return f"{title(summary)}: nothing follows"
    s, default = summary.sweep.settings, summary.times.get(Point("minddp", "default"))
    link = f", a link of {s['link'].replace('gbit', ' Gbit/s').replace('mbit', ' Mbit/s')}" if s["link"] else ""
    named = ",".join(MODELS[s["model"]][0].split(",")[:2]) if s["model"] in MODELS else s["model"]
    text = f"{named}; {s['ranks']} ranks{link}: buckets of {best[0]:g} MiB make minddp's shortest step"
    steps = [f"{1e3 * time.median:.0f} ms" for time in (best[1], default) if time is not None]
    return f"{text},\n{'; the default '.join(steps)}"


def findings(summary: Summary) -> list[str]:
    """What the sweep says, a sentence a finding; one sentence alone where it is too noisy to say anything."""
    doubt = too_noisy(summary)
    lines = [f"too noisy, nothing follows: {doubt}"] if doubt else []
    for variant in summary.variants() if not doubt else []:
        best = summary.best(variant)
        default = summary.times.get(Point(variant, "default"))
        if best is None:
            continue
        text = f"{variant}: the best uniform cap is {best[0]:g} MiB, {_ms(best[1])} ms"
        if default is not None:
            text += f"; the default takes {_ms(default)} ms ({_change(default, best[1])} against it)"
        lines.append(text)
    auto = summary.times.get(Point("minddp", "auto"))
    if auto is not None and not doubt:
        lines.append(_auto_finding(summary, auto))
    if OPTIMUM in summary.times and not doubt:
        lines.append(_optimum_finding(summary, summary.times[OPTIMUM]))
    return lines


def too_noisy(summary: Summary) -> str:
    """Why no conclusion may be drawn, or ""."""
    point, fewest = min(summary.times.items(), key=lambda pair: pair[1].count)
    if fewest.count < 3:
        visits = "visit" if fewest.count == 1 else "visits"
        return f"{point.key} has {fewest.count} {visits}; at least 3 are needed (--rounds 3)"
    floor = summary.times.get(Point(LOCAL))
    for point, time in summary.times.items():
        if floor is not None and point.variant not in LABELS and time.median < floor.median:
            return f"{point.key} took {_ms(time)} ms, less than a step without communication, {_ms(floor)} ms"
    return ""


def _auto_finding(summary: Summary, auto: Spread) -> str:
    point = Point("minddp", "auto")
    text = f'minddp "auto": {_ms(auto)} ms with {len(summary.bucket_bytes(point))} buckets'
    best = summary.best("minddp")
    default = summary.times.get(Point("minddp", "default"))
    if best is not None:
        text += f", {_change(auto, best[1])} against the best uniform cap"
    if default is not None:
        text += f", {_change(auto, default)} against the default"
    predicted = predicted_seconds(summary, point)
    if predicted is not None:
        text += f"; the planner predicted {predicted * 1e3:.1f} ms ({predicted / auto.median - 1:+.1%})"
    return text


def _optimum_finding(summary: Summary, measured: Spread) -> str:
    count = len(summary.bucket_bytes(OPTIMUM))
    text = f"the optimum's {count} buckets: {_ms(measured)} ms"
    computed = predicted_seconds(summary, OPTIMUM)
    if computed is not None:
        text += f"; computed were {computed * 1e3:.1f} ms, so the model is off by {_off(measured, computed)}"
    return text


def predicted_seconds(summary: Summary, point: Point) -> float | None:
    """The step that was computed for the plan of ``point``, if one was."""
    plan = summary.sweep.facts.get(point.key, {}).get("plan")
    if plan is None:
        return None
    from minddp.planner import BucketPlan

    return BucketPlan.from_json(plan).notes.get("predicted_step_seconds")


def _off(time: Spread, seconds: float) -> str:
    return f"{time.median / seconds - 1:+.1%}"


def _ms(time: Spread) -> str:
    return time.show(1e3, 1)


def _change(time: Spread, base: Spread) -> str:
    return f"{time.median / base.median - 1:+.1%}"


def rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: a row per cap, then one per point without; ms, median [quartiles].

    Where the optimum was computed, a column behind each implementation's has how far its steps are from it.
    """
    with_caps = [name for name in (*summary.variants(), RAW) if summary.curve(name)]
    caps = sorted({cap for name in with_caps for cap, _ in summary.curve(name)})
    optimum = predicted_seconds(summary, OPTIMUM)
    heads = ["bucket_cap_mb"]
    for name in with_caps:
        heads += [LABELS.get(name, name), *["from the optimum"] * (optimum is not None and name != RAW)]

    def row(label: str, cap: float | str) -> list[str]:
        cells = [label]
        for name in with_caps:
            time = summary.times.get(Point(name, cap))
            cells.append("" if time is None else time.show(1e3, 1))
            if optimum is not None and name != RAW:
                cells.append("" if time is None else _off(time, optimum))
        return cells

    table = [row(f"{cap:g}", cap) for cap in caps]
    measured = {point.cap_mb for point in summary.times}
    table += [row(cap, cap) for cap in ("default", "auto") if cap in measured]
    if optimum is not None:
        table.append(row("the optimum's buckets", "optimum"))
        table.append(["the optimum, computed", f"{1e3 * optimum:.1f}", *[""] * (len(heads) - 2)])
    return heads, table


def without_buckets(summary: Summary) -> list[tuple[str, Spread]]:
    """The variants that a bucket size means nothing to, the local step first."""
    found = [(LABELS.get(p.variant, p.variant), time) for p, time in summary.times.items() if p.cap_mb is None]
    return sorted(found, key=lambda pair: pair[1].median)


def print_table(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    heads, cells = rows(summary)
    table = Table(title=rf"{title(summary)}: step in ms, median \[quartiles]", title_justify="left")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    console = Console(width=140)
    console.print(table)
    for name, time in without_buckets(summary):
        console.print(f"  {name}: {time.show(1e3, 1)}", highlight=False, markup=False)


def as_csv(sweep: Sweep) -> str:
    """A row for every measured step."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "bucket_cap_mb", "round", "step", "seconds"])
    for visit in sweep.visits:
        point = sweep.points[visit["point"]]
        cap = "" if point.cap_mb is None else point.cap_mb
        for step, seconds in enumerate(visit["seconds"]):
            writer.writerow([point.variant, cap, visit["round"], step, f"{seconds:.6f}"])
    return text.getvalue()


# ---- picture


def draw(summary: Summary, paths: Sequence[Path]) -> str:
    """Draws step time against bucket size into ``paths``; returns the picture as SVG text."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
    _draw_curves(axes, summary)
    _draw_levels(axes, summary)
    _mark_default_and_auto(axes, summary)
    _finish_axes(axes, summary)
    return save(figure, paths)


def pyplot() -> Any:
    """matplotlib.pyplot, set up to draw files; a clear error where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise BenchmarkError("the plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "minddp"  # the same picture gives the same file
    return plt


def save(figure: Any, paths: Sequence[Path]) -> str:
    """Writes ``figure`` to ``paths``, closes it, and returns it as an SVG element for a page."""
    for path in paths:
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot().close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_curves(axes: Any, summary: Summary) -> None:
    for name in (*summary.variants(), RAW):
        curve = summary.curve(name)
        if not curve:
            continue
        caps, times = zip(*curve, strict=True)
        floor = name in LABELS
        style = {"color": COLORS[name], "linestyle": "--" if floor else "-", "linewidth": 1.4 if floor else 2}
        label = f"{LABELS.get(name, name)} (floor)" if floor else name
        axes.plot(caps, [t.median * 1e3 for t in times], marker="." if floor else "o", label=label, **style)
        low, high = [t.low * 1e3 for t in times], [t.high * 1e3 for t in times]
        axes.fill_between(caps, low, high, color=COLORS[name], alpha=0.15, linewidth=0)


def _draw_levels(axes: Any, summary: Summary) -> None:
    """Variants without buckets: a horizontal line each."""
    for point, time in summary.times.items():
        if point.cap_mb is None:
            floor = point.variant in LABELS
            label = f"{LABELS[point.variant]} (floor)" if floor else f"{point.variant}"
            style = (0, (5, 2)) if floor else (0, (1, 1.5))
            axes.axhline(time.median * 1e3, color=COLORS[point.variant], linestyle=style, linewidth=1.4, label=label)


def _mark_default_and_auto(axes: Any, summary: Summary) -> None:
    """torch's default at its cap; what follows the model at its mean bucket."""
    for variant in summary.variants():
        point = Point(variant, "default")
        if point in summary.times:
            place = 25.0 if variant == "torch" else _mean_mib(summary, point)
            axes.plot(
                place, summary.times[point].median * 1e3, marker="D", markersize=9, markerfacecolor="white",
                linestyle="none", markeredgecolor=COLORS[variant], markeredgewidth=1.8, zorder=4,
                label=f"{variant}, default arguments" + " (at its mean bucket)" * (variant != "torch"),
            )  # fmt: skip
    auto = Point("minddp", "auto")
    if auto in summary.times:
        axes.plot(
            _mean_mib(summary, auto), summary.times[auto].median * 1e3, marker="*", markersize=17,
            color=COLORS["minddp"], markeredgecolor="white", linestyle="none", zorder=5,
            label='minddp, "auto" (at its mean bucket)',
        )  # fmt: skip
    computed = predicted_seconds(summary, OPTIMUM)
    if computed is not None:
        label = "the optimum, computed"
        axes.axhline(computed * 1e3, color=COLORS["minddp"], linestyle=(0, (1, 2)), linewidth=1.2, label=label)


def _mean_mib(summary: Summary, point: Point) -> float:
    sizes = summary.bucket_bytes(point)
    return sum(sizes) / len(sizes) / 2**20


def _finish_axes(axes: Any, summary: Summary) -> None:
    caps = sorted({cap for name in (*summary.variants(), RAW) for cap, _ in summary.curve(name)})
    axes.set_xscale("log", base=2)
    if caps:
        axes.set_xticks(caps, [f"{cap:g}" for cap in caps])
    axes.minorticks_off()
    axes.axvline(25, color="#b8bec9", linewidth=1, zorder=0)
    label = {"fontsize": 8, "color": "#6b7280", "ha": "right"}
    axes.text(25, 0.01, "torch's default cap ", transform=axes.get_xaxis_transform(), **label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket_cap_mb (MiB)")
    axes.set_ylabel("step, ms (median; band: quartiles)")
    axes.set_title(sentence(summary), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


# ---- HTML

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
code { background: #f3f4f6; padding: .1rem .3rem; } svg { max-width: 100%; height: auto; }
"""


def as_html(summary: Summary, picture: str) -> str:
    """One file: findings, picture, tables, command and machine."""
    document = summary.sweep.to_json()
    heads, cells = rows(summary)
    levels = [[name, time.show(1e3, 1)] for name, time in without_buckets(summary)]
    machine = [[key, str(value)] for key, value in document["machine"].items()]
    escape = html.escape
    rounds = max(time.count for time in summary.times.values())
    return html_page(
        title(summary),
        [
            f"<h1>Bucket size: {escape(title(summary))}</h1>",
            f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in findings(summary))}</ul>",
            picture,
            f"<h2>Step, ms: median [quartiles] of up to {rounds} rounds</h2>",
            html_table(heads, cells),
            "<h2>Without buckets</h2>",
            html_table(["variant", "step, ms"], levels),
            f"<h2>How</h2><p><code>{escape(document['command'])}</code></p>",
            html_table(["machine", ""], machine),
        ],
    )


def html_page(name: str, body: Sequence[str]) -> str:
    """A page that needs no other file."""
    head = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style>",
    ]
    return "\n".join([*head, *body, "</html>\n"])


def html_table(heads: list[str], cells: list[list[str]]) -> str:
    def row(values: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    return f"<table>{row(heads, 'th')}{''.join(row(values, 'td') for values in cells)}</table>"
