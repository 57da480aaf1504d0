"""Whatever Python hands to the C++ extensions is taken or refused: None and wrong types end no process."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minddp import _C, _extension
from tests import forked

# In each place of a call, one after the other; the others hold what fits.
WRONG: list[Any] = [
    None, 7, -1, 1 << 40, 0.5, "x", (), [None], {}, object(), torch.ones(2), torch.ones(0), [torch.ones(3)],
    torch.ones(2, device="meta"), torch._efficientzerotensor((2,)), torch.ones(2).to_sparse(), lambda *_: None,
]  # fmt: skip


class Fitting:
    """What fits, by the types of pybind11's signatures; a new reducer for each call."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        dist.init_process_group("gloo", store=self.store, rank=0, world_size=1)
        self.group = dist.group.WORLD
        self.kept: Any = None  # the last reducer, which its case does not keep
        self.gloo = self.group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]

    def reducer(self, *cases: Any, wire: torch.dtype = torch.float32) -> Any:
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        reducer = _C.Reducer(parameters, ["a", "b"], self.group, wire_dtypes=[wire] * 2, always_reduce=True)
        for case in cases:
            reducer.add(case)
        reducer.set_buckets([[0], [1]])
        self.kept = reducer
        return reducer

    def attached(self, case: Any) -> Any:
        """It belongs to a reducer then, whose gradients have come once."""
        reducer = self.reducer(case, wire=torch.uint8 if "Quantized" in type(case).__name__ else torch.float32)
        reducer.begin_forward()
        reducer.end_forward([], True)
        return case

    def of(self, kind: str) -> Any:
        for pattern, make in self.TABLE:
            if re.search(pattern, kind):
                return make(self)
        return None

    TABLE: list[tuple[str, Callable[[Any], Any]]] = [
        (r"Optional\[|\| None|object$", lambda self: None),
        (r"Callable", lambda self: lambda *_: None),
        (r"(?i:list)\[.*(?i:list)\[.*int", lambda self: [[0], [1]]),
        (r"(?i:list)\[(typing\.)?Optional|(?i:list)\[.*\| None\]", lambda self: [None, None]),
        (r"(?i:list)\[.*Tensor", lambda self: [torch.ones(2), torch.ones(2)]),
        (r"(?i:list)\[.*str", lambda self: ["a", "b"]),
        (r"(?i:list)\[.*bool", lambda self: [False, False]),
        (r"(?i:list)\[", lambda self: []),
        (r"Reducer$", lambda self: self.reducer()),
        (r"GradBucket", lambda self: self.reducer()._get_zeros_like_grad_buckets()[0]),
        (r"OrderedAllreduce", lambda self: _C.wire.OrderedAllreduce.on_device(self.group, 1024)),
        (r"Case$", lambda self: _C.ProgramCollectives()),
        (r"GraphMode", lambda self: _C.GraphMode.ALL_USED),
        (r"Phase", lambda self: _C.Phase.IDLE),
        (r"ProcessGroup$", lambda self: self.group),
        (r"Backend$", lambda self: self.gloo),
        (r"Store$", lambda self: self.store),
        (r"Work$", lambda self: dist.all_reduce(torch.ones(2), async_op=True)),
        (r"Future", lambda self: dist.all_reduce(torch.ones(2), async_op=True).get_future()),
        (r"Tensor$", lambda self: torch.ones(2)),
        (r"timedelta", lambda self: timedelta(seconds=5)),
        (r"dtype|ScalarType", lambda self: torch.float32),
        (r"bool", lambda self: True),
        (r"float", lambda self: 1.0),
        (r"int|Int", lambda self: 0),
        (r"str", lambda self: "x"),
    ]  # fmt: skip


def signatures(function: Any) -> Iterator[list[str]]:
    """The types of the arguments, of each overload, as pybind11 writes them."""
    for line in (function.__doc__ or "").splitlines():
        if not (found := re.match(r"(?:\d+\. )?\w+\((.*)\) -> .*", line)):
            continue
        kinds, depth, text = [], 0, ""
        for char in found[1] + ",":
            depth += (char in "[(") - (char in "])")
            if char == "," and depth == 0:
                if text.strip():
                    kinds.append(re.sub(r" = .*", "", text.partition(":")[2]).strip())
                text = ""
            else:
                text += char
        yield kinds


def functions(module: Any, owner: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, class or None, function) of all that pybind11 has bound."""
    for name, value in sorted(vars(module).items()):
        if inspect.ismodule(value):
            yield from functions(value, f"{owner}.{name}")
        elif inspect.isclass(value) and not hasattr(value, "__members__"):
            for member in sorted(set(vars(value)) - {"_pybind11_conduit_v1_"}):
                if (member == "__init__" or not member.startswith("__")) and callable(getattr(value, member)):
                    yield f"{owner}.{name}.{member}", value, getattr(value, member)
        elif callable(value) and not inspect.isclass(value) and not name.startswith("__"):
            yield f"{owner}.{name}", None, value


def instance(kind: type, fitting: Fitting) -> Any:
    if kind is _C.Reducer:
        return fitting.reducer()
    if kind is _C.GradBucket:
        return fitting.of("GradBucket")
    made = kind(*(fitting.of(each) for each in next(signatures(kind.__init__))[1:]))  # type: ignore[misc]
    return fitting.attached(made) if isinstance(made, _C.Case) else made


def call_all(module: Any) -> None:
    """Calls all that ``module`` offers, says before each call what it is, and ends."""
    fitting, calls = Fitting(), 0
    for name, kind, function in functions(module, module.__name__):
        for kinds in signatures(function):
            is_method = kind is not None and bool(kinds) and kinds[0].endswith(kind.__name__)
            none_is_taken = len(kinds) == is_method
            for place in range(is_method, len(kinds) + none_is_taken):
                for wrong in [None] if none_is_taken else WRONG:
                    what = "" if none_is_taken else f"{place}: {type(wrong).__name__} for {kinds[place]}"
                    print(f"{name}({what})", file=sys.stderr, flush=True)
                    calls += 1
                    try:
                        arguments = [fitting.of(each) for each in kinds]
                        if is_method:
                            arguments[0] = kind if name.endswith("__init__") else instance(kind, fitting)
                        if not none_is_taken:
                            arguments[place] = wrong
                        if name.endswith("__init__"):
                            made = kind(*arguments[1:])
                            _ = fitting.attached(made) if isinstance(made, _C.Case) else made
                        else:
                            function(*arguments)
                    except Exception:
                        pass
    print(calls)


@pytest.mark.parametrize("name", ["_C", "_shm"])
def test_none_and_wrong_types_end_no_process(name: str) -> None:
    _extension.load()
    source = f"import minddp.{name} as module; from tests.project.test_bindings import call_all; call_all(module)"
    if name == "_shm" and not sys.platform.startswith("linux"):
        pytest.skip("the shared-memory transport is Linux's")
    ended = forked.run(source, timeout=300)
    assert ended.returncode == 0, f"ended by {ended.returncode}; its last calls: {ended.stderr.splitlines()[-3:]}"
    assert int(ended.stdout.split()[-1]) > 50
