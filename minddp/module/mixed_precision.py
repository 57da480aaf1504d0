"""Native mixed precision: low-precision parameters during forward and backward, full precision outside.

Before forward every parameter's ``.data`` becomes a low-precision copy; when backward has ended (or at
once where autograd is off) the full-precision data is back and so are full-precision gradients. What
travels between ranks has ``reduce_dtype``. Configuration: torch's ``_MixedPrecision``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from ..reduction.members import every_name


def _full_precision(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, parameter in every_name(module):
        full = getattr(parameter, "_fp_param", None)
        if full is not None and prefix + name in state and parameter.dtype != full.dtype:
            state[prefix + name] = full


class MixedPrecision:
    """Swaps parameters between their two precisions.

    Args:
        module: the wrapped module, whose state dicts have full precision at any time.
        parameters: those of its parameters that change.
        param_dtype: their dtype in forward and backward.
        moved: called when their autograd nodes have changed, and with them the places of hooks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        param_dtype: torch.dtype,
        moved: Callable[[], None],
    ):
        self.param_dtype = param_dtype
        self._parameters = [p for p in parameters if p.is_floating_point()]
        self._moved = moved
        module._register_state_dict_hook(_full_precision)
        self._low = False
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = torch.empty(0, dtype=param_dtype, device=parameter.device)  # type: ignore[attr-defined]

    @classmethod
    def make(
        cls,
        config: Any,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Iterable[torch.Tensor],
        moved: Callable[[], None],
    ) -> MixedPrecision | None:
        """Casts the buffers; ``None`` where parameters keep their dtype."""
        if config is None:
            return None
        if config.buffer_dtype is not None:
            for buffer in buffers:
                if buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        return cls(module, parameters, config.param_dtype, moved) if config.param_dtype is not None else None

    def lower(self) -> None:
        """Before forward: parameters, and gradients accumulated so far, become low precision."""
        for parameter in self._parameters:
            if not self._low:
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = parameter._fp_param.to(self.param_dtype)  # type: ignore[attr-defined]
            parameter.data = parameter._mp_param  # type: ignore[attr-defined]
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.to(self.param_dtype)
        self._low = True
        # A parameter of another dtype has another AccumulateGrad node: the hooks move along.
        self._moved()

    def restore_after_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """After forward: full precision returns when the backward through ``outputs`` has ended."""
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        if not nodes or not torch.is_grad_enabled():
            self.restore()
        for node in nodes:
            node.register_prehook(self._on_backward)

    def _on_backward(self, grads: Any) -> None:
        Variable._execution_engine.queue_callback(self.restore)

    def restore(self) -> None:
        """Full-precision parameters, and gradients cast to them."""
        if not self._low:
            return
        self._low = False
        for parameter in self._parameters:
            grad = parameter.grad
            if grad is not None and grad.dtype != parameter._fp_param.dtype:  # type: ignore[attr-defined]
                grad = grad.to(parameter._fp_param.dtype)  # type: ignore[attr-defined]
            parameter.grad = None
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]
            parameter.grad = grad
