#include "bucket_assignment.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace minddp {
namespace {

using Key = std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>;

struct OpenBucket {
  std::vector<size_t> indices;
  int64_t nbytes = 0;
};

Key key_of(const ParameterInfo& info) {
  return {info.dtype, info.device.type(), info.device.index()};
}

// Fills buckets from the front of `order`; `cap(i)` is the size at which the i-th closes.
template <typename Cap>
std::vector<std::vector<size_t>> fill_buckets(
    const std::vector<ParameterInfo>& parameters, const std::vector<size_t>& order, Cap cap) {
  std::vector<std::vector<size_t>> closed;
  std::map<Key, OpenBucket> open;
  for (size_t index : order) {
    const ParameterInfo& info = parameters[index];
    if (info.sparse) {
      closed.push_back({index});
      continue;
    }
    OpenBucket& bucket = open[key_of(info)];
    bucket.indices.push_back(index);
    bucket.nbytes += info.nbytes;
    if (bucket.nbytes >= cap(closed.size())) {
      closed.push_back(std::move(bucket.indices));
      bucket = OpenBucket{};
    }
  }
  for (auto& entry : open) {
    if (!entry.second.indices.empty()) {
      closed.push_back(std::move(entry.second.indices));
    }
  }
  return closed;
}

// A bucket is complete when the last of its parameters is: sort by that.
void sort_by_completion(std::vector<std::vector<size_t>>& buckets, const std::vector<size_t>& order) {
  std::vector<size_t> position(1 + *std::max_element(order.begin(), order.end()));
  for (size_t i = 0; i < order.size(); ++i) {
    position[order[i]] = i;
  }
  auto completes = [&](const std::vector<size_t>& bucket) {
    size_t last = 0;
    for (size_t index : bucket) {
      last = std::max(last, position[index]);
    }
    return last;
  };
  std::sort(buckets.begin(), buckets.end(), [&](const auto& a, const auto& b) {
    return completes(a) < completes(b);
  });
}

}  // namespace

std::vector<std::vector<size_t>> assign_buckets(
    const std::vector<ParameterInfo>& parameters,
    const std::vector<size_t>& order,
    const BucketCaps& caps) {
  std::vector<std::vector<size_t>> buckets;
  if (caps.per_bucket.size() == 1) {
    // Fill from the back, so that what is left over, and need not be full, is launched first.
    buckets = fill_buckets(parameters, std::vector<size_t>(order.rbegin(), order.rend()), [&](size_t i) {
      return i == 0 && caps.last_bucket > 0 ? caps.last_bucket : caps.per_bucket[0];
    });
    for (auto& bucket : buckets) {
      std::reverse(bucket.begin(), bucket.end());
    }
  } else {
    buckets = fill_buckets(parameters, order, [&](size_t i) {
      return caps.per_bucket[std::min(i, caps.per_bucket.size() - 1)];
    });
  }
  if (!order.empty()) {
    sort_by_completion(buckets, order);
  }
  return buckets;
}

}  // namespace minddp
