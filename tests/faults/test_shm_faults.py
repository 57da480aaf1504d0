"""What goes wrong around the shared-memory backend: every rank hears of it, by name, and soon."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import minddp.shm
from minddp.testing import RankError, run_ranks

# How long a survivor may take to hear of a peer's end, on a machine with more to do than cores.
SOON = 20.0


def shm_group(seconds: float = 60.0) -> dist.ProcessGroup:
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


def different_calls(rank: int, world_size: int) -> str:
    group = shm_group()
    tensor = torch.ones(100)
    if rank == 0:
        text = expect_failure(lambda: dist.all_reduce(tensor, group=group))
    else:
        text = fails_by_the_next(lambda: dist.broadcast(tensor, 1, group=group), group)
    again = expect_failure(lambda: dist.barrier(group))
    assert "broken since an earlier failure" in again
    return text


def test_ranks_that_call_different_collectives_raise() -> None:
    texts = run_ranks(different_calls, 2)
    assert "rank 1 runs another collective: broadcast(root 1, Float, 400 bytes)" in texts[0], texts[0]
    assert "rank 0" in texts[1], texts[1]


def different_sizes(rank: int, world_size: int) -> str:
    group = shm_group()
    return expect_failure(lambda: dist.all_reduce(torch.ones(100_000 + rank), group=group))


def test_ranks_with_different_sizes_raise() -> None:
    texts = run_ranks(different_sizes, 3)
    assert any("allreduce(SUM, Float, 400004 bytes)" in text for text in texts), texts


def different_splits(rank: int, world_size: int) -> str:
    group = shm_group()
    splits = [1, 3] if rank == 0 else [2, 2]
    return fails_by_the_next(
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3][:: 1 - 2 * rank], splits, group=group),
        group,
    )


def test_splits_that_do_not_match_raise() -> None:
    texts = run_ranks(different_splits, 2)
    assert any("input splits there and the output splits here differ" in text for text in texts), texts


def late_rank(rank: int, world_size: int) -> str:
    group = shm_group(1.0)
    if rank == 1:
        time.sleep(2.5)
    return fails_by_the_next(lambda: dist.all_reduce(torch.ones(3), group=group), group)


def test_a_rank_that_does_not_come_is_named() -> None:
    texts = run_ranks(late_rank, 2)
    assert "rank 1 did not take part within 1000 ms" in texts[0]
    assert "allreduce(SUM, Float, 12 bytes) as number 1" in texts[0]
    assert "rank 0 gave up" in texts[1]


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
        run_ranks(*args[:1], world_size, *args[1:], grace=SOON + 10)
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


def test_a_message_of_another_size_raises() -> None:
    assert "rank 0 sent 12 bytes with tag 0" in run_ranks(message_of_another_size, 2)[1]


def leaving_rank(rank: int, world_size: int) -> str:
    group = shm_group()
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
        return ""
    return expect_failure(lambda: dist.barrier(group))


def test_a_rank_that_destroys_its_group_is_named() -> None:
    assert "rank 1 has left the group" in run_ranks(leaving_rank, 2)[0]


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


def test_abort_fails_what_is_pending() -> None:
    assert "aborted or destroyed" in run_ranks(destroyed_with_work_pending, 2)[0]


def several_hosts(rank: int, world_size: int) -> str:
    os.environ["MINDDP_SHM_HOST_ID"] = str(rank // 2)
    try:
        return expect_failure(shm_group)
    finally:
        del os.environ["MINDDP_SHM_HOST_ID"]


def test_ranks_of_several_hosts_all_raise() -> None:
    for text in run_ranks(several_hosts, 3):
        assert "must share one machine" in text
        assert "has ranks 0 1" in text
        assert "has ranks 2" in text
        assert "backend='gloo'" in text


def missing_rank(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.barrier()
        return ""
    store = dist.PrefixStore("lonely", dist.distributed_c10d._get_default_store())
    text = expect_failure(lambda: minddp.shm._create(store, 0, 2, timedelta(seconds=1)))
    dist.barrier()
    return text


def test_a_rank_that_never_joins_is_named() -> None:
    assert "rank 1 did not come to join the group within 1000 ms" in run_ranks(missing_rank, 2)[0]


def shared_memory_of(pid: int | str) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:minddp-shm")
    descriptors = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            descriptors += "minddp-shm" in os.readlink(link)
        except FileNotFoundError:
            continue
    return maps + descriptors


def leaves_nothing(rank: int, world_size: int) -> None:
    gc.collect()  # groups that earlier calls' tracebacks still hold
    assert shared_memory_of("self") == 0
    for _ in range(3):
        group = shm_group()
        dist.all_reduce(torch.ones(100_000), group=group)
        assert shared_memory_of("self") == world_size  # mapped, and no descriptor left
        dist.destroy_process_group(group)
        del group
        assert shared_memory_of("self") == 0


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    run_ranks(leaves_nothing, 2)
    survivors(killed_rank, False, 10, world_size=2)
    assert {name for name in os.listdir("/dev/shm") if "minddp" in name} <= before
