"""``@on_ranks(2)``: a test that is one function, which every rank runs."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks_pool import RankPool, run_ranks


class Call:
    """What ranks get in the place of the function, whose name is the test's."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name

    def __call__(self, rank: int, world_size: int, *arguments: Any) -> None:
        test = getattr(importlib.import_module(self.module), self.name)
        test.on_each_rank(rank, world_size, *arguments)


def on_ranks(*sizes: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of ``fn(rank, world_size, *parameters)``; ``options`` are :func:`run_ranks`'.

    The further parameters are pytest's, by ``pytest.mark.parametrize`` above. With several sizes there is a test for
    each of them.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(fn).parameters)[2:]

        def test(world_size: int = sizes[0], **parameters: Any) -> None:
            run_ranks(Call(fn.__module__, fn.__name__), world_size, *(parameters[name] for name in names), **options)

        kinds = inspect.Parameter.KEYWORD_ONLY
        shown = [inspect.Parameter(name, kinds) for name in (["world_size"] * (len(sizes) > 1) + names)]
        functools.update_wrapper(test, fn)
        del test.__wrapped__
        test.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        test.on_each_rank = fn  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", sizes)(test) if len(sizes) > 1 else test

    return decorate


def on_own_ranks(fn: Callable[..., Any], world_size: int = 2, *arguments: Any, **options: Any) -> list[Any]:
    """:func:`run_ranks` on ranks that end with the call: a collective that never ends stays behind in theirs."""
    pool = RankPool(world_size)
    try:
        return pool.run(fn, *arguments, **options)
    finally:
        pool.close()


def all_alike(*tensors: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)
