// Python's view of the core: pybind11 only, no logic of its own. Each companion binds itself (bindings.h).
#include "bindings.h"

#include "copy/in_memory.h"
#include "reducer/program_collectives.h"
#include "reducer/reducer.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

namespace minddp {
void bind_stamps(py::module_& module);
namespace {

using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;  // torch.futures.Future

// A collective is never started under the GIL: Gloo's threads may hold its lock while they wait for the GIL. Null
// becomes None.
template <class Start>
py::object without_gil(const Start& start) {
  c10::intrusive_ptr<Future> future;
  {
    py::gil_scoped_release release;
    future = start();
  }
  return future ? py::cast(std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future))) : py::none();
}

std::string type_name(const py::object& object) { return py::str(py::type::of(object).attr("__name__")); }

// Runs on an autograd thread and takes the GIL; see reducer.h for the order of locks.
class PythonCommHook : public CommHook {
 public:
  PythonCommHook(const ReducerState& reducer, py::object state, py::object hook)
      : CommHook(reducer), state_(std::move(state)), hook_(std::move(hook)) {}

  ~PythonCommHook() override {
    py::gil_scoped_acquire gil;
    state_ = py::object();
    hook_ = py::object();
  }

  c10::intrusive_ptr<Future> run(GradBucket& bucket) override {
    py::gil_scoped_acquire gil;
    py::object answer = hook_(state_, py::cast(bucket, py::return_value_policy::copy));
    // A cast alone would make a null pointer of None, which a hook without `return` gives.
    if (py::isinstance<torch::jit::PythonFutureWrapper>(answer)) return answer.cast<PythonFuture>()->fut;
    TORCH_CHECK(false, "callback must return a torch.futures.Future object, but got ", type_name(answer),
        ": the communication hook's future holds one tensor; a hook that reduces nothing returns a completed one.");
  }

  // An exception that was set on a future in Python is its value; only Python's wrapper of the future raises it.
  at::Tensor result(const c10::IValue& value) override {
    if (value.isTensor()) return value.toTensor();
    if (value.isTensorList() && !value.toTensorList().empty()) return value.toTensorVector()[0];
    TORCH_CHECK(value.isPyObject(), "The communication hook's future holds a ", value.tagKind(),
        ", expected a single tensor.");
    py::gil_scoped_acquire gil;
    py::object object = torch::jit::toPyObject(value);
    if (PyExceptionInstance_Check(object.ptr())) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())), object.ptr());
      throw py::error_already_set();
    }
    if (PyList_Check(object.ptr()) && PyList_Size(object.ptr()) > 0) object = object.attr("__getitem__")(0);
    TORCH_CHECK(THPVariable_Check(object.ptr()), "The communication hook's future holds a ", type_name(object),
        ", expected a single tensor.");
    return object.cast<at::Tensor>();
  }

 private:
  py::object state_;
  py::object hook_;
};

std::vector<std::vector<size_t>> bucket_indices(const Reducer& reducer) {
  Reducer::Buckets buckets;
  for (const auto& bucket : reducer.buckets) buckets.push_back(parameter_indices(*bucket));
  return buckets;
}

std::vector<int64_t> bucket_nbytes(const Reducer& reducer) {
  std::vector<int64_t> sizes;
  for (const auto& bucket : reducer.buckets) sizes.push_back(bucket->nbytes());
  return sizes;
}

int64_t allocated_bytes(const Reducer& reducer) {
  int64_t total = 0;
  for (const auto& bucket : reducer.buckets)
    if (bucket->buffer().defined()) total += bucket->nbytes();
  return total;
}

std::vector<GradBucket> zero_buckets(const Reducer& reducer) {
  std::vector<GradBucket> zeros;
  for (size_t i = 0; i < reducer.buckets.size(); ++i) zeros.emplace_back(reducer, i, reducer.buckets[i]->zeros());
  return zeros;
}

// May be asked while an iteration runs on other threads: reads what never moves in memory, and may see a state that
// is half over.
py::dict position(const Reducer& reducer) {
  py::dict place;
  place["iteration"] = reducer.learned.begun;
  place["phase"] = reducer.iteration.phase;
  place["next_bucket"] = reducer.iteration.next_bucket;
  place["missing"] = reducer.missing();
  return place;
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

// Functions of Python's, each for one point of the seam. A function that is not given stays as it is.
class Callbacks : public Case {
 public:
  void on(Moment moment) override {
    if (moment == Moment::kLastLaunch && after_last_launch) after_last_launch();
  }
  bool needs_buckets() const override { return post_scale != nullptr; }
  std::optional<double> scale_of_results() override {
    return post_scale ? std::optional(post_scale()) : std::nullopt;
  }
  void on_interrupted(int, bool) override {  // if nothing was sent, the program may try the same batch again
    if (interrupted && state().iteration.phase == Phase::kBackward) interrupted(state().last_error);
  }
  bool watches() const override { return stall != nullptr; }
  void on_stall(double seconds, size_t bucket, const std::string& error) override {
    if (stall) stall(seconds, bucket, error);
  }

  std::function<void()> after_last_launch;
  std::function<double()> post_scale;
  std::function<void(const std::string&)> interrupted;
  std::function<void(double, size_t, const std::string&)> stall;
};

void set_callbacks(Callbacks& callbacks, decltype(Callbacks::after_last_launch) after_last_launch,
    decltype(Callbacks::post_scale) post_scale, decltype(Callbacks::stall) on_stall,
    decltype(Callbacks::interrupted) on_interrupted) {
  if (after_last_launch) callbacks.after_last_launch = std::move(after_last_launch);
  if (post_scale) callbacks.post_scale = std::move(post_scale);
  if (on_stall) callbacks.stall = hears_interrupts(std::move(on_stall));
  if (on_interrupted) callbacks.interrupted = std::move(on_interrupted);
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

// The places of those that torch's operators cannot read: on the meta device, or with a storage that is too small.
std::vector<size_t> unreadable(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> found;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].layout() == at::kStrided && !is_readable(tensors[i])) found.push_back(i);
  return found;
}

// What a case offers may be asked of its reducer, such as last_step().
py::object of_a_case(const Reducer& reducer, const std::string& name) {
  for (const auto& added : reducer.cases()) {
    py::object found = py::getattr(py::cast(added), name.c_str(), py::none());
    if (!found.is_none()) return found;
  }
  throw py::attribute_error("the reducer has no '" + name +
      "', and no companion that is attached to it either. Are "
      "MINDDP_PLAIN or MINDDP_WITHOUT set?");
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

void bind_cases(py::module_& module) {
  py::class_<Case, std::shared_ptr<Case>>(
      module, "Case", "What a companion adds to a reducer; see csrc/reducer/events.h.");
  bind_case<Callbacks>(module, "Callbacks")
      .def(py::init())
      .def("set_callbacks", &set_callbacks, py::arg("after_last_launch") = nullptr, py::arg("post_scale") = nullptr,
          py::arg("on_stall") = nullptr, py::arg("on_interrupted") = nullptr);
  bind_case<ProgramCollectives>(module, "ProgramCollectives")
      .def(py::init())
      .def("found", &ProgramCollectives::found);
}

void bind_reducer(py::module_& module) {
  using Parameters = std::vector<at::Tensor>;
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer", "Averages gradients over ranks during backward; see csrc/reducer/reducer.h.")
      .def(py::init(
               [](Parameters parameters, std::vector<std::string> names, c10::intrusive_ptr<c10d::ProcessGroup> group,
                   GraphMode graph_mode, std::vector<at::ScalarType> wire_dtypes, bool always_reduce) {
                 return std::make_shared<Reducer>(std::move(parameters), std::move(names), std::move(group),
                     ReducerOptions{graph_mode, std::move(wire_dtypes), always_reduce});
               }),
          py::arg("parameters"), py::arg("names"), given("group"), py::arg("graph_mode") = GraphMode::kAllUsed,
          py::arg("wire_dtypes") = std::vector<at::ScalarType>(), py::arg("always_reduce") = false)
      .def("__getattr__", &of_a_case, py::arg("name"))
      .def_readonly("names", &Reducer::names)
      .def_readonly("rank", &Reducer::rank)
      .def("add", &Reducer::add, given("case"))
      .def("set_buckets", &Reducer::set_buckets, py::arg("buckets"))
      .def("renew_hooks", &Reducer::renew_hooks)
      .def("remove_hooks", &Reducer::remove_hooks)
      .def("take_over", &Reducer::take_over, py::arg("before"))
      .def("check_finished", &Reducer::check_finished)
      .def("begin_forward", &Reducer::begin_forward)
      .def("end_forward", &Reducer::end_forward, py::arg("outputs"), py::arg("synchronized"))
      .def(
          "prepare_for_backward",
          [](Reducer& reducer, const at::Tensor& output) { reducer.prepare_for_backward({output}); },
          py::arg("output"))
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("outputs") = Parameters())
      .def("release_buckets", &Reducer::release_buckets)
      .def("buckets", &bucket_indices)
      .def("bucket_nbytes", &bucket_nbytes)
      .def("allocated_bytes", &allocated_bytes)
      .def(
          "set_comm_hook",
          [](Reducer& reducer, py::object state, py::object hook) {
            reducer.set_comm_hook(std::make_unique<PythonCommHook>(reducer, std::move(state), std::move(hook)));
          },
          py::arg("state"), py::arg("hook"))
      .def(
          "_run_allreduce_hook",
          [](Reducer& reducer, const GradBucket& bucket) {
            return without_gil([&] { return reducer.all_reduce(bucket.index(), bucket.buffer()).future; });
          },
          py::arg("bucket"))
      .def(
          "run_hook",
          [](Reducer& reducer, const GradBucket& bucket) {
            return without_gil([&] { return reducer.reduce(bucket.index(), bucket.buffer()).future; });
          },
          py::arg("bucket"))
      .def("_get_zeros_like_grad_buckets", &zero_buckets)
      .def("shadow_used_map", [](Reducer& reducer) { return without_gil([&] { return reducer.shadow_used_map(); }); })
      .def(
          "wait_after_backward", [](Reducer& r, const PythonFuture& future) { r.wait_after_backward(future->fut); },
          given("future"))
      .def(
          "set_skip_all_reduce_unused", [](Reducer& r, bool skips) { r.skip_all_reduce_unused = skips; },
          py::arg("skips"))
      .def_readwrite("manual_finalization", &Reducer::manual_finalization)
      .def(
          "set_scales", [](Reducer& r, double before, double after) { r.pre_scale = before, r.post_scale = after; },
          py::arg("before"), py::arg("after"))
      .def("expects_backward", &Reducer::expects_backward)
      .def("ready_to_finalize", &Reducer::ready_to_finalize)
      .def("finalize_backward_manual", &Reducer::finalize_backward_manual, Release())
      .def("abort_iteration", &Reducer::abort_iteration)
      .def_readwrite("sync_enabled", &Reducer::sync_enabled)
      .def_readwrite("optimizer_in_backward", &Reducer::optimizer_in_backward)
      .def("phase", [](const Reducer& r) { return r.iteration.phase; })
      .def("in_backward", &Reducer::in_backward)
      .def("missing", &Reducer::missing)
      .def(
          "arrived_in", [](const Reducer& r, size_t index) { return r.arrived_in.at(index); }, py::arg("index"))
      .def("arrival_order", [](const Reducer& r) { return r.learned.order; })
      .def("has_recorded", [](const Reducer& r) { return r.learned.iterations > 0; })
      .def("ended", [](const Reducer& r) { return r.learned.iterations; })
      .def("iteration", [](const Reducer& r) { return r.learned.begun; })
      .def(
          "_get_local_used_map", [](Reducer& r) { return at::tensor(r.sum_of_used_maps(), at::kInt); }, Release())
      .def("_ddp_graph_static", &Reducer::graph_is_static)
      .def("last_error", [](const Reducer& r) { return r.last_error; })
      .def("position", &position);
}

// For tests and benchmarks: each source to the destination beside it, zeros if there is none. `reference`: by the
// readable version.
void scaled_copy_tensors(const std::vector<std::optional<at::Tensor>>& sources,
    const std::vector<at::Tensor>& destinations, at::ScalarType src_type, double scale, bool reference) {
  TORCH_CHECK(
      !sources.empty() && sources.size() == destinations.size(), "as many sources as destinations, one or more");
  const at::Device device = destinations[0].device();
  const at::ScalarType dst_type = destinations[0].scalar_type();
  const auto check = [&](const at::Tensor& tensor, at::ScalarType type, int64_t numel) {
    TORCH_CHECK(lies_in_memory(tensor) && tensor.is_contiguous() && tensor.device() == device &&
            tensor.scalar_type() == type && tensor.numel() == numel,
        "expected ", numel, " elements of ", type, " on ", device, ", found ", tensor.toString(), tensor.sizes());
  };
  std::vector<CopySegment> segments;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& dst = destinations[i];
    check(dst, dst_type, dst.numel());
    if (sources[i]) check(*sources[i], src_type, dst.numel());
    segments.push_back({sources[i] ? sources[i]->const_data_ptr() : nullptr, dst.mutable_data_ptr(), dst.numel()});
  }
  if (!reference) return scaled_copy(segments, device, src_type, dst_type, scale);
  for (const CopySegment& s : segments) scaled_copy_reference(s, device, src_type, dst_type, scale);
}

}  // namespace
}  // namespace minddp

PYBIND11_MODULE(_C, module) {
  using namespace minddp;
  module.doc() = "minddp's reducer. Private: use minddp.DistributedDataParallel.";
  bind_enums(module);
  bind_grad_bucket(module);
  bind_cases(module);
  bind_stamps(module);
  bind_reducer(module);
  module.def("set_look_seconds", [](double seconds) { look_seconds = seconds; }, py::arg("seconds"));
  module.def("wait_for", &wait_for, Release(), given("work"), py::arg("on_stall") = nullptr);
  module.def("wait_for_future", &wait_for_future, given("future"), py::arg("on_stall") = nullptr);
  module.def("group_allgather", &group_allgather, Release(), given("group"), py::arg("outputs"), py::arg("input"),
      py::arg("on_stall") = nullptr);
  module.def("group_broadcast", &group_broadcast, Release(), given("group"), py::arg("tensor"), py::arg("src"),
      py::arg("on_stall") = nullptr);
  module.def("unreadable", &unreadable, py::arg("tensors"));
  module.def("scaled_copy", &scaled_copy_tensors, Release(), py::arg("sources"), py::arg("destinations"),
      py::arg("src_type"), py::arg("scale") = 1.0, py::arg("reference") = false);
  for (const auto& [name, bind] : Companion::all()) {
    py::module_ companion = module.def_submodule(name);
    bind(companion);
  }
}
