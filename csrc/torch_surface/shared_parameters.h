// Case: somebody else reduces some of the parameters, too. A second wrapper of the module, or one that shares a
// layer.
#pragma once

#include "reducer/events.h"

#include <memory>
#include <vector>

namespace minddp {

class SharedParameters : public Case {
 public:
  // `other` reduces some of these parameters. Where one of the two makes gradients `views`, a backward through both
  // is refused: two views cannot be one `.grad`.
  void add(const std::shared_ptr<const ReducerState>& other, bool views);
  void on_origin(Forwards::Answer& answer) override;
  bool follows_gradients() const override { return true; }
  void on_gradient(ArrivedGradient& gradient) override;

 private:
  struct Owner {
    std::weak_ptr<const ReducerState> state;
    std::vector<int64_t> indices;  // there, of each parameter here; or -1
    bool views;
  };

  std::vector<Owner> owners_;
};

}  // namespace minddp
