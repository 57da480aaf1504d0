// Case: wire="int8". Gradients travel as blocks of 8-bit codes (block_quantization.h).
//
// Packing encodes, unpacking decodes: neither is a further pass over memory. A parameter begins a block of its own,
// so its codes do not depend on the bucket that it is in.
//
// Rounding loses something twice: what each rank sends, and what the owner of a piece sends of its sum. With error
// feedback each rank adds what it has lost to what it sends next. A sum's loss is added by its owner alone: in the
// next sum it counts once. The transport adds it where it has summed. What it adds for a parameter that turns out to
// be used on no rank is taken back: its `.grad` may be an earlier one, and nobody takes that sum.
//
// What is lost of a gradient that nobody uses (an iteration that is given up; infinities, whose step a GradScaler
// skips) could be of any size, and would come back in the next sum. So where a bucket is not unpacked, or holds what
// is not finite, its feedback begins anew.
//
// What was packed before the last contribution came (an arrival more than expected) has taken its feedback already:
// packed again, it takes the new one. That differs by less than one step of a code, once.
#pragma once

#include "block_quantization.h"
#include "piece_sum.h"
#include "reducer/events.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace minddp {

// Error feedback, by parameter: what rounding has lost so far, in as many blocks as travel. Buckets share it with
// those that come after them, when buckets are cut anew.
using Residuals = std::vector<std::optional<at::Tensor>>;

class QuantizedBucket : public Bucket {
 public:
  // REQUIRES: options.buffer_dtype == kByte; real floating point parameters.
  QuantizedBucket(const std::vector<size_t>& indices, const std::vector<at::Tensor>& parameters,
      const std::vector<std::string>& names, const Options& options, std::shared_ptr<const Residuals> residuals);
  void begin_iteration() override;
  void before_launch() override;
  void unpack(const at::Tensor& result, double scale, const std::vector<int32_t>& used) override;
  bool is_plain() const override { return false; }
  GradientsIn gradients_in() const override;
  PieceSum sum_of_pieces();  // how the ordered all-reduce adds up the ranks' buffers

 protected:
  void fill(size_t begin, size_t end, const Packing& how) override;
  void leave_to_collective() override;

 private:
  struct Summing {
    explicit Summing(bool feeds) : feeds_back(feeds) {}
    std::mutex mutex;
    bool feeds_back;  // guarded by mutex
  };
  void encode(size_t slot, double scale, bool is_used);
  void forget_losses();
  void take_back(const std::vector<int32_t>& used);

  const std::shared_ptr<const Residuals> residuals_;
  double scale_ = 1.0;                          // of gradients that are encoded when the bucket leaves
  const std::vector<int32_t>* used_ = nullptr;  // on this rank, then
  bool pending_losses_ = false;                 // of gradients that are encoded, and not unpacked
  std::shared_ptr<Summing> summing_;            // shared with the transport's thread
  // The feedback of what this rank has not used, as it was at the launch: by slot.
  std::vector<std::pair<size_t, at::Tensor>> unused_;
};

class QuantizedBuckets : public Case {
 public:
  explicit QuantizedBuckets(Residuals residuals)
      : residuals_(std::make_shared<const Residuals>(std::move(residuals))) {}
  std::unique_ptr<Bucket> make_bucket(const std::vector<size_t>& indices, Bucket::Options& options) override;

 private:
  const std::shared_ptr<const Residuals> residuals_;
};

}  // namespace minddp
