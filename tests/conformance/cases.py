"""Which tests there are, what each is about, and the lists that this folder keeps.

``torch_passes.txt``: one line a test, ``module.test world_size seconds``: it constructs a
DistributedDataParallel and passes with torch's class, on the CPU with Gloo, in a world of that size. The
seconds only help to share out the work. Another release of torch, whose tests may be others, has a list of its own:
``torch_passes-2.15.txt``.
``exceptions.toml``: the tests of that list that do not pass with minddp, each with its reason.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
_HOME = HERE / "torch_passes.txt"
_HOME_RELEASE = "2.13"
_RELEASE = ".".join(version("torch").split(".")[:2])
OWN_PASSES = _HOME if _RELEASE == _HOME_RELEASE else HERE / f"torch_passes-{_RELEASE}.txt"
PASSES = OWN_PASSES if OWN_PASSES.exists() else _HOME
EXCEPTIONS = HERE / "exceptions.toml"

_WHEEL = "torch.testing._internal.distributed."


@dataclass(frozen=True)
class TestModule:
    """How a module of the wheel becomes a TestCase.

    ``bases(module)`` gives the classes to derive from; ``world_sizes`` are tried in turn, and a size of 0
    means that the test's class says it.
    """

    bases: Callable[[ModuleType], tuple[type, ...]]
    world_sizes: tuple[int, ...]


def _distributed_bases(module: ModuleType) -> tuple[type, ...]:
    return module.TestDistBackend, module.DistributedTest._DistTestBase


def _rpc_bases(fixture: str) -> Callable[[ModuleType], tuple[type, ...]]:
    def bases(module: ModuleType) -> tuple[type, ...]:
        from torch.testing._internal.common_distributed import MultiProcessTestCase
        from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
            TensorPipeRpcAgentTestFixture,
        )

        return getattr(module, fixture), TensorPipeRpcAgentTestFixture, MultiProcessTestCase

    return bases


# The key is the module's last name, with the class's name behind a colon where a module has several.
MODULES = {
    "distributed_test": TestModule(_distributed_bases, (2, 3, 4)),
    "ddp_under_dist_autograd_test:DdpUnderDistAutogradTest": TestModule(_rpc_bases("DdpUnderDistAutogradTest"), (0,)),
    "ddp_under_dist_autograd_test:DdpComparisonTest": TestModule(_rpc_bases("DdpComparisonTest"), (0,)),
    "ddp_under_dist_autograd_test:CudaDdpComparisonTest": TestModule(_rpc_bases("CudaDdpComparisonTest"), (0,)),
}


def import_name(module: str) -> str:
    return _WHEEL + module.partition(":")[0]


@dataclass(frozen=True)
class Case:
    module: str
    name: str
    world_size: int
    seconds: float = 1.0

    @property
    def test(self) -> str:
        """The name under which the lists and the reports know it."""
        return f"{self.module.partition(':')[2] or self.module}.{self.name}"

    @property
    def timeout(self) -> float:
        """Six times what it took with torch's class; never below two minutes."""
        return max(120.0, 6 * self.seconds)


THEMES = (
    ("RPC and distributed autograd", r"^Ddp|^Cuda|dist_autograd"),
    ("join and uneven inputs", r"uneven|join"),
    ("optimizer in backward", r"optim_in_backward"),
    ("mixed precision and AMP", r"mixed_precision|_amp"),
    ("local SGD", r"localSGD"),
    ("gradient hooks", r"hook_parity|comm_hook|hook_with|hook_pickling|get_future|_hook$"),
    ("buffers", r"buffer"),
    ("static graph", r"static"),
    ("unused parameters, control flow", r"unused|control_flow|different_graph|ignore_params|undefined_grad"),
    ("accumulation, no_sync", r"no_sync"),
    (
        "construction and its errors",
        r"requires_grad|zero_output|diff_|mesh|across_rank|compute_bucket|sync_module",
    ),
    ("logging data and names", r"logg|profil|param_to_name|data_parallel_params|bucket_cap"),
    ("SyncBatchNorm", r"SyncBatchNorm|sync_bn"),
)


def theme(test: str) -> str:
    return next((name for name, pattern in THEMES if re.search(pattern, test)), "training, everything else")


def read_passes(path: Path = PASSES) -> list[Case]:
    """The tests that pass with torch's class."""
    found = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            test, world_size, seconds = line.split()
            owner, _, name = test.rpartition(".")
            module = next(key for key in MODULES if owner in (key, key.partition(":")[2]))
            found.append(Case(module, name, int(world_size), float(seconds)))
    return found


def write_passes(cases: Iterable[Case], versions: str) -> None:
    head = f"# Found with {versions}: test, world size, seconds.\n"
    lines = sorted(f"{case.test} {case.world_size} {case.seconds:.1f}\n" for case in cases)
    OWN_PASSES.write_text(head + "".join(lines))


def read_exceptions() -> dict[str, str]:
    """Test -> why it does not pass with minddp."""
    table: dict[str, Any] = tomllib.loads(EXCEPTIONS.read_text())
    return {str(test): str(reason) for test, reason in table.items()}
