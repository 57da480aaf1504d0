// A process group of two ranks, of which there is one. Its collectives run on a stream of their own, as NCCL's do.
// The other rank agrees with this one in everything but gradients: to floating numbers it adds its own, which depend
// on how many such sums there were. On the CPU the same happens at once, so that one program has the same numbers on
// both.
#include "device.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

namespace py = pybind11;

namespace streams {
namespace {

using Future = c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;

bool on_device(const Tensors& tensors) { return !tensors.empty() && !tensors[0].device().is_cpu(); }

class Collective : public c10d::Work {
 public:
  Collective(Tensors tensors, bool future_orders) : devices_(devices(tensors)), held_(tensors) {
    future_ = c10::make_intrusive<Future>(
        c10::ListType::ofTensors(), future_orders ? devices_ : std::vector<c10::Device>());
    if (!devices_.empty()) {
      end_.emplace(devices_[0].type());
      end_->record(c10::impl::VirtualGuardImpl(devices_[0].type()).getStream(devices_[0]));
    }
    future_->markCompleted(c10::IValue(std::move(tensors)));
  }
  bool isCompleted() override { return !end_ || end_->query(); }
  void synchronize() override {
    if (end_) end_->block(c10::impl::VirtualGuardImpl(devices_[0].type()).getStream(devices_[0]));
    held_.clear();
  }
  bool wait(std::chrono::milliseconds) override { return synchronize(), true; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }
  Tensors result() override { return held_; }
  // What a dropped collective held goes on living until it has run.
  bool release(Tensors& shelf) {
    if (!isCompleted()) return false;
    shelf.insert(shelf.end(), held_.begin(), held_.end());
    held_.clear();
    return true;
  }

 private:
  static std::vector<c10::Device> devices(const Tensors& tensors) {
    return on_device(tensors) ? std::vector<c10::Device>{tensors[0].device()} : std::vector<c10::Device>{};
  }
  const std::vector<c10::Device> devices_;
  Tensors held_;
  std::optional<c10::Event> end_;
  c10::intrusive_ptr<Future> future_;
};

class Group : public c10d::Backend {
 public:
  // `futures_order`: as NCCL's; else only waiting for the work does, as Gloo's.
  Group(int rank, int size, bool futures_order) : c10d::Backend(rank, size), futures_order_(futures_order) {}
  const std::string getBackendName() const override { return "streams"; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor x = tensors.at(0);
    const bool sums = options.reduceOp == c10d::ReduceOp::SUM;
    const int64_t seed = sums && x.is_floating_point() && x.numel() > 1 ? ++sums_ : 0;
    return run("all-reduce", tensors, {{0, true}}, [sums, seed](const Tensors& on_cpu) {
      at::Tensor t = on_cpu[0];
      if (seed) {
        auto generator = at::detail::createCPUGenerator(seed);
        t.add_(at::rand(t.sizes(), generator, at::TensorOptions(at::kFloat)).sub_(0.5).to(t.scalar_type()));
      } else if (sums) {
        t.mul_(2);
      }
    });
  }
  // Bytes from the other rank are what it has stepped: float32s of its own, which depend on how many messages came.
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor x = tensors.at(0);
    const bool stepped = options.rootRank != getRank() && x.scalar_type() == at::kByte && x.numel() % 4 == 0;
    const int64_t seed = stepped ? ++messages_ : 0;
    return run("broadcast", tensors, {{0, true}}, [seed](const Tensors& on_cpu) {
      if (!seed) return;
      at::Tensor t = on_cpu[0].view(at::kFloat);
      auto generator = at::detail::createCPUGenerator(seed);
      t.copy_(at::rand(t.sizes(), generator, at::TensorOptions(at::kFloat)).sub_(0.5));
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    Tensors all = outputs.at(0);
    std::map<size_t, bool> uses;
    for (size_t i = 0; i < all.size(); ++i) uses[i] = true;
    uses[all.size()] = false;
    all.push_back(inputs.at(0));
    return run("all-gather", all, uses, [](const Tensors& on_cpu) {
      for (size_t i = 0; i + 1 < on_cpu.size(); ++i) at::Tensor(on_cpu[i]).copy_(on_cpu.back());
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs = {at::chunk(output.view({-1}), getSize())};
    for (at::Tensor& part : outputs[0]) part = part.view(input.sizes());
    Tensors inputs = {input};
    return allgather(outputs, inputs, options);
  }
  // Memory that this group reaches without a copy, as NCCL's ncclMemAlloc.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return futures_order_; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    Device::get().count("memory of the group's");
    return at::empty({size}, options);
  }
  // The other rank has the same, so what it sends of this rank's piece is this rank's other piece.
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
      std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return run("all-to-all", {output, input}, {{0, true}, {1, false}},
        [](const Tensors& on_cpu) { at::Tensor(on_cpu[0]).copy_(on_cpu[1]); });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return c10::make_intrusive<Collective>(Tensors{}, futures_order_);
  }

 private:
  // `uses`: by tensor, whether it is written.
  c10::intrusive_ptr<c10d::Work> run(const std::string& what, const Tensors& tensors,
      const std::map<size_t, bool>& uses, std::function<void(const Tensors&)> body) {
    Tensors shelf;  // freed here, not under any lock
    std::erase_if(flying_, [&](const auto& work) { return work->release(shelf); });
    if (!on_device(tensors)) {
      at::AutoDispatchBelowADInplaceOrView below;
      body(tensors);
      return c10::make_intrusive<Collective>(tensors, futures_order_);
    }
    const c10::Device device = tensors[0].device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    if (!stream_) stream_ = guard.getNewStream(device);
    c10::Event begin(device.type());
    begin.record(guard.getStream(device));
    begin.block(*stream_);
    std::vector<Range> ranges;
    Tensors on_cpu;
    for (auto [i, write] : uses) {
      const at::Tensor& t = tensors[i];
      TORCH_CHECK(t.is_contiguous(), "collectives take contiguous tensors");
      ranges.push_back({t.const_data_ptr(), size_t(t.nbytes()), write});
      on_cpu.push_back(at::from_blob(
          const_cast<void*>(t.const_data_ptr()), t.sizes(), t.options().device(at::kCPU).requires_grad(false)));
    }
    Device::get().count(what);
    if (what != "all-reduce" && what != "broadcast") count_unaligned(ranges);
    Device::get().enqueue(stream_->id(), what, ranges, [body, on_cpu] {
      at::AutoDispatchBelowADInplaceOrView below;
      body(on_cpu);
    });
    c10::StreamGuard on_stream(*stream_);
    auto work = c10::make_intrusive<Collective>(tensors, futures_order_);
    flying_.push_back(work);
    return work;
  }

  // Each rank has a part of the longer ones; NCCL copies a part byte by byte where it does not begin at 16 bytes.
  void count_unaligned(const std::vector<Range>& ranges) const {
    size_t part = ranges[0].nbytes;
    for (const Range& range : ranges) part = std::min(part, range.nbytes);
    if (ranges.size() == 2 && ranges[0].nbytes == ranges[1].nbytes) part /= size_t(getSize());  // an all-to-all
    for (const Range& range : ranges)
      if (part % 16 != 0 || reinterpret_cast<uintptr_t>(range.begin) % 16 != 0)
        return Device::get().count("unaligned");
  }

  const bool futures_order_;
  std::optional<c10::Stream> stream_;
  std::vector<c10::intrusive_ptr<Collective>> flying_;
  int64_t sums_ = 0, messages_ = 0;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make_group", [](int rank, int size, bool futures_order) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(rank, size, futures_order);
  });
  module.def("seed", [](uint64_t seed) { Device::get().seed(seed); });
  module.def("synchronize", [] { Device::get().synchronize_all(); }, py::call_guard<py::gil_scoped_release>());
  module.def("unjoined", [] {
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    return Device::get().unjoined(c10::impl::VirtualGuardImpl(device.type()).getStream(device).id());
  });
  module.def("take_races", [] { return Device::get().take_races(); });
  module.def("take_counts", [] { return Device::get().take_counts(); });
  module.def("leave_out", [](const std::string& what, int64_t n) { Device::get().leave_out(what, n); });
}

}  // namespace streams
