"""The constructor's arguments, checked once, frozen, and the one place that says what ranks must have in common."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch.nn.parallel.distributed import _MixedPrecision

from . import _C, environment
from .planner import BucketPlan
from .wire import Wire, make_wire

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25  # at most
_DEFAULT_BUCKETS, _DEFAULT_LEAST_BYTES = 10, 2 * MIB
DEFAULT_LAST_BUCKET_BYTES = MIB
FIRST_BUCKET_BYTES = DEFAULT_BUCKET_CAP_MB * MIB  # of a kind, while the order of arrival is not known
_MOST_CAP_MB = 2.0**43  # 2**63 bytes
_DEFAULT_ALONE_BYTES = {"cpu": 4 * MIB}  # elsewhere the cap: collectives cost more there, copies less

FINITE_MODES = ("raise", "warn", "skip")
REDUCTIONS = ("mean", "sum", "weighted")
_REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Config:
    """What one wrapper was asked to do; see :class:`DistributedDataParallel` for the arguments.

    ``caps``: bytes, one entry a bucket, the last repeats. ``default_caps``: nobody chose them. ``auto_tune``:
    ``bucket_cap_mb="auto"``. ``sync_buffers_at_start``: buffers are part of the first synchronization.
    """

    caps: tuple[int, ...]
    default_caps: bool
    auto_tune: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    forward_sync_buffers: bool
    init_sync: bool
    sync_buffers_at_start: bool
    reduction: str
    reduce_dtype: torch.dtype | None
    predivide_factor: float | None
    bucket_plan: BucketPlan | None
    check_finite: str | None
    check_replicas_every: int | None
    desync_timeout: float | None
    mixed_precision: _MixedPrecision | None
    # Defaults for wrappers that were pickled without them.
    wire: Wire | None = None
    ordered: bool = False
    lazy_bucket_allocation: bool = False
    lists_caps: bool = False  # several, or one, in bucket_cap_mb_list
    on_straggler: Callable[[Any], Any] | None = None
    manual_finalization: bool = False  # no argument: an attribute of the wrapper, which may change

    @property
    def cap(self) -> int:
        """The largest bucket, in bytes."""
        return max(self.caps)

    def caps_for(self, total: int) -> tuple[int, ...]:
        """``caps``, for gradients of ``total`` bytes.

        Where nobody chose them, some ten buckets: the last of equal ones has a tenth of the transfer, which backward
        does not hide, and few of them pay the collective's latency more often than they must.
        """
        if not self.default_caps:
            return self.caps
        return (min(max(total // _DEFAULT_BUCKETS, _DEFAULT_LEAST_BYTES), *self.caps),)

    @property
    def torch_caps(self) -> tuple[int, ...]:
        """``caps`` in torch's class: in launch order, filled from the front."""
        default = (DEFAULT_LAST_BUCKET_BYTES, *self.caps) if self.default_caps else self.caps
        return default if len(default) > 1 else default * 2

    @property
    def last_cap(self) -> int | None:
        """The cap of the bucket that is launched last, which nothing hides; None: as the others."""
        return DEFAULT_LAST_BUCKET_BYTES if self.default_caps else None

    @property
    def graph_mode(self) -> _C.GraphMode:
        """What it means that a gradient does not come."""
        if self.static_graph:
            return _C.GraphMode.STATIC
        return _C.GraphMode.FIND_UNUSED if self.find_unused_parameters else _C.GraphMode.ALL_USED

    def alone_from(self, device_type: str) -> int | None:
        """Bytes from which a gradient has a bucket of its own; None: no gradient has."""
        return _DEFAULT_ALONE_BYTES.get(device_type, self.cap) if self.default_caps else None

    def check_views(self, dtypes: Sequence[torch.dtype]) -> None:
        """Raises ValueError where gradients of ``dtypes`` cannot be windows on their buckets."""
        if self.gradient_as_bucket_view and self.reduce_dtype is not None:
            if any(dtype != self.reduce_dtype for dtype in dtypes):
                raise ValueError(
                    "reduce_dtype and gradient_as_bucket_view=True contradict each other: a gradient cannot be a "
                    "window on a bucket of another dtype. Leave one of them out."
                )

    def check_delayed(self, delayed: bool) -> None:
        """Raises ValueError where parameters are delayed whose gradients would go past what was asked for."""
        asked: dict[str, tuple[Any, Any]] = {
            "reduction": (self.reduction, "mean"),
            "check_finite": (self.check_finite, None),
            "wire": (self.wire and self.wire.dtype, None),
            "ordered": (self.ordered, False),
        }
        for name, (value, default) in asked.items():
            if delayed and value != default:
                raise ValueError(
                    f"{name}={value!r} does not go with delay_all_reduce_named_params, whose gradients are averaged "
                    f"in a collective of their own: leave {name} out, or delay no parameters."
                )

    def _caps_for_comparison(self) -> str | list[float]:
        if self.default_caps:
            return "auto" if self.auto_tune else "the default"
        return [cap / MIB for cap in self.caps]

    def for_comparison(self) -> dict[str, Any]:
        """What decides the ranks' collectives, by argument: must be the same on all of them."""
        return {
            "bucket_cap_mb": self._caps_for_comparison(),
            "bucket_plan": _identity(self.bucket_plan),
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
            "reduction": self.reduction,
            "reduce_dtype": self.reduce_dtype,
            "predivide_factor": self.predivide_factor,
            "wire": self.wire and [self.wire.dtype, self.wire.error_feedback, self.wire.stochastic],
            "ordered": self.ordered,
            "mixed_precision": self.mixed_precision,
            "check_finite": self.check_finite,
            "check_replicas_every": self.check_replicas_every,
            "on_straggler": None if self.on_straggler is None else "given",
        }


_FLAGS = (
    "init_sync",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "lazy_bucket_allocation",
    "ordered",
)


def make_config(arguments: Mapping[str, Any]) -> Config:
    """The constructor's arguments, by name, as a :class:`Config`; those that it has no field for are passed over.

    Raises:
        ValueError, TypeError: an argument makes no sense, or contradicts another; named.
    """
    caps, default, auto = _caps(arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"])
    plan = _plan(arguments["bucket_plan"])
    if plan is not None and auto:
        raise ValueError('bucket_plan= pins the buckets, bucket_cap_mb="auto" searches them: pass one')
    reduction, reduce_dtype = arguments["reduction"], arguments["reduce_dtype"]
    _check_reduction(reduction, reduce_dtype)
    wire = make_wire(arguments["wire"])
    _check_wire(wire, reduce_dtype, arguments["mixed_precision"])
    broadcast, forward = arguments["broadcast_buffers"], arguments["forward_sync_buffers"]
    _warn_about_broadcast_buffers(broadcast, forward)
    if arguments["static_graph"] and arguments["find_unused_parameters"]:
        warn_about_static_and_unused(stacklevel=5)
    return Config(
        caps=caps,
        default_caps=default,
        lists_caps=bool(arguments["bucket_cap_mb_list"]),
        auto_tune=auto,
        forward_sync_buffers=next((bool(value) for value in (forward, broadcast) if value is not None), True),
        sync_buffers_at_start=forward is not None or broadcast is not False,
        reduction=reduction,
        reduce_dtype=reduce_dtype,
        predivide_factor=_predivide_factor(arguments["predivide_factor"]),
        wire=wire,
        bucket_plan=plan,
        mixed_precision=_mixed_precision(arguments["mixed_precision"]),
        check_finite=_finite_mode(arguments["check_finite"]),
        check_replicas_every=_every("check_replicas_every", arguments["check_replicas_every"]),
        on_straggler=_callable("on_straggler", arguments["on_straggler"]),
        desync_timeout=_seconds("desync_timeout", arguments["desync_timeout"]) or environment.desync_timeout(),
        **{name: bool(arguments[name]) for name in _FLAGS},
    )


def warn_about_static_and_unused(stacklevel: int) -> None:
    warnings.warn(
        "find_unused_parameters=True has no effect with a static graph, whose first iteration tells which parameters "
        "are unused.",
        stacklevel=stacklevel,
    )


def _caps(cap: float | str | None, caps: Sequence[float] | None) -> tuple[tuple[int, ...], bool, bool]:
    """In bytes; whether nobody chose them; whether they are to be found by measuring."""
    auto = isinstance(cap, str) and cap == "auto"
    if isinstance(cap, str) and not auto:
        raise ValueError(f'bucket_cap_mb must be a number of MiB, None or "auto", got {cap!r}')
    default = cap is None or auto
    # The argument is checked where a list takes its place, too.
    one = _cap_bytes("bucket_cap_mb", DEFAULT_BUCKET_CAP_MB if default else cap)
    if caps and not hasattr(caps, "__len__"):
        raise TypeError(f"bucket_cap_mb_list must be a list of numbers of MiB, one a bucket, or None, got {caps!r}")
    several = tuple(_cap_bytes("bucket_cap_mb_list", cap) for cap in caps or ())
    return several or (one,), default and not several, auto


def _finite_mode(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return "raise" if value else None
    if value not in FINITE_MODES:
        raise ValueError(f'check_finite must be a bool, "raise", "warn" or "skip", got {value!r}')
    return str(value)


def _every(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a number of iterations, or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {value!r}")
    return int(value)


def _callable(name: str, value: Any) -> Callable[[Any], Any] | None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a callable, or None, got {value!r}")
    result: Callable[[Any], Any] | None = value
    return result


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, or None, got {value!r}")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be a positive, finite number of seconds, or None, got {value!r}")
    return float(value)


def _cap_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are some
        raise TypeError(f"{name} must be a number of MiB, got {value!r}")
    if not 0 <= float(value) < _MOST_CAP_MB:
        raise ValueError(
            f"{name} must be a finite number of MiB, 0 (a bucket for each gradient) or more, got {value!r} "
            "(it must be less than 2**43)"
        )
    return max(int(float(value) * MIB), 1)


def _plan(value: Any) -> BucketPlan | None:
    if isinstance(value, (str, os.PathLike)):
        try:
            return BucketPlan.load(value)
        except OSError as error:
            raise OSError(error.errno, f"bucket_plan cannot be read: {error.strerror}", os.fspath(value)) from error
    if value is None or isinstance(value, BucketPlan):
        return value
    raise TypeError(f"bucket_plan must be a minddp.BucketPlan or the path of a saved one, got {value!r}")


def _identity(plan: BucketPlan | None) -> Any:
    """What two ranks' plans must share: which parameters, in which order, in which bucket."""
    if plan is None or plan.parameters is None:
        return plan and plan.buckets
    return [[plan.parameters[position].name for position in bucket] for bucket in plan.buckets]


def _check_reduction(reduction: str, dtype: Any) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f'reduction must be "mean", "sum" or "weighted", got {reduction!r}')
    if dtype is not None and dtype not in _REDUCE_DTYPES:
        names = ", ".join(map(str, _REDUCE_DTYPES))
        raise TypeError(f"reduce_dtype must be a dtype that ranks can add up ({names}), or None, got {dtype!r}")


def _predivide_factor(value: Any) -> float | None:
    """It and its inverse scale gradients of float32, too."""
    if value is None:
        return None
    if not isinstance(value, Real) or not 2.0**-126 <= float(value) <= 2.0**126:
        raise ValueError(f"predivide_factor must be a positive, finite number, from 2**-126 to 2**126, got {value!r}")
    return float(value)


def _mixed_precision(value: Any) -> Any:
    """torch's ``_MixedPrecision``, or what has its attributes, as of FSDP."""
    if value is None:
        return None
    if not all(hasattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")):
        raise TypeError(
            "mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision(param_dtype=, reduce_dtype=, "
            f"buffer_dtype=), or None, got {value!r}"
        )
    return value


def _check_wire(wire: Wire | None, reduce_dtype: Any, mixed_precision: Any) -> None:
    other = {"reduce_dtype": reduce_dtype, "mixed_precision": mixed_precision}
    for name, value in other.items():
        if wire is not None and value is not None:
            raise ValueError(f"wire={wire.dtype!r} and {name} both say what travels: leave one of them out")


def _warn_about_broadcast_buffers(broadcast: bool | None, forward: bool | None) -> None:
    if broadcast is None:
        return
    warnings.warn(
        "`broadcast_buffers` is deprecated: pass `forward_sync_buffers`"
        + (
            ", whose value is used."
            if forward is not None
            else ". Only broadcast_buffers=False also leaves buffers out of the synchronization at construction."
        ),
        FutureWarning,
        stacklevel=4,
    )
