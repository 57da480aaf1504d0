// A communication hook written in Python. Part of the bindings, not of the reading path.
#pragma once

#include "cases/comm_hook.h"

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/jit/python/pybind_utils.h>

namespace minddp {

// Runs on an autograd thread and takes the GIL; see reducer.h for the order of locks.
class PythonCommHook : public GradBucketHook {
 public:
  PythonCommHook(const ReducerState& reducer, pybind11::object state, pybind11::object hook)
      : GradBucketHook(reducer), state_(std::move(state)), hook_(std::move(hook)) {}

  ~PythonCommHook() override {
    pybind11::gil_scoped_acquire gil;
    state_ = pybind11::object();
    hook_ = pybind11::object();
  }

  c10::intrusive_ptr<Future> run(GradBucket& bucket) override {
    pybind11::gil_scoped_acquire gil;
    pybind11::object answer = hook_(state_, pybind11::cast(bucket, pybind11::return_value_policy::copy));
    try {
      return answer.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
    } catch (const pybind11::cast_error&) {
      std::string type = pybind11::str(pybind11::type::of(answer).attr("__name__"));
      TORCH_CHECK(false, "callback must return a torch.futures.Future object, but got ", type,
          ": the communication hook's future holds one tensor; a hook that reduces nothing returns a completed one.");
    }
  }

  at::Tensor result(const c10::IValue& value) override {
    if (value.isPyObject()) {
      pybind11::gil_scoped_acquire gil;
      pybind11::object object = torch::jit::toPyObject(value);
      return (PyList_Check(object.ptr()) ? object.attr("__getitem__")(0) : object).cast<at::Tensor>();
    }
    if (value.isTensorList()) return value.toTensorVector()[0];
    TORCH_CHECK(
        value.isTensor(), "The communication hook's future holds a ", value.tagKind(), ", expected a single tensor.");
    return value.toTensor();
  }

 private:
  pybind11::object state_;
  pybind11::object hook_;
};

}  // namespace minddp
