#include "reducer.h"

#include "support/completed.h"
#include "support/end_of_backward.h"
#include "support/errors.h"
#include "support/own_windows.h"
#include "support/watched_wait.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

namespace minddp {

// Buckets are known from the start; hooks come with install_hooks(), once somebody owns the reducer.
Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
    c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options, const Buckets& buckets)
    : parameters_(std::move(parameters)), names_(std::move(names)), expect_sparse_(std::move(expect_sparse)),
      group_(std::move(group)), any_sparse_(std::ranges::count(expect_sparse_, true) > 0),
      options_(std::move(options)), place_(parameters_.size()), usage_(parameters_.size()),
      used_map_(options_.graph_mode, alone()), context_(parameters_), sums_(parameters_.size()),
      trace_(std::make_shared<Trace>()) {
  set_buckets(buckets);
}

// Hooks hold the reducer weakly: autograd's nodes keep the hooks, the reducer keeps the parameters, and parameters
// keep their nodes. A strong reference would close that circle, and no wrapper would ever be freed.
void Reducer::install_hooks() {
  OnReady on_ready = [weak = weak_from_this()](size_t index, const at::Tensor& contribution) {
    if (auto self = weak.lock()) self->on_ready(index, contribution);
  };
  BeforeGrowth before_growth = [weak = weak_from_this()](size_t index) {
    auto self = weak.lock();
    if (!self || ContextGradients::has_current()) return;
    auto lock = self->guard();
    self->refuse_earlier_sum(index);
  };
  hooks_ = std::make_unique<GradHooks>(parameters_, on_ready, options_.sums_anew ? before_growth : nullptr);
}

// A parameter may stand at another index than before: registered anew, frozen, or in another order of buckets.
void Reducer::take_over(const Reducer& before) {
  const std::vector<int64_t> theirs = indices_in(before.parameters_, parameters_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (theirs[i] < 0) continue;
    usage_.take_over(i, before.usage_, theirs[i]);
    if (group_ == before.group_) sums_.take_over(i, before.sums_, theirs[i]);
  }
  interrupted_in_ = before.interrupted_in_;
}

// Buckets are made anew, never resized.
void Reducer::set_buckets(const Buckets& buckets) {
  TORCH_CHECK(phase_ == Phase::kIdle, "set_buckets: a backward is not finished; call it between iterations");
  buckets_.clear();
  for (const auto& indices : buckets) {
    const at::Tensor& first = parameters_[indices[0]];
    bool sparse = expect_sparse_[indices[0]];
    bool cast = options_.reduce_dtype && !sparse && first.is_floating_point();
    Bucket::Options options{cast ? *options_.reduce_dtype : first.scalar_type(), sparse};
    options.gradient_as_view = options_.gradient_as_bucket_view && options.buffer_dtype == first.scalar_type();
    options.any_grad_dtype = options_.any_grad_dtype;
    options.rank = group_->getRank();
    options.allocate = transport_memory(group_, first.device());
    for (size_t slot = 0; slot < indices.size(); ++slot) place_[indices[slot]] = {buckets_.size(), slot};
    buckets_.emplace_back(indices, parameters_, names_, options);
  }
  trace_ = std::make_shared<Trace>(*trace_);  // callbacks of earlier collectives keep the old one
  trace_->resize(parameters_.size(), buckets_.size());
}

// Memory alone: the next pack allocates again, so nothing else has to know.
void Reducer::release_buckets() {
  TORCH_CHECK(phase_ == Phase::kIdle, "release_buckets: a backward is not finished");
  for (Bucket& bucket : buckets_) bucket.release();
}

// A program may swallow an error inside of backward; the text is kept for whoever asks why a rank did not come.
void Reducer::fail(const std::string& message) const {
  last_error_ = message;
  TORCH_CHECK(false, message);
}

// What a static graph knows to be unused is not waited for.
std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> indices = usage_.missing();
  std::erase_if(indices, [&](size_t index) { return used_map_.known_unused(index); });
  return indices;
}

// Looked at when the next forward or step begins, not when backward ends: a second backward may still bring the rest,
// and a program that needs neither has lost nothing.
void Reducer::check_finished() const {
  if (phase_ == Phase::kIdle) return;
  // A forward inside of backward is a checkpoint's. Outside, that backward never reached its end.
  bool inside = torch::autograd::get_current_graph_task_id() != -1;
  if (phase_ == Phase::kBackward && inside) return;
  if (phase_ == Phase::kLaunched) fail(errors::not_finalized(group_->getRank()));
  std::vector<errors::Parameter> absent;
  for (size_t index : missing()) absent.push_back({index, names_[index]});
  auto cause = options_.graph_mode == GraphMode::kStatic ? errors::Cause::kGraphChanged
      : phase_ == Phase::kBackward                       ? errors::Cause::kBackwardRaised
                                                         : errors::Cause::kUnused;
  fail(errors::unfinished_reduction(group_->getRank(), absent, cause));
}

std::vector<size_t> Reducer::left_local() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (usage_.outside_no_sync[i]) found.push_back(i);
  return found;
}

// By identity of `.grad`: once zeroed to None, or replaced, what came past the wrapper is gone.
std::vector<std::pair<size_t, int>> Reducer::bypassed() const {
  std::vector<std::pair<size_t, int>> found;
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (usage_.bypassed_in[i] != ParamUsage::kNone && usage_.bypassed_grad[i] == parameters_[i].grad())
      found.emplace_back(i, usage_.bypassed_in[i]);
  return found;
}

// As torch's class does when it is made: who asks for `.grad` before the first backward gets what stays `.grad`.
void Reducer::adopt_gradients() {
  for (Bucket& bucket : buckets_) bucket.adopt_gradients();
}

// Nothing of a graph can be noted here: forward makes it, node by node. Only the number from which its nodes count.
void Reducer::begin_forward() {
  interrupted_in_ = ParamUsage::kNone;
  // Cast and cast back, parameters have other AccumulateGrad nodes. One in turn is enough where one that never comes
  // is an error.
  size_t looks = used_map_.mode() == GraphMode::kFindUnused ? parameters_.size() : 1;
  for (; hooks_ && phase_ == Phase::kIdle && looks > 0; --looks) {
    turn_ = (turn_ + 1) % parameters_.size();
    if (hooks_->is_lost(turn_, parameters_[turn_])) renew_hooks();
  }
  forwards_.begin();
  trace_->note(StepEvent::kForwardBegin);
}

// Where no output is found (a dataclass, tensors kept elsewhere) there is no hook: such a forward takes the next
// backward. Outputs without a node are found: of a module that is frozen, say.
void Reducer::end_forward(const std::vector<at::Tensor>& outputs, bool synchronized) {
  forwards_.end(synchronized, /*visible=*/!outputs.empty());
  trace_->note(StepEvent::kForwardEnd);
  watch(outputs, synchronized);
}

// torch's contract for callers that replace forward: armed here, disarmed by the end of the iteration.
void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  forwards_.arm();
  watch(outputs, /*synchronized=*/true);
}

// An output's hook runs before any gradient is there, and before checkpoints inside make graphs of their own: the
// earliest moment at which a backward can be told from another. Outputs outlive wrappers, so the reference is weak.
void Reducer::watch(const std::vector<at::Tensor>& outputs, bool synchronized) {
  watch_outputs(outputs, [weak = weak_from_this(), synchronized] {
    auto self = weak.lock();
    if (!self) return;
    auto lock = self->guard();
    self->enter_backward(synchronized);
  });
}

// All that an iteration has set; what earlier ones taught (arrivals, unused parameters) stays.
void Reducer::abort_iteration() {
  phase_ = Phase::kIdle;
  next_bucket_ = 0;
  backward_ = {};
  interrupted_in_ = ended_in_ = ParamUsage::kNone;
  deferred_ = false;
  forwards_.iteration_ends();
  usage_.begin_iteration();
  for (Bucket& bucket : buckets_) bucket.abandon();
  extra_futures_.clear();
  used_map_.forget();
  context_.leave(/*done=*/false, usage_, buckets_);
  last_error_.clear();
}

// The first sign of a backward: it has reached an output of a forward, or one of our gradients is there. The latter
// may be in a reentrant checkpoint's graph task, which knows nothing of the rest.
void Reducer::enter_backward(std::optional<bool> through_synchronized_forward) {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  const bool synchronized = through_synchronized_forward.value_or(false);
  const bool known = !backward_.graph_tasks.empty();
  if (synchronized) backward_.taken = false;
  if (synchronized && known && !backward_.has(graph_task)) await_end_of(graph_task);
  if (known && !(synchronized && backward_.has(graph_task) && backward_.origin != Origin::kSynchronized)) return;
  const bool takes = used_map_.mode() != GraphMode::kStatic || has_recorded();  // what it is, outputs tell
  Forwards::Answer answer = synchronized ? Forwards::Answer{Origin::kSynchronized, true} : forwards_.origin(takes);
  // Where torch takes another wrapper's, and waits no longer.
  if (answer.taken && sharers_.any([](const Reducer& other) { return other.forwards_.has_nodes_in_graph(); })) {
    answer = {Origin::kBypassed};
    forwards_.stop_waiting();
  }
  backward_.origin = answer.origin;
  backward_.taken = answer.taken;
  deferred_ |= answer.taken;
  backward_.takes_part.clear();
  const bool asks = used_map_.mode() == GraphMode::kFindUnused && has_recorded();
  if (asks && (answer.seen || (through_synchronized_forward && backward_.origin == Origin::kSynchronized)))
    backward_.takes_part = hooks_->taking_part();
  if (known) return;
  backward_.makes_graph = c10::GradMode::is_enabled();
  backward_.goes_to_all = GraphTaskNodes().goes_to_all();
  backward_.begin = at::sequence_number::peek();
  await_end_of(graph_task);
}

// Of the graph task that runs now.
void Reducer::await_end_of(int graph_task) {
  backward_.graph_tasks.push_back(graph_task);
  at_end_of_backward(weak_from_this(), graph_task, &Reducer::finish_backward, &Reducer::backward_is_gone);
}

// kIncomplete goes on: another backward brings what the first left out. Else all is cleared here rather than at the
// end, so that an iteration which an exception ended leaves nothing behind. Parameters that take no part are marked
// at once: ranks differ in them, and must not differ in when they launch.
void Reducer::begin_iteration() {
  if (std::exchange(phase_, Phase::kBackward) == Phase::kIncomplete) return;
  trace_->begin_backward();
  usage_.begin_iteration();
  next_bucket_ = 0;
  for (Bucket& bucket : buckets_) bucket.begin_backward();
  if (options_.gradient_as_bucket_view) own_windows(buckets_);
  for (size_t i = 0; options_.sums_anew && i < parameters_.size(); ++i) refuse_earlier_sum(i);
  if (!has_recorded()) return;
  const ParamUsage::Flags& part = backward_.takes_part;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    usage_.absent[i] = used_map_.known_unused(i) || (!part.empty() && !part[i] && !usage_.nested[i]);
    if (usage_.absent[i]) mark_variable_ready(i, {});
  }
}

// A post hook on AccumulateGrad, so `.grad` holds the whole sum of this backward's contribution, whoever looks; a
// hook on the tensor would run before it is there. Errors leave through autograd, which ends backward with them.
void Reducer::on_ready(size_t index, const at::Tensor& contribution) {
  auto lock = guard();
  const bool in_context = ContextGradients::has_current();
  const bool defined = in_context ? contribution.defined() : parameters_[index].mutable_grad().defined();
  enter_backward(std::nullopt);
  const bool synchronized = backward_.origin == Origin::kSynchronized;
  if (phase_ == Phase::kLaunched) {
    phase_ = Phase::kBackward;  // it would be lost, or change what is being sent: only abort_iteration() leads on
    next_bucket_ = 0;
    fail(errors::ready_twice(group_->getRank(), {index, names_[index]}, usage_.arrivals[index] + 1));
  }
  if (synchronized && (in_context || context_.in_use())) enter_context(index, defined);
  if (defined && (synchronized || !in_context)) usage_.local_used_map[index] = 1;
  if (defined && !in_context) note_origin(index);
  if (!synchronized) return;
  refuse_shared_view(index);
  if (phase_ != Phase::kBackward) begin_iteration();
  if (contribution.defined() && used_map_.gets_no_gradient(index))
    fail(errors::graph_changed(group_->getRank(), {index, names_[index]}));
  if (used_map_.known_unused(index)) return;
  if (!backward_.has(torch::autograd::get_current_graph_task_id())) usage_.nested[index] = 1;
  trace_->ready[index] = Trace::now();
  const auto arrival = usage_.note_arrival(index, contribution.defined());
  if (arrival == ParamUsage::Arrival::kLast) mark_variable_ready(index, contribution);
  if (arrival == ParamUsage::Arrival::kExtra) gradient_grew(index, contribution);
}

// Two windows cannot be one `.grad`: the second wrapper would send what the first is writing to.
void Reducer::refuse_shared_view(size_t index) const {
  if (alone()) return;  // nothing is sent
  const bool shared = sharers_.any_with_view(index, [](const Reducer& other, size_t there) {
    return other.backward_.origin == Origin::kSynchronized &&
        other.usage_.arrived_in[there] == torch::autograd::get_current_graph_task_id();
  });
  if (shared) fail(errors::shared_view(group_->getRank(), {index, names_[index]}));
}

// Before autograd adds to it, and when an iteration begins, which sends what has not grown, too.
void Reducer::refuse_earlier_sum(size_t index) {
  if (sums_.holds(index, parameters_[index].grad())) fail(errors::summed_again(group_->getRank(), names_[index]));
}

// From here on the iteration is like any other.
void Reducer::enter_context(size_t index, bool defined) {
  const bool begun = phase_ != Phase::kIdle;
  const std::string& refusal = options_.not_in_contexts;
  const char* why = refusal.empty() ? context_.enter(index, defined, begun, usage_, buckets_) : refusal.c_str();
  if (why) fail(errors::context_gradient(group_->getRank(), {index, names_[index]}, why));
}

// Kept by parameter, for optimizer.step(), which has to tell averaged gradients from local ones.
void Reducer::note_origin(size_t index) {
  const bool never_sent = used_map_.gets_no_gradient(index);
  const bool bypassed = backward_.origin == Origin::kBypassed || (never_sent && backward_.origin == Origin::kLocal);
  // Of the graph task that runs it, which all wrappers of this parameter see: a reentrant checkpoint's is not the
  // outermost.
  (bypassed ? usage_.bypassed_in : usage_.arrived_in)[index] = torch::autograd::get_current_graph_task_id();
  if (bypassed) usage_.bypassed_grad[index] = parameters_[index].grad();
  if (backward_.origin == Origin::kLocal && sync_enabled) usage_.outside_no_sync[index] = 1;
}

// The loop, and not this bucket alone: it may have been the one that others, complete before it, waited behind.
void Reducer::mark_variable_ready(size_t index, const at::Tensor& contribution) {
  const size_t b = place_[index].first;
  if (buckets_[b].mark_ready()) trace_->note(b, BucketEvent::kReady);
  take(index, contribution);
  if (!buckets_[b].complete() || may_grow()) return;
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].complete()) launch_or_skip(next_bucket_);
}

// A contribution after the one that was thought the last. Before the bucket has left, no harm is done: it is
// packed again, and the next iterations wait for one arrival more.
void Reducer::gradient_grew(size_t index, const at::Tensor& contribution) {
  auto [bucket, slot] = place_[index];
  if (!buckets_[bucket].repack(slot, options_.pre_scale))
    fail(errors::ready_twice(group_->getRank(), {index, names_[index]}, usage_.arrivals[index]));
  usage_.expected[index] = usage_.arrivals[index];
  take(index, contribution);
}

// In every iteration, as soon as it is there: what the program does to `.grad` from here on changes nothing. What no
// rank uses is not touched.
void Reducer::take(size_t index, const at::Tensor& contribution) {
  auto [b, slot] = place_[index];
  if (buckets_[b].complete() && !skips(b)) return pack(b, contribution);
  if (usage_.local_used_map[index] && !passes_through()) buckets_[b].pack_early(slot, options_.pre_scale, may_grow());
}

// Apart from launch: a complete bucket may have to wait for its turn, its packing need not.
void Reducer::pack(size_t index, const at::Tensor& contribution) {
  trace_->note(index, BucketEvent::kPackBegin);
  if (!passes_through()) buckets_[index].pack(options_.pre_scale, usage_.local_used_map, contribution, may_grow());
}

// Whether nobody used a bucket's parameters, on any rank. REQUIRES: it is complete, or backward is over.
bool Reducer::skips(size_t index) const {
  if (!options_.skip_all_reduce_unused || used_map_.mode() == GraphMode::kAllUsed) return false;
  return std::ranges::none_of(
      *buckets_[index].slots(), [&](const auto& slot) { return usage_.local_used_map[slot.index]; });
}

// REQUIRES: index == next_bucket_.
void Reducer::launch_or_skip(size_t index) {
  if (!skips(index)) launch(index);
  ++next_bucket_;
}

// A bucket may be launched without its gradients (unused here, used elsewhere): it is packed now, as zeros. The
// collective runs on other threads; nothing after this call may write to the buffer.
void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  if (bucket.state() == Bucket::State::kFilling) pack(index, {});
  bucket.before_launch();
  trace_->note(index, BucketEvent::kLaunch);
  GradBucket seen = grad_bucket(index, bucket.buffer());
  Flight flight = passes_through() ? Flight{completed(at::empty({0})), nullptr} : run_hook(seen);
  auto note_done = [done = trace_->done, index](Future&) { Trace::note_done(*done, index); };
  // Not elsewhere, where a future completes when it is enqueued.
  if (bucket.device().is_cpu()) flight.future->addCallback(note_done, /*uses_future=*/false);
  bucket.launched(std::move(flight));
}

// Autograd calls it when the outermost graph task is over, on the thread that ran its last node, with the caller's
// streams current. One task may end while another's iteration is open: only its own is closed. Of several that run
// side by side the last one ends it.
void Reducer::finish_backward(int graph_task) {
  auto lock = guard();
  if (backward_.graph_tasks.size() > 1 && std::erase(backward_.graph_tasks, graph_task)) return;
  const bool own = backward_.has(graph_task);
  const bool taken = own && backward_.taken;
  const bool local = own && backward_.origin != Origin::kSynchronized;
  if (own && backward_.makes_graph && backward_.origin != Origin::kBypassed)
    forwards_.add(backward_.begin, at::sequence_number::peek(), !local);
  if (own) backward_ = {};
  if (local) forwards_.local_backward_ends();
  if (phase_ != Phase::kBackward || local) return;  // a local one does not end the iteration of an interrupted one
  trace_->note(StepEvent::kBackwardEnd);
  if (!used_map_.absence_is_fine() && !missing().empty()) {
    phase_ = Phase::kIncomplete;
    return;
  }
  if (taken && callbacks_.on_taken) callbacks_.on_taken();
  launch_rest(graph_task);
  if (!options_.manual_finalization) return finalize_backward();
  phase_ = Phase::kLaunched;
}

// The used map goes last: it must hold what all of backward used, and its collective has the same place on all ranks.
void Reducer::launch_rest(int graph_task) {
  if (!context_.in_use()) ended_in_ = graph_task;
  while (next_bucket_ < buckets_.size()) launch_or_skip(next_bucket_);
  send_used_map();
  if (callbacks_.after_last_launch) callbacks_.after_last_launch();
}

// May be called from a hook, so backward can still be running; a gradient that comes afterwards is in no average.
void Reducer::finalize_backward_manual() {
  auto lock = guard();
  if (phase_ == Phase::kBackward) {
    trace_->note(StepEvent::kBackwardEnd);
    launch_rest(backward_.graph_tasks.empty() ? ParamUsage::kNone : backward_.graph_tasks.back());
    backward_.origin = Origin::kBypassed;  // what it still brings is this rank's alone
  }
  interrupted_in_ = ParamUsage::kNone;
  finalize_backward();
}

// In launch order: what was launched first has had the most time, and the rest goes on while it is unpacked. What
// other ranks used is known only now, and decides which gradients are made at all.
void Reducer::finalize_backward() {
  auto used =
      used_map_.globally_used(usage_.local_used_map, usage_.arrivals, usage_.grown, [&] { return used_map(); });
  const double scale = post_scale();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    const Flight& flight = bucket.flight();
    if (bucket.state() != Bucket::State::kLaunched || !flight.future) continue;  // skipped; or done, before an error
    wait(*flight.future, i);
    if (passes_through()) continue;
    if (flight.work && !bucket.device().is_cpu()) flight.work->synchronize();
    at::Tensor result = hook_ ? hook_->result(flight.future->value()) : bucket.buffer();
    if (at::isComplexType(bucket.options().buffer_dtype) && !result.is_complex())
      result = at::view_as_complex(result.reshape({-1, 2}));  // as a process group's own future holds it
    if (result.numel() != bucket.numel())
      fail(errors::wrong_hook_result(group_->getRank(), i, result.numel(), bucket.numel()));
    trace_->note(i, BucketEvent::kUnpackBegin);
    if (!optimizer_in_backward) bucket.unpack(result, scale, used);
    bucket.hold_back_streams();
    trace_->note(i, BucketEvent::kUnpackEnd);
  }
  for (size_t i = 0; options_.sums_anew && i < parameters_.size(); ++i)
    if (used[i] && parameters_[i].grad().defined()) sums_.note(i, parameters_[i].grad());
  for (auto& future : std::exchange(extra_futures_, {})) wait(*future, buckets_.size());
  used_map_.join([&](Future& future) { wait(future, buckets_.size()); });
  end_iteration();
}

// Nobody calls back when an exception ends a backward; but its callback is destroyed, and with it the last reference.
void Reducer::backward_is_gone(int graph_task) {
  auto lock = guard();
  if (!backward_.has(graph_task)) return;
  const bool owes =
      backward_.origin == Origin::kSynchronized && (phase_ == Phase::kBackward || backward_.goes_to_all);
  interrupted_in_ = owes ? graph_task : ParamUsage::kNone;
  backward_ = {};
  if ((phase_ != Phase::kBackward && !interrupted()) || !callbacks_.on_interrupted) return;
  try {
    callbacks_.on_interrupted(last_error_);
  } catch (const std::exception& error) {  // nobody is there to catch it, and backward has an error of its own
    TORCH_WARN("DistributedDataParallel could not tell the other ranks that backward has failed: ", error.what());
  }
}

// May ask other ranks (the sum of weights), and raise where that sum is nothing.
double Reducer::post_scale() {
  if (!callbacks_.post_scale) return options_.post_scale;
  try {
    return callbacks_.post_scale();
  } catch (...) {  // on all ranks alike: the next iteration finds nothing of this one
    for (size_t i = 0; i < buckets_.size(); ++i)
      if (buckets_[i].state() == Bucket::State::kLaunched) wait(*buckets_[i].flight().future, i);
    abort_iteration();
    throw;
  }
}

// Last of all, so that whoever sees kIdle sees averages.
void Reducer::end_iteration() {
  const std::vector<size_t> before = std::exchange(last_missing_, usage_.missing());
  graph_is_static_ = graph_is_static_ && (!has_recorded() || before == last_missing_);
  ++ended_;
  usage_.end_iteration([&](size_t i) { return used_map_.gets_no_gradient(i); });
  forwards_.iteration_ends();
  deferred_ = false;
  context_.leave(/*done=*/true, usage_, buckets_);
  for (size_t i = 0; options_.lazy_bucket_allocation && i < buckets_.size(); ++i) buckets_[i].abandon();
  phase_ = Phase::kIdle;
  trace_->note(StepEvent::kFinalizeEnd);
}

// Without a guard that wants to know of lost peers the future's own wait is enough.
void Reducer::wait(Future& future, size_t bucket) {
  if (!callbacks_.on_stall) return future.waitAndThrow();
  wait_watching(
      future, [&](double seconds, const std::string& error) { callbacks_.on_stall(seconds, bucket, error); });
}

}  // namespace minddp
