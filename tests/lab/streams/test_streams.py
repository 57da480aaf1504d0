"""The whole way of a gradient on a device with streams, in random legal orders; see device.h.

What the host does in a step is counted, too: where it waits, and what it copies from memory that is not pinned.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minddp
from minddp import _C
from minddp.functional import sync_batchnorm
from minddp.guards import lost, times, watchdog
from minddp.guards.processes import Process, here
from minddp.planner.autotune import TunerSettings
from tests.lab.streams import extension, programs
from tests.ranks_pool import run_ranks, shutdown
from tests.reducer.late import LateGroup

SEEDS, MORE_SEEDS = [0, 1], [2, 3, 4, 5]  # what is not ordered is found in any order


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """Compiled here, once, and not within a rank's time.

    In processes of their own: one whose autograd engine has run knows of no device that comes later.
    """
    pytest.importorskip("ninja")
    extension.build()
    shutdown()
    yield
    shutdown()


def _check(rank: int, world_size: int, name: str, seeds: list[int]) -> list[str]:
    return programs.check(name, seeds)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(MORE_SEEDS, marks=pytest.mark.all)], ids=["two", "more"])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_gradients_are_the_cpus_in_every_order(name: str, seeds: list[int]) -> None:
    """And after backward the stream that called it is after all others."""
    assert run_ranks(_check, 1, name, seeds, backend=None) == [[]]


def _shadows(rank: int, world_size: int) -> list[str]:
    """What a rank without data leaves behind after the others' backward."""
    device = extension.load()
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        with programs.group():
            model = minddp.DistributedDataParallel(programs.Branches(extension.NAME), **options)
            torch.accelerator.synchronize()
            model._minddp_averager.shadow_backward()
            found += [f"{options}: {text}" for text in device.unjoined()]
    return found


def test_a_rank_without_data_leaves_nothing_unjoined() -> None:
    assert run_ranks(_shadows, 1, backend=None) == [[]]


# ---- what the device itself must see


def _faults(rank: int, world_size: int) -> dict[str, list[str]]:
    """Programs with one mistake each; what was found of them."""
    device = extension.load()
    found: dict[str, list[str]] = {}
    sides: list[Any] = []

    def streams() -> tuple[Any, Any]:
        torch.accelerator.synchronize()
        for side in sides:  # before torch 2.13 the call above leaves them running
            side.synchronize()
        device.take_races()
        sides.append(torch.Stream(extension.NAME))
        return torch.accelerator.current_stream(), sides[-1]

    here, side = streams()
    x = torch.ones(100, device=extension.NAME)
    with side:
        x.add_(1)
    found["no wait"] = device.take_races()
    found["unjoined"] = device.unjoined()
    here.wait_stream(side)
    found["joined"] = device.unjoined()

    for name, records in (("freed without record_stream", False), ("none", True)):
        here, side = streams()
        x = torch.ones(100, device=extension.NAME)
        side.wait_stream(here)
        with side:
            y = x + 1
        if records:
            x.record_stream(side)
        del x
        torch.zeros(100, device=extension.NAME)
        if records:
            here.wait_stream(side)
        found[name] = device.take_races()
    found["none"] += [] if torch.equal(y.cpu(), torch.full((100,), 2.0)) else ["values"]
    torch.accelerator.synchronize()
    return found


@pytest.mark.long  # whoever is first compiles the device
def test_the_device_finds_what_is_not_ordered() -> None:
    found = run_ranks(_faults, 1, backend=None)[0]
    assert found["none"] == found["joined"] == []
    assert len(found["unjoined"]) == 1
    assert any("does not wait for it" in text for text in found["no wait"])
    assert any("the allocator does not know" in text for text in found["freed without record_stream"])


def _values_show(rank: int, world_size: int) -> list[bool]:
    """By order drawn: whether a missing wait shows in the values alone."""
    device = extension.load()
    shown = []
    for seed in range(40):
        torch.accelerator.synchronize()
        device.seed(seed)
        side = torch.Stream(extension.NAME)
        x = torch.zeros(10, device=extension.NAME)
        y = torch.zeros(10, device=extension.NAME)
        torch.accelerator.synchronize()
        with side:
            x.add_(1)
        y.add_(x)
        torch.accelerator.synchronize()
        shown.append(float(y[0]) == 0)
    device.take_races()
    return shown


def test_orders_differ() -> None:
    shown = run_ranks(_values_show, 1, backend=None)[0]
    assert 5 < sum(shown) < 35


# ---- a process group of the device alone


def _compares_channels(rank: int, world_size: int) -> None:
    extension.load()
    with programs.group(extension.ALONE), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", None)
        sync_batchnorm._compare_once(
            minddp.SyncBatchNorm(3), torch.ones(2, 3, device=extension.NAME), dist.group.WORLD
        )


def test_sync_batchnorm_makes_no_group_in_forward() -> None:
    """Of its forward what needs no operator that the fake device lacks."""
    run_ranks(_compares_channels, 1, backend=None)


# ---- a process group in Python


def _constructs_over_late_group(rank: int, world_size: int) -> list[str]:
    extension.load()
    x, side_x = programs.batches(extension.NAME)[0]
    found = []
    for options in ({}, {"check_finite": True}, {"find_unused_parameters": True}, {"check_replicas_every": 1}):
        model = minddp.DistributedDataParallel(
            programs.Branches(extension.NAME), process_group=LateGroup(extension.NAME), **options
        )
        model(x, side_x).square().mean().backward()
        found += [name for name, p in model.named_parameters() if p.grad is None]
    return found


def test_a_group_in_python_that_takes_the_device_alone() -> None:
    """Nobody can ask it where it works: what ranks tell each other travels where the parameters are."""
    assert run_ranks(_constructs_over_late_group, 1, backend=None) == [[]]


# Of each way of its own one; the others in test-all.
LATE = ["default", "views, alone", "unused, views", "static", "mixed precision", "weighted", "late hook"]
LATE += ["check_finite", "futures that order nothing, unused", "delayed gradients", "given up, views, zeros"]
LATE_TOO = [name for name in programs.LATE_PROGRAMS if name not in LATE]


def _late(rank: int, world_size: int, names: list[str]) -> list[str]:
    extension.load()
    return programs.check_late(names, extension.NAME)


@pytest.mark.parametrize("names", [LATE, pytest.param(LATE_TOO, marks=pytest.mark.all)], ids=["few", "the rest"])
def test_a_group_in_python_that_ends_late(names: list[str]) -> None:
    """In every mode; on CUDA it sleeps, and is the first thing that a machine with one GPU runs."""
    assert run_ranks(_late, 1, names, backend=None) == [[]]


# ---- the host's part


def _host_work(rank: int, world_size: int, name: str) -> list[dict[str, int]]:
    """What each step counted, but the first two, and the one whose forward cuts the buckets anew."""
    device = extension.load()
    program = programs.PROGRAMS[name]
    device.seed(0)
    counts = []
    with programs.group():
        module = programs.Branches(extension.NAME)
        model = programs.minddp.DistributedDataParallel(module, **program.options)
        if program.hook is not None:
            model.register_comm_hook(None, program.hook)
        for x, side_x in programs.batches(extension.NAME):
            model.zero_grad()
            if program.options.get("reduction") == "weighted":
                minddp.add_weight(model, 2.0)
            torch.accelerator.synchronize()
            device.take_counts()
            model(x, side_x).square().mean().backward()
            counts.append(dict(device.take_counts()))
            torch.accelerator.synchronize()
    return counts[3 if program.options.get("static_graph") else 2 :]


@pytest.mark.parametrize("name", ["default", "views", "unused", "static", "mixed precision", "late hook", "weighted"])
def test_the_host_neither_waits_nor_copies_pageable_memory(name: str) -> None:
    for counts in run_ranks(_host_work, 1, name, backend=None)[0]:
        # Weights that do not add up must raise before anything is averaged: the host reads their sum, once.
        assert counts.get("synchronize", 0) == (1 if name == "weighted" else 0), counts
        assert counts.get("pageable copy", 0) == 0, counts


def _waits_of_zeroed(rank: int, world_size: int, reduction: str) -> list[int]:
    """How often the host waits in a step whose gradients were zeroed in place, but the first two."""
    device = extension.load()
    device.seed(0)
    waits = []
    with programs.group():
        model = minddp.DistributedDataParallel(programs.Branches(extension.NAME), reduction=reduction)
        for x, side_x in programs.batches(extension.NAME):
            model.zero_grad(set_to_none=False)
            if reduction == "weighted":
                minddp.add_weight(model, 2.0)
            torch.accelerator.synchronize()
            device.take_counts()
            model(x, side_x).square().mean().backward()
            waits.append(dict(device.take_counts()).get("synchronize", 0))
            torch.accelerator.synchronize()
    return waits[2:]


@pytest.mark.parametrize("reduction, waits", [("sum", 1), ("weighted", 2)])
def test_one_answer_says_whether_gradients_were_zeroed(reduction: str, waits: int) -> None:
    """For all of them, where sums of an earlier iteration may still be there; weights take the other wait."""
    assert run_ranks(_waits_of_zeroed, 1, reduction, backend=None) == [[waits, waits]]


def _sends(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, int]:
    """What the group was given in the last step."""
    device = extension.load()
    x, side_x = programs.batches(extension.NAME)[0]
    with programs.group():
        model = minddp.DistributedDataParallel(programs.Branches(extension.NAME), **options)
        for _ in range(3):
            device.take_counts()
            model(x, side_x).square().mean().backward()
    return dict(device.take_counts())


@pytest.mark.parametrize("options", [{"ordered": True}, {"wire": "bf16"}, {"wire": "int8"}], ids=str)
def test_pieces_are_aligned_and_sums_are_gathered(options: dict[str, Any]) -> None:
    """NCCL's copies are 16 bytes wide then, and its all-gather wants one copy of a sum, not one for each rank."""
    counts = run_ranks(_sends, 1, {**programs.SMALL, **options}, backend=None)[0]
    assert counts["all-to-all"] == counts["all-gather"] >= 3
    assert counts.get("unaligned", 0) == 0


def _owned_sends(rank: int, world_size: int) -> tuple[dict[str, int], int, int]:
    """What the group is given in a step of 24 matrices of 256 kB, beside how many pieces they are in; and what that
    enqueues beyond the optimizer's own work."""
    device = extension.load()
    with programs.group():
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(24)]).to(extension.NAME)
        ddp = minddp.DistributedDataParallel(model)
        owned = minddp.Owned(ddp, [(model.parameters(), torch.optim.SGD, {"lr": 0.1, "foreach": False})])
        for _ in range(2):
            ddp(torch.ones(2, 256, device=extension.NAME)).sum().backward()
            torch.accelerator.synchronize()
            device.take_counts()
            owned.step()
        counts = dict(device.take_counts())
        torch.accelerator.synchronize()
    return counts, len(owned._pieces), sum(owner == 0 for owner in owned._owners.values())


def test_what_owners_send_is_packed_by_owner_and_piece() -> None:
    """A launch for each parameter would cost more than its bytes. An owner packs in one launch, the others unpack in
    one; the host waits for nothing."""
    counts, pieces, stepped = run_ranks(_owned_sends, 1, backend=None)[0]
    assert counts["broadcast"] == 2 * pieces < 24
    assert counts["enqueue"] - stepped == counts["broadcast"] + 2 * pieces
    assert counts.get("synchronize", 0) == counts.get("pageable copy", 0) == 0


def _bucket_memory(rank: int, world_size: int, backend: str, asked: str | None) -> int:
    """How many buckets lie in the group's memory."""
    device = extension.load()
    x, side_x = programs.batches(extension.NAME)[0]
    with programs.group(backend), pytest.MonkeyPatch.context() as patch:
        patch.delenv("DDP_DISABLE_COMM_MEM", raising=False)
        if asked is not None:
            patch.setenv("DDP_DISABLE_COMM_MEM", asked)
        device.take_counts()
        model = minddp.DistributedDataParallel(programs.Branches(extension.NAME), **programs.SMALL)
        model(x, side_x).square().mean().backward()
        model(x, side_x).square().mean().backward()
        return dict(device.take_counts()).get("memory of the group's", 0)


def test_buckets_lie_in_the_groups_memory_where_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """As with torch's class; where the group has none, the log says so once."""
    shutdown()  # a warning that is given once is given to a new process
    for asked in (None, "1"):
        assert run_ranks(_bucket_memory, 1, extension.NAME, asked, backend=None) == [0]
    assert run_ranks(_bucket_memory, 1, extension.NAME, "0", backend=None)[0] >= 3
    assert "DDP_DISABLE_COMM_MEM" not in capfd.readouterr().err
    assert run_ranks(_bucket_memory, 1, extension.PLAIN, "0", backend=None) == [0]
    told = capfd.readouterr().err
    assert told.count("DDP_DISABLE_COMM_MEM") == 1, told
    assert "its backend streams has none on streams:0: they are allocated as usual" in told


def _enqueues(rank: int, world_size: int, views: bool) -> list[int]:
    """Of a bucket of 80 gradients, beyond what backward enqueues without a wrapper; and of one whose are empty."""
    device = extension.load()
    x = torch.ones(2, 4, device=extension.NAME)

    def of_a_step(model: torch.nn.Module) -> int:
        for _ in range(3):
            model.zero_grad()
            loss = model(x).sum()
            device.take_counts()
            loss.backward()
        return dict(device.take_counts())["enqueue"]

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)]).to(extension.NAME)

    with programs.group():
        wrapped = minddp.DistributedDataParallel(make(), gradient_as_bucket_view=views)
        more = of_a_step(wrapped) - of_a_step(make())
        empty = torch.nn.Linear(4, 0).to(extension.NAME)
        minddp.DistributedDataParallel(empty, gradient_as_bucket_view=views)(x).sum().backward()
    return [more, *[p.grad.numel() for p in empty.parameters() if p.grad is not None]]


@pytest.mark.parametrize("views", [False, True])
def test_a_bucket_is_a_few_launches_without_the_kernel(views: bool) -> None:
    """Copy in, scale, reduce, copy out; a device that the build has no kernel for is the usual install."""
    (enqueued, *empty) = run_ranks(_enqueues, 1, views, backend=None)[0]
    assert enqueued <= (3 if views else 4)
    assert empty == [0, 0]


def _casts(rank: int, world_size: int) -> tuple[int, int, list[bool]]:
    """What a forward enqueues beyond that of a model in bfloat16; after backward: bytes of low-precision copies, and
    whether the memory that they had is free."""
    device = extension.load()
    x = torch.ones(2, 4, device=extension.NAME)
    low = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(40)]).to(extension.NAME)
    counts = []
    with programs.group():
        model = minddp.DistributedDataParallel(copy.deepcopy(low), mixed_precision=programs.MIXED)
        low.bfloat16()
        for run in (model, lambda x: low(x.bfloat16())):
            device.take_counts()
            loss = run(x).sum()  # type: ignore[operator]
            counts.append(dict(device.take_counts())["enqueue"])
        made = [p._mp_param.untyped_storage()._weak_ref() for p in model.parameters()]
        loss = model(x).sum()
        made += [p._mp_param.untyped_storage()._weak_ref() for p in model.parameters()]
        loss.backward()
        del loss
        left = sum(p._mp_param.untyped_storage().size() for p in model.parameters())
        free = [torch.UntypedStorage._expired(ref) for ref in made]
    return counts[0] - counts[1], left, free


def test_mixed_precision_casts_at_once_and_keeps_no_copies() -> None:
    enqueued, left, free = run_ranks(_casts, 1, backend=None)[0]
    assert enqueued <= 2
    assert left == 0 and all(free)


def _copies(rank: int, world_size: int) -> list[str]:
    """The cases in which the pass on lists is not the readable version's, bit for bit."""
    extension.load()
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 100
    different = []
    for src, dst, scale in itertools.product(floats, floats, (1.0, 0.5, 1 / 3)):
        want, found = torch.zeros(100, dtype=dst), torch.zeros(100, dtype=dst, device=extension.NAME)
        _C.scaled_copy([values.to(src)], [want], src, scale, True)
        on_device = values.to(src).to(extension.NAME)
        _C.scaled_copy([on_device], [found], src, scale)
        if not torch.equal(found.cpu(), want):
            different.append(f"{src} to {dst} by {scale}")
    return different


def test_the_pass_on_lists_copies_as_the_readable_version() -> None:
    assert run_ranks(_copies, 1, backend=None) == [[]]


def _times(rank: int, world_size: int) -> tuple[list[Any], dict[str, int], set[str]]:
    """The last step's communication times, the logged numbers, and the trials of ``bucket_cap_mb="auto"``."""
    device = extension.load()
    device.seed(0)
    x, side_x = programs.batches(extension.NAME)[0]
    with programs.group():
        model = minddp.DistributedDataParallel(programs.Branches(extension.NAME), bucket_cap_mb="auto")
        tuner = model._minddp_observers.get("planner").tuner
        assert tuner is not None
        tuner.settings = TunerSettings(warmup_iterations=2, measured_iterations=1, laps=1, caps_mb=(1,))
        for _ in range(20):
            model(x, side_x).square().mean().backward()
        step = minddp.last_step(model)
        logged = model._get_ddp_logging_data()
        trials = {trial.name for trial in tuner._search.trials} if tuner._search is not None else set()
    device.synchronize()
    unknown = [step.communication_seconds, step.exposed_seconds]
    for bucket in step.buckets:
        unknown += [bucket.done, bucket.communication_seconds, bucket.exposed_seconds]
    return unknown, logged, trials


def test_no_communication_time_is_made_up_on_a_device() -> None:
    """The host enqueues a step, and knows of no collective when it ran; nothing is planned from such times."""
    unknown, logged, trials = run_ranks(_times, 1, backend=None)[0]
    assert len(unknown) >= 5 and set(unknown) == {None}
    assert logged["backward_compute_time"] > 0
    assert not [key for key in logged if "comm_time" in key]
    assert trials and not [name for name in trials if name.startswith("planned")]


def _one_of_two(rank: int, path: str) -> tuple[minddp.DistributedDataParallel, dist.Store]:
    """Two processes, whose collectives the fake backend answers for both: only the store joins them."""
    extension.load()
    store = dist.FileStore(path, 2)
    dist.init_process_group(extension.NAME, rank=rank, world_size=2, store=store)
    model = minddp.DistributedDataParallel(programs.Branches(extension.NAME))
    store.set(f"process{rank}", json.dumps(here()))  # the fake's exchange has told each of itself alone
    watchdog.current(dist.group.WORLD).know({1 - rank: Process(*json.loads(store.get(f"process{1 - rank}")))})
    return model, store


def _hears_of_a_failure(rank: int, world_size: int, path: str) -> str:
    model, store = _one_of_two(rank, path)
    x, side_x = programs.batches(extension.NAME)[0]

    def fails(grad: torch.Tensor) -> None:
        raise ValueError("on rank 1 alone")

    if rank == 1:
        model.module.last.bias.register_hook(fails)
    error = ""
    deadline = time.monotonic() + 30
    while not error and time.monotonic() < deadline:
        model._minddp_observers.get("guards").watch.progress.key = "their name for it"  # they could not agree
        try:
            model(x, side_x).square().mean().backward()
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
        time.sleep(0.1)
    torch.accelerator.synchronize()
    store.set(f"done{rank}", "")
    store.wait(["done0", "done1"], timedelta(seconds=30))
    return error


def test_a_forward_hears_of_a_rank_that_failed(tmp_path: Path) -> None:
    """A backward waits for no collective here, and would go on with wrong gradients."""
    try:
        heard, failed = run_ranks(_hears_of_a_failure, 2, str(tmp_path / "store"), backend=None)
    finally:
        shutdown()
    assert failed == "on rank 1 alone"
    part = r"rank 1 will not take part in (the reduction of )?iteration \d+"
    assert re.search(rf"{part}\. Rank 1 .* says: an exception ended", heard)


def _waits_for_the_device(rank: int, world_size: int, path: str) -> tuple[list[int], list[str]]:
    """Rank 1 fails in an iteration that rank 0 has launched: by look of rank 0's, which waits for its
    device, how often its group was given up; and what its next step, forward and checkpoint say."""
    given_up: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, times.faster(0.05):
        patch.setattr(lost.cases, "abort", given_up.append)
        model, store = _one_of_two(rank, path)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, side_x = programs.batches(extension.NAME)[0]
        for _ in range(2):  # the second cuts the buckets anew
            model(x, side_x).square().mean().backward()
        model._minddp_observers.get("guards").watch.progress.key = "their name for it"  # they could not agree
        looks: list[int] = []
        errors: list[str] = []
        if rank == 1:
            store.wait(["launched"], timedelta(seconds=30))
            model.module.last.bias.register_hook(_fails)
            with pytest.raises(ValueError):
                model(x, side_x).square().mean().backward()
        else:
            model(x, side_x).square().mean().backward()
            time.sleep(0.3)
            looks.append(len(given_up))
            store.set("launched", "")
            deadline = time.monotonic() + 20
            while not given_up and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            looks.append(len(given_up))
            before = [p.detach().cpu() for p in model.parameters()]
            for act in (optimizer.step, lambda: model(x, side_x), model.state_dict):
                with pytest.raises(lost.LostPeer) as raised:
                    act()
                errors.append(str(raised.value))
            assert all(torch.equal(p.detach().cpu(), q) for p, q in zip(model.parameters(), before, strict=True))
        torch.accelerator.synchronize()
        store.set(f"done{rank}", "")
        store.wait(["done0", "done1"], timedelta(seconds=30))
    return looks, errors


def _fails(grad: torch.Tensor) -> None:
    raise ValueError("on rank 1 alone")


def test_the_watchdog_gives_up_a_group_whose_rank_is_lost(tmp_path: Path) -> None:
    """While the program waits for the device, which nobody sees. Nothing uses what the device then makes."""
    try:
        looks, errors = run_ranks(_waits_for_the_device, 2, str(tmp_path / "store"), backend=None)[0]
    finally:
        shutdown()
    assert looks == [0, 1]
    assert len(set(errors)) == 1
    assert re.search(r"rank 1 will not take part in the reduction of iteration 3\. Rank 1 .* says: ", errors[0])
    assert "may have used partial sums" in errors[0]
