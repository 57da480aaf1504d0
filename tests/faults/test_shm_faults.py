"""What goes wrong around the shared-memory backend: every rank hears of it, by name, and soon."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minddp.shm
from tests.on_ranks import on_ranks
from tests.ranks_pool import RankError, run_ranks, shutdown

# How long a survivor may take to hear of a peer's end, on a machine with more to do than cores.
SOON = 120.0


def shm_group(seconds: float = 300.0) -> dist.ProcessGroup:
    return dist.new_group(backend="shm", timeout=timedelta(seconds=seconds))


def expect_failure(call) -> str:
    """The text of the DistBackendError that ``call`` must raise soon."""
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    assert time.monotonic() - begin < SOON
    return str(caught.value)


def fails_by_the_next(call, group: dist.ProcessGroup) -> str:
    """A rank that only sends, or finds all its data there, may learn at the next collective."""

    def call_and_meet() -> None:
        call()
        dist.barrier(group)

    return expect_failure(call_and_meet)


CALLS = {
    "allreduce(SUM, Float, 400 bytes)": lambda t, g: dist.all_reduce(t, group=g),
    "allreduce(MAX, Float, 400 bytes)": lambda t, g: dist.all_reduce(t, dist.ReduceOp.MAX, g),
    "allreduce(SUM, Int, 400 bytes)": lambda t, g: dist.all_reduce(t.int(), group=g),
    "allreduce(SUM, Float, 200 bytes)": lambda t, g: dist.all_reduce(t[:50], group=g),
    "allreduce(SUM, Float, 40000 bytes)": lambda t, g: dist.all_reduce(t.repeat(100), group=g),
    "allreduce(SUM, Float, 0 bytes)": lambda t, g: dist.all_reduce(t[:0], group=g),
    "barrier()": lambda t, g: dist.barrier(g),
}


def calls_that_do_not_fit(rank: int, world_size: int, pairs: list[tuple[str, str]]) -> None:
    """The last rank makes the second call, the others the first."""
    for names in pairs:
        group = shm_group()
        name = names[rank == world_size - 1]
        text = expect_failure(lambda: CALLS[name](torch.ones(100), group))
        assert all(name + " as number 1" in text for name in names), (names, text)
        assert "broken since an earlier failure" in expect_failure(lambda: dist.barrier(group))
        dist.barrier()
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_that_do_not_fit_raise_everywhere_with_both_named(world_size: int) -> None:
    """Every two different calls, both ways round."""
    pairs = [(a, b) for a in CALLS for b in CALLS if a != b]
    run_ranks(calls_that_do_not_fit, world_size, pairs[:: world_size - 1])


def survivor_of_a_late_rank(rank: int, world_size: int) -> str:
    """Rank 0 gives up and goes on with its tensor; the last rank comes later, with data of its own."""
    group = shm_group()
    tensor = torch.ones(300_000)
    dist.barrier()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        text = expect_failure(lambda: group.allreduce([tensor], options).wait())
        tensor.fill_(7.0)
        dist.barrier()
    elif rank == world_size - 1:
        dist.barrier()
        text = expect_failure(lambda: dist.all_reduce(tensor, group=group))
    else:
        text = ""
        work = dist.all_reduce(tensor, group=group, async_op=True)
        dist.barrier()
        with pytest.raises(dist.DistBackendError):  # not the sum with rank 0's sevens
            work.wait()
    dist.barrier()
    assert rank != 0 or bool((tensor == 7.0).all())
    return text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_late_rank_leaves_the_survivors_tensor_alone(world_size: int) -> None:
    texts = run_ranks(survivor_of_a_late_rank, world_size)
    assert "did not take part within the timeout of 1000 ms" in texts[0]
    assert "gave up" in texts[-1]


@on_ranks(3)
def test_the_peers_slots_cannot_be_written_to(rank: int, world_size: int) -> None:
    def mapped() -> set[tuple[bool, str, str]]:
        found = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:minddp-shm" in line:
                addresses, protection, _, _, inode = line.split()[:5]
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found.add((end - begin > 1 << 20, protection, inode))
        return found

    before = mapped()
    group = shm_group()
    dist.barrier(group)
    slots = [protection for large, protection, _ in mapped() - before if large]
    assert sorted(slots) == ["r--s"] * (world_size - 1) + ["rw-s"]


def late_rank(rank: int, world_size: int) -> str:
    group = shm_group(5.0)
    if rank == 1:
        dist.barrier()  # rank 0 is told by then
    text = fails_by_the_next(lambda: dist.all_reduce(torch.ones(3), group=group), group)
    if rank == 0:
        dist.barrier()
    return text


def killed_rank(rank: int, world_size: int, asynchronous: bool, numel: int) -> str:
    group = shm_group()
    tensor = torch.ones(numel)
    dist.all_reduce(tensor, group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if asynchronous:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.2)
        return expect_failure(work.wait)
    return expect_failure(lambda: dist.all_reduce(tensor, group=group))


def survivors(*args, world_size: int = 3) -> dict[int, str]:
    with pytest.raises(RankError) as caught:
        run_ranks(*args[:1], world_size, *args[1:])
    assert set(caught.value.failures) == {1}, caught.value.failures
    return caught.value.results


@pytest.mark.parametrize(("asynchronous", "numel"), [(False, 10), (True, 2_000_000)])
def test_a_killed_rank_makes_the_others_raise(asynchronous: bool, numel: int) -> None:
    for text in survivors(killed_rank, asynchronous, numel).values():
        assert "rank 1 (process" in text
        assert "has died" in text


def killed_in_the_middle(rank: int, world_size: int) -> str:
    group = shm_group()
    tensor = torch.ones(40_000_000)
    if rank == 1:
        dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    def all_reduce_until_it_fails() -> None:
        for _ in range(100):
            dist.all_reduce(tensor, group=group)

    return expect_failure(all_reduce_until_it_fails)


def test_a_rank_killed_inside_a_collective() -> None:
    (text,) = survivors(killed_in_the_middle, world_size=2).values()
    assert "rank 1 (process" in text


def killed_before_gloos_call(rank: int, world_size: int) -> tuple[str, str]:
    """A call that Gloo carries ends in Gloo's words; the next all-reduce has the number."""
    group = shm_group()
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.ones(1000)
    with pytest.raises(RuntimeError) as caught:
        dist.broadcast(tensor, 1, group=group)
    return str(caught.value), expect_failure(lambda: dist.all_reduce(tensor, group=group))


def test_a_rank_killed_before_a_call_of_gloos() -> None:
    for gloos, ours in survivors(killed_before_gloos_call).values():
        assert "onnection" in gloos  # closed or reset by peer
        assert "rank 1 (process" in ours
        assert "has died" in ours


@on_ranks(2)
def test_a_callback_may_destroy_the_group(rank: int, world_size: int) -> None:
    for case in ("waited for", "by the worker", "nested", "twice"):
        group = shm_group()
        dist.barrier(group)

        def destroy(done: torch.futures.Future, group: dist.ProcessGroup = group) -> str:
            done.value()
            begin = time.monotonic()
            dist.destroy_process_group(group)
            assert time.monotonic() - begin < 4.0  # it would wait five seconds for itself
            return "destroyed"

        def destroy_in_nested(done: torch.futures.Future, group: dist.ProcessGroup = group, end=destroy) -> str:
            work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
            return work.get_future().then(end).wait()

        work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
        future = work.get_future().then(destroy_in_nested if case == "nested" else destroy)
        if case == "waited for":
            work.wait()
        assert future.wait() == "destroyed"
        if case == "twice":
            with pytest.raises(ValueError, match="[Ii]nvalid process group"):
                dist.destroy_process_group(group)
        del group, work, future, destroy, destroy_in_nested
        gc.collect()
        dist.barrier()
    wait_until(lambda: segments_mapped_by("self") == 0)


def wait_until(condition) -> None:
    end = time.monotonic() + SOON
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert condition()


def leaving_rank(rank: int, world_size: int) -> str:
    group = shm_group()
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
        return ""
    return expect_failure(lambda: dist.barrier(group))


def destroyed_with_work_pending(rank: int, world_size: int) -> str:
    """Rank 1 never comes, rank 0 drops the group: its work must fail, and nothing hang."""
    group = shm_group()
    if rank == 1:
        dist.barrier()
        return ""
    backend = group._get_backend(torch.device("cpu"))
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    backend.abort()
    text = expect_failure(work.wait)
    dist.barrier()
    return text


def several_hosts(rank: int, world_size: int) -> str:
    os.environ["MINDDP_SHM_HOST_ID"] = str(rank // 2)
    try:
        return expect_failure(shm_group)
    finally:
        del os.environ["MINDDP_SHM_HOST_ID"]


def missing_rank(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.barrier()
        return ""
    store = dist.PrefixStore("lonely", dist.distributed_c10d._get_default_store())
    text = expect_failure(lambda: minddp.shm._create(store, 0, 2, timedelta(seconds=1)))
    dist.barrier()
    return text


HOSTS = ("must share one machine", "has ranks 0 1", "has ranks 2", "backend='gloo'")
ABSENT = "rank 1 did not take part within the timeout of 5000 ms"


@pytest.mark.parametrize(
    ("program", "words_by_rank"),
    [
        (late_rank, [(ABSENT, "allreduce(SUM, Float, 12 bytes) as number 1"), ("rank 0 gave up",)]),
        (leaving_rank, [("rank 1 has left the group",), ()]),
        (destroyed_with_work_pending, [("aborted or destroyed",), ()]),
        (several_hosts, [HOSTS] * 3),
        (missing_rank, [("rank 1 did not come to join the group within 1000 ms",), ()]),
    ],
)
def test_who_does_not_come_or_has_left_is_named(program, words_by_rank: list[tuple[str, ...]]) -> None:
    for text, words in zip(run_ranks(program, len(words_by_rank)), words_by_rank, strict=True):
        assert all(word in text for word in words), text


@on_ranks(3)
def test_a_group_made_again_on_the_same_store(rank: int, world_size: int) -> None:
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    for round in range(4):
        if rank == round % world_size:
            time.sleep(0.3)  # the others find the cards of the round before
        backend = minddp.shm._create(store, rank, world_size, timedelta(seconds=300))
        tensor = torch.full((1000,), float(rank + round))
        backend.allreduce([tensor]).wait()
        assert float(tensor[0]) == sum(range(world_size)) + round * world_size
        backend.shutdown()
        del backend


def attempts(rank: int, world_size: int, kind: str) -> str:
    """Rank 1 cannot make its part, at first; the second attempt, on the same store, succeeds."""
    store = dist.PrefixStore(kind, dist.distributed_c10d._get_default_store())

    def create():
        return minddp.shm._create(store, rank, world_size, timedelta(seconds=300))

    dist.barrier()
    begin = time.monotonic()
    load, limits = minddp.shm.load, resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1 and kind == "memory":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    if rank == 1 and kind == "extension":
        minddp.shm.load = lambda: (_ for _ in ()).throw(ImportError("no such extension"))
    try:
        with pytest.raises(dist.DistBackendError) as caught:
            create()
    finally:
        minddp.shm.load = load
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert time.monotonic() - begin < SOON
    if rank == 1:
        time.sleep(0.3)  # the others find what is left of the first attempt
    create().barrier().wait()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "reason"), [("memory", "ftruncate of"), ("extension", "ImportError: no such ext")])
def test_a_rank_that_cannot_join_tells_the_others_at_once(kind: str, reason: str) -> None:
    texts = run_ranks(attempts, 3, kind)
    for rank in range(3):
        assert "rank 1 could not join the group: " in texts[rank]
        assert reason in texts[rank]


def segments_mapped_by(pid: int | str) -> int:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:minddp-shm" in line})


def segments_open_in(pid: int | str) -> list[int]:
    descriptors = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "minddp-shm" in os.readlink(link):
                descriptors.append(int(link.name))
        except FileNotFoundError:
            continue
    return descriptors


def leaves_nothing(rank: int, world_size: int) -> None:
    gc.collect()  # groups that earlier calls' tracebacks still hold
    assert segments_mapped_by("self") == 0
    for _ in range(3):
        group = shm_group()
        dist.all_reduce(torch.ones(100_000), group=group)
        assert segments_mapped_by("self") == world_size
        assert segments_open_in("self") == []  # nobody can map them any more
        dist.destroy_process_group(group)
        del group
        assert segments_mapped_by("self") == len(segments_open_in("self")) == 0


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(leaves_nothing, 2)
    survivors(killed_rank, False, 10, world_size=2)
    assert {name for name in os.listdir("/dev/shm") if "minddp" in name} <= before


def security(rank: int, world_size: int) -> None:
    """Until all have mapped it, a segment is open to its user alone, and cannot be resized."""
    segment = minddp.shm._native().Segment()
    (descriptor,) = segments_open_in("self")
    assert segment.card()[:2] == (os.getpid(), descriptor)
    status = os.fstat(descriptor)
    assert status.st_mode & 0o7777 == 0o600
    assert status.st_uid == os.geteuid()
    for size in (4096, status.st_size * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    if os.geteuid() == 0:
        pid = os.fork()
        if pid == 0:  # another user
            path = f"/proc/{os.getppid()}/fd/{descriptor}"
            os.setuid(65534)
            try:
                os.open(path, os.O_RDONLY)
            except PermissionError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
    segment.close()
    assert segments_open_in("self") == []


def test_another_user_cannot_map_a_segment() -> None:
    shutdown()  # ranks of their own: one group each
    run_ranks(security, 2)


def forged_card(rank: int, world_size: int, kind: str) -> str:
    """Rank 1 is another program, which gives something else as its card."""
    store = dist.PrefixStore(kind, dist.distributed_c10d._get_default_store())
    gather = minddp.shm._gather

    def forged(rest, text: str) -> list[str]:
        if rank == 1 and text.startswith("{"):
            card = json.loads(text)
            pid, _, token = card["segment"]
            with Path("/proc/self/status").open() as file:  # any file that this process has open
                card["segment"] = [pid, file.fileno(), token]
                return gather(rest, "cos\nsystem" if kind == "text" else json.dumps(card))
        return gather(rest, text)

    minddp.shm._gather = forged
    try:
        return expect_failure(lambda: minddp.shm._create(store, rank, 2, timedelta(seconds=300)))
    finally:
        minddp.shm._gather = gather


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("text", "rank 1 could not join the group: what it gives as its card"), ("file", "is not a segment of shared")],
)
def test_what_a_rank_gives_as_its_card_is_checked(kind: str, reason: str) -> None:
    assert all(reason in text for text in run_ranks(forged_card, 2, kind))
