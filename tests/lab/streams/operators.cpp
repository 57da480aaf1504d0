// Tensors on the device, by what ATen and autograd ask of a backend: memory, views, copies, and every other operator
// as "its shape by the meta device now, its values by the CPU later".
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

namespace streams {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

thread_local int64_t current_stream = 0;
std::atomic<int64_t> last_stream{0};

c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

// ---- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(++last_stream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(++last_stream); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new TicketPtr;
    *static_cast<TicketPtr*>(*event) = Device::get().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Device::get().block(*static_cast<TicketPtr*>(event), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !event || Device::get().query(*static_cast<TicketPtr*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<TicketPtr*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) Device::get().synchronize(*static_cast<TicketPtr*>(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Device::get().query(Device::get().record(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override { Device::get().synchronize(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { Device::get().synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Device::get().record_use(data.get(), stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory

struct Memory final : c10::Allocator {
  explicit Memory(bool pinned) : pinned(pinned) {}
  static void release(void* data) {
    if (data) Device::get().free(data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? Device::get().allocate(nbytes, current_stream, pinned) : nullptr;  // as CUDA's
    return {data, data, &release, pinned ? c10::Device(c10::kCPU) : kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  const bool pinned;
};
Memory memory(false), pinned_memory(true);
REGISTER_ALLOCATOR(kType, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(Device::get().owns(data), "The specified pointer resides on host memory");
    return kDevice;
  }
  bool isPinnedPtr(const void* data) const override { return Device::get().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
[[maybe_unused]] const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ---- operators

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// The same memory, for the CPU. Keeps nothing alive: the device does not either.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!is_ours(t)) return t;
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(),
      t.options().device(at::kCPU).requires_grad(false));
}

Range range_of(const at::Tensor& t, bool write) {
  if (!is_ours(t) || t.numel() == 0) return {nullptr, 0, write};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {t.const_data_ptr(), size_t(last + 1) * t.element_size(), write};
}

void enqueue(const std::string& what, std::vector<Range> ranges, std::function<void()> run) {
  Device::get().enqueue(current_stream, what, std::move(ranges), [run = std::move(run)] {
    at::AutoDispatchBelowADInplaceOrView below;
    run();
  });
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at;
  if (offset) at = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Device::get().record_use(self.storage().data_ptr().get(), stream.id());
}

// As CUDA: only a copy between pinned memory and the device does not wait.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  at::Tensor from = on_cpu(self), to = on_cpu(dst);
  const bool both = is_ours(self) && is_ours(dst);
  const at::Tensor& host = is_ours(self) ? dst : self;
  const bool pinned = !both && Device::get().is_pinned(host.storage().data());
  if (!both && !is_ours(self) && !pinned) {
    Device::get().count("pageable copy");
    from = from.clone();
  }
  if (pinned) Device::get().record_use(host.storage().data(), current_stream);
  if (pinned && !is_ours(self))  // what is in that memory when the copy runs; nothing keeps it alive
    from = at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options().pinned_memory(false));
  enqueue("copy", {range_of(self, false), range_of(dst, true)}, [from, to]() mutable { to.copy_(from); });
  if (!both && !(pinned && non_blocking)) Device::get().synchronize(current_stream);
  return dst;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Tensor value = at::empty_like(self, self.options().device(at::kCPU));
  copy_from(self, value, false);
  return value.item();
}

// Applies `change` to the tensors of an argument, which moves to `device`.
template <typename Change>
c10::IValue each_tensor(const c10::IValue& value, c10::Device device, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  return value.isDevice() ? c10::IValue(device) : value;
}

at::Tensor on_meta(const at::Tensor& t) {
  if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).requires_grad(false));
}

// An empty tensor that an operator writes to gets its result's shape.
void make_room(at::Tensor out, const at::Tensor& meta) {
  if (out.numel() > 0 || meta.numel() == 0) return;
  at::Tensor room = at::empty_strided(meta.sizes(), meta.strides(), out.options().requires_grad(false));
  out.set_(room.storage(), 0, room.sizes(), room.strides());
}

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::vector<c10::IValue> given = torch::jit::pop(*stack, schema.arguments().size());
  std::map<const c10::TensorImpl*, at::Tensor> metas;
  std::vector<c10::IValue> meta_stack, cpu_stack;
  std::vector<Range> ranges;
  for (const c10::IValue& value : given)
    meta_stack.push_back(each_tensor(value, c10::kMeta, [&](const at::Tensor& t) {
      at::Tensor& meta = metas[t.unsafeGetTensorImpl()];
      if (!meta.defined()) meta = on_meta(t);
      return meta;
    }));
  op.callBoxed(&meta_stack);
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias && alias->isWrite();
    if (write && given[i].isTensor())
      make_room(given[i].toTensor(), metas.at(given[i].toTensor().unsafeGetTensorImpl()));
    cpu_stack.push_back(each_tensor(given[i], c10::kCPU, [&](const at::Tensor& t) {
      ranges.push_back(range_of(t, write));
      return on_cpu(t);
    }));
  }
  std::vector<at::Tensor> made;  // by result; undefined where it is an argument
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      size_t argument = 0;
      while (!schema.arguments()[argument].alias_info() || !(*schema.arguments()[argument].alias_info() == *alias))
        TORCH_CHECK(++argument < given.size(), schema, ": a view that the fake device does not know");
      TORCH_CHECK(alias->isWrite(), schema, ": a view that the fake device does not know");
      stack->push_back(given[argument]);
      made.emplace_back();
      continue;
    }
    TORCH_CHECK(meta_stack[i].isTensor(), schema, ": a result that the fake device does not know");
    const at::Tensor meta = meta_stack[i].toTensor();
    made.push_back(meta.defined()
            ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(kDevice).requires_grad(false))
            : at::Tensor());
    if (made.back().defined()) ranges.push_back(range_of(made.back(), true));
    stack->push_back(made.back());
  }
  std::vector<at::Tensor> results;
  for (const at::Tensor& t : made) results.push_back(t.defined() ? on_cpu(t) : t);
  enqueue(schema.name(), ranges, [op, cpu_stack, results]() mutable {
    op.callBoxed(&cpu_stack);
    for (size_t i = 0; i < results.size(); ++i)
      if (results[i].defined() && results[i].numel()) results[i].copy_(cpu_stack[i].toTensor());
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  for (const char* name : {"_foreach_copy_", "_foreach_mul_.Scalar", "_foreach_zero_"})  // else one entry a tensor
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("_local_scalar_dense", local_scalar_dense);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

}  // namespace
}  // namespace streams
