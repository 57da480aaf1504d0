// What the reducer and its cases both see, and the points of an iteration at which cases take part.
//
// The core averages dense gradients. A case is what only some programs need: a unit of its own in csrc/cases. The
// core calls a Case at the points below. (Other cases are subclasses of Bucket.) A reader of the core may skip them.
#pragma once

#include "bucket.h"
#include "forwards.h"
#include "grad_states.h"
#include "iteration.h"

#include <memory>
#include <string>
#include <vector>

namespace minddp {

struct ReducerState {
  const std::vector<at::Tensor> parameters;
  const std::vector<std::string> names;
  const int rank;

  Forwards forwards;
  Backward backward;
  Iteration iteration{parameters.size()};
  Learned learned{parameters.size()};
  GradStates grads{parameters.size()};
  std::vector<std::unique_ptr<Bucket>> buckets;
  mutable std::string last_error;

  // Keeps the text: a program may catch the error inside of backward, and others ask later why this rank is missing.
  [[noreturn]] void fail(const std::string& message) const {
    last_error = message;
    TORCH_CHECK(false, message);
  }
};

// A gradient that has come, as the core sees it; a case may correct it.
struct ArrivedGradient {
  const size_t index;
  const at::Tensor& contribution;  // undefined: none
  bool defined;                    // there is a gradient now
  bool in_grad = true;             // it is in `.grad`
};

// Stands in the place of the reducer's all-reduce (cases/comm_hook.h).
class CommHook {
 public:
  virtual ~CommHook() = default;
  // Starts the reduction of a packed bucket. Called once for each that is sent, in launch order, on the thread that
  // launches it.
  virtual Flight start(size_t bucket, at::Tensor buffer) = 0;
  // The reduced bucket: the tensor in the completed future's value.
  virtual at::Tensor result(const c10::IValue& value) = 0;
  // Devices only: Reducer::all_reduce() sets it if the hook calls that.
  c10::intrusive_ptr<c10d::Work> work;
};

class Case {
 public:
  virtual ~Case() = default;
  // A backward has given its first sign, or has become synchronized. `answer` has its origin, which a case may
  // change.
  virtual void on_backward(Forwards::Answer& answer) {}
  // Autograd is about to add to `.grad`. on_growth() is called on all cases, if one of them wants_growth().
  virtual bool wants_growth() const { return false; }
  virtual void on_growth(size_t index) {}
  // A gradient has come, of any backward; nothing has been done about it.
  virtual void on_arrival(ArrivedGradient& arrival) {}
  // An iteration begins; nothing is packed.
  virtual void on_begin() {}
  // The averages of this bucket's parameters with used[index] != 0 have been written.
  virtual void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) {}
  // The iteration is over: `done`, or given up.
  virtual void on_end(bool done) {}
};

}  // namespace minddp
