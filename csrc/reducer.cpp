#include "reducer.h"

#include "errors.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace minddp {

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
    c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options, const Buckets& buckets)
    : parameters_(std::move(parameters)), names_(std::move(names)), expect_sparse_(std::move(expect_sparse)),
      group_(std::move(group)), several_threads_(std::any_of(parameters_.begin(), parameters_.end(),
                                    [&](const at::Tensor& p) { return p.device() != parameters_[0].device(); })),
      options_(std::move(options)), place_(parameters_.size()), usage_(parameters_.size()),
      used_map_(options_.graph_mode, options_.skip_all_reduce_unused), trace_(std::make_shared<Trace>()) {
  set_buckets(buckets);
}

void Reducer::install_hooks() {
  hooks_.reset();
  hooks_ = std::make_unique<GradHooks>(
      parameters_, [weak = weak_from_this()](size_t index, const at::Tensor& contribution) {
        if (auto self = weak.lock()) self->on_ready(index, contribution);
      });
}

void Reducer::set_buckets(const Buckets& buckets) {
  TORCH_CHECK(phase_ == Phase::kIdle, "set_buckets: a backward is not finished; call it between iterations");
  buckets_.clear();
  for (const auto& indices : buckets) {
    const at::Tensor& first = parameters_[indices[0]];
    bool sparse = expect_sparse_[indices[0]];
    bool cast = options_.reduce_dtype && !sparse && first.is_floating_point();
    Bucket::Options options{cast ? *options_.reduce_dtype : first.scalar_type(), sparse};
    options.gradient_as_view = options_.gradient_as_bucket_view && options.buffer_dtype == first.scalar_type();
    options.rank = group_->getRank();
    options.allocate = transport_memory(group_, first.device());
    for (size_t slot = 0; slot < indices.size(); ++slot) place_[indices[slot]] = {buckets_.size(), slot};
    buckets_.emplace_back(indices, parameters_, names_, options);
  }
  trace_ = std::make_shared<Trace>(*trace_);  // callbacks of earlier collectives keep the old one
  trace_->resize(parameters_.size(), buckets_.size());
}

void Reducer::release_buckets() {
  TORCH_CHECK(phase_ == Phase::kIdle, "release_buckets: a backward is not finished");
  for (Bucket& bucket : buckets_) bucket.release();
}

void Reducer::fail(const std::string& message) const {
  last_error_ = message;
  TORCH_CHECK(false, message);
}

std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> indices = usage_.missing();
  std::erase_if(indices, [&](size_t index) { return used_map_.known_unused(index); });
  return indices;
}

void Reducer::check_finished() const {
  if (phase_ == Phase::kIdle) return;
  // A forward inside of backward is a checkpoint's. Outside, that backward never reached its end.
  bool inside = torch::autograd::get_current_graph_task_id() != -1;
  if (phase_ == Phase::kBackward && inside) return;
  std::vector<errors::Parameter> absent;
  for (size_t index : missing()) absent.push_back({index, names_[index]});
  auto cause = options_.graph_mode == GraphMode::kStatic ? errors::Cause::kGraphChanged
      : phase_ == Phase::kBackward                       ? errors::Cause::kBackwardRaised
                                                         : errors::Cause::kUnused;
  fail(errors::unfinished_reduction(group_->getRank(), absent, cause));
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  trace_->note(StepEvent::kForwardEnd);
  watch_outputs(outputs, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->on_backward_begins();
  });
}

void Reducer::on_backward_begins() {
  auto lock = guard();
  // Whether to synchronize is decided where backward begins: no_sync around backward alone counts.
  if (phase_ != Phase::kBackward && sync_enabled) begin_backward();
}

void Reducer::begin_backward() {
  // The callback runs when the graph task that runs now is over. A reentrant checkpoint's backward is a graph
  // task of its own; forward's outputs are reached before it, in the outer one.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto self = weak.lock()) self->finish_backward();
  });
  if (std::exchange(phase_, Phase::kBackward) == Phase::kIncomplete) return;
  trace_->begin_backward();
  std::fill(usage_.arrivals.begin(), usage_.arrivals.end(), 0);
  next_bucket_ = 0;
  for (Bucket& bucket : buckets_) bucket.begin_backward();
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (used_map_.known_unused(i)) mark_variable_ready(i, {});
}

void Reducer::on_ready(size_t index, const at::Tensor& contribution) {
  auto lock = guard();
  if (parameters_[index].mutable_grad().defined()) usage_.local_used_map[index] = 1;
  if (phase_ != Phase::kBackward) {
    if (!sync_enabled) return;
    begin_backward();
  }
  if (used_map_.known_unused(index)) fail(errors::graph_changed(group_->getRank(), {index, names_[index]}));
  trace_->ready[index] = Trace::now();
  switch (usage_.note_arrival(index)) {
    case ParamUsage::Arrival::kEarly: break;
    case ParamUsage::Arrival::kLast: mark_variable_ready(index, contribution); break;
    case ParamUsage::Arrival::kExtra: gradient_grew(index); break;
  }
}

void Reducer::mark_variable_ready(size_t index, const at::Tensor& contribution) {
  auto [b, slot] = place_[index];
  if (recorded_) buckets_[b].pack_early(slot, options_.pre_scale);
  if (!buckets_[b].mark_ready()) return;
  trace_->note(b, BucketEvent::kReady);
  if (!recorded_) return;
  pack(b, contribution);  // now, not when it is launched: the gradients are still in the cache
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].complete()) launch(next_bucket_);
}

// A contribution after the one that was thought the last. Before the bucket has left, no harm is done: it is
// packed again, and the next iterations wait for one arrival more.
void Reducer::gradient_grew(size_t index) {
  int32_t arrivals = usage_.arrivals[index];
  auto [bucket, slot] = place_[index];
  if (!buckets_[bucket].repack(slot, options_.pre_scale))
    fail(errors::ready_twice(group_->getRank(), {index, names_[index]}, arrivals));
  usage_.expected[index] = arrivals;
}

void Reducer::pack(size_t index, const at::Tensor& contribution) {
  trace_->note(index, BucketEvent::kPackBegin);
  buckets_[index].pack(options_.pre_scale, usage_.local_used_map, contribution);
}

// REQUIRES: index == next_bucket_.
void Reducer::launch(size_t index) {
  if (index == 0 && callbacks_.before_first_launch) callbacks_.before_first_launch();
  Bucket& bucket = buckets_[index];
  if (bucket.state() == Bucket::State::kFilling) pack(index, {});
  trace_->note(index, BucketEvent::kLaunch);
  GradBucket seen = grad_bucket(index, bucket.buffer());
  auto future = run_hook(seen);
  if (bucket.device().is_cpu()) {  // elsewhere a future completes when it is enqueued: no time to tell
    future->addCallback([trace = trace_, index](Future&) { trace->note(index, BucketEvent::kDone); },
        /*uses_future=*/false);
  }
  bucket.launched(std::move(future));
  ++next_bucket_;
}

void Reducer::finish_backward() {
  if (phase_ != Phase::kBackward) return;
  trace_->note(StepEvent::kBackwardEnd);
  if (!used_map_.absence_is_fine() && !missing().empty()) {
    phase_ = Phase::kIncomplete;
    return;
  }
  launch_remaining_buckets();
  send_used_map();
  finalize_backward();
}

void Reducer::launch_remaining_buckets() {
  while (next_bucket_ < buckets_.size()) {
    const auto& slots = *buckets_[next_bucket_].slots();
    bool used =
        std::any_of(slots.begin(), slots.end(), [&](const auto& slot) { return usage_.local_used_map[slot.index]; });
    if (options_.skip_all_reduce_unused && used_map_.absence_is_fine() && !used)
      ++next_bucket_;  // on all ranks alike
    else
      launch(next_bucket_);
  }
}

void Reducer::finalize_backward() {
  std::vector<int32_t> used =
      used_map_.globally_used(usage_.local_used_map, [&](Future& future) { wait(future, buckets_.size()); });
  double scale = callbacks_.post_scale ? callbacks_.post_scale() : options_.post_scale;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    if (bucket.state() != Bucket::State::kLaunched) continue;  // skipped as unused
    wait(*bucket.future(), i);
    at::Tensor result = hook_ ? hook_->result(bucket.future()->value()) : bucket.buffer();
    if (result.numel() != bucket.numel())
      fail(errors::wrong_hook_result(group_->getRank(), i, result.numel(), bucket.numel()));
    trace_->note(i, BucketEvent::kUnpackBegin);
    if (!optimizer_in_backward) bucket.unpack(result, scale, used);
    trace_->note(i, BucketEvent::kUnpackEnd);
  }
  for (auto& future : std::exchange(extra_futures_, {})) wait(*future, buckets_.size());
  end_iteration();
}

void Reducer::end_iteration() {
  std::vector<size_t> absent = usage_.missing();
  graph_is_static_ = graph_is_static_ && (!recorded_ || absent == last_missing_);
  last_missing_ = std::move(absent);
  if (!recorded_) usage_.learn_expected();
  recorded_ = true;
  std::fill(usage_.local_used_map.begin(), usage_.local_used_map.end(), 0);
  phase_ = Phase::kIdle;
  trace_->note(StepEvent::kFinalizeEnd);
}

void Reducer::wait(Future& future, size_t bucket) {
  if (!callbacks_.on_stall) return future.waitAndThrow();
  wait_watching(future, [&](double seconds) { callbacks_.on_stall(seconds, bucket); });
}

}  // namespace minddp
