"""What ``ddp._get_ddp_logging_data()`` returns: torch's keys, with values read off the reducer.

Counts and sizes are plain integers, lists are text, times are nanoseconds. Runtime statistics are taken
at the start of a forward, about the iteration before it: for the first ten iterations, then for every
``sample_rate``-th.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .. import environment
from ..config import Config
from ..parameters import Parameters
from ..reducer import Reducer
from ..timeline.step_times import on_device

_ALWAYS_RECORDED = 10
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
    return {key: times[key] for key in times if "comm_" not in key or not on_device(step)}


def _backend_name(group: dist.ProcessGroup) -> str:
    try:
        return dist.get_backend(group)
    except (RuntimeError, ValueError):  # a group that torch.distributed did not make
        return str(group.name())


class LoggingData:
    """Collects the facts; kept by the module as ``ddp.logger``."""

    def __init__(
        self,
        module: torch.nn.Module,
        config: Config,
        parameters: Parameters,
        reducer: Reducer,
        devices: tuple[list[int] | None, int | None],
    ):
        self._parameters = parameters.reduced
        self._reducer = weakref.ref(reducer)
        self._facts: dict[str, Any] = self._construction_facts(module, config, parameters, reducer, devices)
        self._sample_rate = 100
        self._recorded = 0
        self._sums = dict.fromkeys(_TIMES, 0)

    @staticmethod
    def _construction_facts(
        module: torch.nn.Module,
        config: Config,
        parameters: Parameters,
        reducer: Reducer,
        devices: tuple[list[int] | None, int | None],
    ) -> dict[str, Any]:
        group = reducer.group
        backend = _backend_name(group)
        device_ids, output_device = devices
        facts: dict[str, Any] = {
            "world_size": group.size(),
            "rank": group.rank(),
            "iteration": 0,
            "module_name": type(module).__name__,
            "backend_name": backend,
            "device_ids": _join(device_ids or []),
            "output_device": -1 if output_device is None else output_device,
            "broadcast_buffers": int(config.forward_sync_buffers),
            "bucket_cap_bytes": config.cap,
            "find_unused_parameters": int(config.find_unused_parameters),
            "gradient_as_bucket_view": int(config.gradient_as_bucket_view),
            "static_graph": int(config.static_graph),
            "dtypes": _join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters.reduced})),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters.reduced),
            "num_parameter_tensors": len(parameters.reduced),
            "bucket_sizes": _join(reducer.bucket_nbytes()),
            "is_multi_device_module": int(parameters.is_multi_device),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in module.modules())),
            "num_buckets_reduced": 0,
        }
        names = {**_ENVIRONMENT, **_BACKEND_ENVIRONMENT.get(backend, {})}
        facts.update(environment.torch_ddp_variables(names))
        if backend == "gloo":
            facts["gloo_num_threads"] = _GLOO_THREADS
        return facts

    @property
    def comm_hook(self) -> str | None:
        return self._facts.get("comm_hook")

    def set(self, key: str, value: Any) -> None:
        self._facts[key] = value

    def set_sample_rate(self, rate: int) -> None:
        self._sample_rate = rate

    def note_join(self) -> None:
        self._facts["join_uneven_inputs"] = 1

    def set_error_and_log(self, message: str) -> None:
        self._facts["has_error"] = 1
        self._facts["error"] = message

    def note_rebuilt(self, reducer: Reducer) -> None:
        buckets = reducer.buckets()
        self._facts.update(
            has_rebuilt_buckets=1,
            rebuilt_bucket_sizes=_join(reducer.bucket_nbytes()),
            prev_iteration_grad_ready_order_indices=_join(reducer.order_of_arrival),
            rebuilt_per_bucket_param_indices=_join(" ".join(map(str, bucket)) for bucket in buckets),
        )

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
        self._facts.update(
            module_name=module_name,
            device_ids=_join(device_ids),
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            static_graph=int(static_graph),
        )

    def set_runtime_stats_and_log(self) -> None:
        """Records the iteration before, when it is its turn and no forward has done so."""
        if (reducer := self._reducer()) is not None:
            self.before_forward(reducer)

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """What is known, as torch's two maps, of text and of numbers."""
        reducer = self._reducer()
        facts = self._facts if reducer is None else self.data(reducer)
        return SimpleNamespace(
            strs_map={key: value for key, value in facts.items() if isinstance(value, str)},
            ints_map={key: int(value) for key, value in facts.items() if not isinstance(value, str)},
        )

    def _set_comm_hook_name(self, comm_hook: str) -> None:
        self.set("comm_hook", comm_hook)

    def _set_uneven_input_join(self) -> None:
        self.note_join()

    def _set_static_graph(self) -> None:
        self.set("static_graph", 1)

    def before_forward(self, reducer: Reducer) -> None:
        """Records the iteration before this forward, when it is its turn."""
        iteration = reducer.iteration()
        if iteration == self._facts["iteration"] or iteration == 0:
            return
        if iteration <= _ALWAYS_RECORDED or iteration % self._sample_rate == 0:
            self._record(reducer, iteration)

    def _record(self, reducer: Reducer, iteration: int) -> None:
        step = reducer.last_step()
        times = times_of(step)
        self._recorded += 1
        self._facts["iteration"] = iteration
        self._facts.update(times)
        for key in [key for key in _TIMES if key in times]:
            self._sums[key] += times[key]
            self._facts[f"avg_{key}"] = self._sums[key] // self._recorded
        unused = [i for i, ready in enumerate(step["ready_ns"]) if ready < 0]
        self._facts["unused_parameter_size"] = sum(self._parameters[i].nbytes for i in unused)
        self._facts["num_buckets_reduced"] = sum(b["launch_ns"] >= 0 for b in step["buckets"])

    def data(self, reducer: Reducer) -> dict[str, Any]:
        """Everything known, as one flat dict."""
        facts = dict(self._facts)
        step = reducer.last_step()
        facts["num_buckets_reduced"] = sum(b["launch_ns"] >= 0 for b in step["buckets"])
        facts["can_set_static_graph"] = bool(reducer._ddp_graph_static())
        if error := reducer.last_error():
            facts.update(has_error=1, error=error)
        return facts
