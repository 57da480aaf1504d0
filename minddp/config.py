"""The constructor's arguments that the core understands, checked once, frozen, and what ranks must have in common."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from . import _C
from .functions import group_of

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25  # at most
_DEFAULT_BUCKETS, _DEFAULT_LEAST_BYTES = 10, 2 * MIB
DEFAULT_LAST_BUCKET_BYTES = MIB
FIRST_BUCKET_BYTES = DEFAULT_BUCKET_CAP_MB * MIB  # of a kind, while the order of arrival is not known
_MOST_CAP_MB = 2.0**43  # 2**63 bytes
_DEFAULT_ALONE_BYTES = {"cpu": 4 * MIB}  # elsewhere the cap: collectives cost more there, copies less


@dataclass(frozen=True)
class Config:
    """What the core of one wrapper was asked to do; see :class:`DistributedDataParallel` for the arguments.

    ``caps``: bytes, one entry a bucket, the last repeats. ``default_caps``: nobody chose them. ``lists_caps``:
    several were given, or one in ``bucket_cap_mb_list``. ``auto_tune``: a companion chooses them while training runs.
    ``sync_buffers_at_start``: buffers are part of the first synchronization.
    """

    caps: tuple[int, ...]
    default_caps: bool
    lists_caps: bool
    auto_tune: bool
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    lazy_bucket_allocation: bool
    forward_sync_buffers: bool
    sync_buffers_at_start: bool

    @property
    def cap(self) -> int:
        """The largest bucket, in bytes."""
        return max(self.caps)

    def caps_for(self, total: int) -> tuple[int, ...]:
        """``caps``, for gradients of ``total`` bytes.

        If nobody chose them, there are some ten buckets: the last of equal ones has a tenth of the transfer, which
        backward does not hide, and few buckets pay the collective's latency no more often than they must.
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

    @cached_property
    def graph_mode(self) -> _C.GraphMode:
        """What it means that a gradient does not come."""
        if self.static_graph:
            return _C.GraphMode.STATIC
        return _C.GraphMode.FIND_UNUSED if self.find_unused_parameters else _C.GraphMode.ALL_USED

    def alone_from(self, device_type: str) -> int | None:
        """Bytes from which a gradient has a bucket of its own; None: no gradient has."""
        return _DEFAULT_ALONE_BYTES.get(device_type, self.cap) if self.default_caps else None

    def for_comparison(self) -> dict[str, Any]:
        """What decides the ranks' collectives, by argument: must be the same on all of them."""
        caps: Any = [cap / MIB for cap in self.caps]
        if self.default_caps:
            caps = "auto" if self.auto_tune else "the default"
        return {
            "bucket_cap_mb": caps,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
        }


def make_config(
    *,
    bucket_cap_mb: float | str | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
    broadcast_buffers: bool | None = None,
    forward_sync_buffers: bool | None = None,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    **flags: bool,
) -> Config:
    """The constructor's arguments as a :class:`Config`.

    Raises:
        ValueError, TypeError: an argument makes no sense; named.
    """
    caps, default, auto = _caps(bucket_cap_mb, bucket_cap_mb_list)
    _warn_about_broadcast_buffers(broadcast_buffers, forward_sync_buffers)
    if static_graph and find_unused_parameters:
        warn_about_static_and_unused(stacklevel=5)
    flags |= {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
    for name, value in flags.items():
        if value is not None and not hasattr(type(value), "__bool__"):  # "False" is true
            raise TypeError(f"{name} must be a bool, got {value!r}")
    given = (value for value in (forward_sync_buffers, broadcast_buffers) if value is not None)
    return Config(
        caps=caps,
        default_caps=default,
        lists_caps=bool(bucket_cap_mb_list),
        auto_tune=auto,
        forward_sync_buffers=bool(next(given, True)),
        sync_buffers_at_start=forward_sync_buffers is not None or broadcast_buffers is not False,
        **{name: bool(value) for name, value in flags.items()},
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
    # The argument is checked also if a list takes its place.
    one = _cap_bytes("bucket_cap_mb", DEFAULT_BUCKET_CAP_MB if default else cap)
    if caps and not hasattr(caps, "__len__"):
        raise TypeError(f"bucket_cap_mb_list must be a list of numbers of MiB, one a bucket, or None, got {caps!r}")
    several = tuple(_cap_bytes("bucket_cap_mb_list", cap) for cap in caps or ())
    return several or (one,), default and not several, auto


def _cap_bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are some
        raise TypeError(f"{name} must be a number of MiB, got {value!r}")
    if not 0 <= float(value) < _MOST_CAP_MB:
        raise ValueError(
            f"{name} must be a finite number of MiB, 0 (a bucket for each gradient) or more, got {value!r} "
            "(it must be less than 2**43)"
        )
    return max(int(float(value) * MIB), 1)


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


def choose_group(group: Any, mesh: Any) -> Any:
    """The group of the arguments ``process_group`` and ``device_mesh``, or the default group.

    Raises:
        ValueError: there is no group; as from torch's class.
        RuntimeError: both are given, this rank is not in the group, it was destroyed, or the mesh has several
            dimensions.
    """
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    return group_of(group if mesh is None else _group_of(mesh), "DistributedDataParallel")


def _group_of(mesh: Any) -> Any:
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh of one dimension, or None, got {mesh!r}")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    return mesh.get_group(mesh_dim=0)
