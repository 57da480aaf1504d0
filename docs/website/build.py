"""Puts the pages together in build/docs/source, and runs Sphinx on them; a warning is an error."""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from . import drawings, errors, how, source, tutorials
from .layout import HOME, ROOT, Layout, core_in_reading_order, is_core_python, make_layout, sections
from .markdown import Writer

BUILD = ROOT / "build" / "docs"


def configuration() -> str:
    """The page of environment variables, from the docstring of minddp/environment.py and CONTRIBUTING.md's table."""
    docstring = ast.get_docstring(ast.parse((ROOT / "minddp" / "environment.py").read_text())) or ""
    rows = re.findall(r"^((?:``[A-Z_*]+``(?:, )?)+)\s{2,}(.*(?:\n {4,}\S.*)*)", docstring, re.MULTILINE)
    if len(rows) < 3:
        raise ValueError("minddp/environment.py: its docstring has no table of variables any more")
    lines = [f"* {_markdown(names)}: {_markdown(' '.join(meaning.split()))}." for names, meaning in rows]
    building = re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    known = {name.strip("`") for names, _ in rows for name in names.split(", ")}
    lines_building = [f"* `{name}`: {meaning}." for name, meaning in building if name not in known]
    return "\n".join(
        [
            "# Configuration\n",
            "## Arguments\n",
            "[`DistributedDataParallel`](api.md) takes torch's arguments in torch's order. Those beyond torch's are "
            "keywords only.\n",
            "## Environment variables\n",
            "Read when they are asked for, all in [`minddp/environment.py`](source/minddp/environment.py.md).\n",
            *lines,
            "\n## Variables of the build\n",
            *lines_building,
            "",
        ]
    )


def _markdown(text: str) -> str:
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text.replace("``", "`"))


API = """# API

```{eval-rst}
.. currentmodule:: minddp

The module
----------

.. autoclass:: minddp.DistributedDataParallel
   :members:
   :inherited-members: Module
   :exclude-members: forward

Functions that take the wrapper
-------------------------------

.. autofunction:: minddp.abort_iteration
.. autofunction:: minddp.add_weight
.. autofunction:: minddp.bucket_plan
.. autofunction:: minddp.check_replicas
.. autofunction:: minddp.last_step
.. autofunction:: minddp.load_wire_state
.. autofunction:: minddp.refresh
.. autofunction:: minddp.release_buckets
.. autofunction:: minddp.repair_replicas
.. autofunction:: minddp.report
.. autofunction:: minddp.skipped_steps
.. autofunction:: minddp.wire_state

Losses, and installing the class
--------------------------------

.. autoexception:: minddp.LostPeer
.. autofunction:: minddp.install
.. autofunction:: minddp.uninstall

SyncBatchNorm
-------------

.. autoclass:: minddp.SyncBatchNorm
   :show-inheritance:
.. autofunction:: minddp.convert_sync_batchnorm

Collectives inside the graph
----------------------------

.. automodule:: minddp.functional
   :members:
   :imported-members:

Timeline
--------

.. autofunction:: minddp.trace
.. autoclass:: minddp.timeline.StepTimes
   :members:
.. autoclass:: minddp.timeline.BucketTimes
   :members:
.. autoclass:: minddp.straggler.Report
   :members:
   :inherited-members:
.. autoclass:: minddp.straggler.RankTimes
   :members:
.. autoclass:: minddp.straggler.Straggler
   :members:

Buckets
-------

.. automodule:: minddp.planner
   :members:
   :imported-members:

The shared-memory process group
-------------------------------

.. automodule:: minddp.shm
   :members:
```
"""


def order_page(title: str, text: str, paths: list[str], layout: Layout) -> str:
    """A page that lists annotated files in reading order. REQUIRES: it stands in the folder source/."""
    names = [layout.pages[path].removeprefix("source/") for path in paths]
    rows = [
        f"{place}. [`{path}`]({name}.md). {source.first_sentence(path)}"
        for place, (path, name) in enumerate(zip(paths, names), 1)
    ]
    core = set(core_in_reading_order())
    listed = [name for path, name in zip(paths, names) if path in core or is_core_python(path)]
    toctree = "```{toctree}\n:hidden:\n\n" + "\n".join(listed) + "\n```\n"
    return f"# {title}\n\n{text}\n\n" + "\n".join(rows) + "\n\n" + toctree


# Files that are shown as they are: title, and what stands above.
LISTINGS = {
    "tutorials/mini_ddp.py": (
        "DDP in 100 lines",
        "`NaiveDDP` is the idea in 20 lines, `MiniDDP` adds what makes it fast. Both have the gradients of "
        "[the real one](reading.md), bit for bit.",
    ),
    "exercises/exercises.py": (
        "The functions to write",
        "Each says what it is given and what it is to return; [Exercises](exercises.md) says how to test it.",
    ),
    "exercises/solutions/solutions.py": ("Solutions", "One way to write [the exercises](exercises.md)."),
}


def listing(title: str, text: str, path: str, page: str) -> str:
    """A page that shows a Python file as it is."""
    file = os.path.relpath(ROOT / path, (BUILD / "source" / page).parent)
    return f"# {title}\n\n{text}\n\n```{{literalinclude}} {file}\n:language: python\n```\n"


def toctrees() -> str:
    blocks = []
    for caption, pages in sections().items():
        blocks.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n")
    return "\n".join(blocks)


def assemble(with_tutorials: bool) -> Layout:
    layout = make_layout()
    pages = BUILD / "source"
    pages.mkdir(parents=True, exist_ok=True)
    writer = Writer(layout, pages, drawings.every_drawing())
    for path in layout.cpp + layout.python:
        page = layout.pages[path]
        writer.write(page, source.render(path, page, layout, pages))
    writer.write("configuration", configuration())
    writer.write("errors", errors.page(layout))
    writer.write("api", API)
    if with_tutorials:
        tutorials.ensure_outputs(layout)
    for path in layout.tutorials:
        page = layout.pages[path]
        translate = functools.partial(writer.translate, page=page, path=path)
        writer.write(page, tutorials.render(path, page, pages, with_tutorials, translate))
    writer.write("tutorials", tutorials.index(layout))
    for path, (title, text) in LISTINGS.items():
        writer.write(layout.pages[path], listing(title, text, path, layout.pages[path]))
    intro = "Each file is shown as it is, its comments beside the code that they stand above."
    writer.write("source/cpp", order_page("The reducer, annotated: C++", intro, layout.cpp, layout))
    writer.write("source/python", order_page("The module, annotated: Python", intro, layout.python, layout))
    for path, page in layout.pages.items():
        if path.endswith(".md"):
            text = writer.translate((ROOT / path).read_text(), page, path)
            writer.write(page, text + ("\n" + toctrees() if path == HOME else ""))
    writer.remove_others()
    return layout


def main() -> int:
    parser = argparse.ArgumentParser("python -m docs.website", description=__doc__)
    parser.add_argument("--no-tutorials", action="store_true", help="do not run them: pages without what they print")
    options = parser.parse_args()
    layout = assemble(not options.no_tutorials)
    html = BUILD / "html"
    # -a: a page that has not changed has the others in its sidebar.
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-a", "-W", "--keep-going", "-q", "-j", "2"]
    command += ["-c", str(Path(__file__).parent), "-d", str(BUILD / "doctrees"), str(BUILD / "source"), str(html)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    status = subprocess.run(command, env=environment).returncode
    if status == 0:
        (html / "index.html").write_text(how.for_site(layout.pages.values()))
        print(f"{len(list(html.rglob('*.html')))} pages: {html / 'index.html'}")
    return status
