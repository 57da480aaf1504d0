#include <Python.h>

#include "shm_backend.h"

#include "wire/gil_release.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace minddp::shm {
namespace {

using c10d::OpType;
using Tensors = ShmBackend::Tensors;

// How long the end of a group waits for works that nobody waited for.
constexpr auto kDrainTime = std::chrono::seconds(5);

// How long who waits for a message looks for it before sleeping.
constexpr auto kMessageSpin = std::chrono::microseconds(20);

void check_tensor(const char* what, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "shm ", what, ": ", argument, " is an undefined tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "shm ", what, ": ", argument, " is on ", tensor.device(),
      ", but this backend moves CPU tensors; use nccl or gloo for it, or tensor.cpu()");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "shm ", what, ": ", argument, " is ", tensor.layout(),
      ", but this backend moves dense tensors; use tensor.to_dense()");
}

void check_same_dtype(const char* what, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), "shm ", what, ": input and output must have one dtype, got ",
      a.scalar_type(), " and ", b.scalar_type());
}

void check_same_size(const char* what, const at::Tensor& input, const at::Tensor& output) {
  check_same_dtype(what, input, output);
  TORCH_CHECK_VALUE(input.numel() == output.numel(), "shm ", what,
      ": input and output must have the same number of elements, got ", input.numel(), " and ", output.numel());
}

// Flat memory for a tensor of any strides: its own where it is contiguous, else a copy that
// write_back() returns. Lives as long as the work.
class FlatTensor {
 public:
  explicit FlatTensor(const at::Tensor& tensor) : tensor_(tensor) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    flat_ = tensor.contiguous();
  }

  Span span() const { return {static_cast<char*>(flat_.data_ptr()), flat_.nbytes()}; }

  // The part that belongs to one of `parts` ranks.
  Span part(size_t index, size_t parts) const {
    const size_t bytes = flat_.nbytes() / parts;
    return {span().data + index * bytes, bytes};
  }

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

std::vector<FlatTensor> flatten(const char* what, const char* argument, const Tensors& tensors) {
  std::vector<FlatTensor> flat;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(what, argument, tensor);
    flat.emplace_back(tensor);
  }
  return flat;
}

std::vector<Span> spans(const std::vector<FlatTensor>& tensors) {
  std::vector<Span> result;
  for (const FlatTensor& tensor : tensors) result.push_back(tensor.span());
  return result;
}

std::vector<Span> parts(const FlatTensor& tensor, size_t count) {
  std::vector<Span> result;
  for (size_t i = 0; i < count; ++i) result.push_back(tensor.part(i, count));
  return result;
}

// Cuts along the first dimension; no splits means equal ones.
std::vector<Span> cut_rows(const char* argument, const FlatTensor& flat, const at::Tensor& tensor,
    const std::vector<int64_t>& splits, size_t ranks) {
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) % static_cast<int64_t>(ranks) == 0,
        "shm alltoall: the first dimension of ", argument, " must be divisible by the number of ranks, ", ranks,
        ", got shape ", tensor.sizes());
    return parts(flat, ranks);
  }
  int64_t sum = 0;
  for (const int64_t rows : splits) {
    TORCH_CHECK_VALUE(rows >= 0, "shm alltoall: ", argument, "_split_sizes has a negative entry, ", rows);
    sum += rows;
  }
  TORCH_CHECK_VALUE(splits.size() == ranks && tensor.dim() > 0 && sum == tensor.size(0), "shm alltoall: ", argument,
      "_split_sizes must be one size per rank (", ranks, ") that add up to the first dimension of shape ",
      tensor.sizes(), ", got ", splits);
  const size_t row_bytes = sum > 0 ? tensor.nbytes() / static_cast<size_t>(sum) : 0;
  std::vector<Span> result;
  char* begin = flat.span().data;
  for (const int64_t rows : splits) {
    result.push_back({begin, static_cast<size_t>(rows) * row_bytes});
    begin += result.back().bytes;
  }
  return result;
}

Call call(const at::Tensor& tensor, std::chrono::milliseconds timeout) { return {tensor.scalar_type(), timeout}; }

Reduction reduction(const char* what, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(op.op_ != c10d::ReduceOp::PREMUL_SUM, "shm ", what,
      ": PREMUL_SUM is not supported; scale the tensor and use SUM");
  return {op.op_, reduce_function(op.op_, tensor.scalar_type()), static_cast<size_t>(tensor.element_size())};
}

}  // namespace

// How a call is known: to c10d, to the profiler, in messages.
struct ShmBackend::Kind {
  OpType type;
  const char* title;
};

ShmBackend::ShmBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size), timeout_(timeout),
      group_(Group::join(*store, rank, size, timeout, Mailbox::table_bytes(size), Exchange::ring_bytes())),
      collectives_(make_owned<Collectives>(group_)), messenger_(make_owned<Messenger>(group_)),
      queue_(make_owned<WorkQueue>()) {}

ShmBackend::~ShmBackend() { stop(kDrainTime); }

void ShmBackend::shutdown() { stop(kDrainTime); }

void ShmBackend::abort() { stop(std::chrono::milliseconds(0)); }

void ShmBackend::stop(std::chrono::milliseconds patience) {
  if (!owner_.here()) return;
  const GilRelease release;
  queue_->stop(patience, [this] { group_->abort(); });
  messenger_->stop(patience);
  group_->leave();
}

void ShmBackend::check_owner(const char* what) const {
  if (owner_.here()) return;
  C10_THROW_ERROR(DistBackendError,
      c10::str("shm ", what, ": this process group is that of process ", owner_.pid(),
          ", from which this one was forked; a forked process is no rank of it and needs a group of its own"));
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>("shm", timeout_.load());
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "shm allocateTensor: device must be cpu, got ", options.device());
  TORCH_CHECK_VALUE(size >= 0, "shm allocateTensor: size must not be negative, got ", size);
  check_owner("allocateTensor");
  size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(size), options.dtype().itemsize(), &bytes))
    throw OutOfSharedMemory(c10::str("shm: a tensor of ", size, " elements of ", options.dtype().itemsize(),
        " bytes has more bytes than can be addressed"));
  if (bytes == 0) return at::empty({size}, options);
  const std::shared_ptr<SharedHeap> heap = group_->shared_heap();
  char* data = heap->allocate(bytes);
  return at::from_blob(data, {size}, [heap, data](void*) { heap->free(data); }, options.device(c10::kCPU));
}

bool ShmBackend::is_shared(const at::Tensor& tensor) const {
  return owner_.here() && tensor.is_contiguous() && group_->offset_of(tensor.data_ptr(), tensor.nbytes()) >= 0;
}

void ShmBackend::check_rank(const char* what, int rank) const {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < size_, "shm ", what, ": rank ", rank, " is not in this group of ", size_, " ranks");
}

void ShmBackend::check_root(const char* what, int64_t root) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < size_, "shm ", what, ": root ", root, " is not in this group of ", size_, " ranks");
}

void ShmBackend::check_count(const char* what, const char* argument, size_t count, size_t expected) const {
  TORCH_CHECK_VALUE(
      count == expected, "shm ", what, ": ", argument, " must have ", expected, " tensors, got ", count);
}

template <class CallOptions>
ShmBackend::WorkPointer ShmBackend::submit(
    const Kind& kind, const CallOptions& options, const Tensors& inputs, Tensors outputs, Program program) {
  check_owner(kind.title + std::strlen("shm:"));
  const auto timeout = options.timeout == c10d::kUnsetTimeout ? timeout_.load() : options.timeout;
  ++submitted_;
  auto work = c10::make_intrusive<ShmWork>(rank_, kind.type, kind.title, inputs, std::move(outputs),
      [collectives = collectives_, program = std::move(program), timeout] { program(*collectives, timeout); });
  const std::shared_ptr<WorkQueue> queue = queue_;  // a callback may end the group meanwhile
  queue->submit(work, !options.asyncOp);
  return work;
}

ShmBackend::WorkPointer ShmBackend::barrier(const c10d::BarrierOptions& options) {
  return submit({OpType::BARRIER, "shm:barrier"}, options, {}, {},
      [](Collectives& collectives, auto timeout) { collectives.barrier({at::ScalarType::Undefined, timeout}); });
}

ShmBackend::WorkPointer ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_count("broadcast", "tensors", tensors.size(), 1);
  check_root("broadcast", options.rootRank);
  check_tensor("broadcast", "tensor", tensors[0]);
  return submit({OpType::BROADCAST, "shm:broadcast"}, options, tensors, tensors,
      [tensor = tensors[0], flat = FlatTensor(tensors[0]), root = static_cast<int>(options.rootRank)](
          Collectives& collectives, auto timeout) {
        collectives.broadcast(flat.span(), root, call(tensor, timeout));
        flat.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_count("allreduce", "tensors", tensors.size(), 1);
  check_tensor("allreduce", "tensor", tensors[0]);
  return submit({OpType::ALLREDUCE, "shm:all_reduce"}, options, tensors, tensors,
      [tensor = tensors[0], flat = FlatTensor(tensors[0]),
          how = reduction("allreduce", options.reduceOp, tensors[0])](Collectives& collectives, auto timeout) {
        collectives.allreduce(flat.span(), how, call(tensor, timeout));
        flat.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  const auto flat = flatten("allreduce_coalesced", "tensor", tensors);
  std::vector<Reduction> how;
  for (const at::Tensor& tensor : tensors) how.push_back(reduction("allreduce_coalesced", options.reduceOp, tensor));
  return submit({OpType::ALLREDUCE_COALESCED, "shm:all_reduce_coalesced"}, options, tensors, tensors,
      [tensors, flat, how](Collectives& collectives, auto timeout) {
        for (size_t i = 0; i < tensors.size(); ++i) {
          collectives.allreduce(flat[i].span(), how[i], call(tensors[i], timeout));
          flat[i].write_back();
        }
      });
}

ShmBackend::WorkPointer ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_count("reduce", "tensors", tensors.size(), 1);
  check_root("reduce", options.rootRank);
  check_tensor("reduce", "tensor", tensors[0]);
  return submit({OpType::REDUCE, "shm:reduce"}, options, tensors, tensors,
      [tensor = tensors[0], flat = FlatTensor(tensors[0]), root = static_cast<int>(options.rootRank),
          how = reduction("reduce", options.reduceOp, tensors[0])](Collectives& collectives, auto timeout) {
        collectives.reduce(flat.span(), root, how, call(tensor, timeout));
        flat.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_count("allgather", "inputs", inputs.size(), 1);
  check_count("allgather", "output lists", outputs.size(), 1);
  check_count("allgather", "the output list", outputs[0].size(), static_cast<size_t>(size_));
  const auto flat_inputs = flatten("allgather", "input", inputs);
  const auto flat_outputs = flatten("allgather", "output", outputs[0]);
  for (const at::Tensor& output : outputs[0]) check_same_dtype("allgather", inputs[0], output);
  check_same_size("allgather", inputs[0], outputs[0][static_cast<size_t>(rank_)]);
  return submit({OpType::ALLGATHER, "shm:all_gather"}, options, inputs, outputs[0],
      [tensor = inputs[0], flat_inputs, flat_outputs](Collectives& collectives, auto timeout) {
        collectives.allgather(flat_inputs[0].span(), spans(flat_outputs), call(tensor, timeout));
        for (const FlatTensor& output : flat_outputs) output.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPointer ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* what = "allgather_into_tensor";
  check_count(what, "outputs", outputs.size(), inputs.size());
  const auto flat_inputs = flatten(what, "input", inputs);
  const auto flat_outputs = flatten(what, "output", outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_dtype(what, inputs[i], outputs[i]);
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_, "shm ", what, ": the output must have ", size_,
        " times the input's ", inputs[i].numel(), " elements, got ", outputs[i].numel());
  }
  return submit({OpType::_ALLGATHER_BASE, "shm:all_gather_into_tensor"}, options, inputs, outputs,
      [ranks = static_cast<size_t>(size_), inputs, flat_inputs, flat_outputs](
          Collectives& collectives, auto timeout) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          const auto pieces = parts(flat_outputs[i], ranks);
          collectives.allgather(flat_inputs[i].span(), pieces, call(inputs[i], timeout));
          flat_outputs[i].write_back();
        }
      });
}

// outputs[r][i] receives inputs[i] of rank r.
ShmBackend::WorkPointer ShmBackend::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const char* what = "allgather_coalesced";
  check_count(what, "output lists", outputs.size(), static_cast<size_t>(size_));
  const auto flat_inputs = flatten(what, "input", inputs);
  std::vector<std::vector<FlatTensor>> flat_outputs;
  Tensors all_outputs;
  for (const Tensors& list : outputs) {
    check_count(what, "each output list", list.size(), inputs.size());
    flat_outputs.push_back(flatten(what, "output", list));
    all_outputs.insert(all_outputs.end(), list.begin(), list.end());
    for (size_t i = 0; i < inputs.size(); ++i) check_same_size(what, inputs[i], list[i]);
  }
  return submit({OpType::ALLGATHER_COALESCED, "shm:all_gather_coalesced"}, options, inputs, all_outputs,
      [inputs, flat_inputs, flat_outputs](Collectives& collectives, auto timeout) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          std::vector<Span> pieces;
          for (const auto& list : flat_outputs) pieces.push_back(list[i].span());
          collectives.allgather(flat_inputs[i].span(), pieces, call(inputs[i], timeout));
          for (const auto& list : flat_outputs) list[i].write_back();
        }
      });
}

ShmBackend::WorkPointer ShmBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  check_count("gather", "inputs", inputs.size(), 1);
  check_root("gather", options.rootRank);
  const bool is_root = options.rootRank == rank_;
  check_count("gather", "output lists (on the root, none elsewhere)", outputs.size(), is_root ? 1 : 0);
  const Tensors list = is_root ? outputs[0] : Tensors{};
  check_count("gather", "the output list", list.size(), is_root ? static_cast<size_t>(size_) : 0);
  const auto flat_inputs = flatten("gather", "input", inputs);
  const auto flat_outputs = flatten("gather", "output", list);
  for (const at::Tensor& output : list) check_same_size("gather", inputs[0], output);
  return submit({OpType::GATHER, "shm:gather"}, options, inputs, list,
      [tensor = inputs[0], flat_inputs, flat_outputs, root = static_cast<int>(options.rootRank)](
          Collectives& collectives, auto timeout) {
        collectives.gather(flat_inputs[0].span(), spans(flat_outputs), root, call(tensor, timeout));
        for (const FlatTensor& output : flat_outputs) output.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  check_count("scatter", "outputs", outputs.size(), 1);
  check_root("scatter", options.rootRank);
  const bool is_root = options.rootRank == rank_;
  check_count("scatter", "input lists (on the root, none elsewhere)", inputs.size(), is_root ? 1 : 0);
  const Tensors list = is_root ? inputs[0] : Tensors{};
  check_count("scatter", "the input list", list.size(), is_root ? static_cast<size_t>(size_) : 0);
  const auto flat_inputs = flatten("scatter", "input", list);
  const auto flat_outputs = flatten("scatter", "output", outputs);
  for (const at::Tensor& input : list) check_same_size("scatter", input, outputs[0]);
  return submit({OpType::SCATTER, "shm:scatter"}, options, list, outputs,
      [tensor = outputs[0], flat_inputs, flat_outputs, root = static_cast<int>(options.rootRank)](
          Collectives& collectives, auto timeout) {
        collectives.scatter(flat_outputs[0].span(), spans(flat_inputs), root, call(tensor, timeout));
        flat_outputs[0].write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  check_count("reduce_scatter", "outputs", outputs.size(), 1);
  check_count("reduce_scatter", "input lists", inputs.size(), 1);
  check_count("reduce_scatter", "the input list", inputs[0].size(), static_cast<size_t>(size_));
  const auto flat_inputs = flatten("reduce_scatter", "input", inputs[0]);
  const auto flat_outputs = flatten("reduce_scatter", "output", outputs);
  for (const at::Tensor& input : inputs[0]) check_same_size("reduce_scatter", input, outputs[0]);
  return submit({OpType::REDUCE_SCATTER, "shm:reduce_scatter"}, options, inputs[0], outputs,
      [tensor = outputs[0], flat_inputs, flat_outputs,
          how = reduction("reduce_scatter", options.reduceOp, outputs[0])](Collectives& collectives, auto timeout) {
        collectives.reduce_scatter(flat_outputs[0].span(), spans(flat_inputs), how, call(tensor, timeout));
        flat_outputs[0].write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

ShmBackend::WorkPointer ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const char* what = "reduce_scatter_tensor";
  check_count(what, "outputs", outputs.size(), inputs.size());
  const auto flat_inputs = flatten(what, "input", inputs);
  const auto flat_outputs = flatten(what, "output", outputs);
  std::vector<Reduction> how;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_dtype(what, inputs[i], outputs[i]);
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_, "shm ", what, ": the input must have ", size_,
        " times the output's ", outputs[i].numel(), " elements, got ", inputs[i].numel());
    how.push_back(reduction(what, options.reduceOp, outputs[i]));
  }
  return submit({OpType::_REDUCE_SCATTER_BASE, "shm:reduce_scatter_tensor"}, options, inputs, outputs,
      [ranks = static_cast<size_t>(size_), outputs, flat_inputs, flat_outputs, how](
          Collectives& collectives, auto timeout) {
        for (size_t i = 0; i < outputs.size(); ++i) {
          const auto pieces = parts(flat_inputs[i], ranks);
          collectives.reduce_scatter(flat_outputs[i].span(), pieces, how[i], call(outputs[i], timeout));
          flat_outputs[i].write_back();
        }
      });
}

ShmBackend::WorkPointer ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
    std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  check_tensor("alltoall", "input", input);
  check_tensor("alltoall", "output", output);
  check_same_dtype("alltoall", input, output);
  const FlatTensor flat_input(input);
  const FlatTensor flat_output(output);
  const size_t ranks = static_cast<size_t>(size_);
  return submit({OpType::ALLTOALL_BASE, "shm:all_to_all"}, options, {input}, {output},
      [input, flat_input, flat_output, pieces_in = cut_rows("input", flat_input, input, input_splits, ranks),
          pieces_out = cut_rows("output", flat_output, output, output_splits, ranks)](
          Collectives& collectives, auto timeout) {
        collectives.alltoall(pieces_out, pieces_in, call(input, timeout));
        flat_output.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_count("alltoall", "inputs", inputs.size(), static_cast<size_t>(size_));
  check_count("alltoall", "outputs", outputs.size(), static_cast<size_t>(size_));
  const auto flat_inputs = flatten("alltoall", "input", inputs);
  const auto flat_outputs = flatten("alltoall", "output", outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_dtype("alltoall", inputs[i], outputs[0]);
    check_same_dtype("alltoall", inputs[0], outputs[i]);
  }
  return submit({OpType::ALLTOALL, "shm:all_to_all"}, options, inputs, outputs,
      [tensor = inputs[0], flat_inputs, flat_outputs](Collectives& collectives, auto timeout) {
        collectives.alltoall(spans(flat_outputs), spans(flat_inputs), call(tensor, timeout));
        for (const FlatTensor& output : flat_outputs) output.write_back();
      });
}

ShmBackend::WorkPointer ShmBackend::send(Tensors& tensors, int to, int tag) {
  check_rank("send", to);
  return message(tensors, to, tag, OpType::SEND);
}

ShmBackend::WorkPointer ShmBackend::recv(Tensors& tensors, int from, int tag) {
  check_rank("recv", from);
  return message(tensors, from, tag, OpType::RECV);
}

ShmBackend::WorkPointer ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(tensors, Mailbox::kAnySource, tag, OpType::RECVANYSOURCE);
}

// A send is done once its message is copied away: here, as a rule, so it needs no thread.
ShmBackend::WorkPointer ShmBackend::message(Tensors& tensors, int peer, int tag, OpType type) {
  const bool sends = type == OpType::SEND;
  const char* title = sends ? "shm:send" : "shm:recv";
  const char* what = title + std::strlen("shm:");
  check_owner(what);
  check_count(what, "tensors", tensors.size(), 1);
  check_tensor(what, "tensor", tensors[0]);
  auto work = c10::make_intrusive<ShmWork>(rank_, type, title, tensors, tensors, nullptr);
  const std::shared_ptr<Messenger> messenger = messenger_;  // a callback may end the group meanwhile
  work->set_helper([messenger](ShmWork& waited) {
    const auto end = std::chrono::steady_clock::now() + kMessageSpin;
    while (!waited.isCompleted() && std::chrono::steady_clock::now() < end) messenger->progress();
  });
  const FlatTensor flat(tensors[0]);
  const auto done = [work, flat, sends](int from, std::exception_ptr error) {
    if (!error && !sends) flat.write_back();
    work->complete_with(error, from);
  };
  if (sends)
    messenger->send(flat.span(), peer, tag, timeout_.load(), done);
  else
    messenger->receive(flat.span(), peer, tag, timeout_.load(), done);
  return work;
}

}  // namespace minddp::shm
