"""What ``ddp._get_ddp_logging_data()`` returns: torch's keys, with values read off the reducer.

Counts and sizes are plain integers, lists are text, times are nanoseconds. All of it is found when somebody asks: a
forward counts itself, and no more. Averages are of the last steps whose stamps are kept (32).
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from .. import environment
from ..averager import Averager
from ..messages import backend_of

_ALWAYS_LOGGED = 10
_TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_BACKEND_ENVIRONMENT = {
    "gloo": {
        "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
        "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
    },
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}
_GLOO_THREADS = 2
_AVERAGED = 32  # steps; more are not kept
_DTYPE_NAMES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


def _join(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def times_of(step: dict[str, Any]) -> dict[str, int]:
    """Nanoseconds of the phases of one ``reducer.last_step()``, under torch's names. On a device, where the host does
    not know when a collective ran, without its times."""
    launches = [b["launch_ns"] for b in step["buckets"] if b["launch_ns"] >= 0]
    ends = [max(b["done_ns"], b["unpack_begin_ns"] if b["done_ns"] < 0 else -1) for b in step["buckets"]]
    begin, end = step["backward_begin_ns"], step["backward_end_ns"]
    comm_begin = min(launches, default=end)
    comm_end = max([*ends, comm_begin])
    forward = step["forward_begin_ns"]
    times = {
        "forward_compute_time": max(step["forward_end_ns"] - forward, 0),
        "backward_compute_time": max(end - begin, 0),
        "backward_comm_time": max(comm_end - comm_begin, 0),
        "backward_compute_comm_overlap_time": max(min(end, comm_end) - comm_begin, 0),
        "forward_compute_time_start": forward,
        "backward_compute_time_start": begin,
        "backward_comm_time_start": comm_begin,
        "backward_compute_time_end": end,
        "backward_comm_time_end": comm_end,
    }
    on_device = any("on_device" in bucket for bucket in step["buckets"])
    return {key: times[key] for key in times if "comm_" not in key or not on_device}


class LoggingData:
    """Finds the facts; kept by the module as ``ddp.logger``.

    Args:
        averager: the wrapper's. Kept weakly.
        devices: the wrapper's ``device_ids`` and ``output_device``.
    """

    def __init__(self, averager: Averager, devices: tuple[list[int] | None, int | None]):
        self._averager = weakref.ref(averager)
        self._device_ids, self._output_device = devices
        self._sample_rate = 100
        self._noted: dict[str, Any] = {"bucket_sizes": _join(averager.reducer.bucket_nbytes())}
        self.forwards = 0  # that were synchronized
        self.rebuilds = not averager.is_settled  # new buckets are to come, and forget the stamps of the old
        self._times: list[dict[str, int]] = []
        self._last: dict[str, int] = {"num_buckets_reduced": 0}

    @property
    def comm_hook(self) -> str | None:
        return self._noted.get("comm_hook")

    def set(self, key: str, value: Any) -> None:
        self._noted[key] = value

    def set_sample_rate(self, rate: int) -> None:
        self._sample_rate = rate

    def set_error_and_log(self, message: str) -> None:
        self._noted.update(has_error=1, error=message)

    def note_rebuilt(self, averager: Averager) -> None:
        reducer = averager.reducer
        self.rebuilds, buckets = False, reducer.buckets()
        self._noted.update(
            has_rebuilt_buckets=1,
            rebuilt_bucket_sizes=_join(reducer.bucket_nbytes()),
            prev_iteration_grad_ready_order_indices=_join(averager.order_of_arrival),
            rebuilt_per_bucket_param_indices=_join(" ".join(map(str, bucket)) for bucket in buckets),
        )

    def data(self) -> dict[str, Any]:
        """Everything known, as one flat dict."""
        averager = self._averager()
        if averager is None:
            return dict(self._noted)
        reducer = averager.reducer
        self.note_steps(averager)
        # As with torch's class, where a forward logs the iteration before it: the first ten, then every n-th.
        iteration = max(self.forwards - 1, 0)
        if iteration > _ALWAYS_LOGGED:
            iteration = max(_ALWAYS_LOGGED, iteration - iteration % self._sample_rate)
        facts = {**self._facts(averager), "iteration": iteration, **self._last}
        if iteration and self._times:
            facts |= self._times[-1]
            for key in [key for key in _TIMES if key in self._times[-1]]:
                facts[f"avg_{key}"] = sum(times[key] for times in self._times) // len(self._times)
        facts["can_set_static_graph"] = bool(reducer._ddp_graph_static())
        if averager.is_joining:
            facts["join_uneven_inputs"] = 1
        if error := reducer.last_error():
            facts.update(has_error=1, error=error)
        return {**facts, **self._noted}

    def _facts(self, averager: Averager) -> dict[str, Any]:
        config, parameters, group = averager.config, averager.parameters, averager.group
        backend = backend_of(group)
        facts: dict[str, Any] = {
            "world_size": group.size(),
            "rank": group.rank(),
            "module_name": type(averager.module).__name__,
            "backend_name": backend,
            "device_ids": _join(self._device_ids or []),
            "output_device": -1 if self._output_device is None else self._output_device,
            "broadcast_buffers": int(config.forward_sync_buffers),
            "bucket_cap_bytes": config.cap,
            "find_unused_parameters": int(config.find_unused_parameters),
            "gradient_as_bucket_view": int(config.gradient_as_bucket_view),
            "static_graph": int(config.static_graph),
            "dtypes": _join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters.reduced})),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters.reduced),
            "num_parameter_tensors": len(parameters.reduced),
            "is_multi_device_module": int(parameters.is_multi_device),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in averager.module.modules())),
        }
        names = {**_ENVIRONMENT, **_BACKEND_ENVIRONMENT.get(backend, {})}
        facts.update(environment.torch_ddp_variables(names))
        if backend == "gloo":
            facts["gloo_num_threads"] = _GLOO_THREADS
        return facts

    def note_steps(self, averager: Averager) -> None:
        """Keeps what the stamps show of the last steps, if there are any with these buckets."""
        if steps := averager.reducer.recent_steps(_AVERAGED):
            self._times = [times_of(step) for step in steps]
            unused = [p for p, ready in zip(averager.parameters.reduced, steps[-1].get("ready_ns", ())) if ready < 0]
            launched = sum(bucket["launch_ns"] >= 0 for bucket in steps[-1]["buckets"])
            self._last = {
                "has_rebuilt_buckets": 0,
                "num_buckets_reduced": launched,
                "unused_parameter_size": sum(p.nbytes for p in unused),
            }

    # --- torch's names: forks of its class call them in methods of their own ---

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        self._noted.update(
            module_name=module_name,
            device_ids=_join(device_ids),
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            static_graph=int(static_graph),
        )

    def set_runtime_stats_and_log(self) -> None:
        """A forward begins."""
        self.forwards += 1

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """What is known, as torch's two maps, of text and of numbers."""
        facts = self.data()
        return SimpleNamespace(
            strs_map={key: value for key, value in facts.items() if isinstance(value, str)},
            ints_map={key: int(value) for key, value in facts.items() if not isinstance(value, str)},
        )

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self.set("comm_hook", comm_hook)

    def _set_uneven_input_join(self) -> None:
        self.set("join_uneven_inputs", 1)

    def _set_static_graph(self) -> None:
        self.set("static_graph", 1)
