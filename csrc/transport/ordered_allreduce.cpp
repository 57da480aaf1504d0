#include "ordered_allreduce.h"

#include <ATen/ATen.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace minddp {
namespace ordered {

using Future = c10::ivalue::Future;
using Backend = OrderedAllreduce::Backend;

// A part of the buffer: one piece for each rank.
struct Chunk {
  int64_t begin;        // its first unit
  at::Tensor place;     // bytes of the buffer
  at::Tensor bytes;     // the same; or a copy with as many units for each rank, where `place` has not
  at::Tensor received;  // every rank's copy of this rank's piece; then the sum, once for each rank
  c10::intrusive_ptr<c10d::Work> scattered;
};

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
    if (!chunk.bytes.is_same(chunk.place))
      std::memcpy(chunk.place.mutable_data_ptr(), chunk.bytes.const_data_ptr(), size_t(chunk.place.numel()));
    if (--left == 0) future->markCompleted(std::move(buffer));
  }
  void keep_until_over(c10d::Work& work) {
    work.getFuture()->addCallback([job = shared_from_this()](Future&) {}, /*uses_future=*/false);
  }
};

std::vector<Chunk> cut(const at::Tensor& buffer, int64_t unit, int64_t ranks, int64_t chunk_bytes) {
  const at::Tensor bytes = at::from_blob(buffer.mutable_data_ptr(), {int64_t(buffer.nbytes())}, at::kByte);
  const int64_t units = bytes.numel() / unit;
  const int64_t most = std::max<int64_t>(chunk_bytes / unit / ranks, 1) * ranks;
  std::vector<Chunk> chunks;
  for (int64_t begin = 0; begin < units; begin += most) {
    const int64_t size = std::min(most, units - begin), padded = (size + ranks - 1) / ranks * ranks;
    Chunk chunk{begin, bytes.narrow(0, begin * unit, size * unit), {}, {}, {}};
    chunk.bytes = chunk.place;
    if (padded != size) {
      chunk.bytes = at::zeros({padded * unit}, at::kByte);
      std::memcpy(chunk.bytes.mutable_data_ptr(), chunk.place.const_data_ptr(), size_t(size * unit));
    }
    chunk.received = at::empty_like(chunk.bytes);
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

c10::intrusive_ptr<c10d::Work> all_to_all(c10d::Backend& backend, at::Tensor output, at::Tensor input) {
  std::vector<int64_t> even;
  return backend.alltoall_base(output, input, even, even, c10d::AllToAllOptions());
}

}  // namespace ordered

using namespace ordered;

// Sums what has been scattered, and gathers the sums, one chunk after the other.
struct OrderedAllreduce::Worker {
  Worker(Backend s, Backend g, int64_t bytes)
      : scatters(std::move(s)), gathers(std::move(g)), ranks(scatters->getSize()), rank(scatters->getRank()),
        chunk_bytes(bytes) {}

  const Backend scatters, gathers;
  const int ranks, rank;
  const int64_t chunk_bytes;

  std::mutex starting;  // held while a buffer's all-to-alls are issued and its job is queued
  std::mutex mutex;     // guards what follows
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  bool busy = false, ends = false;
  std::thread thread;

  void run() {
    while (auto job = next()) {
      try {
        for (Chunk& chunk : job->chunks) reduce(*job, chunk);
      } catch (...) {
        job->fail(std::current_exception());
      }
    }
  }

  std::shared_ptr<Job> next() {
    std::unique_lock lock(mutex);
    busy = false;
    changed.wait(lock, [&] { return ends || !jobs.empty(); });
    if (jobs.empty()) return nullptr;
    busy = true;
    auto job = std::move(jobs.front());
    jobs.pop_front();
    return job;
  }

  // The gathering is an all-to-all, too, of as many copies: backends' all-gathers go round a ring, and copy more.
  void reduce(Job& job, Chunk& chunk) {
    chunk.scattered->wait();
    const int64_t piece = chunk.received.numel() / ranks, units = piece / job.sum.unit;
    auto* base = static_cast<std::byte*>(chunk.received.mutable_data_ptr());
    std::vector<const void*> sources;
    for (int r = 0; r < ranks; ++r) sources.push_back(base + r * piece);
    job.sum.add(base, sources.data(), ranks, chunk.begin + rank * units, units);
    for (int r = 1; r < ranks; ++r) std::memcpy(base + r * piece, base, size_t(piece));
    auto done = [job = job.shared_from_this(), &chunk](Future& future) {
      if (future.hasError())
        job->fail(future.exception_ptr());
      else
        job->gathered(chunk);
    };
    all_to_all(*gathers, chunk.bytes, chunk.received)->getFuture()->addCallback(done, /*uses_future=*/false);
  }
};

OrderedAllreduce::OrderedAllreduce(Backend scatters, Backend gathers, int64_t chunk_bytes)
    : worker_(std::make_shared<Worker>(std::move(scatters), std::move(gathers), chunk_bytes)) {
  worker_->thread = std::thread([worker = worker_] { worker->run(); });
}

OrderedAllreduce::~OrderedAllreduce() {
  bool busy;
  {
    std::lock_guard lock(worker_->mutex);
    worker_->ends = true;
    busy = worker_->busy || !worker_->jobs.empty();
  }
  worker_->changed.notify_one();
  busy ? worker_->thread.detach() : worker_->thread.join();
}

c10::intrusive_ptr<Future> OrderedAllreduce::start(const at::Tensor& buffer, PieceSum sum) {
  auto job = std::make_shared<Job>(buffer, std::move(sum));
  job->chunks = cut(buffer, job->sum.unit, worker_->ranks, worker_->chunk_bytes);
  job->left = job->chunks.size();
  if (job->chunks.empty()) job->future->markCompleted(buffer);
  if (job->chunks.empty()) return job->future;
  std::lock_guard starting(worker_->starting);
  for (Chunk& chunk : job->chunks) {
    chunk.scattered = all_to_all(*worker_->scatters, chunk.received, chunk.bytes);
    job->keep_until_over(*chunk.scattered);
  }
  {
    std::lock_guard lock(worker_->mutex);
    worker_->jobs.push_back(job);
  }
  worker_->changed.notify_one();
  return job->future;
}

}  // namespace minddp
