// What the reducer and its cases both see, and the points of an iteration at which cases take part.
//
// The core averages dense gradients. What only some programs meet is a case, where it can be separated: a unit of its
// own in csrc/cases, which the core calls at the points below. A reader of the core may skip all of them.
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

  // A program may swallow an error inside of backward; the text says later why this rank is missing.
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
  // On a device, the Work of the reducer's own all-reduce, if the hook that runs has asked for that.
  c10::intrusive_ptr<c10d::Work> work;
};

class Case {
 public:
  virtual ~Case() = default;
  // A backward has reached us; `answer` says whose it counts as.
  virtual void on_backward(Forwards::Answer& answer) {}
  // Autograd is about to add to `.grad`. on_growth() is called on all cases, if one of them wants_growth().
  virtual bool wants_growth() const { return false; }
  virtual void on_growth(size_t index) {}
  // A gradient has come, of any backward; nothing has been done about it.
  virtual void on_arrival(ArrivedGradient& arrival) {}
  // An iteration begins; nothing is packed.
  virtual void on_begin() {}
  // A bucket's averages are in their places, of parameters with used[index] != 0.
  virtual void after_unpack(const Bucket& bucket, const std::vector<int32_t>& used) {}
  // The iteration is over: `done`, or given up.
  virtual void on_end(bool done) {}
};

}  // namespace minddp
