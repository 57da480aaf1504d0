#include "ready_order.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace minddp {

ReadyOrder::Order ReadyOrder::order() const {
  Order order;
  for (size_t i = position_.size(); i-- > 0;) {
    (position_[i] == kNotSeen ? order.absent : order.arrived).push_back(i);
  }
  std::sort(order.arrived.begin(), order.arrived.end(), [&](size_t a, size_t b) {
    return position_[a] < position_[b];
  });
  return order;
}

ReadyOrder::Order ReadyOrder::agree(c10d::ProcessGroup& group, at::Device device) const {
  Order mine = order();
  at::Tensor message = at::empty({1 + static_cast<int64_t>(position_.size())}, at::kLong);
  int64_t* out = message.data_ptr<int64_t>();
  *out++ = static_cast<int64_t>(mine.arrived.size());
  std::copy(mine.absent.begin(), mine.absent.end(), std::copy(mine.arrived.begin(), mine.arrived.end(), out));
  std::vector<at::Tensor> tensors = {message.to(device)};
  group.broadcast(tensors)->wait();
  message = tensors[0].cpu();
  const int64_t* first = message.const_data_ptr<int64_t>() + 1;
  const int64_t* absent = first + first[-1];
  return {{first, absent}, {absent, first + position_.size()}};
}

}  // namespace minddp
