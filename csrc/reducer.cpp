#include "reducer.h"

#include "errors.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <condition_variable>
#include <numeric>
#include <set>

namespace minddp {
namespace {

size_t device_count(const std::vector<at::Tensor>& parameters) {
  std::set<std::string> devices;
  for (const at::Tensor& p : parameters) {
    devices.insert(p.device().str());
  }
  return devices.size();
}

}  // namespace

Reducer::Reducer(
    std::vector<at::Tensor> parameters,
    std::vector<std::string> names,
    std::vector<bool> expect_sparse,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    ReducerOptions options)
    : parameters_(std::move(parameters)),
      names_(std::move(names)),
      expect_sparse_(std::move(expect_sparse)),
      group_(std::move(group)),
      options_(std::move(options)),
      divisor_(group_->getSize()),
      several_threads_(device_count(parameters_) > 1),
      bucket_of_(parameters_.size()),
      usage_(parameters_.size()),
      order_(parameters_.size()),
      trace_(std::make_shared<Trace>()) {
  // No order is known yet. Gradients come roughly in reverse order of definition.
  make_buckets(assign(order_.order()));
}

void Reducer::install_hooks() {
  std::weak_ptr<Reducer> weak = weak_from_this();
  hooks_ = std::make_unique<GradHooks>(parameters_, [weak](size_t index) {
    if (auto self = weak.lock()) {
      self->on_ready(index);
    }
  });
}

// ---------------------------------------------------------------------------------------------
// Forward
// ---------------------------------------------------------------------------------------------

std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> indices = usage_.missing();
  indices.erase(
      std::remove_if(indices.begin(), indices.end(), [&](size_t i) { return known_unused(i); }),
      indices.end());
  return indices;
}

void Reducer::check_finished() const {
  bool died = phase_ == Phase::kBackward && torch::autograd::get_current_graph_task_id() == -1;
  if (phase_ == Phase::kIdle || (phase_ == Phase::kBackward && !died)) {
    return;
  }
  std::vector<errors::Parameter> names;
  for (size_t index : missing()) {
    names.push_back({index, names_[index]});
  }
  bool is_static = options_.graph_mode == GraphMode::kStatic;
  auto cause = is_static ? errors::Cause::kGraphChanged : died ? errors::Cause::kBackwardRaised : errors::Cause::kUnused;
  fail(errors::unfinished_reduction(group_->getRank(), names, cause));
}

void Reducer::fail(const std::string& message) const {
  last_error_ = message;
  TORCH_CHECK(false, message);
}

at::Tensor Reducer::used_map() {
  if (used_map_) {
    wait(*used_map_, buckets_.size());
    return used_map_tensor_;
  }
  return at::tensor(usage_.local_used_map());
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  trace_->step(StepEvent::kForwardEnd);
  std::weak_ptr<Reducer> weak = weak_from_this();
  watch_outputs(outputs, [weak] {
    if (auto self = weak.lock()) {
      self->on_backward_begins();
    }
  });
}

// ---------------------------------------------------------------------------------------------
// Backward
// ---------------------------------------------------------------------------------------------

void Reducer::on_backward_begins() {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (several_threads_) {
    lock.lock();
  }
  // Whether to synchronize is decided where backward begins: no_sync around backward alone counts.
  if (phase_ != Phase::kBackward && sync_enabled_) {
    begin_backward();
  }
}

void Reducer::begin_backward() {
  // The callback runs when the graph task that is running now is over. A reentrant checkpoint's
  // backward is a graph task of its own; forward's outputs are reached before it, in the outer one.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto self = weak.lock()) {
      self->finish_backward();
    }
  });
  bool resumes = phase_ == Phase::kIncomplete;
  phase_ = Phase::kBackward;
  if (resumes) {
    return;
  }
  trace_->begin_step();
  trace_->step(StepEvent::kBackwardBegin);
  usage_.begin_backward();
  order_.begin();
  next_bucket_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.begin_backward();
  }
  for (size_t i = 0; i < static_used_.size(); ++i) {
    if (!static_used_[i]) {
      mark_variable_ready(i);
    }
  }
}

void Reducer::on_ready(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (several_threads_) {
    lock.lock();
  }
  if (phase_ != Phase::kBackward) {
    if (!sync_enabled_) {
      usage_.note_unsynchronized(index);
      return;
    }
    begin_backward();
  }
  if (known_unused(index)) {
    fail(errors::graph_changed(group_->getRank(), {index, names_[index]}));
  }
  order_.note_arrival(index);
  trace_->ready(index);
  switch (usage_.note_arrival(index)) {
    case ParamUsage::Arrival::kEarly:
      break;
    case ParamUsage::Arrival::kLast:
      mark_variable_ready(index);
      break;
    case ParamUsage::Arrival::kExtra:
      gradient_grew(index);
      break;
  }
}

void Reducer::mark_variable_ready(size_t index) {
  size_t b = bucket_of_[index];
  if (!buckets_[b].mark_ready()) {
    return;
  }
  trace_->bucket(b, BucketEvent::kReady);
  if (order_recorded_) {
    // Now, not when it is launched: the gradients are still in the cache.
    pack(b);
    launch_ready_buckets();
  }
}

// A contribution after the one that was thought the last. Before the bucket has left, no harm is
// done: it is packed again, and the next iterations wait for one arrival more.
void Reducer::gradient_grew(size_t index) {
  Bucket& bucket = buckets_[bucket_of_[index]];
  if (bucket.state() == Bucket::State::kLaunched) {
    fail(errors::ready_twice(group_->getRank(), {index, names_[index]}, usage_.arrivals(index)));
  }
  usage_.expect_at_least(index, usage_.arrivals(index));
  bucket.repack();
}

void Reducer::launch_ready_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending() == 0) {
    launch(next_bucket_);
  }
}

void Reducer::pack(size_t index) {
  trace_->bucket(index, BucketEvent::kPackBegin);
  buckets_[index].pack(pre_scale());
}

// REQUIRES: index == next_bucket_.
void Reducer::launch(size_t index) {
  if (index == 0) {
    launch_weight();
  }
  Bucket& bucket = buckets_[index];
  if (bucket.state() == Bucket::State::kFilling) {
    pack(index);
  }
  trace_->bucket(index, BucketEvent::kLaunch);
  std::vector<GradBucket::Piece> pieces;
  if (hook_) {
    for (const Bucket::Slot& slot : bucket.slots()) {
      pieces.push_back({slot.parameter, slot.offset, slot.strides});
    }
  }
  GradBucket view(index, buckets_.size(), bucket.buffer(), std::move(pieces));
  auto future = hook_ ? hook_->run(view) : run_allreduce(view);
  if (bucket.device().is_cpu()) {  // elsewhere a future completes when it is enqueued: no time to tell
    future->addCallback(
        [trace = trace_, done = trace_->slot(index, BucketEvent::kDone)](Future&) { *done = Trace::now(); },
        /*uses_future=*/false);
  }
  bucket.launched(std::move(future));
  ++next_bucket_;
}

c10::intrusive_ptr<Future> Reducer::run_allreduce(const GradBucket& bucket) {
  bool average = options_.average_in_collective && options_.reduction == Reduction::kMean &&
      options_.predivide_factor == 0 && divisor_ == group_->getSize() && !hook_;
  return allreduce(*group_, bucket.buffer(), average);
}

c10::intrusive_ptr<Future> Reducer::run_hook(GradBucket& bucket) {
  return hook_ ? hook_->run(bucket) : run_allreduce(bucket);
}

// The mean is a sum and a division. Dividing before the sum keeps half precision in range and costs
// nothing, since packing passes over the gradients anyway; AVG leaves it to the collective. A hook
// gets the gradients as they are and divides by itself.
double Reducer::pre_scale() const {
  if (hook_) {
    return 1.0;
  }
  if (options_.predivide_factor != 0) {
    return 1.0 / options_.predivide_factor;
  }
  if (options_.reduction != Reduction::kMean) {
    return 1.0;
  }
  return options_.average_in_collective && divisor_ == group_->getSize() ? 1.0 : 1.0 / double(divisor_);
}

// ---------------------------------------------------------------------------------------------
// The end of backward
// ---------------------------------------------------------------------------------------------

void Reducer::finish_backward() {
  if (phase_ != Phase::kBackward) {
    return;
  }
  trace_->step(StepEvent::kBackwardEnd);
  if (!unused_is_fine() && !missing().empty()) {
    phase_ = Phase::kIncomplete;
    return;
  }
  launch_all_buckets();
  launch_used_map();
  finalize_backward();
}

void Reducer::launch_all_buckets() {
  for (size_t i = next_bucket_; i < buckets_.size(); i = next_bucket_) {
    const auto& slots = buckets_[i].slots();
    bool used = std::any_of(slots.begin(), slots.end(), [&](const Bucket::Slot& slot) {
      return usage_.local_used_map()[slot.index] != 0;
    });
    if (options_.skip_all_reduce_unused && unused_is_fine() && !used) {
      ++next_bucket_;  // on every rank alike, the user has promised
      continue;
    }
    launch(i);
  }
}

bool Reducer::sends_used_map() const {
  return options_.graph_mode == GraphMode::kFindUnused ||
      (options_.graph_mode == GraphMode::kStatic && static_used_.empty());
}

// After the last bucket: the one place in the order of collectives that is the same on all ranks.
void Reducer::launch_used_map() {
  used_map_ = nullptr;
  if (!sends_used_map() || options_.skip_all_reduce_unused) {
    return;
  }
  const auto& local = usage_.local_used_map();
  at::Tensor map = at::empty({static_cast<int64_t>(local.size())}, at::kInt);
  std::copy(local.begin(), local.end(), map.data_ptr<int32_t>());
  used_map_tensor_ = map.to(device(), /*non_blocking=*/true);
  used_map_ = allreduce(*group_, used_map_tensor_, /*average=*/false);
}

// 1 for parameters whose gradient some rank has. Waits only when this rank lacks some: with all of
// them used here, the others' maps change nothing.
std::vector<int32_t> Reducer::globally_used() {
  const auto& local = usage_.local_used_map();
  if (!static_used_.empty()) {
    return static_used_;
  }
  bool all_here = std::all_of(local.begin(), local.end(), [](int32_t used) { return used != 0; });
  bool decides_for_good = options_.graph_mode == GraphMode::kStatic;
  if (used_map_ && (!all_here || decides_for_good)) {
    wait(*used_map_, buckets_.size());
    at::Tensor map = used_map_tensor_.cpu();
    return {map.const_data_ptr<int32_t>(), map.const_data_ptr<int32_t>() + map.numel()};
  }
  return options_.skip_all_reduce_unused ? local : std::vector<int32_t>(local.size(), 1);
}

void Reducer::finalize_backward() {
  std::vector<int32_t> used = globally_used();
  double scale = post_scale();
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].state() != Bucket::State::kLaunched) {
      continue;  // skipped as unused
    }
    wait(*buckets_[i].future(), i);
    at::Tensor result = reduced(i);
    trace_->bucket(i, BucketEvent::kUnpackBegin);
    if (!optimizer_in_backward_) {
      buckets_[i].unpack(result, scale, used);
    }
    trace_->bucket(i, BucketEvent::kUnpackEnd);
  }
  for (auto& future : extra_futures_) {
    wait(*future, buckets_.size());
  }
  extra_futures_.clear();
  if (options_.graph_mode == GraphMode::kStatic && static_used_.empty()) {
    static_used_ = used;
  }
  end_iteration();
}

at::Tensor Reducer::reduced(size_t index) {
  const Bucket& bucket = buckets_[index];
  if (!hook_) {
    return bucket.buffer();
  }
  at::Tensor result = hook_->result(bucket.future()->value());
  TORCH_CHECK(
      bucket.sparse() || result.numel() == bucket.numel(),
      errors::wrong_hook_result(
          group_->getRank(), index, "a tensor of " + std::to_string(result.numel()) + " elements",
          std::to_string(bucket.numel()) + " elements"));
  return result;
}

void Reducer::end_iteration() {
  trace_->step(StepEvent::kFinalizeEnd);
  std::vector<size_t> now_missing = usage_.missing();
  graph_is_static_ = graph_is_static_ && (!order_recorded_ || now_missing == last_missing_);
  last_missing_ = std::move(now_missing);
  if (!order_recorded_) {
    usage_.learn_expected();
    order_recorded_ = true;
  }
  usage_.end_synchronization();
  weight_.reset();
  weight_future_ = nullptr;
  phase_ = Phase::kIdle;
}

// Waits without the GIL. A peer that will never come is noticed here, by the handler.
void Reducer::wait(Future& future, size_t bucket) {
  if (on_stall_ && !future.completed()) {
    struct Latch {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
    };
    auto latch = std::make_shared<Latch>();
    future.addCallback(
        [latch](Future&) {
          std::lock_guard<std::mutex> lock(latch->mutex);
          latch->done = true;
          latch->changed.notify_all();
        },
        /*uses_future=*/false);
    int64_t begin = Trace::now();
    std::unique_lock<std::mutex> lock(latch->mutex);
    while (!latch->changed.wait_for(lock, std::chrono::seconds(1), [&] { return latch->done; })) {
      lock.unlock();
      on_stall_(double(Trace::now() - begin) * 1e-9, bucket);
      lock.lock();
    }
  }
  future.waitAndThrow();
}

// ---------------------------------------------------------------------------------------------
// Weighted reduction
// ---------------------------------------------------------------------------------------------

void Reducer::add_weight(double weight) {
  weight_ = weight_.value_or(0) + weight;
}

// Before bucket 0, on every rank. A rank without a weight sends NaN, so that all ranks learn of it.
void Reducer::launch_weight() {
  if (options_.reduction != Reduction::kWeighted) {
    return;
  }
  weight_tensor_ = at::full({1}, weight_.value_or(NAN), at::kDouble).to(device());
  weight_future_ = allreduce(*group_, weight_tensor_, /*average=*/false);
}

double Reducer::post_scale() {
  double undo = hook_ ? double(group_->getSize())  // hooks average; what is wanted starts from the sum
                      : (options_.predivide_factor != 0 ? options_.predivide_factor : 1.0);
  switch (options_.reduction) {
    case Reduction::kMean:
      return hook_ || options_.predivide_factor == 0 ? 1.0 : undo / double(divisor_);
    case Reduction::kSum:
      return undo;
    case Reduction::kWeighted:
      break;
  }
  wait(*weight_future_, buckets_.size());
  double total = weight_tensor_.item<double>();
  int rank = group_->getRank();
  bool here = !weight_.has_value();
  if (std::isnan(total) || !(total > 0)) {
    end_iteration();
  }
  TORCH_CHECK(!std::isnan(total), errors::weight_missing(rank, here));
  TORCH_CHECK(total > 0, errors::weight_not_positive(rank, total));
  return undo / total;
}

// ---------------------------------------------------------------------------------------------
// Buckets
// ---------------------------------------------------------------------------------------------

std::vector<ParameterInfo> Reducer::parameter_infos() const {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& p = parameters_[i];
    infos.push_back({static_cast<int64_t>(p.nbytes()), p.scalar_type(), p.device(), expect_sparse_[i]});
  }
  return infos;
}

void Reducer::make_buckets(const std::vector<std::vector<size_t>>& assignment) {
  buckets_.clear();
  buckets_.reserve(assignment.size());
  for (const auto& indices : assignment) {
    const at::Tensor& first = parameters_[indices[0]];
    bool cast = options_.reduce_dtype && !expect_sparse_[indices[0]] && first.is_floating_point();
    Bucket::Options options;
    options.buffer_dtype = cast ? *options_.reduce_dtype : first.scalar_type();
    options.sparse = expect_sparse_[indices[0]];
    options.gradient_as_view = options_.gradient_as_bucket_view && options.buffer_dtype == first.scalar_type();
    options.rank = group_->getRank();
    for (size_t index : indices) {
      bucket_of_[index] = buckets_.size();
    }
    buckets_.emplace_back(indices, parameters_, names_, options);
    buckets_.back().begin_backward();
  }
  trace_ = std::make_shared<Trace>(*trace_);  // callbacks of old collectives keep the old one
  trace_->resize(parameters_.size(), buckets_.size());
}

bool Reducer::rebuild_buckets() {
  if (rebuilt_ || !order_recorded_ || phase_ != Phase::kIdle) {
    return false;
  }
  make_buckets(assign(order_.agree(*group_, device())));
  rebuilt_ = true;
  return true;
}

// What never arrived would hold up what did, so the two do not share buckets.
std::vector<std::vector<size_t>> Reducer::assign(const ReadyOrder::Order& order) const {
  auto infos = parameter_infos();
  auto buckets = assign_buckets(infos, order.arrived, options_.caps);
  auto absent = assign_buckets(infos, order.absent, options_.caps);
  buckets.insert(buckets.end(), absent.begin(), absent.end());
  return buckets;
}

void Reducer::set_buckets(const std::vector<std::vector<size_t>>& buckets) {
  TORCH_CHECK(phase_ == Phase::kIdle, "set_buckets: a backward is not finished; call it between iterations");
  make_buckets(buckets);
  rebuilt_ = true;
}

void Reducer::release_buckets() {
  TORCH_CHECK(phase_ == Phase::kIdle, "release_buckets: a backward is not finished");
  for (Bucket& bucket : buckets_) {
    bucket.release();
  }
}

void Reducer::set_comm_hook(std::unique_ptr<CommHook> hook) {
  TORCH_CHECK(
      hook_ == nullptr && !options_.reduce_dtype,
      "register_comm_hook or register_builtin_comm_hook can only be called once.");
  hook_ = std::move(hook);
}

void Reducer::set_reduce_dtype(std::optional<at::ScalarType> dtype) {
  options_.reduce_dtype = dtype;
  std::vector<std::vector<size_t>> same;
  for (const Bucket& bucket : buckets_) {
    same.emplace_back();
    for (const Bucket::Slot& slot : bucket.slots()) {
      same.back().push_back(slot.index);
    }
  }
  make_buckets(same);
}

void Reducer::set_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  group_ = std::move(group);
  divisor_ = group_->getSize();
}

void Reducer::reset() {
  phase_ = Phase::kIdle;
  order_recorded_ = rebuilt_ = false;
  static_used_.clear();
  used_map_ = nullptr;
  usage_ = ParamUsage(parameters_.size());
  order_.begin();
  make_buckets(assign(order_.order()));
}

// ---------------------------------------------------------------------------------------------
// A rank that ran out of data
// ---------------------------------------------------------------------------------------------

GradBucket Reducer::zero_bucket(size_t index) const {
  std::vector<GradBucket::Piece> pieces;
  for (const Bucket::Slot& slot : buckets_[index].slots()) {
    pieces.push_back({slot.parameter, slot.offset, slot.strides});
  }
  return GradBucket(index, buckets_.size(), buckets_[index].zeros_like_buffer(), std::move(pieces));
}

void Reducer::shadow_backward() {
  weight_ = 0.0;
  launch_weight();
  std::vector<c10::intrusive_ptr<Future>> futures;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    GradBucket zeros = zero_bucket(i);
    futures.push_back(run_hook(zeros));
  }
  usage_.end_synchronization();
  launch_used_map();
  for (size_t i = 0; i < futures.size(); ++i) {
    wait(*futures[i], i);
  }
  if (weight_future_) {
    wait(*weight_future_, buckets_.size());
  }
  order_recorded_ = true;
  weight_.reset();
}

}  // namespace minddp
