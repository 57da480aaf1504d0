// Python's view of the reducer's stamps.
#include "bindings.h"
#include "reducer/stamps.h"

namespace minddp {
namespace {

py::dict bucket_times(const ReducerState& reducer, const StepStamps& step, size_t index) {
  py::dict times;
  times["index"] = index;
  times["nbytes"] = reducer.buckets[index]->nbytes();
  times["ready_ns"] = step.at(index, BucketMoment::kReady);
  times["pack_begin_ns"] = step.at(index, BucketMoment::kPack);
  times["launch_ns"] = step.at(index, BucketMoment::kLaunch);
  times["launch_end_ns"] = step.at(index, BucketMoment::kLaunched);
  times["done_ns"] = step.done_at(index);
  times["unpack_begin_ns"] = step.at(index, BucketMoment::kUnpack);
  times["unpack_end_ns"] = step.at(index, BucketMoment::kUnpacked);
  if (!reducer.buckets[index]->device().is_cpu()) times["on_device"] = true;  // stamps are the host's, which enqueues
  return times;
}

py::dict as_dict(const ReducerState& reducer, const StepStamps& step, const StepStamps::Moments& moments) {
  py::list buckets;
  for (size_t i = 0; i < step.buckets.size(); ++i) buckets.append(bucket_times(reducer, step, i));
  auto at = [&](StepEvent event) { return moments[size_t(event)]; };
  py::dict found;
  found["iteration"] = step.iteration;
  found["previous_end_ns"] = step.approach.previous_end;
  found["first_arrival_ns"] = step.approach.first_arrival;
  found["optimizer_ns"] = step.approach.optimizer;
  found["arrival_ns"] = step.approach.arrival;
  found["forward_begin_ns"] = at(StepEvent::kForwardBegin);
  found["forward_end_ns"] = at(StepEvent::kForwardEnd);
  found["backward_begin_ns"] = at(StepEvent::kBackwardBegin);
  found["backward_end_ns"] = at(StepEvent::kBackwardEnd);
  found["finalize_end_ns"] = at(StepEvent::kFinalizeEnd);
  found["buckets"] = buckets;
  return found;
}

py::dict last_step(const Stamps& stamps) {
  const Trace& trace = stamps.trace();
  py::dict step = as_dict(stamps.reducer(), trace, trace.whole ? trace.finished : trace.step);
  step["ready_ns"] = trace.ready;
  for (py::handle bucket : step["buckets"])
    bucket["parameters"] = parameter_indices(*stamps.reducer().buckets[bucket["index"].cast<size_t>()]);
  return step;
}

// Oldest first. Only the newest, which last_step() returns, has parameters.
py::list recent_steps(const Stamps& stamps, size_t at_most) {
  const Trace& trace = stamps.trace();
  const size_t kept = trace.earlier.size() + trace.whole;
  py::list steps;
  for (size_t i = kept > at_most ? kept - at_most : 0; i < trace.earlier.size(); ++i)
    steps.append(as_dict(stamps.reducer(), trace.earlier[i], trace.earlier[i].step));
  if (trace.whole && at_most > 0) steps.append(last_step(stamps));
  return steps;
}

}  // namespace

void bind_stamps(py::module_& module) {
  bind_case<Stamps>(module, "Stamps")
      .def(py::init())
      .def("arrive", &Stamps::arrive, py::arg("optimizer_ns"))
      .def("last_step", &last_step)
      .def("recent_steps", &recent_steps, py::arg("at_most") = 32);
}

}  // namespace minddp
