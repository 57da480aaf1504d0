"""The end of a backward by the caller's hand: torch 2.15's interface, on every torch."""

from __future__ import annotations

from typing import Any


class ManualFinalization:
    """The part of :class:`DistributedDataParallel` that leaves a backward's end to the caller; names are torch's."""

    _minddp_engine: Any
    _minddp_config: Any

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller ends each synchronized backward, once, by :meth:`finalize_backward`.

        Collectives begin as ever; what waits for them and writes to ``.grad`` is left to the caller, so that other
        work can run beside them. Until then the next forward and ``optimizer.step()`` raise. Set it before forward.

        Raises:
            RuntimeError: set between a forward and the end of its backward, or where every parameter's reduction is
                delayed.
        """
        return bool(self._minddp_config.manual_finalization)

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        engine = self._minddp_engine
        if engine is None:
            self._minddp_check_not_delayed(bool(required))
            return
        engine.reducer._set_manual_finalization_required(bool(required))
        self._minddp_config = engine.config = engine.replaced(manual_finalization=bool(required))

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` has to wait until the backward of the last forward has returned.

        True for a module's first synchronized backward, which tells the order of gradients, and under
        ``mixed_precision``. Else a hook in backward may call it too, once all gradients of the module are there.
        """
        if not self.require_manual_backward_finalization:
            return False
        engine = self._minddp_engine
        return engine.mixed is not None or bool(engine.reducer._should_finalize_after_backward())

    def finalize_backward(self) -> None:
        """Waits for the collectives of a synchronized backward and writes the averages to ``.grad``. Exactly once.

        Raises:
            RuntimeError: ``require_manual_backward_finalization`` is not set, gradients are still to come, nothing is
                to be finalized (under ``no_sync``, or a second time), or every parameter's reduction is delayed.
        """
        self._minddp_check_not_delayed(True)
        self._minddp_engine.reducer._finalize_backward_manual()

    def _minddp_check_not_delayed(self, required: bool) -> None:
        if required and self._minddp_engine is None:
            raise RuntimeError(
                "Manual backward finalization is not supported when all DDP parameters use "
                "delay_all_reduce_named_params: that reduction ends with backward."
            )
