"""What goes wrong around the shared-memory backend: every rank hears of it, by name, and soon."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minddp.shm
from minddp.testing import RankError, run_ranks, shutdown
from tests.on_ranks import on_ranks

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


def different_splits(rank: int, world_size: int) -> str:
    group = shm_group()
    splits = [1, 3] if rank == 0 else [2, 2]
    return fails_by_the_next(
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), splits, splits, group=group), group
    )


def test_splits_that_do_not_match_raise() -> None:
    texts = run_ranks(different_splits, 2)
    assert any("input splits there and the output splits here differ" in text for text in texts), texts


def different_own_splits(rank: int, world_size: int) -> str:
    """What rank 1 keeps has no place in its output; what it sends fits."""
    group = shm_group()
    kept = torch.full((8,), 7.0)  # behind the output, in one piece of memory
    splits_out, splits_in = ([2, 2], [2, 2]) if rank == 0 else ([2, 2], [2, 4])
    output, data = kept[:4], torch.ones(sum(splits_in))
    text = fails_by_the_next(lambda: dist.all_to_all_single(output, data, splits_out, splits_in, group=group), group)
    assert torch.equal(kept[4:], torch.full((4,), 7.0))
    return text


def test_a_ranks_own_splits_that_do_not_match_raise() -> None:
    texts = run_ranks(different_own_splits, 2)
    assert "rank 1 sends 16 bytes to itself, and expects 8" in texts[1], texts
    run_ranks(different_own_splits_alone, 1)


def different_own_splits_alone(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match="rank 0 sends 16 bytes to itself, and expects 8"):
        dist.all_to_all_single(torch.ones(2), torch.ones(4), [2], [4], group=shm_group())


CALLS = {
    "broadcast(root 0, Float, 400 bytes)": lambda t, g, r, n: dist.broadcast(t, 0, group=g),
    "broadcast(root 1, Float, 400 bytes)": lambda t, g, r, n: dist.broadcast(t, 1, group=g),
    "broadcast(root 0, Float, 200 bytes)": lambda t, g, r, n: dist.broadcast(t[:50], 0, group=g),
    "broadcast(root 0, Int, 400 bytes)": lambda t, g, r, n: dist.broadcast(t.int(), 0, group=g),
    "broadcast(root 0, Float)": lambda t, g, r, n: dist.broadcast(t[:0], 0, group=g),
    "reduce(SUM, root 0, Float, 400 bytes)": lambda t, g, r, n: dist.reduce(t, 0, group=g),
    "reduce(SUM, root 1, Float, 400 bytes)": lambda t, g, r, n: dist.reduce(t, 1, group=g),
    "reduce(MAX, root 0, Float, 400 bytes)": lambda t, g, r, n: dist.reduce(t, 0, dist.ReduceOp.MAX, group=g),
    "gather(root 0, Float, 400 bytes)": lambda t, g, r, n: gather(t, g, r, n, 0),
    "gather(root 1, Float, 400 bytes)": lambda t, g, r, n: gather(t, g, r, n, 1),
    "scatter(root 0, Float, 400 bytes)": lambda t, g, r, n: scatter(t, g, r, n, 0),
    "scatter(root 1, Float, 400 bytes)": lambda t, g, r, n: scatter(t, g, r, n, 1),
    "allreduce(SUM, Float, 400 bytes)": lambda t, g, r, n: dist.all_reduce(t, group=g),
    "allreduce(SUM, Float)": lambda t, g, r, n: dist.all_reduce(t[:0], group=g),
    "barrier()": lambda t, g, r, n: dist.barrier(g),
}


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, rank: int, world_size: int, root: int) -> None:
    dist.gather(tensor, [tensor.clone() for _ in range(world_size)] if rank == root else None, root, group=group)


def scatter(tensor: torch.Tensor, group: dist.ProcessGroup, rank: int, world_size: int, root: int) -> None:
    dist.scatter(tensor, [tensor.clone() for _ in range(world_size)] if rank == root else None, root, group=group)


def calls_that_do_not_fit(rank: int, world_size: int, pairs: list[tuple[str, str]]) -> None:
    """The last rank makes the second call, the others the first."""
    for names in pairs:
        group = shm_group()
        name = names[rank == world_size - 1]
        text = expect_failure(lambda: CALLS[name](torch.ones(100), group, rank, world_size))
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
    tensor = minddp.shm.empty(300_000, group=group).fill_(1.0)
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
def test_the_peers_heaps_cannot_be_written_to(rank: int, world_size: int) -> None:
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
    heaps = [protection for large, protection, _ in mapped() - before if large]
    assert sorted(heaps) == ["r--s"] * (world_size - 1) + ["rw-s"]


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


def killed_sender(rank: int, world_size: int) -> str:
    group = shm_group()
    tensor = torch.zeros(3)
    if rank == 1:
        dist.send(torch.ones(3), 0, group)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        time.sleep(0.3)
        dist.recv(tensor, 1, group)  # what was sent before the end still arrives
        assert torch.equal(tensor, torch.ones(3))
        return expect_failure(lambda: dist.recv(tensor, 1, group))
    return "rank 1 has died"


def test_a_receive_from_a_killed_rank_raises() -> None:
    assert all("has died" in text for text in survivors(killed_sender).values())


def message_of_another_size(rank: int, world_size: int) -> str:
    group = shm_group()
    if rank == 0:
        dist.send(torch.ones(3), 1, group)
        return ""
    return expect_failure(lambda: dist.recv(torch.ones(4), 0, group))


@on_ranks(2)
def test_sends_without_a_receive_are_queued(rank: int, world_size: int) -> None:
    """Both send first and receive afterwards: more than the table holds, without a receive posted."""
    group = shm_group()
    peer, count = 1 - rank, 500
    out = [torch.full((1 + i % 3,), float(i)) for i in range(count)]
    sends = [dist.isend(tensor, peer, group, tag=i % 2) for i, tensor in enumerate(out)]
    assert not sends[-1].is_completed()
    dist.barrier()  # nobody receives before both have looked
    received = [torch.zeros(1 + i % 3) for i in range(count)]
    works = [dist.irecv(tensor, peer, group, tag=i % 2) for i, tensor in enumerate(received)]
    for work in [*reversed(works), *sends]:
        work.wait()
    assert all(torch.equal(a, b) for a, b in zip(out, received, strict=True))


def sends_that_nobody_takes(rank: int, world_size: int) -> str:
    group = shm_group(1.0)
    dist.barrier()
    text = ""
    if rank == 0:
        sends = [dist.isend(torch.ones(1), 1, group) for _ in range(65)]
        text = expect_failure(sends[-1].wait)
        sends[63].wait()
    dist.barrier()
    return text


def sends_after_leaving(rank: int, world_size: int) -> str:
    group = shm_group()
    if rank == 1:
        dist.barrier()
        return ""
    dist.destroy_process_group(group)
    text = expect_failure(lambda: group.send([torch.ones(1)], 1, 0).wait())
    dist.barrier()
    return text


@on_ranks(2)
def test_a_callback_may_destroy_the_group(rank: int, world_size: int) -> None:
    for case in ("waited for", "by the worker", "of a receive", "nested", "twice"):
        group = shm_group()
        sent = threading.Event()
        dist.barrier(group)

        def destroy(
            done: torch.futures.Future, group: dist.ProcessGroup = group, sent: threading.Event = sent
        ) -> str:
            done.value()
            assert case != "of a receive" or sent.wait(SOON)  # a rank that has left sends nothing
            begin = time.monotonic()
            dist.destroy_process_group(group)
            assert time.monotonic() - begin < 4.0  # it would wait five seconds for itself
            return "destroyed"

        def destroy_in_nested(done: torch.futures.Future, group: dist.ProcessGroup = group, end=destroy) -> str:
            work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
            return work.get_future().then(end).wait()

        if case == "of a receive":
            work = dist.irecv(torch.ones(1), 1 - rank, group)
            future = work.get_future().then(destroy)
            time.sleep(0.1)  # the receives wait, on a thread of the group
            dist.send(torch.ones(1), 1 - rank, group)
            sent.set()
            assert future.wait() == "destroyed"
        else:
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
UNRECEIVED = "rank 0 sends to rank 1 with tag 0, where 64 earlier messages are unreceived"
ABSENT = "rank 1 did not take part within the timeout of 5000 ms"


@pytest.mark.parametrize(
    ("program", "words_by_rank"),
    [
        (late_rank, [(ABSENT, "allreduce(SUM, Float, 12 bytes) as number 1"), ("rank 0 gave up",)]),
        (message_of_another_size, [(), ("rank 0 sent 12 bytes with tag 0",)]),
        (sends_that_nobody_takes, [(UNRECEIVED, "none was received within 1000 ms"), ()]),
        (sends_after_leaving, [("rank 0 sends to rank 1",), ()]),
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
    load, limits = minddp.shm.load, resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1 and kind == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    if rank == 1 and kind == "extension":
        minddp.shm.load = lambda: (_ for _ in ()).throw(ImportError("no such extension"))
    try:
        with pytest.raises(ImportError if rank == 1 and kind == "extension" else dist.DistBackendError) as caught:
            create()
    finally:
        minddp.shm.load = load
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.monotonic() - begin < SOON
    if rank == 1:
        time.sleep(0.3)  # the others meet the note of the first attempt
    create().barrier().wait()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "reason"), [("memory", "mmap of"), ("extension", "ImportError: no such extension")])
def test_a_rank_that_cannot_join_tells_the_others_at_once(kind: str, reason: str) -> None:
    texts = run_ranks(attempts, 3, kind)
    for rank in (0, 2):
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
        assert len(segments_open_in("self")) == 1  # its own, for fork
        dist.destroy_process_group(group)
        del group
        assert segments_mapped_by("self") == len(segments_open_in("self")) == 0


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(leaves_nothing, 2)
    survivors(killed_rank, False, 10, world_size=2)
    assert {name for name in os.listdir("/dev/shm") if "minddp" in name} <= before


def security(rank: int, world_size: int) -> None:
    """A segment is open to its user alone, cannot be resized, and cards are text that is checked."""
    group = shm_group()
    (descriptor,) = segments_open_in("self")
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
    dist.destroy_process_group(group)


def test_another_user_cannot_map_a_segment() -> None:
    shutdown()  # ranks of their own: one group each
    run_ranks(security, 2)


def forged_card(rank: int, world_size: int, kind: str) -> str:
    """Rank 1's place is taken by who can write to the store, but is no rank."""
    store = dist.PrefixStore(kind, dist.distributed_c10d._get_default_store())
    if rank == 1:
        store.wait(["minddp-shm/card/0"], timedelta(seconds=300))
        card = store.get("minddp-shm/card/0").decode()
        head, numbers = card.rsplit("\n", 1)
        _, _, size, token = numbers.split()
        with Path("/proc/self/status").open() as file:  # any file that this process has open
            forged = {"text": "cos\nsystem", "file": f"{head}\n{os.getpid()} {file.fileno()} {size} {token}"}[kind]
            store.set("minddp-shm/card/1", forged)
            store.add("minddp-shm/events", 1)
            cards = [card, forged]
            value = 0xCBF29CE484222325
            for byte in b"".join(text.encode() + b"\0" for text in cards):
                value = (value ^ byte) * 0x100000001B3 % 2**64
            for what in ("agreed", "attached"):
                store.set(f"minddp-shm/{value:x}/{what}/1", "yes" if what == "agreed" else "")
            dist.barrier()
        return ""
    text = expect_failure(lambda: minddp.shm._create(store, 0, 2, timedelta(seconds=300)))
    dist.barrier()
    return text


@pytest.mark.parametrize(("kind", "reason"), [("text", "is not a card"), ("file", "is not a segment of shared")])
def test_what_the_store_holds_is_checked(kind: str, reason: str) -> None:
    assert reason in run_ranks(forged_card, 2, kind)[0]
