#include "reducer.h"

#include "copy/in_memory.h"
#include "errors.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

namespace minddp {

// --- forward

// The graph does not exist yet: only the sequence number at which its nodes will begin is noted.
void Reducer::begin_forward() {
  // module.half().float() gives parameters new AccumulateGrad nodes, without our hooks. If absence is allowed, a lost
  // hook would look like an unused parameter, so each forward looks at all of them. If absence is an error, a lost
  // hook cannot lead to a wrong average. In that case each forward looks at one parameter only, in turn. If one hook
  // is lost, all are renewed.
  size_t checks = used_map.absence_is_fine() ? parameters.size() : std::min<size_t>(1, parameters.size());
  for (; hooks_ && iteration.phase == Phase::kIdle && checks > 0; --checks) {
    next_hook_check_ = (next_hook_check_ + 1) % parameters.size();
    if (hooks_->is_lost(next_hook_check_, parameters[next_hook_check_])) renew_hooks();
  }
  forwards.begin();
  notify(Moment::kForwardBegin);
}

// If no output tensor is found (a dataclass, tensors kept elsewhere), there is no hook. If the forward was
// synchronized, each backward then counts as its own, until an iteration or the next synchronized forward ends. If it
// ran under no_sync, a backward then counts as local, unless it goes through a synchronized forward or is adopted.
// An output without a node (a frozen module's) counts as found. One exception: a forward under no_sync that returns
// the module's own parameters. No node would show that a backward has come through that forward.
void Reducer::end_forward(const std::vector<at::Tensor>& outputs, bool synchronized) {
  const bool own = std::ranges::any_of(outputs, [](const at::Tensor& output) { return output.requires_grad(); }) &&
      std::ranges::none_of(outputs, [](const at::Tensor& output) { return output.grad_fn() != nullptr; });
  forwards.end(synchronized, /*visible=*/!outputs.empty() && (synchronized || !own));
  notify(Moment::kForwardEnd);
  watch(outputs, synchronized);
}

// torch has this call for callers that replace forward. Backwards synchronize from here to the end of the iteration.
void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  forwards.arm();
  watch(outputs, /*synchronized=*/true);
}

// An output's hook runs before autograd computes the gradients of the layers that made the output. It is the earliest
// moment at which we know which forward a backward goes through. Outputs outlive wrappers, so the reference is weak.
void Reducer::watch(const std::vector<at::Tensor>& outputs, bool synchronized) {
  if (parameters.empty()) return;  // companions average them all
  watch_outputs(outputs, [weak = weak_from_this(), synchronized] {
    auto self = weak.lock();
    if (!self) return;
    auto lock = self->guard();
    self->enter_backward(synchronized);
  });
}

// --- backward begins

// The first notice decides the backward's origin; a later output of a synchronized forward may still make it
// synchronized. If a gradient is the notice, Forwards::origin() searches the graph task's nodes. In a reentrant
// checkpoint the search finds nothing: its graph task has none of the forward's nodes.
void Reducer::enter_backward(std::optional<bool> through_synchronized_forward) {
  const int graph_task = current_graph_task();
  const bool synchronized = through_synchronized_forward.value_or(false);
  const bool known = backward.runs();
  if (synchronized && known && !backward.has(graph_task)) {
    await_end_of(graph_task);
    backward.comes_once = iteration.comes_once = false;
  }
  const bool becomes_synchronized = synchronized && backward.has(graph_task) && !backward.is_synchronized();
  if (known && !becomes_synchronized) return;
  // In a static graph's first iteration, which decides what is unused, no forward adopts a bypassing backward.
  const bool adopts = used_map.mode() != GraphMode::kStatic || has_ended_once();
  Forwards::Answer answer = forwards.origin(adopts, through_synchronized_forward, /*within_no_sync=*/!sync_enabled);
  for (auto& c : cases_) c->on_origin(answer);
  backward.join(answer);
  if (hooks_ && backward.is_synchronized()) predict_arrivals(answer.seen || through_synchronized_forward);
  if (known) return;
  backward.makes_graph = c10::GradMode::is_enabled();
  backward.reaches_all_leaves = GraphTaskNodes().reaches_all_leaves();
  backward.begin = at::sequence_number::peek();
  notify(Moment::kBackward);
  await_end_of(graph_task);
}

// What the running graph task shows of its gradients before the first one comes. It brings each gradient once for
// each of its nodes. More can come only from another task: a reentrant checkpoint's, another thread's, or a second
// backward's, if this one leaves gradients out. `graph_is_its_own`: the task has nodes of the forward, or has reached
// its output.
void Reducer::predict_arrivals(bool graph_is_its_own) {
  backward.takes_part.clear();
  backward.comes_once = false;
  const bool is_new = !has_ended_once() || backward.adopted;  // what earlier iterations have taught does not apply
  const bool finds_unused = used_map.mode() == GraphMode::kFindUnused && graph_is_its_own;
  if (used_map.mode() == GraphMode::kStatic || !(is_new || finds_unused)) return;
  const bool nests = is_new && GraphTaskNodes().has_reentrant_checkpoint();
  Flags part = hooks_->taking_part();
  const auto comes_once = [&](char nodes) { return nodes == 1 || (nodes == 0 && finds_unused); };
  backward.comes_once = !nests && std::ranges::all_of(part, comes_once);
  if (finds_unused && (has_ended_once() || !nests)) backward.takes_part = std::move(part);
}

// REQUIRES: `graph_task` is the running one.
void Reducer::await_end_of(int graph_task) {
  backward.graph_tasks.push_back(graph_task);
  at_end_of_backward(weak_from_this(), graph_task, &Reducer::finish_backward, &Reducer::on_backward_gone);
}

// An iteration in kIncomplete goes on: another backward brings what the first one left out. A new iteration marks the
// parameters that take no part as ready. Which ones they are may differ between ranks; the order of launches
// must not (reducer.h).
void Reducer::begin_iteration() {
  const bool goes_on = iteration.phase == Phase::kIncomplete;
  if (!goes_on) iteration.forget();
  iteration.phase = Phase::kBackward;
  iteration.comes_once = backward.comes_once && !goes_on;
  iteration.launches_at_end |= backward.adopted && !iteration.comes_once;
  if (goes_on) return;
  learned.begin_iteration();
  for (auto& bucket : buckets) bucket->begin_iteration();
  notify(Moment::kIterationBegin);
  const Flags& part = backward.takes_part;
  for (size_t i = 0; i < parameters.size(); ++i) {
    iteration.absent[i] = used_map.known_unused(i) || (!part.empty() && !part[i] && !learned.nested[i]);
    if (iteration.absent[i]) mark_variable_ready(i, {});
  }
}

// --- a gradient arrives

// Runs as a post hook on AccumulateGrad, so `.grad` includes this contribution already. A hook on the tensor would
// run before autograd has added it. Errors leave through autograd, which ends backward with them.
void Reducer::on_ready(size_t index, const at::Tensor& contribution) {
  auto lock = guard();
  enter_backward(std::nullopt);
  if (iteration.phase == Phase::kLaunched) {
    iteration.too_late = true;
    fail(errors::ready_twice(rank, {index, names[index]}, iteration.arrivals[index] + 1));
  }
  ArrivedGradient gradient{index, contribution, parameters[index].mutable_grad().defined()};
  for (Case* c : follow_gradients_) c->on_gradient(gradient);
  const bool synchronized = backward.is_synchronized();
  if (gradient.defined && (synchronized || gradient.in_grad)) used[index] = 1;
  if (gradient.defined && gradient.in_grad) {
    if (!bypasses(index)) arrived_in[index] = current_graph_task();
    for (Case* c : follow_gradients_) c->after_accumulation(index);
  }
  if (!synchronized) return;
  if (iteration.phase != Phase::kBackward) begin_iteration();
  const bool nested = !backward.has(current_graph_task());
  if (nested) iteration.comes_once = false;
  iteration.launches_at_end |= backward.adopted && !iteration.comes_once;
  if (contribution.defined() && (used_map.known_unused(index) || used_map.used_nowhere(index)))
    fail(errors::graph_changed(rank, {index, names[index]}));
  if (used_map.known_unused(index)) return;
  if (nested) learned.nested[index] = 1;
  for (Case* c : follow_gradients_) c->on_arrival(index);
  const auto arrival = learned.note_arrival(iteration, index, contribution.defined());
  if (arrival == Learned::Arrival::kLast) mark_variable_ready(index, contribution);
  if (arrival == Learned::Arrival::kExtra) on_extra_arrival(index, contribution);
}

// A loop: later buckets may be complete already, and have waited for this one.
void Reducer::mark_variable_ready(size_t index, const at::Tensor& contribution) {
  const size_t bucket = bucket_and_slot_[index].first;
  if (buckets[bucket]->mark_ready()) notify(BucketMoment::kReady, bucket);
  pack_on_arrival(index, contribution);
  if (!buckets[bucket]->complete() || arrivals_unknown() || waits_for_all()) return;
  while (!all_launched() && may_leave(iteration.next_bucket)) launch_or_skip(iteration.next_bucket);
  if (all_launched()) send_used_map();
}

// Handles a contribution after the one that was thought the last, or to a parameter that was thought absent. If the
// bucket has neither left nor been skipped, the gradient is packed again, and the next iterations wait for that
// arrival. Otherwise, or if it cannot be packed again, it is an error.
void Reducer::on_extra_arrival(size_t index, const at::Tensor& contribution) {
  auto [bucket, slot] = bucket_and_slot_[index];
  if (has_left(bucket) || !buckets[bucket]->repack(slot, pre_scale))
    fail(errors::ready_twice(rank, {index, names[index]}, iteration.arrivals[index]));
  learned.expected[index] = std::max(learned.expected[index], iteration.arrivals[index]);
  pack_on_arrival(index, contribution);
}

// Packs the whole bucket if this was its last gradient. Otherwise, on the CPU, packs this gradient. A parameter that
// this rank has not used is packed with its bucket.
void Reducer::pack_on_arrival(size_t index, const at::Tensor& contribution) {
  auto [bucket, slot] = bucket_and_slot_[index];
  if (buckets[bucket]->complete() && !skips(bucket)) return pack(bucket, contribution);
  if (used[index] && !passes_through()) buckets[bucket]->pack_early(slot, packing(contribution));
}

// Not part of launch(): a complete bucket may have to wait for its turn, but can be packed now.
void Reducer::pack(size_t bucket, const at::Tensor& contribution) {
  notify(BucketMoment::kPack, bucket);
  if (!passes_through()) buckets[bucket]->pack(packing(contribution));
}

// --- buckets leave

// True if skip_all_reduce_unused is set and this rank has used none of the bucket's parameters. The caller promises
// that in this case no other rank has used any of them. REQUIRES: the bucket is complete, or backward is over.
bool Reducer::skips(size_t bucket) const {
  if (!skip_all_reduce_unused || used_map.mode() == GraphMode::kAllUsed) return false;
  return std::ranges::none_of(*buckets[bucket]->slots(), [&](const auto& slot) { return used[slot.index]; });
}

// REQUIRES: all buckets before it have left.
void Reducer::launch_or_skip(size_t bucket) {
  if (!skips(bucket)) launch(bucket);
  ++iteration.next_bucket;
}

// At the end of backward a bucket may not be complete: this rank has not used a parameter, or fewer contributions
// came than expected. It is packed now, with zeros where there is no `.grad`. The collective runs on other threads;
// nothing after this call may write to the buffer.
void Reducer::launch(size_t index) {
  Bucket& bucket = *buckets[index];
  if (bucket.state() == Bucket::State::kFilling) pack(index, {});
  bucket.before_launch();
  notify(BucketMoment::kLaunch, index);
  bucket.launched(passes_through() ? Flight{completed(at::empty({0}))} : reduce(index, bucket.buffer()));
  notify(BucketMoment::kLaunched, index);
}

namespace {

// A sparse tensor's lie elsewhere.
bool has_numbers(const at::Tensor& tensor) { return tensor.layout() != at::kStrided || has_memory(tensor); }

at::Tensor in_one_run(const at::Tensor& tensor) {
  const bool is_one = tensor.layout() != at::kStrided || (tensor.dim() == 1 && tensor.is_contiguous());
  return is_one ? tensor : tensor.reshape({-1}).contiguous();
}

}  // namespace

// The sum over ranks, in place. A single rank has it already.
Flight Reducer::all_reduce(size_t index, const at::Tensor& buffer) {
  if (!has_numbers(buffer)) fail(errors::wrong_hook_result(rank, index, 0, buckets[index]->numel()));
  if (is_alone()) return {completed(buffer), nullptr};
  for (auto& c : cases_)
    if (auto flight = c->all_reduce(*buckets[index], buffer, wait_for(index))) return *flight;
  Flight flight = minddp::all_reduce(*group, buffer);
  if (hook_ && !buffer.device().is_cpu()) hook_->work = flight.work;
  return flight;
}

// The used map follows the last bucket: a collective that waited for the end of backward would come there after other
// modules' collectives.
void Reducer::send_used_map() {
  iteration.used_map_sent = true;
  used_map.send(*group, used, iteration.accumulated, parameters[0].device());
}

// --- backward ends

// Autograd calls it when a graph task that enter_backward() has registered is over, on the thread that ran its last
// node, with the caller's streams current. If several threads run backward(), the last task ends the backward. A task
// that is no longer in `backward` ends nothing: an exception in another task, or abort_iteration(), has cleared
// `backward`.
void Reducer::finish_backward(int graph_task) {
  auto lock = guard();
  if (!backward.has(graph_task)) return;
  if (backward.graph_tasks.size() > 1) return void(std::erase(backward.graph_tasks, graph_task));
  finalizing_ = backward.is_synchronized();
  auto ends = c10::make_scope_exit([this] { finalizing_ = false; });
  const Backward ended = std::exchange(backward, {});
  const bool local = ended.origin == Origin::kLocal || ended.origin == Origin::kBypassed;
  // With create_graph=True backward has made nodes, which belong to its forward. An adopted backward went through no
  // synchronized forward, so its nodes are local.
  if (ended.makes_graph && ended.origin != Origin::kBypassed)
    forwards.add(ended.begin, at::sequence_number::peek(), !local && !ended.adopted);
  if (iteration.phase != Phase::kBackward || local) return;  // a local one ends no iteration
  notify(Moment::kBackwardEnd);
  if (!used_map.absence_is_fine() && !missing().empty()) {
    iteration.phase = Phase::kIncomplete;
    return;
  }
  launch_rest(graph_task);
  if (!manual_finalization) return finalize_backward();
  iteration.phase = Phase::kLaunched;
}

void Reducer::launch_rest(int graph_task) {
  iteration.last_backward = graph_task;
  while (!all_launched()) launch_or_skip(iteration.next_bucket);
  if (!iteration.used_map_sent) send_used_map();
  notify(Moment::kLastLaunch);
}

// May be called from a hook while backward runs. A gradient that comes afterwards is not in this average.
void Reducer::finalize_backward_manual() {
  auto lock = guard();
  finalizing_ = true;
  auto ends = c10::make_scope_exit([this] { finalizing_ = false; });
  if (iteration.phase == Phase::kBackward) {
    notify(Moment::kBackwardEnd);
    launch_rest(backward.runs() ? backward.graph_tasks.back() : -1);
    backward.origin = Origin::kBypassed;  // what it still brings is this rank's alone
  }
  notify(Moment::kFinalizing);
  finalize_backward();
}

// In launch order: the first bucket has had the most time, and the others go on while it is unpacked. The used map is
// sent after all buckets, so waiting for it is waiting for them. So it is read at the first bucket for which it
// matters.
void Reducer::finalize_backward() {
  const double scale = scale_of_results();
  std::optional<UsedMap::Map> used_anywhere;
  auto read = [&] { used_anywhere = used_map.globally_used(used, iteration.arrivals, wait_for(buckets.size())); };
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (!used_anywhere && used_map.matters_to(*buckets[i]->slots(), used)) read();
    unpack(i, scale, used_anywhere ? *used_anywhere : used);
  }
  if (!used_anywhere) read();
  for (auto& future : std::exchange(extra_futures_, {})) wait(*future, buckets.size());
  used_map.join(wait_for(buckets.size()));
  end_iteration();
}

void Reducer::unpack(size_t index, double scale, const std::vector<int32_t>& used_anywhere) {
  Bucket& bucket = *buckets[index];
  const Flight& flight = bucket.flight();
  if (bucket.state() != Bucket::State::kLaunched || !flight.future) return;  // skipped; or unpacked already
  wait(*flight.future, index);
  if (passes_through()) return;
  if (flight.work && !bucket.device().is_cpu()) order_streams(*flight.work);
  at::Tensor result = hook_ ? hook_->result(flight.future->value()) : bucket.buffer();
  if (result._is_zerotensor() || result.is_conj() || result.is_neg()) result = result.clone();  // into memory
  const bool is_there = has_numbers(result);
  // A process group's own future holds pairs of real numbers.
  if (is_there && at::isComplexType(bucket.dtype()) && !result.is_complex())
    result = at::view_as_complex(result.reshape({-1, 2}));
  if (!is_there || result.numel() != bucket.numel())
    fail(errors::wrong_hook_result(rank, index, is_there ? result.numel() : 0, bucket.numel()));
  result = in_one_run(result);
  if (result.device() != bucket.device()) result = result.to(bucket.device());
  notify(BucketMoment::kUnpack, index);
  if (!optimizer_in_backward) {
    bucket.unpack(result, scale, used_anywhere);
    for (auto& c : cases_) c->averages_written(bucket, used_anywhere);
  }
  bucket.hold_back_streams();
  notify(BucketMoment::kUnpacked, index);
}

// A case may ask other ranks (for the sum of weights), and raise if that sum is 0.
double Reducer::scale_of_results() {
  try {
    for (auto& c : cases_)
      if (auto scale = c->scale_of_results()) return *scale;
  } catch (...) {  // all ranks raise: the next iteration starts clean
    for (size_t i = 0; i < buckets.size(); ++i)
      if (buckets[i]->state() == Bucket::State::kLaunched) wait(*buckets[i]->flight().future, i);
    used_map.join(wait_for(buckets.size()));
    abort_iteration();
    throw;
  }
  return post_scale;
}

void Reducer::end_iteration() {
  const std::vector<size_t> before = std::exchange(last_missing_, iteration.missing());
  last_error.clear();
  graph_is_static_ = graph_is_static_ && (!has_ended_once() || before == last_missing_);
  ++learned.iterations;
  std::fill(used.begin(), used.end(), 0);  // all that was accumulated is averaged now
  forwards.iteration_ends();
  notify(Moment::kAveraged);
  iteration.phase = Phase::kIdle;
}

// --- exceptions and waits

// Called when a graph task is no more, whatever has ended it. There is something to do only if finish_backward() has
// not run: an exception has ended the task, and autograd has destroyed its callback without calling it.
void Reducer::on_backward_gone(int graph_task) {
  auto lock = guard();
  if (!backward.has(graph_task)) return;
  const bool owes =
      backward.is_synchronized() && (iteration.phase == Phase::kBackward || backward.reaches_all_leaves);
  backward = {};
  try {
    for (auto& c : cases_) c->on_interrupted(graph_task, owes);
  } catch (const std::exception& error) {  // nobody is there to catch it, and backward has an error of its own
    TORCH_WARN("DistributedDataParallel could not tell the other ranks that backward has failed: ", error.what());
  }
}

// Forgets the iteration. Keeps `learned`, what is known to be unused, and the notes on local and bypassing
// gradients.
void Reducer::abort_iteration() {
  iteration.forget();
  backward = {};
  forwards.iteration_ends();
  for (auto& bucket : buckets) bucket->abandon();
  notify(Moment::kGivenUp);
  extra_futures_.clear();
  used_map.forget();
  last_error.clear();
}

// A watching case finds lost peers; without one, the future's own wait is enough. The case is Python, which runs the
// program's signal handlers first: they find gradients enabled, as outside of backward.
void Reducer::wait(Future& future, size_t bucket) {
  if (std::ranges::none_of(cases_, [](const auto& c) { return c->watches(); })) return future.waitAndThrow();
  c10::AutoGradMode enabled(true);
  wait_watching(future, [&](double seconds, const std::string& error) {
    for (auto& c : cases_) c->on_stall(seconds, bucket, error);
  });
}

}  // namespace minddp
