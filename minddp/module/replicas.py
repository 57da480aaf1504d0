"""The wrapper's replicas: compared over ranks, now and then or at once, and made one again."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..guards.replicas import check_replicas
from ..reduction.members import all_parameters
from ..reduction.start import sync_module_states
from .shown import shown


class Replicas:
    """The part of :class:`DistributedDataParallel` that looks after the ranks' models being one."""

    module: torch.nn.Module
    process_group: Any
    device: torch.device
    _minddp_wrapped: Any
    broadcast_bucket_size: int
    _minddp_config: Any
    _minddp_iterations_unchecked: int = 0

    def check_replicas(self, buffers: bool = False) -> None:
        """Raises on every rank unless all ranks hold the same parameters, bit for bit. Collective.

        Reads the model once, on the host: for now and then (``check_replicas_every=``), or after each step while
        looking for a cause.

        Args:
            buffers: compare buffers too. Between the broadcasts before forward they usually differ.

        Raises:
            RuntimeError: names the tensors that differ, and which ranks hold the same.
        """
        tensors = itertools.chain(all_parameters(self.module), self.module.named_buffers() if buffers else ())
        named = [(name, tensor) for name, tensor in tensors if name not in self._minddp_wrapped.left_alone]
        check_replicas(named, self.process_group, self.device)

    def repair_replicas(self, rank: int) -> None:
        """Gives all ranks ``rank``'s parameters and buffers. Collective, between iterations.

        The optimizers' states stay each rank's own: load one rank's on all of them, or make them anew.

        Raises:
            ValueError: the group has no such rank.
        """
        size = self.process_group.size()
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise ValueError(f"repair_replicas: rank must be one of the group's, 0 to {size - 1}, got {rank!r}")
        ignored = self._minddp_wrapped.left_alone
        sync_module_states(self.module, self.process_group, self.broadcast_bucket_size, rank, ignored, buffers=True)

    @shown
    def skipped_steps(self) -> int:
        """With ``check_finite="skip"``: iterations whose gradients no optimizer used; the same on all ranks."""
        engine: Any = self.__dict__.get("_minddp_engine")
        return 0 if engine is None or engine.finite is None else int(engine.finite.skipped)

    def _minddp_check_replicas_now_and_then(self) -> None:
        """Before each synchronized forward."""
        self._minddp_iterations_unchecked += 1
        if self._minddp_iterations_unchecked >= self._minddp_config.check_replicas_every:
            self._minddp_iterations_unchecked = 0
            Replicas.check_replicas(self)
