#include <Python.h>

#include "shm_backend.h"

#include "copy/gil_release.h"
#include "copy/in_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace minddp::shm {
namespace {

// How long the end of a group waits for works that nobody waited for.
constexpr auto kDrainTime = std::chrono::seconds(5);

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided;
}

// Flat memory for a tensor of any strides: its own if it is contiguous, otherwise a copy that
// write_back() returns. Lives as long as the work.
class FlatTensor {
 public:
  explicit FlatTensor(const at::Tensor& tensor) : tensor_(tensor) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    flat_ = tensor.contiguous();
  }

  Span span() const { return {static_cast<char*>(flat_.data_ptr()), flat_.nbytes()}; }

  void write_back() const {
    if (!flat_.is_same(tensor_)) {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      tensor_.copy_(flat_);
    }
  }

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
};

}  // namespace

ShmBackend::ShmBackend(
    Rest rest, std::shared_ptr<Segment> own, const std::vector<Card>& cards, std::chrono::milliseconds timeout)
    : Backend(rest->getRank(), rest->getSize()), timeout_(timeout), rest_(make_owned<Rest>(std::move(rest))),
      group_(make_owned<Group>(std::move(own), rank_, cards)), allreduce_(make_owned<Allreduce>(group_)),
      queue_(make_owned<WorkQueue>()) {}

ShmBackend::~ShmBackend() {
  const GilRelease release;  // threads are waited for, Gloo's too
  stop(kDrainTime);
  if (owner_.here()) rest_->reset();
}

void ShmBackend::shutdown() {
  stop(kDrainTime);
  if (owner_.here()) (*rest_)->shutdown();
}

void ShmBackend::abort() {
  stop(std::chrono::milliseconds(0));
  if (owner_.here()) (*rest_)->abort();
}

void ShmBackend::stop(std::chrono::milliseconds patience) {
  if (!owner_.here()) return;
  queue_->stop(patience, [this] { group_->abort(); });
  group_->leave();
}

void ShmBackend::check_owner(const char* what) const {
  if (owner_.here()) return;
  C10_THROW_ERROR(DistBackendError,
      c10::str("shm ", what, ": this process group is that of process ", owner_.pid(),
          ", from which this one was forked; a forked process is no rank of it and needs a group of its own"));
}

c10d::Backend& ShmBackend::rest(const char* what) const {
  check_owner(what);
  return **rest_;
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_.load());
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  rest("setTimeout").setTimeout(timeout);
  timeout_.store(timeout);
}

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return submitted_.load() + rest("getSequenceNumberForGroup").getSequenceNumberForGroup();
}

ShmBackend::WorkPointer ShmBackend::submit(c10d::OpType type, const char* title, const Tensors& tensors,
    std::chrono::milliseconds timeout, Program program) {
  check_owner(title + std::strlen("shm:"));
  if (timeout == c10d::kUnsetTimeout) timeout = timeout_.load();
  ++submitted_;
  auto work = c10::make_intrusive<ShmWork>(
      rank_, type, title, tensors,
      [allreduce = allreduce_, program = std::move(program), timeout] { program(*allreduce, timeout); }, queue_);
  const std::shared_ptr<WorkQueue> queue = queue_;  // a callback may end the group meanwhile
  queue->submit(work);
  return work;
}

ShmBackend::WorkPointer ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(c10d::OpType::BARRIER, "shm:barrier", {}, options.timeout,
      [](Allreduce& allreduce, auto timeout) { allreduce.barrier(timeout); });
}

ShmBackend::WorkPointer ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !is_ours(tensors[0])) return rest("allreduce").allreduce(tensors, options);
  TORCH_CHECK_VALUE(has_memory(tensors[0]),
      "shm allreduce: the tensor has no memory for all of its elements: torch's ",
      "zero tensors have none (use tensor.clone()), nor has one whose storage was resized");
  const auto op = options.reduceOp.op_;
  const at::ScalarType dtype = tensors[0].scalar_type();
  const Reduction how{op, dtype, reduce_function(op, dtype)};
  return submit(c10d::OpType::ALLREDUCE, "shm:all_reduce", tensors, options.timeout,
      [flat = FlatTensor(tensors[0]), how](Allreduce& allreduce, auto timeout) {
        allreduce.run(flat.span(), how, timeout);
        flat.write_back();
      });
}

}  // namespace minddp::shm
