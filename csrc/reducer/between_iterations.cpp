// The rest of the reducer: how it is made, remade and asked.
#include "cases/changed_module.h"
#include "cases/context_gradients.h"
#include "cases/earlier_sums.h"
#include "cases/half_bucket.h"
#include "cases/lazy_memory.h"
#include "cases/lone_bucket.h"
#include "cases/moved_views.h"
#include "cases/program_collectives.h"
#include "cases/quantized_bucket.h"
#include "cases/shared_parameters.h"
#include "cases/sparse_bucket.h"
#include "cases/view_bucket.h"
#include "reducer.h"
#include "support/errors.h"

#include <torch/csrc/autograd/graph_task.h>

namespace minddp {

namespace {
bool same_dtypes(const std::vector<at::Tensor>& parameters, const std::vector<at::ScalarType>& dtypes) {
  return dtypes.empty() ||
      std::ranges::equal(parameters, dtypes, {}, [](const at::Tensor& parameter) { return parameter.scalar_type(); });
}
}  // namespace

// Buckets are known from the start; hooks come with install_hooks(), once somebody owns the reducer.
Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::vector<bool> expect_sparse,
    c10::intrusive_ptr<c10d::ProcessGroup> group, ReducerOptions options, const Buckets& buckets)
    : ReducerState{std::move(parameters), std::move(names), group->getRank()},
      expect_sparse_(std::move(expect_sparse)), group_(std::move(group)),
      any_sparse_(std::ranges::count(expect_sparse_, true) > 0), options_(std::move(options)),
      any_cast_(options_.any_grad_dtype || !same_dtypes(this->parameters, options_.wire_dtypes)),
      place_(this->parameters.size()), used_map_(options_.graph_mode, alone()), trace_(std::make_shared<Trace>()) {
  ReducerState& state = *this;
  cases_.push_back(std::make_unique<ContextGradients>(state, options_.not_in_contexts));
  if (options_.graph_mode != GraphMode::kFindUnused) {
    program_collectives_ = new ProgramCollectives(state, *group_);
    cases_.emplace_back(program_collectives_);
  }
  if (options_.gradient_as_bucket_view) cases_.push_back(std::make_unique<MovedViews>(state));
  if (options_.refuses_earlier_sums) cases_.push_back(std::make_unique<EarlierSums>(state));
  if (options_.lazy_bucket_allocation) cases_.push_back(std::make_unique<LazyMemory>(state));
  set_buckets(buckets);
}

void Reducer::share(const std::shared_ptr<Reducer>& other, bool views) {
  if (!shared_) {
    ReducerState& state = *this;
    shared_ = new SharedParameters(state, alone());
    cases_.emplace_back(shared_);
  }
  shared_->add({other, static_cast<const ReducerState*>(other.get())}, views);
}

void Reducer::note_changed(const std::vector<at::Tensor>& changed, std::string why) {
  if (!changed_) {
    if (changed.empty()) return;
    const ReducerState& state = *this;
    changed_ = new ChangedModule(state);
    cases_.emplace_back(changed_);
  }
  changed_->note(changed, std::move(why), [weak = weak_from_this()](size_t index, const at::Tensor&) {
    auto self = weak.lock();
    if (!self) return;
    auto lock = self->guard();
    self->enter_backward(std::nullopt);
    self->changed_->on_gradient(index);
  });
}

// Hooks hold the reducer weakly. The reducer keeps the nodes (GradHooks), and nodes keep their hooks. A strong
// reference from the hooks to the reducer would close that circle, and no reducer would ever be freed.
void Reducer::install_hooks() {
  OnReady on_ready = [weak = weak_from_this()](size_t index, const at::Tensor& contribution) {
    if (auto self = weak.lock()) self->on_ready(index, contribution);
  };
  BeforeGrowth before_growth = [weak = weak_from_this()](size_t index) {
    auto self = weak.lock();
    if (!self) return;
    auto lock = self->guard();
    for (auto& c : self->cases_) c->on_growth(index);
  };
  const bool wanted = std::ranges::any_of(cases_, [](const auto& c) { return c->wants_growth(); });
  hooks_ = std::make_unique<GradHooks>(parameters, on_ready, wanted ? before_growth : nullptr);
}

// A parameter's index may differ from before: others were frozen, or parameters were registered anew.
void Reducer::take_over(const Reducer& before) {
  grads.take_over(before.grads, indices_in(before.parameters, parameters), group_ == before.group_);
}

void GradStates::take_over(const GradStates& before, const std::vector<int64_t>& there, bool same_group) {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (there[i] < 0) continue;
    used[i] = before.used[there[i]];
    states_[i] = before.states_[there[i]];
    if (!same_group) states_[i].result = SameTensor();
  }
  interrupted_in_ = before.interrupted_in_;
}

void GradStates::restore(const GradStates& earlier) {
  const int interrupted_in = interrupted_in_;
  *this = earlier;
  interrupted_in_ = interrupted_in;
}

// Buckets are made anew, never resized.
void Reducer::set_buckets(const Buckets& indices_by_bucket) {
  TORCH_CHECK(iteration.phase == Phase::kIdle, "set_buckets: a backward is not finished; call it between iterations");
  buckets.clear();
  for (const auto& indices : indices_by_bucket) {
    for (size_t slot = 0; slot < indices.size(); ++slot) place_[indices[slot]] = {buckets.size(), slot};
    buckets.push_back(make_bucket(indices));
  }
  trace_ = std::make_shared<Trace>(*trace_);  // callbacks of earlier collectives keep the old one
  trace_->resize(parameters.size(), buckets.size());
}

// The first kind that fits. The last one always does.
std::unique_ptr<Bucket> Reducer::make_bucket(const std::vector<size_t>& indices) const {
  const at::Tensor& first = parameters[indices[0]];
  const at::ScalarType dtype = first.scalar_type();
  const at::ScalarType wire = options_.wire_dtypes.empty() ? dtype : options_.wire_dtypes[indices[0]];
  const bool sparse = expect_sparse_[indices[0]], casts = wire != dtype;
  const Bucket::Options options{
      sparse ? dtype : wire, options_.any_grad_dtype, rank, transport_memory(group_, first.device())};
  if (sparse) return std::make_unique<SparseBucket>(indices, parameters, names, options);
  if (wire == at::kByte)
    return std::make_unique<QuantizedBucket>(indices, parameters, names, options, options_.quantization);
  if (wire == at::kHalf && casts && options_.warns_of_overflow)
    return std::make_unique<HalfBucket>(indices, parameters, names, options);
  if (options_.gradient_as_bucket_view && !casts)
    return std::make_unique<ViewBucket>(indices, parameters, names, options);
  if (indices.size() == 1 && first.is_cpu() && !casts && !options.allocate)
    return std::make_unique<LoneBucket>(indices, parameters, names, options);
  return std::make_unique<Bucket>(indices, parameters, names, options);
}

// Memory alone: the next pack allocates again, so nothing else has to know.
void Reducer::release_buckets() {
  TORCH_CHECK(iteration.phase == Phase::kIdle, "release_buckets: a backward is not finished");
  for (auto& bucket : buckets) bucket->release();
}

// torch's class does the same at construction. So `.grad` is a view even before the first backward.
void Reducer::adopt_gradients() {
  for (auto& bucket : buckets) bucket->adopt_gradients();
}

// What a static graph knows to be unused is not waited for.
std::vector<size_t> Reducer::missing() const {
  std::vector<size_t> indices = iteration.missing();
  std::erase_if(indices, [&](size_t index) { return used_map_.known_unused(index); });
  return indices;
}

// Looked at when the next forward or step begins, not when backward ends: a second backward may still bring the rest.
// A program with no further forward and no step loses nothing.
void Reducer::check_finished() const {
  if (iteration.phase == Phase::kIdle) return;
  // A forward inside of backward is a checkpoint's. This backward may still bring what is missing.
  const bool inside = torch::autograd::get_current_graph_task_id() != -1;
  if (iteration.phase != Phase::kLaunched && inside) return;
  if (iteration.phase == Phase::kLaunched && !iteration.too_late) fail(errors::not_finalized(rank));
  std::vector<errors::Parameter> absent;
  for (size_t index : missing()) absent.push_back({index, names[index]});
  // With a static graph, backward has perhaps raised our own error that the graph has changed.
  const auto cause = options_.graph_mode == GraphMode::kStatic ? errors::Cause::kGraphChanged
      : iteration.phase == Phase::kIncomplete                  ? errors::Cause::kUnused
                                                               : errors::Cause::kBackwardRaised;
  fail(errors::unfinished_reduction(rank, absent, cause));
}

c10::intrusive_ptr<Future> Reducer::shadow_used_map() {
  std::fill(grads.used.begin(), grads.used.end(), 0);
  send_used_map();
  used_map_.follow(for_used_map());
  ++trace_->iteration;
  ++learned.iterations;
  return used_map_.future();
}

}  // namespace minddp
