// Who else reduces some of an owner's parameters: a second wrapper of the module, or of one that shares a layer.
#pragma once

#include "same_tensor.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace minddp {

template <class Owner>
class Sharers {
 public:
  // `mine`: parameters, as their indices are meant; one of the two makes their gradients `views`, or none does.
  void add(const std::shared_ptr<Owner>& other, const std::vector<at::Tensor>& theirs,
      const std::vector<at::Tensor>& mine, bool views) {
    std::erase_if(sharers_, [&](const Sharer& s) { return s.owner.expired() || s.owner.lock() == other; });
    sharers_.push_back({other, indices_in(theirs, mine), views});
  }
  // Whether it `holds` for one that is alive.
  template <class Predicate>
  bool any(const Predicate& holds) const {
    return std::ranges::any_of(sharers_, [&](const Sharer& sharer) {
      auto owner = sharer.owner.lock();
      return owner && holds(*owner);
    });
  }
  // The same, of those that reduce parameter `index`, which one of the two makes a view: it is told its index there.
  template <class Predicate>
  bool any_with_view(size_t index, const Predicate& holds) const {
    return std::ranges::any_of(sharers_, [&](const Sharer& sharer) {
      auto owner = sharer.theirs[index] < 0 || !sharer.views ? nullptr : sharer.owner.lock();
      return owner && holds(*owner, sharer.theirs[index]);
    });
  }

 private:
  struct Sharer {
    std::weak_ptr<Owner> owner;
    std::vector<int64_t> theirs;  // each parameter's index there, or -1
    bool views;
  };
  std::vector<Sharer> sharers_;
};

}  // namespace minddp
