// What the cases of torch's surface raise for what a program does; as reducer/errors.h.
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace minddp::errors {

// Two wrappers reduce one gradient, which is a view on one's bucket, in the same backward.
inline std::string shared_view(int rank, const std::string& name) {
  return c10::str("Parameter '", name,
      "' belongs to two wrappers that both reduce its gradient in this backward, one of them with ",
      "gradient_as_bucket_view=True: its gradient would be a view on one's bucket, and be changed while the other ",
      "sends it. Construct both with gradient_as_bucket_view=False, or wrap once the module that holds both. [rank ",
      rank, "]");
}

// A backward of distributed autograd's, in which a gradient cannot be reduced.
inline std::string context_gradient(int rank, const std::string& name, const char* why) {
  return c10::str("The gradient of parameter '", name,
      "' cannot be reduced in torch.distributed.autograd.backward(): ", why,
      ", or use torch.nn.parallel.DistributedDataParallel for it. [rank ", rank, "]");
}

}  // namespace minddp::errors
