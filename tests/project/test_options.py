"""What a program that types an argument's name sees: type checkers, editors, and the error."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import minddp
from minddp import events
from minddp.options import Options


def test_type_checkers_know_the_arguments_that_companions_have():
    own = inspect.signature(minddp.DistributedDataParallel.__init__).parameters
    named = {name for name, parameter in own.items() if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    added = set(events.all_options()) - named
    assert set(Options.__annotations__) == added, "minddp/options.py lists them with their types"
    assert all(own[name].annotation is not inspect.Parameter.empty for name in Options.__annotations__)


@pytest.mark.parametrize(
    "given, says",
    [
        ("bucket_cap", "'bucket_cap'. Did you mean 'bucket_cap_mb'?"),
        ("check_finit", "'check_finit'. Did you mean 'check_finite'?"),
        ("colour", "'colour'. help(minddp.DistributedDataParallel) describes all arguments."),
    ],
)
def test_a_mistyped_argument_is_suggested(given, says):
    with pytest.raises(TypeError) as caught:
        events.parse({given: 3}, list(inspect.signature(minddp.DistributedDataParallel.__init__).parameters))
    assert str(caught.value) == f"DistributedDataParallel has no argument {says}"


def test_every_companion_is_registered_and_its_arguments_have_a_page():
    folder = Path(minddp.__file__).parent
    companions = {path.parent.name for path in folder.glob("*/observer.py")}
    known = {companion.__module__.split(".")[1] for companion in events.registered()}
    assert companions <= known, "the tuple in minddp/__init__.py registers them"
    page = (folder.parent / "docs/arguments.md").read_text()
    arguments = inspect.signature(TorchDDP).parameters
    assert not [name for name in events.all_options() if f"`{name}" not in page and name not in arguments], (
        "docs/arguments.md describes each argument that torch's class does not have"
    )


def test_type_checkers_know_the_functions_that_are_imported_when_asked_for():
    tree = ast.parse(Path(minddp.__file__).read_text())
    imports = next(node for node in tree.body if isinstance(node, ast.If) and node.orelse).body
    assert {alias.name for node in imports for alias in node.names} == {*minddp._LAZY, *minddp._FOLDERS}


def test_dir_shows_what_is_public():
    assert {name for name in dir(minddp) if not name.startswith("__")} == set(minddp.__all__) - {"__config__"}
    assert {"__version__", "__config__", "__doc__"} <= set(dir(minddp))


@pytest.mark.all
@pytest.mark.long
def test_a_type_checker_refuses_what_the_constructor_refuses(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    program = """
        import torch
        from minddp import DistributedDataParallel as DDP
        m = torch.nn.Linear(1, 1)
        DDP(m, bucket_cap_mb="auto", wire="int8", reduction="weighted", check_finite=True, check_replicas_every=3)
        DDP(m, bucket_cap=3)
        DDP(m, wire=7)
        DDP(m, reduction="median")
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program).strip() + "\n")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    arguments = ["--python-version", version, "--follow-imports=silent", "--ignore-missing-imports", "--config-file="]
    told, errors, _ = mypy.run([*arguments, "--cache-dir", str(tmp_path / "cache"), str(path)])
    found = [line.split(":", 2)[1:] for line in told.splitlines() if ": error: " in line]
    assert [int(number) for number, _ in found] == [5, 6, 7], told + errors
    assert 'Unexpected keyword argument "bucket_cap"' in found[0][1]
