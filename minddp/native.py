"""The C++ reducer with the cases of the default companions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from ._C import guards, timeline, torch_surface, wire


class Reducer(_C.Reducer):
    """``options``: those of :class:`_C.ReducerOptions`, and those of the cases."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        group: dist.ProcessGroup,
        options: dict[str, Any],
        buckets: list[list[int]],
    ):
        core = {name: options[name] for name in ("graph_mode", "wire_dtypes", "always_reduce") if name in options}
        super().__init__(parameters, names, group, _C.ReducerOptions(**core))
        self.callbacks, self.grads, self.changed_module = _C.Callbacks(), guards.GradStates(), guards.ChangedModule()
        self.stamps, self.moments = timeline.Stamps(), guards.Moments()
        self.shared, self.views = torch_surface.SharedParameters(), torch_surface.GradientViews()
        self.program = _C.ProgramCollectives()
        views = options.get("gradient_as_bucket_view", False)
        travels = set(options.get("wire_dtypes", ()))
        ordered = options.get("ordered")
        quantization: dict[str, Any] = {name: options.get(name) for name in ("residuals", "stochastic", "seed")}
        cases: list[tuple[bool, Any]] = [
            (True, torch_surface.TransportMemory()),
            (options.get("any_grad_dtype", False), torch_surface.AnyGradDtype()),
            (any(expect_sparse), torch_surface.SparseBuckets(expect_sparse)),
            (torch.uint8 in travels, torch.uint8 in travels and wire.QuantizedBuckets(**quantization)),
            (options.get("warns_of_overflow", False), wire.HalfBuckets()),
            (ordered is not None, ordered is not None and wire.OrderedSums(ordered)),
            (True, torch_surface.ContextGradients(options.get("not_in_contexts", ""))),
            (options["graph_mode"] != _C.GraphMode.FIND_UNUSED, self.program),
            (views, self.views),
            (options.get("refuses_earlier_sums", False), guards.EarlierSums()),
            (options.get("lazy_bucket_allocation", False), torch_surface.LazyMemory()),
            (True, self.shared),
            (True, self.changed_module),
            (True, self.grads),
            (True, self.callbacks),
            (True, self.stamps),
            (True, self.moments),
        ]
        for is_needed, case in cases:
            if is_needed:
                self.add(case)
        super().set_buckets(buckets)
        self._has_views = views

    def adopt_gradients(self) -> None:
        if self._has_views:
            self.views.adopt_gradients()

    def set_callbacks(self, **callbacks: Any) -> None:
        self.callbacks.set(**callbacks)

    def program_communicates(self) -> bool:
        return self.program.found()

    def note_changed(self, parameters: list[torch.Tensor], why: str) -> None:
        self.changed_module.note(parameters, why)

    def share(self, other: _C.Reducer, views: bool) -> None:
        self.shared.add(other, views)

    def arrive(self, optimizer_ns: int) -> None:
        self.stamps.arrive(optimizer_ns)

    def last_step(self) -> dict[str, Any]:
        return self.stamps.last_step()

    def recent_steps(self, at_most: int) -> list[dict[str, Any]]:
        return self.stamps.recent_steps(at_most)

    def position(self) -> dict[str, Any]:
        return {**super().position(), "moments": self.moments.last()}

    def interrupted(self) -> bool:
        return self.grads.is_interrupted()

    def bypassed(self) -> list[tuple[int, int]]:
        return self.grads.bypassed()

    def left_local(self) -> list[int]:
        return self.grads.left_local()

    def touched_in(self, index: int) -> int:
        return self.grads.touched_in(index)

    def averaged_since(self, index: int, backward: int) -> bool:
        return self.grads.averaged_since(index, backward)
