"""Everything that the installed torch's DDP offers is here, or stands below with the reason why not.

Runs on whichever torch is installed, so that a new release says what it has brought.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import minddp
from minddp.functions import FUNCTIONS
from minddp.torch_base import TorchBase
from minddp.torch_surface.names import REFUSED
from tests.on_ranks import on_ranks
from tests.ranks_pool import run_ranks

OURS = minddp.DistributedDataParallel

# Defaults that differ: name -> why.
OTHER_DEFAULTS = {"broadcast_buffers": "True in torch 2.11, None later; the same buffers are broadcast"}

_INSIDE = "inside torch's own class; another one does its work here"
_PYTHON_REDUCER = "torch's reducer in Python, for compiled autograd, which raises here"
LEFT_OUT = {
    "_register_accum_grad_hook": _PYTHON_REDUCER,
    "_fire_reducer_autograd_hook": _INSIDE,
    "_delayed_all_reduce_hook": _INSIDE,
    "_register_delay_all_reduce_hook": _INSIDE,
    "_root_copy_hook": _INSIDE,
    "_module_wait_for_copy_hook": _INSIDE,
    "_check_default_group": _INSIDE,
    "_check_manual_backward_finalization_supported": _INSIDE,
    "_check_global_requires_backward_grad_sync": _INSIDE,
    "_check_and_sync_module_buffers": _INSIDE,
    "_match_all_reduce_for_bwd_pass": _INSIDE,
    "_match_unused_params_allreduce": _INSIDE,
    "_passing_sync_batchnorm_handle": "torch's SyncBatchNorm checks its device there; minddp's works on any",
    "_set_sparse_metadata": "NCCL's sparse reduction with known indices; named in docs/gaps.md",
}
ATTRIBUTES_LEFT_OUT = {
    "_comm_hooks": _INSIDE,
    "_lazy_init_ran": _INSIDE,
    "_bucket_config": _INSIDE,
    "_delay_grad_buffer": _INSIDE,
    "_delay_grad_views": _INSIDE,
    "_require_manual_backward_finalization": _INSIDE,
    "_accum_grad_hooks": _PYTHON_REDUCER,
}
_OF_2_13, _OF_2_15 = "torch's since 2.13", "torch's since 2.15"
# Names that an installed torch may be too old for, or that an instance of torch's class has later.
OF_ANOTHER_TORCH = {
    "batched_grad_copy": _OF_2_13,
    "forward_sync_buffers": _OF_2_13,
    "finalize_backward": _OF_2_15,
    "lazy_bucket_allocation": _OF_2_15,
    "require_manual_backward_finalization": _OF_2_15,
    "should_finalize_after_backward": _OF_2_15,
    "_divide_by_initial_world_size": "torch's class has it once there was a join()",
}
_OF_THE_MODULE = "the module's method, or its constructor's argument, makes the reducer anew"
REDUCER_LEFT_OUT = {
    "_autograd_hook": _PYTHON_REDUCER,
    "_delay_all_reduce": "torch's static graph launches everything at the end of its first backward with it",
    "_install_post_backward_futures": "minddp's wait_after_backward",
    "_push_all_rebuilt_params": "torch's join keeps its order of gradients with it",
    "_set_forward_pass_work_handle": "torch's join counts ranks with it; minddp's set_divisor",
    "_set_mixed_precision_param_dtype": _OF_THE_MODULE,
    "_set_optimizer_in_backward": "minddp's optimizer_in_backward",
    "_set_sparse_metadata": "NCCL's sparse reduction with known indices; named in docs/gaps.md",
    "_set_static_graph": _OF_THE_MODULE,
    "_update_process_group": _OF_THE_MODULE,
    "_set_ddp_runtime_logging_sample_rate": "the module's method",
    "get_backward_stats": "minddp's last_step",
    "set_logger": "the log reads the reducer here",
}


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _defined_by_torch() -> dict[str, Any]:
    runs = (property, classmethod, staticmethod)
    return {name: value for name, value in vars(TorchDDP).items() if callable(value) or isinstance(value, runs)}


def _defined_here() -> dict[str, Any]:
    """By the core, and by the companion that fills torch's names in."""
    filled = {}
    for name, value in vars(TorchBase).items():
        function = value.fget if isinstance(value, property) else value
        if getattr(function, "__module__", "").startswith("minddp.torch_surface"):
            filled[name] = value
    return {**filled, **vars(OURS)}


def test_every_argument_is_here_at_its_place() -> None:
    theirs = list(inspect.signature(TorchDDP).parameters.values())
    ours = list(inspect.signature(OURS).parameters.values())
    assert [p.name for p in theirs] == [p.name for p in ours[: len(theirs)]]
    for mine, its in zip(ours, theirs):
        assert mine.kind == its.kind, its.name
        assert mine.default == its.default or its.name in OTHER_DEFAULTS, its.name


def test_every_argument_is_documented() -> None:
    text = OURS.__doc__ or ""
    for name in inspect.signature(OURS).parameters:
        assert f"        {name}:" in text, name


def test_every_method_and_property_is_here_or_left_out() -> None:
    after = {name for base in TorchDDP.__mro__[1:] for name in vars(base)}
    here = _defined_here()
    missing = {name for name in _defined_by_torch() if name not in here and name not in after} - set(REFUSED)
    assert missing <= set(LEFT_OUT), f"torch {torch.__version__} has {sorted(missing - set(LEFT_OUT))}"
    assert not _public(missing)
    assert not set(LEFT_OUT) & set(here), "listed as left out, but here"


def test_what_nobody_calls_raises_with_the_way_out() -> None:
    assert set(REFUSED) <= set(vars(TorchDDP))
    for name, way_out in REFUSED.items():
        with pytest.raises(NotImplementedError, match=re.escape(f"{name} is left out of minddp. {way_out}")):
            getattr(OURS, name)(None)


@pytest.mark.parametrize("name", sorted(_public(_defined_by_torch()) - {"train", *REFUSED}))
def test_it_is_of_the_same_kind_and_takes_the_same(name: str) -> None:
    """A property is a property, settable where torch's is; a method takes what torch's takes, in its order."""
    theirs, ours = _defined_by_torch()[name], _defined_here()[name]
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(theirs, property):
        assert theirs.fset is None or ours.fset is not None
        return
    mine = [p for p in inspect.signature(getattr(OURS, name)).parameters.values() if p.name != "self"]
    for i, parameter in enumerate(p for p in inspect.signature(getattr(TorchDDP, name)).parameters.values()):
        if parameter.name == "self":
            continue
        place = i - 1 if "self" in inspect.signature(getattr(TorchDDP, name)).parameters else i
        assert mine[place].name == parameter.name
        assert mine[place].kind == parameter.kind
        assert mine[place].default == parameter.default


def _seen(ddp_class: Any) -> dict[str, Any]:
    """Names of one wrapper, before and after some steps; which iterations are logged."""
    ddp = ddp_class(torch.nn.Linear(3, 3))
    at_start = set(ddp._get_ddp_logging_data())
    logged = []
    for _ in range(13):
        ddp(torch.ones(1, 3)).sum().backward()
        logged.append(ddp._get_ddp_logging_data()["iteration"])
    return {
        "logged": logged,
        "attributes": set(vars(ddp)),
        "all": set(dir(ddp)),
        "reducer": {name for name in dir(ddp.reducer) if not name.startswith("__")},
        "logger": {name for name in dir(ddp.logger) if not name.startswith(("__", "_pybind11"))},
        "keys at the start": at_start,
        "keys": set(ddp._get_ddp_logging_data()),
    }


def _instances(rank: int, world_size: int) -> Any:
    return _seen(TorchDDP), _seen(OURS)


@pytest.fixture(scope="module")
def instances() -> Any:
    [both] = run_ranks(_instances, 1)
    return both


@pytest.mark.parametrize(
    ("what", "left_out"),
    [
        ("attributes", ATTRIBUTES_LEFT_OUT),
        ("reducer", REDUCER_LEFT_OUT),
        ("logger", {}),
        ("keys at the start", {}),
        ("keys", {}),
    ],
)
def test_every_name_of_an_instance_is_here_or_left_out(instances: Any, what: str, left_out: dict[str, str]) -> None:
    theirs, ours = instances
    missing = theirs[what] - ours["all" if what == "attributes" else what]
    assert missing <= set(left_out), sorted(missing - set(left_out))
    assert what == "reducer" or not _public(missing)
    assert theirs["logged"] == ours["logged"] and "set_runtime_stats_and_log" in theirs["logger"]


def _added(here: set[str], there: set[str]) -> set[str]:
    return {name for name in here - there if not name.startswith("_minddp_")} - set(OF_ANOTHER_TORCH)


def test_nothing_is_added_but_private_names(instances: Any) -> None:
    """What torch's instance has as an attribute, such as ``reducer``, the class may have here."""
    theirs, ours = instances
    assert not _added(ours["all"], theirs["all"])
    assert not _added(set(dir(OURS)), theirs["all"])


@on_ranks(1)
def test_what_minddp_adds_are_functions_of_the_package(rank: int, world_size: int) -> None:
    """What is said where one is looked for in a wrapper, or called without one."""

    class Module(torch.nn.Linear):
        report = "the module's"

    ddp = OURS(Module(3, 3))
    for name in FUNCTIONS:
        assert not hasattr(ddp, name)
        with pytest.raises(AttributeError, match=rf"It is a function of the package: minddp\.{name}\(ddp\)$"):
            getattr(ddp, name)
    with pytest.raises(AttributeError) as unknown:
        _ = ddp.reports
    assert "minddp." not in str(unknown.value) and ddp.module.report == "the module's"
    for given, out in (
        (TorchDDP(torch.nn.Linear(3, 3)), "minddp.install()"),
        (ddp.module, "Pass the wrapper around it"),
        (torch.nn.Sequential(ddp), "is its submodule '0': pass that"),
        (None, "got NoneType"),
    ):
        for name in FUNCTIONS:
            arguments: dict[str, Any] = {"add_weight": {"weight": 1}, "load_wire_state": {"state": {}}}.get(name, {})
            arguments = {"rank": 0} if name == "repair_replicas" else arguments
            with pytest.raises(TypeError) as wrong:
                getattr(minddp, name)(given, **arguments)
            text = f"minddp.{name}: ddp must be a minddp.DistributedDataParallel, got"
            assert str(wrong.value).startswith(text) and out in str(wrong.value)
    compiled = torch.compile(ddp, backend="eager")
    assert minddp.bucket_plan(compiled) == minddp.bucket_plan(ddp)


def test_the_page_and_the_package_list_the_functions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wrapper.md").read_text()
    assert set(re.findall(r"^\| `minddp\.(\w+)\(ddp", page, re.MULTILINE)) == set(FUNCTIONS), "docs/wrapper.md"
    assert set(FUNCTIONS) <= set(minddp.__all__) and set(minddp.__all__) <= set(dir(minddp))
    for name in FUNCTIONS:
        function = getattr(minddp, name)
        assert function.__name__ == name and next(iter(inspect.signature(function).parameters)) == "ddp"
    with pytest.raises(AttributeError, match="module 'minddp' has no attribute 'reports'"):
        _ = minddp.reports


@on_ranks(1)
def test_a_forks_forward_runs_and_is_logged(rank: int, world_size: int) -> None:
    """A forward as forks of torch's class have it, of several releases."""

    class Fork(OURS):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.logger.set_runtime_stats_and_log()
            self.reducer.prepare_for_forward()
            output = self.module(x)
            self.reducer.prepare_for_backward([])
            return output

    ddp = Fork(torch.nn.Linear(3, 3))
    ddp.logger._set_comm_hook_name("mine")
    ddp.logger._set_uneven_input_join()
    ddp.logger._set_static_graph()
    ddp.logger.set_construction_data_and_log("Mine", [0], -1, True, False, False)
    for _ in range(3):
        ddp(torch.ones(1, 3)).sum().backward()
    maps, flat = ddp.logger._get_ddp_logging_data(), ddp._get_ddp_logging_data()
    texts, numbers = maps.strs_map, maps.ints_map
    assert texts["comm_hook"] == "mine" and texts["module_name"] == "Mine" and texts["device_ids"] == "0"
    assert numbers["join_uneven_inputs"] == 1 and numbers["iteration"] == 2 and numbers["avg_backward_comm_time"] >= 0
    assert {**texts, **numbers} == flat
