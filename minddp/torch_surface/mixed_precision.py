"""Native mixed precision: low-precision parameters during forward and backward, full precision outside.

Before forward every parameter's ``.data`` becomes a low-precision copy; when backward has ended (or at once
where autograd is off) the full-precision data is back and so are full-precision gradients, and the copies are
let go. Another backward through the outputs of a forward lowers them again, for as long as it runs. What
travels between ranks has ``reduce_dtype``. Configuration: torch's ``_MixedPrecision``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from .._C import torch_surface as native
from ..parameters import every_name


def _full_precision(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, parameter in every_name(module):
        full = getattr(parameter, "_fp_param", None)
        if full is not None and prefix + name in state and parameter.dtype != full.dtype:
            _adopt_change(parameter)
            state[prefix + name] = full


def _adopt_change(parameter: Any) -> None:
    """What the program has written into a low-precision parameter is its value: an optimizer's step or a checkpoint
    after a forward that no backward has followed."""
    if parameter._version != parameter._mp_version or parameter.data_ptr() != parameter._mp_param.data_ptr():
        parameter._fp_param.copy_(parameter.detach())
        parameter._mp_version = parameter._version


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Each in ``dtype``, with its strides; what has it already is returned as it is.

    By one operator for all, since on a device one for each is a launch for each. Not what is sparse or has a graph.
    """
    cast, together = list(tensors), []
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.requires_grad:
            cast[i] = tensor.to(dtype)
        elif tensor.dtype != dtype:
            cast[i] = torch.empty_like(tensor, dtype=dtype)
            together.append(i)
    if together:
        with torch.no_grad():
            torch._foreach_copy_([cast[i] for i in together], [tensors[i] for i in together])
    return cast


class MixedPrecision:
    """Swaps parameters between their two precisions.

    Args:
        module: the wrapped module, whose state dicts have full precision at any time.
        parameters: those of its parameters that change.
        param_dtype: their dtype in forward and backward.
        moved: called when their autograd nodes have changed: the new ones need hooks.
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
            if self._low:
                _adopt_change(parameter)
            else:
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
        full = [parameter._fp_param for parameter in self._parameters]  # type: ignore[attr-defined]
        for parameter, low in zip(self._parameters, _cast(full, self.param_dtype)):
            parameter._mp_param = parameter.data = low  # type: ignore[attr-defined]
            parameter._mp_version = parameter._version  # type: ignore[attr-defined]
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for grad, low in zip(grads, _cast([grad.detach() for grad in grads], self.param_dtype)):
            grad.data = low
        self._low = True
        # A parameter of another dtype has another AccumulateGrad node, which needs a hook.
        self._moved()

    def restore_after_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """After forward: full precision returns when a backward through ``outputs`` has ended."""
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        if not nodes or not torch.is_grad_enabled():
            self.restore()
        for node in nodes:
            node.register_prehook(self._on_backward)

    def _on_backward(self, grads: Any) -> None:
        if not self._low:  # another forward, or backward, has ended since
            self.lower()
        if native.backward_looks_ahead():  # a gradient penalty's, say: its graph is used again
            return
        Variable._execution_engine.queue_callback(self.restore)

    def restore(self) -> None:
        """Full-precision parameters, and gradients cast to them."""
        if not self._low:
            return
        self._low = False
        for parameter in self._parameters:
            _adopt_change(parameter)
        with_grad: list[Any] = [parameter for parameter in self._parameters if parameter.grad is not None]
        grads = {id(parameter): parameter.grad for parameter in with_grad}
        for dtype in {parameter._fp_param.dtype for parameter in with_grad}:
            of_dtype = [parameter for parameter in with_grad if parameter._fp_param.dtype == dtype]
            cast = _cast([parameter.grad for parameter in of_dtype], dtype)
            grads.update(zip(map(id, of_dtype), cast))
        for parameter in self._parameters:
            parameter.grad = None
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]
            parameter.grad = grads.get(id(parameter))
            # Whoever still needs the copy, a graph that is kept, holds it.
            parameter._mp_param = parameter.new_empty(0, dtype=self.param_dtype)  # type: ignore[attr-defined]
