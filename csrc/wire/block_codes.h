// The arithmetic of one block of 8-bit codes, for the CPU's loops and the GPU's kernel. Pure.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace minddp {
namespace block_codes {

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
// Added to a small number, it leaves the number's nearest integer, ties to even, in the low bits.
constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23
// The same in steps of 1/256: the low 16 bits are a fixed-point number with eight binary places.
constexpr float kRoundsTo256ths = kRounds / 256;
// Of a block that is smaller, the scale would be too small to be divided by: it travels as zeros, and is not kept.
constexpr float kSmallest = 1e-30f;
// The largest whose product with 127 is finite. A constant: from an infinite product GCC 13 concludes that the scale
// was infinite.
constexpr float kLargestScale = std::bit_cast<float>(0x7c010203u);

enum Code : int8_t { kPlus = 127, kMinus = -127, kNaN = -128 };  // of what is not finite

constexpr uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & kMagnitude; }

// The integer in `moved`, which is a small number + `rounds`, one of the two above.
constexpr int32_t low_bits(float moved, float rounds) {
  return std::bit_cast<int32_t>(moved) - std::bit_cast<int32_t>(rounds);
}

struct Scale {
  float scale, inverse;  // 0: too small to be encoded
};

// `largest`: the bits of the largest magnitude, which is finite.
constexpr Scale scale_for(uint32_t largest) {
  const float magnitude = std::bit_cast<float>(largest);
  if (magnitude < kSmallest) return {0.0f, 0.0f};
  const float scale = magnitude / 127;  // no std::min: that takes a constant's address, which a GPU has none of
  return {scale < kLargestScale ? scale : kLargestScale, 127 / magnitude};
}

// Of a block that holds what is not finite: its scale, and a number's code. `largest`: of the finite ones.
constexpr float scale_beside_special(uint32_t largest) {
  const float magnitude = std::bit_cast<float>(largest);
  return magnitude < kSmallest ? 0.0f : magnitude / 126;
}
constexpr int8_t special_code(float x, float scale) {
  if (magnitude(x) > kInfinity) return kNaN;
  if (magnitude(x) == kInfinity) return x > 0 ? kPlus : kMinus;
  return scale == 0 ? int8_t(0) : static_cast<int8_t>(low_bits(x / scale + kRounds, kRounds));
}
// Its number. `product`: the code's with the scale, which a GPU must not fuse with a sum.
constexpr float value_of(int8_t code, float product) {
  if (code == kPlus) return std::numeric_limits<float>::infinity();
  if (code == kMinus) return -std::numeric_limits<float>::infinity();
  if (code == kNaN) return std::numeric_limits<float>::quiet_NaN();
  return product;
}

}  // namespace block_codes
}  // namespace minddp
