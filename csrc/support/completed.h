// A future without a collective.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace minddp {

// The future of a collective that is over: it holds a list of one tensor, as a process group's does.
inline c10::intrusive_ptr<c10::ivalue::Future> completed(const at::Tensor& tensor) {
  std::vector<c10::Device> devices;
  if (!tensor.device().is_cpu()) devices.push_back(tensor.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(devices));
  future->markCompleted(c10::List<at::Tensor>({tensor}));
  return future;
}

}  // namespace minddp
