// Python's view of the reducer: pybind11 only, no logic of its own.
#include "python_comm_hook.h"
#include "reducer.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace minddp;

#ifdef MINDDP_WITH_CUDA
void bind_cuda(py::module_& module);
#endif
#ifdef MINDDP_WITH_SHM
void bind_shm(py::module_& module);
#endif

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

// torch's FutureWrapper, which Python code knows as torch.futures.Future.
py::object to_python(c10::intrusive_ptr<Future> future) {
  return py::cast(std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future)));
}

py::dict bucket_times(const Reducer& reducer, size_t index) {
  const Bucket& bucket = reducer.buckets()[index];
  py::list parameters;
  for (const Bucket::Slot& slot : bucket.slots()) {
    parameters.append(slot.index);
  }
  py::dict times;
  times["index"] = index;
  times["nbytes"] = bucket.nbytes();
  times["parameters"] = parameters;
  times["ready_ns"] = reducer.trace().at(index, BucketEvent::kReady);
  times["pack_begin_ns"] = reducer.trace().at(index, BucketEvent::kPackBegin);
  times["launch_ns"] = reducer.trace().at(index, BucketEvent::kLaunch);
  times["done_ns"] = reducer.trace().at(index, BucketEvent::kDone);
  times["unpack_begin_ns"] = reducer.trace().at(index, BucketEvent::kUnpackBegin);
  times["unpack_end_ns"] = reducer.trace().at(index, BucketEvent::kUnpackEnd);
  return times;
}

py::dict last_step(const Reducer& reducer) {
  const Trace& trace = reducer.trace();
  py::dict step;
  step["iteration"] = trace.iteration();
  step["forward_begin_ns"] = trace.at(StepEvent::kForwardBegin);
  step["forward_end_ns"] = trace.at(StepEvent::kForwardEnd);
  step["backward_begin_ns"] = trace.at(StepEvent::kBackwardBegin);
  step["backward_end_ns"] = trace.at(StepEvent::kBackwardEnd);
  step["finalize_end_ns"] = trace.at(StepEvent::kFinalizeEnd);
  step["ready_ns"] = trace.ready();
  py::list buckets;
  for (size_t i = 0; i < reducer.buckets().size(); ++i) {
    buckets.append(bucket_times(reducer, i));
  }
  step["buckets"] = buckets;
  return step;
}

std::vector<std::vector<size_t>> bucket_indices(const Reducer& reducer) {
  std::vector<std::vector<size_t>> buckets;
  for (const Bucket& bucket : reducer.buckets()) {
    buckets.emplace_back();
    for (const Bucket::Slot& slot : bucket.slots()) {
      buckets.back().push_back(slot.index);
    }
  }
  return buckets;
}

std::vector<int64_t> bucket_nbytes(const Reducer& reducer) {
  std::vector<int64_t> sizes;
  for (const Bucket& bucket : reducer.buckets()) {
    sizes.push_back(bucket.nbytes());
  }
  return sizes;
}

int64_t allocated_bytes(const Reducer& reducer) {
  int64_t total = 0;
  for (const Bucket& bucket : reducer.buckets()) {
    total += bucket.allocated() ? bucket.nbytes() : 0;
  }
  return total;
}

void bind_enums(py::module_& module) {
  py::enum_<Phase>(module, "Phase")
      .value("IDLE", Phase::kIdle)
      .value("BACKWARD", Phase::kBackward)
      .value("INCOMPLETE", Phase::kIncomplete);
  py::enum_<GraphMode>(module, "GraphMode")
      .value("ALL_USED", GraphMode::kAllUsed)
      .value("FIND_UNUSED", GraphMode::kFindUnused)
      .value("STATIC", GraphMode::kStatic);
  py::enum_<Reduction>(module, "Reduction")
      .value("MEAN", Reduction::kMean)
      .value("SUM", Reduction::kSum)
      .value("WEIGHTED", Reduction::kWeighted);
}

void bind_grad_bucket(py::module_& module) {
  py::class_<GradBucket>(
      module, "GradBucket",
      "One bucket, as a communication hook sees it; offers what torch.distributed.GradBucket does.")
      .def("index", &GradBucket::index, "Position of the bucket in launch order.")
      .def("buffer", &GradBucket::buffer, "The flat 1-D tensor of all gradients in the bucket.")
      .def("gradients", &GradBucket::gradients, "One parameter-shaped window on buffer() per parameter.")
      .def("parameters", &GradBucket::parameters, "The parameters, in the order of gradients().")
      .def("is_last", &GradBucket::is_last, "Whether this bucket is the last to be reduced.")
      .def("set_buffer", &GradBucket::set_buffer, py::arg("buffer"), "Puts another tensor in buffer()'s place.");
}

void bind_reducer(py::module_& module) {
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer", "Averages gradients over ranks during backward; see csrc/reducer.h.")
      .def(
          py::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                      std::vector<bool> expect_sparse, c10::intrusive_ptr<c10d::ProcessGroup> group,
                      ReducerOptions options) {
            auto reducer = std::make_shared<Reducer>(
                std::move(parameters), std::move(names), std::move(expect_sparse), std::move(group),
                std::move(options));
            reducer->install_hooks();
            return reducer;
          }),
          py::arg("parameters"), py::arg("names"), py::arg("expect_sparse"), py::arg("group"),
          py::arg("options"))
      .def("remove_hooks", &Reducer::remove_hooks)
      .def("check_finished", &Reducer::check_finished)
      .def("note_forward_begin", &Reducer::note_forward_begin)
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs") = std::vector<at::Tensor>())
      .def("on_ready", &Reducer::on_ready, py::arg("index"), Release())
      .def("_rebuild_buckets", &Reducer::rebuild_buckets, Release())
      .def("set_buckets", &Reducer::set_buckets, py::arg("buckets"))
      .def("release_buckets", &Reducer::release_buckets)
      .def("buckets", &bucket_indices)
      .def("bucket_nbytes", &bucket_nbytes)
      .def("allocated_bytes", &allocated_bytes)
      .def("has_rebuilt", &Reducer::has_rebuilt)
      .def("observed_order", [](const Reducer& reducer) {
        ReadyOrder::Order order = reducer.observed_order();
        order.arrived.insert(order.arrived.end(), order.absent.begin(), order.absent.end());
        return order.arrived;
      })
      .def("assume_order_recorded", &Reducer::assume_order_recorded)
      .def(
          "set_comm_hook",
          [](Reducer& reducer, py::object state, py::object hook) {
            reducer.set_comm_hook(std::make_unique<PythonCommHook>(std::move(state), std::move(hook)));
          },
          py::arg("state"), py::arg("hook"))
      .def("has_comm_hook", &Reducer::has_comm_hook)
      .def("set_reduce_dtype", &Reducer::set_reduce_dtype, py::arg("dtype"))
      .def("set_static_graph", &Reducer::set_static_graph)
      .def("set_divisor", &Reducer::set_divisor, py::arg("divisor"))
      .def_property("sync_enabled", &Reducer::sync_enabled, &Reducer::set_sync_enabled)
      .def("set_optimizer_in_backward", &Reducer::set_optimizer_in_backward)
      .def("set_process_group", &Reducer::set_process_group, py::arg("group"))
      .def("reset", &Reducer::reset)
      .def("add_weight", &Reducer::add_weight, py::arg("weight"))
      .def(
          "add_post_backward_future",
          [](Reducer& reducer, const std::shared_ptr<torch::jit::PythonFutureWrapper>& future) {
            reducer.add_post_backward_future(future->fut);
          },
          py::arg("future"))
      .def(
          "set_stall_handler",
          [](Reducer& reducer, std::function<void(double, size_t)> handler) {
            reducer.set_stall_handler(std::move(handler));
          },
          py::arg("handler"))
      .def(
          "_run_allreduce_hook",
          [](Reducer& reducer, const GradBucket& bucket) { return to_python(reducer.run_allreduce(bucket)); },
          py::arg("bucket"))
      .def(
          "run_hook", [](Reducer& reducer, GradBucket& bucket) { return to_python(reducer.run_hook(bucket)); },
          py::arg("bucket"))
      .def("zero_bucket", &Reducer::zero_bucket, py::arg("index"))
      .def("shadow_backward", &Reducer::shadow_backward, Release())
      .def("phase", &Reducer::phase)
      .def("missing", &Reducer::missing)
      .def("_get_local_used_map", &Reducer::used_map, Release())
      .def("_ddp_graph_static", &Reducer::graph_is_static)
      .def("last_error", &Reducer::last_error)
      .def("iteration", [](const Reducer& reducer) { return reducer.trace().iteration(); })
      .def("install_hooks", &Reducer::install_hooks)
      .def("last_step", &last_step);
}

void bind_options(py::module_& module) {
  py::class_<ReducerOptions>(module, "ReducerOptions")
      .def(py::init<>())
      .def_readwrite("graph_mode", &ReducerOptions::graph_mode)
      .def_readwrite("reduction", &ReducerOptions::reduction)
      .def_readwrite("predivide_factor", &ReducerOptions::predivide_factor)
      .def_readwrite("reduce_dtype", &ReducerOptions::reduce_dtype)
      .def_readwrite("gradient_as_bucket_view", &ReducerOptions::gradient_as_bucket_view)
      .def_readwrite("skip_all_reduce_unused", &ReducerOptions::skip_all_reduce_unused)
      .def_readwrite("average_in_collective", &ReducerOptions::average_in_collective)
      .def_property(
          "bucket_caps", [](const ReducerOptions& options) { return options.caps.per_bucket; },
          [](ReducerOptions& options, std::vector<int64_t> caps) { options.caps.per_bucket = std::move(caps); })
      .def_property(
          "last_bucket_cap", [](const ReducerOptions& options) { return options.caps.last_bucket; },
          [](ReducerOptions& options, int64_t cap) { options.caps.last_bucket = cap; });
}

// The pure units, for their tests.
void bind_units(py::module_& module) {
  module.def(
      "assign_buckets",
      [](const std::vector<at::Tensor>& parameters, const std::vector<bool>& sparse,
         const std::vector<size_t>& order, std::vector<int64_t> per_bucket, int64_t last_bucket) {
        std::vector<ParameterInfo> infos;
        for (size_t i = 0; i < parameters.size(); ++i) {
          const at::Tensor& p = parameters[i];
          infos.push_back({static_cast<int64_t>(p.nbytes()), p.scalar_type(), p.device(), sparse[i]});
        }
        return assign_buckets(infos, order, {std::move(per_bucket), last_bucket});
      },
      py::arg("parameters"), py::arg("sparse"), py::arg("order"), py::arg("per_bucket"),
      py::arg("last_bucket") = 0);
  module.def(
      "scaled_copy",
      [](const at::Tensor& src, const at::Tensor& dst, double scale) {
        TORCH_CHECK(src.numel() == dst.numel() && src.is_contiguous() && dst.is_contiguous());
        CopySegment segment{src.const_data_ptr(), dst.mutable_data_ptr(), src.numel()};
        scaled_copy(&segment, 1, src.scalar_type(), dst.scalar_type(), scale);
      },
      py::arg("src"), py::arg("dst"), py::arg("scale"));
  module.def("has_cuda", [] {
#ifdef MINDDP_WITH_CUDA
    return true;
#else
    return false;
#endif
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "minddp's reducer. Private: use minddp.DistributedDataParallel.";
  bind_enums(module);
  bind_grad_bucket(module);
  bind_options(module);
  bind_reducer(module);
  bind_units(module);
#ifdef MINDDP_WITH_CUDA
  bind_cuda(module);
#endif
#ifdef MINDDP_WITH_SHM
  bind_shm(module);
#endif
}
