"""Communication hooks: what may be registered, and when."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from .torch_surface.shown import shown

BUILTIN_HOOK_DTYPES = {"FP16_COMPRESS": torch.float16, "ALLREDUCE": None}


def waits_in_callbacks(state: object) -> bool:
    """Whether the hook of this state is PowerSGD, which sends more, and waits for it, once a collective is over.

    On the CPU it does so on the process group's own threads: with several buckets under way none is left to send
    anything, and what they send has another order on each rank. There one bucket goes after the other.
    """
    module = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    return module is not None and isinstance(state, module.PowerSGDState)


class HookRegistration:
    """The part of :class:`DistributedDataParallel` that takes communication hooks; names are torch's."""

    gradient_as_bucket_view: bool
    _minddp_wrapped: Any
    _minddp_engine: Any

    @shown
    def _minddp_steps_in_backward(self) -> bool:
        """Whether an optimizer steps in a bucket's hook."""
        return self._minddp_engine is not None and self._minddp_engine.reducer.optimizer_in_backward

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket) -> torch.futures.Future[torch.Tensor]`` reduces buckets from the next backward on.

        Hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` fit. A hook divides by the
        world size itself; its future holds one tensor with as many elements as ``bucket.buffer()``.

        Raises:
            TypeError, ValueError: the hook is not callable, or its signature is another one.
            RuntimeError: a hook is registered already, or the last backward was not finished.
        """
        self._check_comm_hook(hook)
        self._minddp_check_hook_time()
        self._minddp_engine.set_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's built-in C++ hooks: here, the dtype in which gradients travel."""
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in BUILTIN_HOOK_DTYPES:
            raise ValueError(f"comm_hook_type must be one of dist.BuiltinCommHookType, got {comm_hook_type!r}")
        self._minddp_check_hook_time()
        self._minddp_engine.set_hook(None, comm_hook_type)

    def _minddp_check_hook_time(self) -> None:
        engine = self._minddp_engine
        if engine is None:
            raise RuntimeError("every parameter's reduction is delayed: there are no buckets to hook")
        if engine.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        engine.check_finished()
        if engine.tuner is not None:
            raise RuntimeError(
                'bucket_cap_mb="auto" re-plans buckets while training, and hooks may keep state by bucket: '
                "tune without the hook, then pin the plan (bucket_plan=)"
            )
        if engine.config.wire is not None or engine.config.ordered:
            raise RuntimeError("a communication hook reduces buckets itself, and wire= and ordered= say how they are "
                               "reduced: leave those out, or the hook")  # fmt: skip
        if engine.config.reduce_dtype is not None or engine.config.predivide_factor is not None:
            raise RuntimeError("a communication hook decides dtype and division itself: leave out reduce_dtype "
                               "and predivide_factor")  # fmt: skip

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, f"Communication hook must be callable, got {hook!r}.")
        parameters = inspect.signature(hook).parameters
        if "bucket" not in parameters:
            self._log_and_throw(
                ValueError, f"Communication hook must be hook(state, bucket), got parameters {list(parameters)}."
            )
        if parameters["bucket"].annotation not in (inspect._empty, dist.GradBucket, _C.GradBucket, "dist.GradBucket"):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        result = inspect.signature(hook).return_annotation
        future = torch.futures.Future[torch.Tensor]
        if result not in (inspect._empty, future, "torch.futures.Future[torch.Tensor]"):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        if self.__dict__.get("_minddp_engine") is not None:
            self._minddp_engine.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """An optimizer that steps in a bucket's hook, right after its reduction."""
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP: torch has no functional form of it"
            ) from error

    def _setup_in_backward_optimizers(self) -> None:
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._minddp_wrapped.module_parameters):
            return
        from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
            _apply_optim_in_backward_hook,
        )

        handles = dist.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in self._minddp_wrapped.module_parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        if self._minddp_engine.finite is not None:
            raise RuntimeError("check_finite= looks before optimizer.step(); an optimizer in backward has none")
        hook = _apply_optim_in_backward_hook(gradient_is_bucket_view=self.gradient_as_bucket_view)
        self.register_comm_hook(weakref.ref(self), hook)
        self._minddp_engine.reducer.optimizer_in_backward = True
