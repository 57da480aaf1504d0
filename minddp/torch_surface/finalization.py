"""Manual finalization: the caller ends each synchronized backward, as with the class of torch 2.15.

Collectives begin as ever. What waits for them and writes to ``.grad`` is left to the caller, so that other work can
run beside them. Until then the next forward and ``optimizer.step()`` raise.
"""

from __future__ import annotations

from typing import Any

from .. import _C
from ..averager import averagers
from ..torch_base import fill


class _WrapperNames:
    @property
    def require_manual_backward_finalization(self: Any) -> bool:
        """Whether the caller ends each synchronized backward, once, by :meth:`finalize_backward`. Set it before
        forward.

        Raises:
            RuntimeError: set between a forward and the end of its backward, or where every parameter's reduction is
                delayed.
        """
        return bool(self.__dict__.get("_minddp_manual_finalization", False))

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self: Any, required: bool) -> None:
        if required:
            _check_has_buckets(self)
        self._minddp_averager.reducer._set_manual_finalization_required(bool(required))
        self.__dict__["_minddp_manual_finalization"] = bool(required)

    @property
    def should_finalize_after_backward(self: Any) -> bool:
        """Whether :meth:`finalize_backward` has to wait until the backward of the last forward has returned.

        True for a module's first synchronized backward, which tells the order of gradients, and under
        ``mixed_precision``. Otherwise a hook in backward may call it too, once all gradients of the module are there.
        """
        if not self.require_manual_backward_finalization:
            return False
        return bool(self._minddp_averager.reducer._should_finalize_after_backward())

    def finalize_backward(self: Any) -> None:
        """Waits for the collectives of a synchronized backward and writes the averages to ``.grad``. Exactly once.

        Raises:
            RuntimeError: ``require_manual_backward_finalization`` is not set, gradients are still to come, nothing is
                to be finalized (under ``no_sync``, or a second time), or every parameter's reduction is delayed.
        """
        _check_has_buckets(self)
        self._minddp_averager.reducer._finalize_backward_manual()


def _check_has_buckets(ddp: Any) -> None:
    if not ddp._minddp_wrapped.names:
        raise RuntimeError(
            "Manual backward finalization is not supported when all DDP parameters use "
            "delay_all_reduce_named_params: that reduction ends with backward."
        )


class _ReducerNames:
    def _set_manual_finalization_required(self: Any, required: bool) -> None:
        """Whether each synchronized backward is ended by :meth:`_finalize_backward_manual`, not by itself.

        Raises:
            RuntimeError: a backward is expected, running or not finalized.
        """
        if required != self.manual_finalization and self.expects_backward():
            raise RuntimeError(
                "require_manual_backward_finalization cannot be changed after forward while a backward pass is "
                f"expected or in progress. Set it before forward, or after backward finalization. {_on(self)}"
            )
        self.manual_finalization = required

    def _should_finalize_after_backward(self: Any) -> bool:
        """Whether buckets are launched at the end of the next backward only: the first one tells the order. Under
        ``mixed_precision`` always, whose parameters change back there."""
        return not self.has_recorded() or _averager_of(self).observers.get("torch_surface").mixed is not None

    def _finalize_backward_manual(self: Any) -> None:
        """Waits for the collectives of a backward and writes the averages; in a hook of it, or after it.

        Raises:
            RuntimeError: nothing is to be finalized, or some gradients are not there yet.
        """
        if not self.manual_finalization:
            raise RuntimeError(
                "finalize_backward() called but manual backward finalization is not required. Set "
                f"require_manual_backward_finalization to true first. {_on(self)}"
            )
        if self.phase() == _C.Phase.IDLE:
            raise RuntimeError(
                "finalize_backward() called but no gradient reduction requires finalization. This can happen if "
                f"no_sync() is active or finalize_backward() was already called for this backward pass. {_on(self)}"
            )
        if not self.ready_to_finalize():
            missing = ", ".join(self.names[i] for i in self.missing()) or "none"
            raise RuntimeError(
                "finalize_backward() called before all DDP buckets were ready. Call it when all parameters have "
                "their gradients; where should_finalize_after_backward was true after forward, after backward() has "
                f"returned. Parameters without a gradient so far: {missing}. {_on(self)}"
            )
        self.finalize_backward_manual()

    # Torch's names for what is in the core under others.
    _run_comm_hook = _C.Reducer.run_hook
    _remove_autograd_hooks = _C.Reducer.remove_hooks
    _check_reducer_finalized = _C.Reducer.check_finished
    _reset_state = _C.Reducer.abort_iteration

    def _rebuild_buckets(self: Any) -> bool:
        """See :meth:`minddp.averager.Averager.rebuild_buckets`. Whether it had anything to do."""
        averager = _averager_of(self)
        settled = averager.is_settled
        averager.rebuild_buckets()
        return bool(averager.is_settled != settled)

    def prepare_for_forward(self) -> None:
        """Nothing is to be done; callers of :meth:`prepare_for_backward` call it."""


def _on(reducer: Any) -> str:
    return f"[rank {reducer.rank}]"


def _averager_of(reducer: Any) -> Any:
    return next(averager for averager in averagers() if averager.reducer is reducer)


fill(_WrapperNames)
fill(_ReducerNames, _C.Reducer)
