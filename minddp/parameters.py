"""Which parameters a module has, which of them a wrapper reduces, and where they lie.

A program's own class may say anything in ``named_parameters()``: leave a child out, yield a parameter twice, or one
that is registered nowhere. What trains has to be found all the same, each parameter once, or replicas drift apart
without a word. Torch asks each of ``named_modules()`` for what is its own; here both are asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._utils import _get_device_index

from . import _C
from .logs import log

Named = tuple[str, torch.nn.Parameter]

# Around what torch's class does not ask of a parameter: the __torch_function__ of a program's own class may refuse
# it. Nothing of the program's runs inside.
plainly = torch._C.DisableTorchFunction


def all_parameters(module: torch.nn.Module, ignored: Container[str] = ()) -> list[Named]:
    """Each parameter once, with its first name that is not ignored: what the module's ``named_parameters()`` yields,
    and then what each of its ``named_modules()`` says to have itself, as with torch's class."""
    named: dict[int, Named] = {}
    for name, parameter in itertools.chain(module.named_parameters(), _of_each_module(module)):
        if name not in ignored:
            named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def _of_each_module(module: torch.nn.Module) -> Iterator[Named]:
    """A parameter of several modules comes several times."""
    for prefix, child in module.named_modules():
        try:
            own = list(child.named_parameters(recurse=False))
        except TypeError:  # a method of its own, which cannot be asked for that
            own = list(torch.nn.Module.named_parameters(child, recurse=False))
        yield from _prefixed(prefix, own)


def registered(module: torch.nn.Module, prefix: str = "", above: tuple[torch.nn.Module, ...] = ()) -> Iterator[Named]:
    """Every parameter that a module or one below it holds, under all its names, whatever their methods tell."""
    if isinstance(module, torch.jit.ScriptModule):  # its methods are nobody's own
        yield from _prefixed(prefix, torch.nn.Module.named_parameters(module, remove_duplicate=False))
        return
    yield from _prefixed(prefix, ((name, p) for name, p in module._parameters.items() if p is not None))
    for name, child in module._modules.items():
        if child is not None and not any(child is other for other in above):
            yield from registered(child, f"{prefix}.{name}" if prefix else name, (*above, module))


def _prefixed(prefix: str, named: Iterable[Named]) -> Iterator[Named]:
    return ((f"{prefix}.{name}" if prefix else name, parameter) for name, parameter in named)


def every_name(module: torch.nn.Module) -> Iterator[Named]:
    """Every parameter under every name; a tied one has several."""
    return itertools.chain(module.named_parameters(), registered(module), all_parameters(module))


class Parameters:
    """The tensors of ``module``, without those that it asks to ignore.

    Args:
        module: the module to wrap.
        left_alone: names of what no rank's training depends on: see :func:`asked_to_ignore`.
        apart: names of parameters that a companion averages by itself.

    Attributes:
        ignored: names that are not the buckets': those left alone, and those apart.
        module_parameters: all that are not ignored.
        names, reduced: of those, the ones that require gradients, in the module's order.
        device, device_type, is_multi_device: where they lie.

    Raises:
        RuntimeError: nothing requires a gradient, or a lazy layer has no shapes yet.
        ValueError: parameters on several types of devices.
    """

    def __init__(self, module: torch.nn.Module, left_alone: set[str], apart: set[str]):
        self._module, self._apart = module, apart
        self.left_alone = left_alone - apart
        self.ignored = left_alone | apart
        self._left: dict[int, torch.nn.Parameter] = {}  # alive, so that no other object gets one's id
        if self.ignored:
            named = {id(p) for _, p in all_parameters(module, self.ignored)}
            self._left = {id(p): p for _, p in all_parameters(module) if id(p) not in named}
        self.collect()

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The module's of now, but for those that are left alone, whatever their names are now."""
        return [(name, p) for name, p in all_parameters(self._module, self.ignored) if id(p) not in self._left]

    def collect(self) -> None:
        """Looks at the module anew."""
        named = self.named()
        for name, parameter in named:
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise RuntimeError(
                    f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: "
                    f"'{name}' has no shape yet. Run a dummy forward pass to initialize the lazy modules first."
                )
            if not parameter.requires_grad:
                continue
            with plainly():
                dtype = parameter.dtype
                grad_dtype = getattr(parameter, "grad_dtype", dtype)
            if grad_dtype not in (None, dtype):
                raise RuntimeError(
                    f"DistributedDataParallel reduces gradients of their parameters' dtypes, but '{name}' is "
                    f"{dtype} with grad_dtype {grad_dtype}: leave grad_dtype as it is, or pass "
                    "reduce_dtype= to choose the dtype in which gradients travel."
                )
        reduced = [(name, p) for name, p in named if p.requires_grad]
        if not reduced and not self._apart:
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient: use the module as it is, or set requires_grad before wrapping."
            )
        self.module_parameters = [p for _, p in named]
        self.names = [name for name, _ in reduced]
        self.reduced = [p for _, p in reduced]
        self._look_at_devices()
        self._warn_of_hidden()

    def check_materialized(self) -> None:
        """Raises RuntimeError where a parameter has no values that could be sent."""
        named = all_parameters(self._module)
        with plainly():
            bare = {*_C.unreadable([p for _, p in named])}
            found = [n for i, (n, p) in enumerate(named) if (p.is_meta or i in bare) and n not in self.ignored]
        if found:
            raise RuntimeError(
                f"DistributedDataParallel: {found[:10]} have no values: they are on the meta device, or the storage "
                "was resized. Give them some before wrapping: to_empty() and initialize, "
                "load_state_dict(assign=True), or untyped_storage().resize_()."
            )

    def _warn_of_hidden(self) -> None:
        known = {id(p) for _, p in all_parameters(self._module)}
        ignored = self.ignored
        hidden = [
            n for n, p in registered(self._module) if p.requires_grad and id(p) not in known and n not in ignored
        ]
        if hidden:
            log.warning(
                "DistributedDataParallel: %s require gradients, but neither named_parameters() nor any of "
                "named_modules() tells of them: their gradients are not averaged.",
                hidden[:10],
            )

    def _look_at_devices(self) -> None:
        parameters = self.module_parameters or [p for _, p in all_parameters(self._module)]
        types = sorted({p.device.type for p in parameters})
        if len(types) > 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but its "
                f"parameters are on {types}: move the whole module to one type before wrapping."
            )
        self.device_type = types[0]
        self.device = parameters[0].device
        self.devices = {p.device for p in parameters}
        self.is_multi_device = len(self.devices) > 1

    def check_devices(
        self, device_ids: Sequence[Any] | None, output_device: Any
    ) -> tuple[list[int] | None, int | None]:
        """(device_ids, output_device) as indices; both None for CPU and multi-device modules.

        Raises:
            ValueError: they do not fit where the parameters are.
        """
        if device_ids is not None and not hasattr(device_ids, "__len__"):
            raise TypeError(f"device_ids must be a list of one device, or None, got {device_ids!r}")
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids can only be None or contain a single element, got {device_ids}.")
        single = self.device_type != "cpu" and not self.is_multi_device
        if device_ids and single:
            output = device_ids[0] if output_device is None else output_device
            return [_get_device_index(x, True) for x in device_ids], _get_device_index(output, True)
        if device_ids or output_device:  # as torch: an output_device of 0 is none
            raise ValueError(
                f"device_ids {device_ids} and output_device {output_device} only work with a module on one GPU, "
                f"but its parameters are on {sorted(str(d) for d in self.devices)}: leave both out."
            )
        return None, None

    def expect_sparse(self) -> list[bool]:
        """For each reduced parameter, whether its gradient is sparse."""
        sparse = {
            id(parameter)
            for module in self._module.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
            for parameter in module._parameters.values()  # parameters() may be a method of its own
            if parameter is not None
        }
        return [id(p) in sparse for p in self.reduced]

    def facts(self) -> tuple[list[str], list[torch.Size], list[torch.dtype]]:
        """Names, shapes and dtypes of what is reduced: what a bucket plan is tied to."""
        with plainly():
            return self.names, [p.shape for p in self.reduced], [p.dtype for p in self.reduced]

    def buffers(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The module's buffers as they are now: modules may put other tensors in their places. ``module``: the
        wrapper's, which may stand in the wrapped one's place for a while."""
        return {name: buffer for name, buffer in module.named_buffers() if name not in self.ignored}


def all_names(module: torch.nn.Module) -> set[str]:
    """Every name of every parameter and buffer; a tied one has several."""
    buffers = torch.nn.Module.named_buffers(module, remove_duplicate=False)
    return {name for name, _ in itertools.chain(every_name(module), module.named_buffers(), buffers)}


def asked_to_ignore(module: torch.nn.Module) -> set[str]:
    """The names in what ``_set_params_and_buffers_to_ignore_for_model`` has left in the module."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ())
    known = all_names(module) if names else set()
    if unknown := sorted(name if isinstance(name, str) else type(name).__name__ for name in names - known):
        # Libraries prefix names they cannot know to be there. Torch takes them all.
        told = "_ddp_params_and_buffers_to_ignore names %s, but the module has no such parameter or buffer."
        log.warning(told, unknown)
    return names
