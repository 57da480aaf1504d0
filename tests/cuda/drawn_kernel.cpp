// The emulated kernels on drawn shapes, offsets, scales, missing sources and flags, beside plain loops. Each tensor lies
// in memory of exactly its size, so that AddressSanitizer finds each access outside of it.
//
//   drawn_kernel ROUNDS SEED
#include "emulated_kernel.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

std::mt19937_64 dice;
int64_t draw(int64_t count) { return static_cast<int64_t>(dice() % count); }
bool one_in(int64_t count) { return draw(count) == 0; }

[[noreturn]] void fail(const char* what, long round) {
  std::printf("round %ld: %s\n", round, what);
  std::exit(1);
}

// `count` numbers that begin anywhere and end where the memory ends.
template <typename T>
struct Exact {
  explicit Exact(int64_t count, int64_t offset = draw(9))
      : memory(std::make_unique<char[]>((offset + count) * sizeof(T))),
        data(reinterpret_cast<T*>(memory.get()) + offset) {}
  std::unique_ptr<char[]> memory;
  T* data;
};

template <typename T>
T number() {
  if (one_in(3000)) return static_cast<T>(one_in(2) ? INFINITY : NAN);
  return static_cast<T>(static_cast<float>(draw(20'001) - 10'000) / 64);
}

template <typename T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(T)) == 0;
}

template <typename Src, typename Dst>
Dst converted(Src value, double scale) {
  if constexpr (std::is_same_v<Src, Dst>)
    if (scale == 1.0) return value;
  using Acc = Accumulate<Src, Dst>;
  return static_cast<Dst>(static_cast<Acc>(value) * static_cast<Acc>(scale));
}

int64_t numel() {
  if (one_in(4)) return draw(5);
  return one_in(3) ? kChunk * (1 + draw(3)) + draw(3) - 1 : draw(700);
}

template <typename Src, typename Dst>
void copy(at::ScalarType src_type, at::ScalarType dst_type, long round) {
  const int64_t count = 1 + draw(40);
  const double scale = one_in(3) ? 1.0 : 1.0 / (1 + draw(7));
  std::vector<Exact<Src>> sources;
  std::vector<Exact<Dst>> destinations;
  std::vector<CopySegment> segments;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = numel();
    sources.emplace_back(n);
    destinations.emplace_back(n);
    const bool missing = one_in(9);
    for (int64_t k = 0; k < n; ++k) sources[i].data[k] = missing ? Src(0.0f) : number<Src>();
    segments.push_back({missing ? nullptr : sources[i].data, destinations[i].data, n});
  }
  const int64_t capacities[] = {1, 2, int64_t(kSmallTable), int64_t(kLargeTable), 100'000};
  if (emulate(segments.data(), count, int(src_type), int(dst_type), scale, capacities[draw(5)]) < 0)
    fail(error(), round);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < segments[i].numel; ++k) {
      const Dst want = converted<Src, Dst>(sources[i].data[k], scale);
      if (!same_bits(want, destinations[i].data[k])) fail("a number differs", round);
    }
  }
}

// The sum of some pieces is near the exact one, where all numbers are finite.
template <typename T>
void blocks(at::ScalarType type, long round) {
  // Near the end of a block every second time.
  const int64_t n = one_in(2) ? QuantizedBlock::kNumbers * (1 + draw(11)) + draw(9) - 8 : 1 + draw(3000);
  const int64_t count = QuantizedBlock::count(n), pieces = 2 + draw(4);
  const double scale = 1.0 / (1 + draw(3));
  Exact<T> src(n), dst(n);
  double largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    src.data[i] = number<T>();
    const double value = static_cast<double>(static_cast<float>(src.data[i]));
    finite = finite && std::isfinite(value);
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  // Blocks of a bucket lie at multiples of four bytes.
  auto memory = std::make_unique<char[]>(pieces * count * sizeof(QuantizedBlock) + 4);
  auto* first = reinterpret_cast<QuantizedBlock*>(memory.get() + 4 * draw(2));
  Exact<QuantizedBlock> lost(count, 0);
  std::memset(static_cast<void*>(lost.data), 0, count * sizeof(QuantizedBlock));
  const bool feeds_back = one_in(2);
  for (int64_t k = 0; k < pieces; ++k)
    emulate_quantize(src.data, int(type), n, scale, feeds_back && k == 0 ? lost.data : nullptr, first + k * count);
  emulate_add_quantized(first, int(pieces), count, feeds_back ? lost.data : nullptr);
  emulate_dequantize(first, 1.0, dst.data, int(type), n);
  if (!finite) return;
  const double step = pieces * scale * largest / 127;  // of the sum's codes; each piece has lost half of its own, too
  for (int64_t i = 0; i < n; ++i) {
    const double exact = pieces * scale * static_cast<double>(static_cast<float>(src.data[i]));
    const double got = static_cast<double>(static_cast<float>(dst.data[i]));
    if (!(std::fabs(got - exact) <= 1.1 * step + std::fabs(exact) / 1000)) fail("a sum is far off", round);
  }
}

void play(long round) {
  using at::ScalarType;
  switch (draw(8)) {
    case 0: copy<float, float>(ScalarType::Float, ScalarType::Float, round); break;
    case 1: copy<float, c10::BFloat16>(ScalarType::Float, ScalarType::BFloat16, round); break;
    case 2: copy<c10::BFloat16, float>(ScalarType::BFloat16, ScalarType::Float, round); break;
    case 3: copy<c10::Half, double>(ScalarType::Half, ScalarType::Double, round); break;
    case 4: copy<double, c10::Half>(ScalarType::Double, ScalarType::Half, round); break;
    case 5: copy<c10::BFloat16, c10::Half>(ScalarType::BFloat16, ScalarType::Half, round); break;
    case 6: copy<c10::Half, c10::Half>(ScalarType::Half, ScalarType::Half, round); break;
    case 7: copy<double, double>(ScalarType::Double, ScalarType::Double, round); break;
  }
  switch (draw(3)) {
    case 0: blocks<float>(ScalarType::Float, round); break;
    case 1: blocks<c10::Half>(ScalarType::Half, round); break;
    case 2: blocks<double>(ScalarType::Double, round); break;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 50;
  dice.seed(argc > 2 ? std::atol(argv[2]) : 1);
  for (long round = 0; round < rounds; ++round) play(round);
  std::printf("%ld rounds\n", rounds);
}
