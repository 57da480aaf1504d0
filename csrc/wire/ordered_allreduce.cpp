#include "ordered_allreduce.h"

#include "reducer/wait.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

namespace minddp {
namespace ordered {

using Future = c10::ivalue::Future;
using Backend = HostOrderedAllreduce::Backend;

// A part of the buffer: one piece for each rank.
struct Chunk {
  int64_t begin;        // its first unit
  at::Tensor place;     // bytes of the buffer
  at::Tensor bytes;     // the same; or a copy with as many units for each rank, where `place` has not
  at::Tensor received;  // every rank's copy of this rank's piece; then the sum, first
  c10::intrusive_ptr<c10d::Work> scattered;
};

// On the CPU without copy_(), which may start further threads.
void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  if (to.is_cpu())
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), size_t(to.numel()));
  else
    to.copy_(from.narrow(0, 0, to.numel()));
}

// What was copied to be cut evenly goes back to its place.
void put_back(const Chunk& chunk) {
  if (!chunk.bytes.is_same(chunk.place)) copy_bytes(chunk.bytes, chunk.place);
}

// One buffer's way. Alive until every collective of it is over, since they know nothing but addresses. Refers to no
// backend: the last reference to a job may go on a thread of one, which would wait for itself.
struct Job : std::enable_shared_from_this<Job> {
  Job(const at::Tensor& buffer, PieceSum how) : buffer(buffer), sum(std::move(how)) {}

  at::Tensor buffer;
  const PieceSum sum;
  std::vector<Chunk> chunks;
  std::atomic<size_t> left{0};  // chunks that are not gathered
  std::atomic<bool> failed{false};
  const c10::intrusive_ptr<Future> future = c10::make_intrusive<Future>(c10::TensorType::get());

  void fail(const std::exception_ptr& error) {
    if (!failed.exchange(true)) future->setError(error);
  }
  // The future holds the buffer then, and nobody else.
  void gathered(const Chunk& chunk) {
    put_back(chunk);
    if (--left == 0) future->markCompleted(std::move(buffer));
  }
  void keep_until_over(c10d::Work& work) {
    work.getFuture()->addCallback([job = shared_from_this()](Future&) {}, /*uses_future=*/false);
  }
};

// At least four, so that transfers and sums overlap also where a bucket is small; but none so small that starting it
// takes longer than sending it. All pieces are multiples of 16 bytes, so that all begin at one where the buffer does:
// NCCL copies 16 bytes at a time where both addresses are such, otherwise an element, which is one byte here
// (reduceCopy in its src/device/common_kernel.h).
std::vector<Chunk> cut(const at::Tensor& bytes, int64_t unit, int64_t ranks, int64_t chunk_bytes) {
  constexpr int64_t kParts = 4, kSmallest = 1 << 16, kAligned = 16;
  const int64_t units = bytes.numel() / unit;
  const int64_t size = std::min(chunk_bytes, std::max(bytes.numel() / kParts, kSmallest));
  const int64_t step = kAligned / std::gcd(kAligned, unit) * ranks;  // units, by which chunks grow
  const int64_t most = std::max<int64_t>(size / unit / step, 1) * step;
  std::vector<Chunk> chunks;
  for (int64_t begin = 0; begin < units; begin += most) {
    const int64_t part = std::min(most, units - begin), padded = (part + step - 1) / step * step;
    Chunk chunk{begin, bytes.narrow(0, begin * unit, part * unit), {}, {}, {}};
    chunk.bytes = chunk.place;
    if (padded != part) {
      chunk.bytes = at::zeros({padded * unit}, bytes.options());
      copy_bytes(chunk.place, chunk.bytes.narrow(0, 0, part * unit));
    }
    chunk.received = at::empty_like(chunk.bytes);
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

// Adds the ranks' copies of a piece up; the first of the pieces it returns is the sum.
std::vector<at::Tensor> add(const PieceSum& sum, const Chunk& chunk, int64_t ranks, int64_t rank) {
  std::vector<at::Tensor> pieces = chunk.received.chunk(ranks);
  sum.add(pieces, chunk.begin + rank * (pieces[0].numel() / sum.unit));
  return pieces;
}

c10::intrusive_ptr<c10d::Work> all_to_all(c10d::Backend& backend, at::Tensor output, at::Tensor input) {
  std::vector<int64_t> even;
  return backend.alltoall_base(output, input, even, even, c10d::AllToAllOptions());
}

c10::intrusive_ptr<c10d::Work> all_gather(c10d::Backend& backend, at::Tensor output, at::Tensor input) {
  return backend._allgather_base(output, input, c10d::AllgatherOptions());
}

// Works on jobs one after the other, on a thread of its own.
class Stage {
 public:
  explicit Stage(std::function<void(const std::shared_ptr<Job>&)> work) : work_(std::move(work)) {}

  void push(std::shared_ptr<Job> job) {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }
  // Whether the thread has nothing to do, and ends. It ends after what it has to do otherwise.
  bool end() {
    bool idle;
    {
      std::lock_guard lock(mutex_);
      ends_ = true;
      idle = !busy_ && jobs_.empty();
    }
    changed_.notify_one();
    return idle;
  }
  void run() {
    while (auto job = next()) {
      try {
        work_(job);
      } catch (...) {
        job->fail(std::current_exception());
      }
    }
  }

 private:
  std::shared_ptr<Job> next() {
    std::unique_lock lock(mutex_);
    busy_ = false;
    changed_.wait(lock, [&] { return ends_ || !jobs_.empty(); });
    if (jobs_.empty()) return nullptr;
    busy_ = true;
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    return job;
  }

  const std::function<void(const std::shared_ptr<Job>&)> work_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool busy_ = false, ends_ = false;
};

}  // namespace ordered

using namespace ordered;

// Two threads: one sends the ranks their pieces, the other sums what has come, and sends the sums. No thread of
// Python issues a collective: its Work would hold something of Python's, and the backend's thread that drops it would
// need the GIL.
struct HostOrderedAllreduce::Worker {
  Worker(Backend s, Backend g, int64_t bytes)
      : scatters(std::move(s)), gathers(std::move(g)), ranks(scatters->getSize()), rank(scatters->getRank()),
        chunk_bytes(bytes) {}

  const Backend scatters, gathers;
  const int ranks, rank;
  const int64_t chunk_bytes;
  Stage sums{[this](const std::shared_ptr<Job>& job) {
    for (Chunk& chunk : job->chunks) reduce(*job, chunk);
  }};
  Stage sends{[this](const std::shared_ptr<Job>& job) {
    for (Chunk& chunk : job->chunks) {
      chunk.scattered = all_to_all(*scatters, chunk.received, chunk.bytes);
      job->keep_until_over(*chunk.scattered);
    }
    sums.push(job);
  }};
  std::thread sending, summing;

  void reduce(Job& job, Chunk& chunk) {
    chunk.scattered->wait();
    // Gloo's all-gather goes round a ring, and copies more than an all-to-all of copies of the sum.
    const std::vector<at::Tensor> pieces = add(job.sum, chunk, ranks, rank);
    for (size_t r = 1; r < pieces.size(); ++r) copy_bytes(pieces[0], pieces[r]);
    auto done = [job = job.shared_from_this(), &chunk](Future& future) {
      if (future.hasError())
        job->fail(future.exception_ptr());
      else
        job->gathered(chunk);
    };
    all_to_all(*gathers, chunk.bytes, chunk.received)->getFuture()->addCallback(done, /*uses_future=*/false);
  }
};

HostOrderedAllreduce::HostOrderedAllreduce(Backend scatters, Backend gathers, int64_t chunk_bytes)
    : worker_(std::make_shared<Worker>(std::move(scatters), std::move(gathers), chunk_bytes)) {
  worker_->sending = std::thread([worker = worker_] { worker->sends.run(); });
  worker_->summing = std::thread([worker = worker_] { worker->sums.run(); });
}

HostOrderedAllreduce::~HostOrderedAllreduce() {
  const bool idle = worker_->sends.end() & worker_->sums.end();
  for (std::thread* thread : {&worker_->sending, &worker_->summing}) idle ? thread->join() : thread->detach();
}

c10::intrusive_ptr<Future> HostOrderedAllreduce::start(const at::Tensor& buffer, PieceSum sum) {
  auto job = std::make_shared<Job>(buffer, std::move(sum));
  const at::Tensor bytes = at::from_blob(buffer.mutable_data_ptr(), {int64_t(buffer.nbytes())}, at::kByte);
  job->chunks = cut(bytes, job->sum.unit, worker_->ranks, worker_->chunk_bytes);
  job->left = job->chunks.size();
  if (job->chunks.empty())
    job->future->markCompleted(buffer);
  else
    worker_->sends.push(job);
  return job->future;
}

// While a chunk is summed, the next one is scattered, and those before it are gathered.
c10::intrusive_ptr<Future> DeviceOrderedAllreduce::start(const at::Tensor& buffer, PieceSum sum) {
  std::lock_guard lock(mutex_);
  const c10::Device device = buffer.device();
  const c10::impl::VirtualGuardImpl streams(device.type());
  if (!streams_.contains(device)) streams_.emplace(device, streams.getStreamFromGlobalPool(device));
  const c10::Stream stream = streams_.at(device);
  c10::Event packed(device.type());
  packed.record(streams.getStream(device));
  const c10::StreamGuard on_stream(stream);
  packed.block(stream);
  buffer.record_stream(stream);

  const auto backend = group_->getBackend(device.type());
  const int64_t ranks = group_->getSize();
  std::vector<Chunk> chunks = cut(buffer.view(at::kByte), sum.unit, ranks, chunk_bytes_);
  std::vector<c10::intrusive_ptr<c10d::Work>> gathered;
  auto scatter = [&](size_t i) {
    if (i < chunks.size()) chunks[i].scattered = all_to_all(*backend, chunks[i].received, chunks[i].bytes);
  };
  scatter(0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    scatter(i + 1);
    order_streams(*chunks[i].scattered);
    const std::vector<at::Tensor> pieces = add(sum, chunks[i], ranks, group_->getRank());
    gathered.push_back(all_gather(*backend, chunks[i].bytes, pieces[0]));
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    order_streams(*gathered[i]);
    put_back(chunks[i]);
  }
  auto future = c10::make_intrusive<Future>(c10::TensorType::get(), std::vector<c10::Device>{device});
  future->markCompleted(buffer);
  return future;
}

}  // namespace minddp
