// Python's view of the reducer: pybind11 only, no logic of its own.
#include "bindings_comm_hook.h"
#include "cases/program_collectives.h"
#include "reducer/reducer.h"
#include "support/block_quantization.h"
#include "support/gil_release.h"
#include "support/graph_task.h"
#include "support/watched_wait.h"
#include "transport/ordered_allreduce.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace minddp {
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

std::vector<size_t> parameter_indices(const Bucket& bucket) {
  std::vector<size_t> indices;
  for (const Bucket::Slot& slot : *bucket.slots()) indices.push_back(slot.index);
  return indices;
}

Reducer::Buckets bucket_indices(const Reducer& reducer) {
  Reducer::Buckets buckets;
  for (const auto& bucket : reducer.state().buckets) buckets.push_back(parameter_indices(*bucket));
  return buckets;
}

py::dict bucket_times(const Reducer& reducer, const StepStamps& stamps, size_t index) {
  py::dict times;
  times["index"] = index;
  times["nbytes"] = reducer.state().buckets[index]->nbytes();
  times["ready_ns"] = stamps.at(index, BucketEvent::kReady);
  times["pack_begin_ns"] = stamps.at(index, BucketEvent::kPackBegin);
  times["launch_ns"] = stamps.at(index, BucketEvent::kLaunch);
  times["launch_end_ns"] = stamps.at(index, BucketEvent::kLaunchEnd);
  times["done_ns"] = stamps.done_at(index);
  times["unpack_begin_ns"] = stamps.at(index, BucketEvent::kUnpackBegin);
  times["unpack_end_ns"] = stamps.at(index, BucketEvent::kUnpackEnd);
  return times;
}

py::dict step_stamps(const Reducer& reducer, const StepStamps& stamps, const StepStamps::Moments& moments) {
  py::list buckets;
  for (size_t i = 0; i < stamps.buckets.size(); ++i) buckets.append(bucket_times(reducer, stamps, i));
  auto at = [&](StepEvent event) { return moments[size_t(event)]; };
  py::dict step;
  step["iteration"] = stamps.iteration;
  step["previous_end_ns"] = stamps.approach.previous_end;
  step["first_arrival_ns"] = stamps.approach.first_arrival;
  step["optimizer_ns"] = stamps.approach.optimizer;
  step["arrival_ns"] = stamps.approach.arrival;
  step["forward_begin_ns"] = at(StepEvent::kForwardBegin);
  step["forward_end_ns"] = at(StepEvent::kForwardEnd);
  step["backward_begin_ns"] = at(StepEvent::kBackwardBegin);
  step["backward_end_ns"] = at(StepEvent::kBackwardEnd);
  step["finalize_end_ns"] = at(StepEvent::kFinalizeEnd);
  step["buckets"] = buckets;
  return step;
}

py::dict last_step(const Reducer& reducer) {
  const Trace& trace = reducer.trace();
  py::dict step = step_stamps(reducer, trace, trace.whole ? trace.finished : trace.step);
  step["ready_ns"] = trace.ready;
  for (py::handle bucket : step["buckets"])
    bucket["parameters"] = parameter_indices(*reducer.state().buckets[bucket["index"].cast<size_t>()]);
  return step;
}

// Oldest first; only the last, which last_step() tells, knows parameters.
py::list recent_steps(const Reducer& reducer, size_t at_most) {
  const Trace& trace = reducer.trace();
  const size_t kept = trace.earlier.size() + trace.whole;
  py::list steps;
  for (size_t i = kept > at_most ? kept - at_most : 0; i < trace.earlier.size(); ++i) {
    const StepStamps& stamps = trace.earlier[(trace.oldest + i) % trace.earlier.size()];
    steps.append(step_stamps(reducer, stamps, stamps.step));
  }
  if (trace.whole && at_most > 0) steps.append(last_step(reducer));
  return steps;
}

std::vector<int64_t> bucket_nbytes(const Reducer& reducer) {
  std::vector<int64_t> sizes;
  for (const auto& bucket : reducer.state().buckets) sizes.push_back(bucket->nbytes());
  return sizes;
}

int64_t allocated_bytes(const Reducer& reducer) {
  int64_t total = 0;
  for (const auto& bucket : reducer.state().buckets)
    if (bucket->buffer().defined()) total += bucket->nbytes();
  return total;
}

std::vector<GradBucket> zero_buckets(const Reducer& reducer) {
  std::vector<GradBucket> buckets;
  for (size_t i = 0; i < reducer.state().buckets.size(); ++i)
    buckets.emplace_back(reducer.state(), i, reducer.state().buckets[i]->zeros());
  return buckets;
}

// A collective is never started under the GIL: Gloo's threads may hold its lock while they wait for the GIL.
py::object run_allreduce(Reducer& reducer, const GradBucket& bucket) {
  c10::intrusive_ptr<Future> future;
  {
    py::gil_scoped_release release;
    future = reducer.all_reduce(bucket.index(), bucket.buffer()).future;
  }
  return to_python(std::move(future));
}

py::object run_hook(Reducer& reducer, const GradBucket& bucket) {
  c10::intrusive_ptr<Future> future;
  {
    py::gil_scoped_release release;
    future = reducer.reduce(bucket.index(), bucket.buffer()).future;
  }
  return to_python(std::move(future));
}

py::object shadow_used_map(Reducer& reducer) {
  c10::intrusive_ptr<Future> future;
  {
    py::gil_scoped_release release;
    future = reducer.shadow_used_map();
  }
  return future ? to_python(std::move(future)) : py::none();
}

void set_comm_hook(Reducer& reducer, py::object state, py::object hook) {
  reducer.set_comm_hook(std::make_unique<PythonCommHook>(reducer.state(), std::move(state), std::move(hook)));
}

void set_scales(Reducer& reducer, double before, double after) {
  reducer.pre_scale = before;
  reducer.post_scale = after;
}

// A thread that asks for the GIL then is ended, inside of frames that must not be.
bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// A watcher that Ctrl-C interrupts is called once more, with -1 seconds: the wait is over, its collective is not.
// Nobody watches while Python ends.
template <typename... Rest>
std::function<void(double, Rest...)> hears_interrupts(std::function<void(double, Rest...)> watcher) {
  if (!watcher) return nullptr;
  return [watcher = std::move(watcher)](double seconds, Rest... rest) {
    if (python_ends()) return;
    try {
      watcher(seconds, rest...);
    } catch (const py::error_already_set& error) {
      bool interrupts = [&] {
        py::gil_scoped_acquire gil;
        return error.matches(PyExc_KeyboardInterrupt);
      }();
      if (interrupts) watcher(-1, rest...);
      throw;
    }
  };
}

// What is not given stays as it is.
void set_callbacks(Reducer& reducer, std::function<void()> after_last_launch, std::function<double()> post_scale,
    std::function<void(double, size_t, const std::string&)> on_stall,
    std::function<void(const std::string&)> on_interrupted,
    std::function<void(const std::vector<size_t>&)> on_adopted) {
  ReducerCallbacks& callbacks = reducer.callbacks();
  if (after_last_launch) callbacks.after_last_launch = std::move(after_last_launch);
  if (post_scale) callbacks.post_scale = std::move(post_scale);
  if (on_stall) callbacks.on_stall = hears_interrupts(std::move(on_stall));
  if (on_interrupted) callbacks.on_interrupted = std::move(on_interrupted);
  if (on_adopted) callbacks.on_adopted = std::move(on_adopted);
}

// Where an iteration is, for whoever asks while it runs on other threads: reads what never moves in memory, and may
// see a state that is half over.
py::dict position(const Reducer& reducer) {
  const Trace& trace = reducer.trace();
  py::dict place;
  place["iteration"] = trace.iteration;
  place["moments"] = trace.step;
  place["phase"] = reducer.state().iteration.phase;
  place["next_bucket"] = reducer.state().iteration.next_bucket;
  place["missing"] = reducer.missing();
  return place;
}

// Collectives on a process group of any kind, one that is written in Python included. For the host, each is over when
// it returns. For a device, it may only be enqueued, and the current streams wait for it.
// `on_stall` (watched_wait.h): for groups whose works have futures of torch's own.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const OnStall& on_stall) {
  if (!on_stall) return void(work->wait());
  wait_watching(*work->getFuture(), hears_interrupts(on_stall));
  order_streams(*work);
}

// The same of a communication hook's future.
void wait_for_future(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const OnStall& on_stall) {
  py::gil_scoped_release release;
  if (on_stall) return wait_watching(*future->fut, hears_interrupts(on_stall));
  future->fut->waitAndThrow();
}

// The same memory, without a Python object. A group's thread that lets go of a tensor with one takes the GIL: Gloo's
// under a mutex, for which a call through a Python subclass of ProcessGroup waits while it holds the GIL.
std::vector<at::Tensor> without_python(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors) aliases.push_back(tensor.detach());
  return aliases;
}

void group_allgather(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<at::Tensor>& outputs,
    const at::Tensor& input, const OnStall& on_stall) {
  std::vector<std::vector<at::Tensor>> all = {without_python(outputs)};
  std::vector<at::Tensor> inputs = without_python({input});
  wait_for(group->allgather(all, inputs), on_stall);
}

void group_broadcast(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const at::Tensor& tensor, int64_t src,
    const OnStall& on_stall) {
  std::vector<at::Tensor> tensors = without_python({tensor});
  c10d::BroadcastOptions options;
  options.rootRank = src;
  wait_for(group->broadcast(tensors, options), on_stall);
}

void bind_enums(py::module_& module) {
  py::enum_<Phase>(module, "Phase")
      .value("IDLE", Phase::kIdle)
      .value("BACKWARD", Phase::kBackward)
      .value("INCOMPLETE", Phase::kIncomplete)
      .value("LAUNCHED", Phase::kLaunched);
  py::enum_<GraphMode>(module, "GraphMode")
      .value("ALL_USED", GraphMode::kAllUsed)
      .value("FIND_UNUSED", GraphMode::kFindUnused)
      .value("STATIC", GraphMode::kStatic);
}

void bind_grad_bucket(py::module_& module) {
  py::class_<GradBucket>(module, "GradBucket",
      "One bucket, as a communication hook sees it; offers what torch.distributed.GradBucket does.")
      .def("index", &GradBucket::index, "Position of the bucket in launch order.")
      .def("buffer", &GradBucket::buffer, "The flat 1-D tensor of all gradients in the bucket.")
      .def("gradients", &GradBucket::gradients, "One parameter-shaped view on buffer() per parameter.")
      .def("parameters", &GradBucket::parameters, "The parameters, in the order of gradients().")
      .def("is_last", &GradBucket::is_last, "Whether this bucket is the last to be reduced.")
      .def("set_buffer", &GradBucket::set_buffer, py::arg("buffer"), "Puts another tensor in buffer()'s place.");
}

// By keyword, each once: what is not given has its default, and what does not exist is an error.
ReducerOptions options_of(const py::kwargs& given) {
  ReducerOptions options;
  size_t known = 0;
  auto read = [&](const char* name, auto& field) {
    if (!given.contains(name)) return;
    field = given[name].cast<std::decay_t<decltype(field)>>();
    ++known;
  };
  read("graph_mode", options.graph_mode);
  read("wire_dtypes", options.wire_dtypes);
  read("ordered", options.ordered);
  auto quantization = std::make_shared<Quantization>();
  read("residuals", quantization->residuals);
  read("stochastic", quantization->stochastic);
  read("seed", quantization->seed);
  options.quantization = std::move(quantization);
  read("warns_of_overflow", options.warns_of_overflow);
  read("gradient_as_bucket_view", options.gradient_as_bucket_view);
  read("lazy_bucket_allocation", options.lazy_bucket_allocation);
  read("any_grad_dtype", options.any_grad_dtype);
  read("refuses_earlier_sums", options.refuses_earlier_sums);
  read("always_reduce", options.always_reduce);
  read("not_in_contexts", options.not_in_contexts);
  if (known != given.size()) throw py::type_error("ReducerOptions: an option that does not exist");
  return options;
}

void bind_options(py::module_& module) {
  using Backend = HostOrderedAllreduce::Backend;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Ordered = std::shared_ptr<OrderedAllreduce>;
  py::class_<OrderedAllreduce, Ordered>(
      module, "OrderedAllreduce", "Sums in the order of ranks; see csrc/transport/ordered_allreduce.h.")
      .def_static(
          "on_host",
          [](Backend scatters, Backend gathers, int64_t chunk_bytes) -> Ordered {
            auto* made = new HostOrderedAllreduce(std::move(scatters), std::move(gathers), chunk_bytes);
            return Ordered(made, [](OrderedAllreduce* ended) {
              const GilRelease release;  // it joins its backends' threads
              delete ended;
            });
          },
          py::arg("scatters"), py::arg("gathers"), py::arg("chunk_bytes"))
      .def_static(
          "on_device",
          [](Group group, int64_t chunk_bytes) -> Ordered {
            return std::make_shared<DeviceOrderedAllreduce>(std::move(group), chunk_bytes);
          },
          py::arg("group"), py::arg("chunk_bytes"));
  py::class_<ReducerOptions>(module, "ReducerOptions", "What a reducer is, as long as it lives; see csrc/reducer.")
      .def(py::init(&options_of));
}

void bind_reducer(py::module_& module) {
  using Parameters = std::vector<at::Tensor>;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer", "Averages gradients over ranks during backward; see csrc/reducer/reducer.h.")
      .def(py::init([](Parameters parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
                        Group group, ReducerOptions options, const Reducer::Buckets& buckets) {
        auto reducer = std::make_shared<Reducer>(std::move(parameters), std::move(names), std::move(expect_sparse),
            std::move(group), std::move(options), buckets);
        reducer->install_hooks();
        return reducer;
      }),
          py::arg("parameters"), py::arg("names"), py::arg("expect_sparse"), py::arg("group"), py::arg("options"),
          py::arg("buckets"))
      .def("renew_hooks", &Reducer::renew_hooks)
      .def("note_changed", &Reducer::note_changed, py::arg("parameters"), py::arg("why"))
      .def("remove_hooks", &Reducer::remove_hooks)
      .def("take_over", &Reducer::take_over, py::arg("before"))
      .def("check_finished", &Reducer::check_finished)
      .def("arrive", &Reducer::arrive, py::arg("optimizer_ns"))
      .def("begin_forward", &Reducer::begin_forward)
      .def("end_forward", &Reducer::end_forward, py::arg("outputs"), py::arg("synchronized"))
      .def(
          "prepare_for_backward",
          [](Reducer& reducer, const at::Tensor& output) { reducer.prepare_for_backward({output}); },
          py::arg("output"))
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs") = Parameters())
      .def("set_buckets", &Reducer::set_buckets, py::arg("buckets"))
      .def("release_buckets", &Reducer::release_buckets)
      .def("buckets", &bucket_indices)
      .def("bucket_nbytes", &bucket_nbytes)
      .def("allocated_bytes", &allocated_bytes)
      .def("set_comm_hook", &set_comm_hook, py::arg("state"), py::arg("hook"))
      .def("_run_allreduce_hook", &run_allreduce, py::arg("bucket"))
      .def("run_hook", &run_hook, py::arg("bucket"))
      .def("_get_zeros_like_grad_buckets", &zero_buckets)
      .def("shadow_used_map", &shadow_used_map)
      .def(
          "wait_after_backward", [](Reducer& r, const PythonFuture& future) { r.wait_after_backward(future->fut); },
          py::arg("future"))
      .def(
          "set_skip_all_reduce_unused", [](Reducer& r, bool skips) { r.skip_all_reduce_unused = skips; },
          py::arg("skips"))
      .def(
          "set_manual_finalization", [](Reducer& r, bool required) { r.manual_finalization = required; },
          py::arg("required"))
      .def("expects_backward", &Reducer::expects_backward)
      .def("ready_to_finalize", &Reducer::ready_to_finalize)
      .def("finalize_backward_manual", &Reducer::finalize_backward_manual, Release())
      .def("set_scales", &set_scales, py::arg("before"), py::arg("after"))
      .def("set_callbacks", &set_callbacks, py::arg("after_last_launch") = nullptr, py::arg("post_scale") = nullptr,
          py::arg("on_stall") = nullptr, py::arg("on_interrupted") = nullptr, py::arg("on_adopted") = nullptr)
      .def("abort_iteration", &Reducer::abort_iteration)
      .def("bypassed", [](const Reducer& r) { return r.state().grads.bypassed(r.state().parameters); })
      .def("left_local", [](const Reducer& r) { return r.state().grads.left_local(); })
      .def("adopt_gradients", &Reducer::adopt_gradients)
      .def("share", &Reducer::share, py::arg("other"), py::arg("views"))
      .def(
          "arrived_in", [](const Reducer& r, size_t index) { return r.state().grads.arrived_in(index); },
          py::arg("index"))
      .def(
          "touched_in", [](const Reducer& r, size_t index) { return r.state().grads.touched_in(index); },
          py::arg("index"))
      .def("averaged_since", &Reducer::averaged_since, py::arg("index"), py::arg("backward"))
      .def_readwrite("sync_enabled", &Reducer::sync_enabled)
      .def_readwrite("optimizer_in_backward", &Reducer::optimizer_in_backward)
      .def("phase", [](const Reducer& r) { return r.state().iteration.phase; })
      .def("interrupted", [](const Reducer& r) { return r.state().grads.is_interrupted(); })
      .def("in_backward", &Reducer::in_backward)
      .def("missing", &Reducer::missing)
      .def("has_recorded", [](const Reducer& r) { return r.state().learned.iterations > 0; })
      .def("ended", [](const Reducer& r) { return r.state().learned.iterations; })
      .def("iteration", [](const Reducer& r) { return r.trace().iteration; })
      .def(
          "_get_local_used_map", [](Reducer& r) { return at::tensor(r.used_map(), at::kInt); }, Release())
      .def("_ddp_graph_static", &Reducer::graph_is_static)
      .def("last_error", [](const Reducer& r) { return r.state().last_error; })
      .def("position", &position)
      .def("program_communicates",
          [](Reducer& r) { return r.program_collectives() && r.program_collectives()->found(); })
      .def("last_step", &last_step)
      .def("recent_steps", &recent_steps, py::arg("at_most"));
}

// Of the group's backend for CPU tensors: torch's Python interface tells only Gloo's.
std::chrono::milliseconds cpu_timeout(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
}

// For tests: the copy, and its readable version.
void scaled_copy_tensors(const at::Tensor& src, const at::Tensor& dst, double scale, bool reference) {
  TORCH_CHECK(src.numel() == dst.numel() && src.is_contiguous() && dst.is_contiguous());
  CopySegment segment{src.const_data_ptr(), dst.mutable_data_ptr(), src.numel()};
  if (reference)
    scaled_copy_reference(segment, src.device(), src.scalar_type(), dst.scalar_type(), scale);
  else
    scaled_copy({segment}, src.device(), src.scalar_type(), dst.scalar_type(), scale);
}

// For tests: blocks of codes, on the tensors' device.
void bind_block_quantization(py::module_& module) {
  using Lost = std::optional<at::Tensor>;
  module.def(
      "quantize",
      [](const at::Tensor& src, double scale, const Lost& lost, const at::Tensor& blocks) {
        quantize(src, scale, lost.value_or(at::Tensor()), Rounding(), blocks);
      },
      Release(), py::arg("src"), py::arg("scale"), py::arg("lost"), py::arg("blocks"));
  module.def("dequantize", &dequantize, Release(), py::arg("blocks"), py::arg("scale"), py::arg("dst"));
  module.def(
      "add_quantized",
      [](const std::vector<at::Tensor>& pieces, const Lost& lost) {
        add_quantized(pieces, Rounding(), lost.value_or(at::Tensor()));
      },
      Release(), py::arg("pieces"), py::arg("lost"));
}

}  // namespace
}  // namespace minddp

PYBIND11_MODULE(_C, module) {
  using namespace minddp;
  module.doc() = "minddp's reducer. Private: use minddp.DistributedDataParallel.";
  bind_enums(module);
  bind_grad_bucket(module);
  bind_options(module);
  bind_reducer(module);
  module.def("backward_looks_ahead", [] { return GraphTaskNodes().looks_ahead(); });
  module.def("cpu_timeout", &cpu_timeout, py::arg("group"));
  module.def("set_look_seconds", [](double seconds) { look_seconds = seconds; }, py::arg("seconds"));
  module.def("wait_for", &wait_for, Release(), py::arg("work"), py::arg("on_stall") = nullptr);
  module.def("wait_for_future", &wait_for_future, py::arg("future"), py::arg("on_stall") = nullptr);
  module.def("group_allgather", &group_allgather, Release(), py::arg("group"), py::arg("outputs"), py::arg("input"),
      py::arg("on_stall") = nullptr);
  module.def("group_broadcast", &group_broadcast, Release(), py::arg("group"), py::arg("tensor"), py::arg("src"),
      py::arg("on_stall") = nullptr);
  module.def("scaled_copy", &scaled_copy_tensors, py::arg("src"), py::arg("dst"), py::arg("scale"),
      py::arg("reference") = false);
  bind_block_quantization(module);
#ifdef MINDDP_WITH_CUDA
  bind_cuda(module);
#endif
#ifdef MINDDP_WITH_SHM
  bind_shm(module);
#endif
}
