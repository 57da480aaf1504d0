// The rest of the reducer: how it is made, remade and asked.
#include "errors.h"
#include "lone_bucket.h"
#include "reducer.h"

namespace minddp {

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
    c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options)
    : ReducerState{std::move(parameters), std::move(names), std::move(group), std::move(options)},
      bucket_and_slot_(this->parameters.size()) {
  const size_t count = this->parameters.size(), wires = this->options.wire_dtypes.size();
  TORCH_CHECK(this->names.size() == count && (wires == 0 || wires == count), "Reducer: ", count, " parameters, ",
      this->names.size(), " names and ", wires, " dtypes");
}

// Python may keep a case.
Reducer::~Reducer() {
  for (auto& c : cases_) c->state_ = nullptr;
}

void Reducer::add(std::shared_ptr<Case> added) {
  TORCH_CHECK(added->state_ == nullptr, "add: the case belongs to a reducer already");
  added->state_ = this;
  if (added->needs_before_accumulation()) before_accumulation_.push_back(added.get());
  if (added->follows_gradients()) follow_gradients_.push_back(added.get());
  cases_.push_back(std::move(added));
}

// Hooks hold the reducer weakly. The reducer keeps the nodes (GradHooks), and nodes keep their hooks. A strong
// reference from the hooks to the reducer would close that circle, and no reducer would ever be freed.
void Reducer::install_hooks() {
  OnReady on_ready = [weak = weak_from_this()](size_t index, const at::Tensor& contribution) {
    if (auto self = weak.lock()) self->on_ready(index, contribution);
  };
  BeforeAccumulation before = [weak = weak_from_this()](size_t index) {
    auto self = weak.lock();
    if (!self) return;
    auto lock = self->guard();
    for (Case* c : self->before_accumulation_) c->before_accumulation(index);
  };
  hooks_ = std::make_unique<GradHooks>(parameters, on_ready, before_accumulation_.empty() ? nullptr : before);
}

// A parameter's index may differ from before: others were frozen, or parameters were registered anew.
void Reducer::take_over(const Reducer& before) {
  sync_enabled = before.sync_enabled;
  optimizer_in_backward = before.optimizer_in_backward;
  const std::vector<int64_t> there = indices_in(before.parameters, parameters);
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (there[i] < 0) continue;
    used[i] = before.used[there[i]];
    arrived_in[i] = before.arrived_in[there[i]];
  }
  for (auto& c : cases_)
    for (auto& older : before.cases_) c->take_over(*older, there, group == before.group);
}

// Buckets are made anew, never resized.
void Reducer::set_buckets(const Buckets& indices_by_bucket) {
  TORCH_CHECK(iteration.phase == Phase::kIdle, "set_buckets: a backward is not finished; call it between iterations");
  const auto is_known = [&](size_t i) { return i < parameters.size(); };
  for (const auto& indices : indices_by_bucket)
    TORCH_CHECK(!indices.empty() && std::ranges::all_of(indices, is_known),
        "set_buckets: each bucket has indices of parameters, of which there are ", parameters.size());
  const bool first = buckets.empty();
  buckets.clear();
  for (const auto& indices : indices_by_bucket) {
    for (size_t slot = 0; slot < indices.size(); ++slot) bucket_and_slot_[indices[slot]] = {buckets.size(), slot};
    buckets.push_back(make_bucket(indices));
  }
  if (first)  // a module that is cast later changes nothing
    all_plain_ = std::ranges::all_of(buckets, [](const auto& bucket) { return bucket->is_plain(); });
  notify(Moment::kNewBuckets);
  if (first) install_hooks();
}

std::unique_ptr<Bucket> Reducer::make_bucket(const std::vector<size_t>& indices) {
  const at::Tensor& first = parameters[indices[0]];
  const at::ScalarType wire = options.wire_dtypes.empty() ? first.scalar_type() : options.wire_dtypes[indices[0]];
  Bucket::Options wanted{wire, rank};
  for (auto& c : cases_)
    if (auto bucket = c->make_bucket(indices, wanted)) return bucket;
  const bool swaps_memory =
      indices.size() == 1 && first.is_cpu() && wanted.buffer_dtype == first.scalar_type() && !wanted.allocate;
  if (swaps_memory) return std::make_unique<LoneBucket>(indices, parameters, names, wanted);
  return std::make_unique<Bucket>(indices, parameters, names, wanted);
}

// Memory alone: the next pack allocates again, so nothing else has to know.
void Reducer::release_buckets() {
  TORCH_CHECK(iteration.phase == Phase::kIdle, "release_buckets: a backward is not finished");
  for (auto& bucket : buckets) bucket->release();
}

// What a static graph knows to be unused is not waited for.
std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> indices = iteration.missing();
  std::erase_if(indices, [&](size_t index) { return used_map.known_unused(index); });
  return indices;
}

// Looked at when the next forward or step begins, not when backward ends: a second backward may still bring the rest.
// A program with no further forward and no step loses nothing.
void Reducer::check_finished() const {
  if (iteration.phase == Phase::kIdle) return;
  // A forward inside of backward is a checkpoint's. This backward may still bring what is missing.
  const bool inside = current_graph_task() != -1;
  if (iteration.phase != Phase::kLaunched && inside) return;
  if (iteration.phase == Phase::kLaunched && !iteration.too_late) fail(errors::not_finalized(rank));
  std::vector<errors::Parameter> absent;
  for (size_t index : missing()) absent.push_back({index, names[index]});
  // With a static graph, backward has perhaps raised our own error that the graph has changed.
  const auto cause = options.graph_mode == GraphMode::kStatic ? errors::Cause::kGraphChanged
      : iteration.phase == Phase::kIncomplete                 ? errors::Cause::kUnused
                                                              : errors::Cause::kBackwardRaised;
  fail(errors::unfinished_reduction(rank, absent, cause));
}

c10::intrusive_ptr<Future> Reducer::shadow_used_map() {
  std::fill(used.begin(), used.end(), 0);
  send_used_map();
  used_map.follow(wait_for(buckets.size()));
  ++learned.begun;
  ++learned.iterations;
  return used_map.future();
}

std::vector<int32_t> Reducer::sum_of_used_maps() {
  std::vector<int32_t> map = used_map.sum(wait_for(buckets.size()));
  map.resize(parameters.size());
  return map;
}

}  // namespace minddp
