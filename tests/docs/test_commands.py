"""Every command that the docs show, taken from the pages, in a copy of the sources as a fresh clone has them.

Every command of README is run as a reader types it, or stands in ``NOT_RUN`` with the reason. Of the other pages'
commands it is tested that what they name is there and takes these arguments: scripts parse them and stop, make shows
what it would do, pytest finds the tests that are meant.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.ranks_pool import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "csrc/README.md", "benchmarks/README.md", "exercises/README.md"]
FIRST = ("make", "python", "torchrun", "minddp", "pip", "pytest", "source", ".ci/run")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:" + "|".join(map(re.escape, FIRST)) + r")(?: |$)")
# The reader's own.
THEIRS = {"train.py", "replica.py", "script.py", "trace.json", "mine:make"}
# Of other pages than README, and cheap enough to be run as they stand.
RUN = [
    "python tutorials/00_autograd_for_ddp.py",
    "make demo RANKS=3 TORCH_DDP=1",
]
# README's commands that are not run here: the line of .ci/run that runs them, or what they need.
NOT_RUN = {
    "make test": "CI: step test",
    "make site": "CI: step docs",
    "minddp timeline": "the command's name; README runs it on a file",
    "python tutorials/05_mean_or_sum.py": "CI: step tutorials",
    "python tutorials/12_break_it.py": "CI: step tutorials",
    "python tutorials/13_fewer_bytes.py": "CI: step tutorials",
    "python tutorials/16_a_rank_is_killed.py": "CI: step tutorials",
    "pip install dist/minddp-*+torch2.13.0*.whl": "CI: .ci/wheel_alone",
    "pip install torch": "a network; make's first step does it",
    'pip install torch "setuptools>=77" wheel ninja && pip install --no-build-isolation .': "tests/lab/package",
    "pip install rich transformers": "a network; `make .venv/.extra-bench` does it",
    "make wheels": "a network, and ten minutes for each of two more torches",
    "make check-torch": "a network, and an hour",
    "make lab ARGS=faults": "an hour or two",
    "python benchmarks/memory.py": "minutes",
    "python benchmarks/overhead.py": "an hour",
    "python benchmarks/shm.py": "minutes",
    "python benchmarks/bucket_size.py --link 1gbit --models gpt2-small": "root, and an hour",
    "python benchmarks/wire.py --link 1gbit": "root, and an hour",
    "python benchmarks/gpu_check.py --ranks 2": "two GPUs; CI runs the parts that need none",
}
# What README leaves to the reader.
GIVEN = """
import torch

MyModel, loss_function = lambda: torch.nn.Linear(4, 1), torch.nn.MSELoss()
x, y = torch.ones(2, 4), torch.ones(2, 1)
"""


def texts() -> dict[str, str]:
    """The pages, and the docstrings of what is started from the command line."""
    found = {name: (ROOT / name).read_text() for name in PAGES}
    found |= {f"docs/{path.name}": path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    for path in [*ROOT.glob("tutorials/*.py"), *ROOT.glob("minddp/cli/*.py"), *ROOT.glob("benchmarks/*.py")]:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.relative_to(ROOT).as_posix()] = text
    return found


def commands_of(text: str) -> list[str]:
    """Lines of code blocks, and what stands in backticks, that begin like a command."""
    candidates, prose, fence = [], "", None
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        mark = re.match(r"```(\w*)", line)
        if mark:
            fence = mark[1] if fence is None else None
        elif fence is None and not line.startswith("    "):
            prose += line + "\n"
        elif fence in (None, "", "bash", "text"):
            candidates.append(line.strip())
    candidates += [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    found = []
    for candidate in candidates:
        candidate = re.split(r"\s+#|\s{2,}|…", candidate)[0].strip()
        if COMMAND.match(candidate + " ") and " ..." not in candidate and "|" not in candidate:
            found.append(candidate)
    return found


README = (ROOT / "README.md").read_text()
OF_README = list(dict.fromkeys(commands_of(README)))
ALL = sorted({(command, page) for page, text in texts().items() for command in commands_of(text)})


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """(variables before it, its words); [arguments] is left out, and what may be left out is in."""
    parts = [part.strip("[]") for part in shlex.split(command.replace("[arguments]", ""))]
    variables = {}
    while re.fullmatch(r"[A-Z_]+=.*", parts[0]):
        name, _, value = parts.pop(0).partition("=")
        variables[name] = value
    return variables, parts


def of(first: str) -> list[tuple[str, list[str]]]:
    return [(command, words(command)[1]) for command, _ in ALL if words(command)[1][0] == first]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A repository of the sources, tracked or not yet, and the extension as it is built: nothing else."""
    folder = tmp_path_factory.mktemp("clone") / "minddp"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "minddp").glob("_*.so")] + ["minddp/_build.json"]
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # Benchmarks name the commit of their results.
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "--no-verify", "-m", "All of it"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def built(clone: Path) -> Path:
    """The clone after ``make build``. Its environment is its own, the packages in it are this Python's."""
    python = clone / ".venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=clone, check=True)
    (site,) = clone.glob(".venv/lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    torchrun = python.with_name("torchrun")
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    (clone / "build").mkdir()
    stamps = [".venv/.base", ".venv/.extra-demo", ".venv/.extra-test", f"build/built{str(python).replace('/', '-')}-"]
    for stamp in stamps:  # make goes by them
        (clone / stamp).touch()
    run(["make", "build"], clone)
    return clone


def run(command: list[str], folder: Path, timeout: float = 170, **variables: str) -> str:
    """The output; the command must end well. Where it finds the package is its own business."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=timeout, **streams)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
    return str(done.stdout)


def type_in(command: str, folder: Path) -> str:
    """As a reader does in a built clone. Two of them on one machine need other ports."""
    line = f"source .venv/bin/activate && {command}"
    return run(["bash", "-c", line], folder, timeout=900, PET_MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")


def test_there_are_commands():
    assert len(ALL) > 60
    assert {command for command, _ in ALL if "|" in command} == set()


def test_every_command_begins_with_something_that_is_tested():
    assert {words(command)[1][0] for command, _ in ALL} <= set(FIRST)


def test_make(clone):
    """make knows the target, and what it would do is something. (check-* and wheels would start another make.)"""
    makefile = (clone / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile.replace("\\\n", " "), re.MULTILINE)).split())
    for command, parts in of("make"):
        assert parts[1] in targets, command
        if not parts[1].startswith(("check-", "wheels")):
            assert run([*parts, "-n", f"PYTHON={sys.executable}"], clone).strip(), command


def test_pytest_finds_what_is_meant(clone):
    commands = of("pytest")
    paths = sorted({part for _, parts in commands for part in parts[1:] if part.startswith("tests")})
    quiet = ["--collect-only", "-q", "-o", "addopts=-p no:cacheprovider"]
    listed = run([sys.executable, "-m", "pytest", *quiet, *paths], clone)
    nodes = [line for line in listed.splitlines() if "::" in line]
    for command, parts in commands:
        folders = [part for part in parts[1:] if part.startswith("tests")]
        keyword = parts[parts.index("-k") + 1] if "-k" in parts else ""
        assert folders, command
        for folder in folders:
            assert (clone / folder).exists(), command
            found = [node for node in nodes if node.startswith(folder) and keyword.lower() in node.lower()]
            assert found, f"{command}: no such test in {folder}"


PARSE = """
import argparse, importlib.util, json, runpy, sys, traceback
original = argparse.ArgumentParser.parse_args
class Parsed(BaseException):
    pass
def parse_args(self, *arguments, **keywords):
    original(self, *arguments, **keywords)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_args
failed = {}
path = list(sys.path)
for command, kind, name, arguments in json.loads(sys.stdin.read()):
    sys.argv, sys.path[:] = [name, *arguments], path
    try:
        if kind == "script":
            sys.path.insert(0, name.rpartition("/")[0])
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=False)
    except Parsed:
        continue
    except SystemExit as end:
        if end.code or "--help" not in arguments:
            failed[command] = traceback.format_exc()[-1500:]
    except BaseException as error:
        failed[command] = traceback.format_exc()[-1500:]
    else:
        failed[command] = "it ended without parsing its arguments"
print("\\n" + json.dumps(failed))
"""


SUBCOMMANDS = {"run", "tune", "timeline", "report", "doctor"}


def without_placeholders(parts: list[str]) -> list[str]:
    return [part for part in parts if part not in ("...", "\\")]


def test_scripts_take_these_arguments(clone):
    """They parse them, and are stopped there. A script that takes none is only looked for."""
    asked = []
    for command, parts in [*of("python"), *of("minddp")]:
        parts = without_placeholders(parts)
        if len(parts) == 1:
            continue  # its name alone
        if parts[0] == "minddp":
            # `minddp run` passes on what it does not know. Two words only name a command.
            assert len(parts) < 2 or parts[1] in SUBCOMMANDS, command
            if len(parts) > 2 and parts[1] != "run":
                asked.append((command, "module", "minddp", parts[1:]))
        elif parts[1:2] == ["-m"]:
            module = parts[2]
            if module.split(".")[0] in ("minddp", "torch"):
                continue
            file = clone / (module.replace(".", "/") + ".py")
            file = file if file.exists() else clone / module.replace(".", "/") / "__main__.py"
            assert file.exists(), command
            if "parse_args" in file.read_text():
                asked.append((command, "module", module, parts[3:]))
        elif parts[1] not in THEIRS:
            assert (clone / parts[1]).exists(), command
            if "parse_args" in (clone / parts[1]).read_text() and "01_digits" not in parts[1]:
                asked.append((command, "script", parts[1], parts[2:]))
    assert len(asked) > 20
    process = subprocess.run(
        [sys.executable, "-c", PARSE], cwd=clone, input=json.dumps(asked), capture_output=True, text=True, timeout=170
    )
    assert process.returncode == 0, process.stderr
    failed = json.loads(process.stdout.strip().splitlines()[-1])
    assert not failed, "\n".join(f"{command}\n{text}" for command, text in failed.items())


def test_torchrun_takes_these_arguments(clone):
    from torch.distributed.run import get_args_parser

    for command, parts in of("torchrun"):
        if len(parts) == 1:
            continue  # its name alone
        options = get_args_parser().parse_args(without_placeholders(parts[1:]))
        script = options.training_script
        if options.module:
            assert script in ("minddp", "minddp.run"), command
        else:
            assert script in THEIRS or (clone / script).exists(), command


@pytest.mark.parametrize("command", RUN)
def test_runs_as_written(built, command):
    type_in(command, built)


def test_what_readme_does_not_run_has_a_reason():
    indented = re.findall(r"^    (.*)", re.sub(r"```.*?```", "", README, flags=re.DOTALL), re.MULTILINE)
    assert [line for line in indented if not COMMAND.match(line)] == []
    assert set(NOT_RUN) <= set(OF_README)
    steps = (ROOT / ".ci/run").read_text()
    assert [why for why in NOT_RUN.values() if why.startswith("CI: ") and why.removeprefix("CI: ") not in steps] == []


def test_readme_runs_as_written(built):
    """In its order: later commands read what earlier ones have written. Its Python is the program that is traced."""
    *_, example = blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    step = example.splitlines()[-1]
    shown = re.findall(r"`(print\(.*?)`", README)
    program = [GIVEN, *blocks, f"for _ in range(4):\n    {step}", "import minddp", *shown]
    (built / "train.py").write_text("\n".join(program))
    (built / "my_models.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(1024, 8)\n")
    printed = {command: type_in(command, built) for command in OF_README if command not in NOT_RUN}
    traced = printed["MINDDP_TRACE=trace.json torchrun --nproc-per-node 2 -m minddp.run train.py"]
    assert "1 bucket, 2 gradients" in traced, traced
