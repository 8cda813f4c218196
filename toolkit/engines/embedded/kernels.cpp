// The operations that decide the speed of a decode step on a CPU, as torch custom operators.
//
// One rule holds for all of them: the result for a token does not depend on how many other tokens,
// sequences or threads take part. Every sum is computed in one fixed order (over k in a linear,
// over positions in attention), each in its own vector lane, and each output is computed by one
// thread. So verifying five tokens at once gives, bit by bit, the same as five single steps.
//
// Weights are packed in blocks of 64 rows, [blocks, k, 64], or, for products of groups of codes or
// of BF16 numbers, [blocks, k/4, 64, 4] and [blocks, k/2, 64, 2]: so one pass over memory, from
// front to back, feeds vectors of rows. GCC compiles its vector types to the instructions that the
// machine has; VNNI, the BF16 product and AMX are used if the machine has them.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define TOOLKIT_BF16
#endif
#if defined(TOOLKIT_BF16) && defined(__AVX512VNNI__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define TOOLKIT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using at::Tensor;

// A vector is a register: GCC keeps wider ones in memory.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Shorts = int16_t __attribute__((vector_size(kLanes * 4)));
using Bytes = int8_t __attribute__((vector_size(kLanes)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

constexpr int64_t kBlock = 64;   // rows in a packed block
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kTokens = 6;   // rows of activations per pass over the weights: 24 sums fit into 32 registers
constexpr int64_t kGrain = 1 << 17;  // with fewer multiply-adds, a second thread costs more than it saves
constexpr float kFp8Max = 448.0f;

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

// The same for the last vector of a row, which may have fewer numbers; the others are zeros. It is not inlined, because a copy of unknown length is a call, and around a call every
// vector is written to memory.
[[gnu::noinline, gnu::cold]] Floats load_few(const float* from, int64_t count) {
  Floats v = {};
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

[[gnu::noinline, gnu::cold]] void store_few(float* to, Floats v, int64_t count) { std::memcpy(to, &v, count * sizeof(float)); }

inline Floats load(const float* from, int64_t count) { return count >= kLanes ? load<Floats>(from) : load_few(from, count); }

inline void store(float* to, Floats v, int64_t count) { count >= kLanes ? store(to, v) : store_few(to, v, count); }

// Memory that a thread takes and gives back like a stack. A forward takes some at a hundred places,
// and malloc would need as long as a small model's arithmetic. It grows to the most that was taken at
// a time.
class Arena {
 public:
  ~Arena() { std::free(data_); }

  // nullptr if there is no memory.
  char* take(size_t bytes) {
    if (used_ + bytes <= size_) {
      taken_ += bytes, used_ += bytes;
      return data_ + used_ - bytes;
    }
    char* more = allocated(bytes);
    if (more) taken_ += bytes, most_ = std::max(most_, taken_);
    return more;
  }

  void give_back(char* from, size_t bytes) {
    taken_ -= bytes;
    if (data_ <= from && from < data_ + size_) {
      used_ -= bytes;
    } else {
      std::free(from);
    }
    if (taken_ == 0 && most_ > size_) {
      std::free(data_);
      data_ = allocated(most_);
      size_ = data_ ? most_ : 0;
    }
  }

 private:
  static char* allocated(size_t bytes) { return static_cast<char*>(std::aligned_alloc(64, bytes)); }

  char* data_ = nullptr;
  size_t size_ = 0, used_ = 0;   // of data_
  size_t taken_ = 0, most_ = 0;  // with what did not fit into it
};

thread_local Arena arena;

// Uninitialized memory until the end of its block. It begins at the start of a cache line.
template <typename V>
class Scratch {
 public:
  explicit Scratch(int64_t count) : bytes_((count * sizeof(V) + 127) / 64 * 64), data_(arena.take(bytes_)) {
    TORCH_CHECK(data_, "no memory for ", count, " numbers of scratch");
  }
  ~Scratch() { arena.give_back(data_, bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator V*() const { return reinterpret_cast<V*>(data_); }

 private:
  size_t bytes_;
  char* data_;
};

// Subtract zero rather than add it: x - 0 is x for every x, -0 included, so that the compiler keeps
// only the broadcast.
inline Floats splat(float x) { return x - Floats{}; }

// sum + a * b, rounded once if the processor can. Left to itself, GCC decides anew in every loop whether
// it rounds once or twice, so that the bits would depend on the number of tokens.
inline Floats plus_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

// a > b ? a : b, and a < b ? a : b, so b if either is NaN. The processor has an instruction for just
// that, which GCC 12 does not find.
inline Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
inline Floats smaller(Floats a, Floats b) {
#ifdef __AVX512F__
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

// Keep a loaded value in a register. Otherwise GCC loads it again for every product, and the loads
// limit the speed of the loop.
inline void keep_loaded([[maybe_unused]] Floats& v) {
#ifdef __AVX512F__
  asm("" : "+v"(v));
#endif
}

// Add what is added here at once. Otherwise GCC first adds the products of several steps to each
// other, and writes sums to memory for lack of registers.
#ifdef __AVX2__
inline Ints in_this_order(Ints sum) {
  asm("" : "+v"(sum));
  return sum;
}
#endif

// Weights are prefetched this far ahead, a quarter of the nearest cache. Only this way are weights that
// exceed the caches read at the speed of memory: the hardware's own prefetcher stops at every 4 KiB
// page, and its pauses cost time as soon as there is arithmetic between the loads. Small linears lie
// behind each other, so this reaches into the next one.
constexpr int64_t kAheadBytes = 12288;

inline void prefetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// A vector of weights of any storage type as floats; all of these conversions are exact. GCC 12
// compiles __builtin_convertvector on bytes lane by lane (14 times slower), so the instruction is
// named.
struct Fp8 { uint8_t bits; };
struct Bf16 { uint16_t bits; };

#ifdef __AVX512F__
inline Ints signed_bytes(const void* w) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(w)); }
inline Ints halves(const void* w) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(w)); }
#elif defined(__AVX2__)
inline Ints signed_bytes(const void* w) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(w))); }
inline Ints halves(const void* w) { return (Ints)_mm256_cvtepu16_epi32(load<__m128i>(w)); }
#else
inline Ints signed_bytes(const void* w) { return __builtin_convertvector(load<Bytes>(w), Ints); }
inline Ints halves(const void* w) { return __builtin_convertvector(load<Halves>(w), Ints); }
#endif

inline Floats widen(const float* w) { return load<Floats>(w); }
inline Floats widen(const Bf16* w) { return (Floats)(halves(w) << 16); }

// The exponent bias of E4M3 is 7, that of float is 127: move the sign and the seven other bits into
// their places, and multiply by 2^120. This is correct for subnormals, too. Weights hold no NaN.
inline Floats widened(Ints code_on_top) { return (Floats)(code_on_top >> 4 & int32_t(0x87f00000)) * 0x1p120f; }
inline Floats widen(const Fp8* w) { return widened(signed_bytes(w) << 24); }

// A code in a cache, which may be NaN (0x7f or 0xff): a fault has to reach the logits, not to become
// a number.
struct CachedFp8 { uint8_t bits; };
constexpr int32_t kFp8Nan = 0x7f;

inline Floats widen(const CachedFp8* codes) {
  Floats value = widen(reinterpret_cast<const Fp8*>(codes));
  return (signed_bytes(codes) & kFp8Nan) == kFp8Nan ? splat(std::numeric_limits<float>::quiet_NaN()) : value;
}

// Round to the nearest E4M3 number, half to even and saturating, as torch's clamp and cast do. From
// 2^-6 on, a code keeps the three bits after the leading one, and the twenty lower bits are
// rounded. Smaller numbers are multiples of 2^-9; adding 1.5 * 2^14 rounds to these.
inline Floats rounded_to_fp8(Floats x) {
  x = smaller(splat(kFp8Max), larger(splat(-kFp8Max), x));
  Ints bits = (Ints)x;
  Floats normal = (Floats)((bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffff);
  Floats small = (x + 0x1.8p14f) - 0x1.8p14f;
  Floats rounded = (bits & 0x7fffffff) < 0x3c800000 ? small : normal;
  return x == x ? rounded : x;
}

// The bits of the nearest BF16 numbers, half to even.
inline Ints nearest_bf16(Floats x) {
  Ints bits = (Ints)x;
  Ints nearest = bits + 0x7fff + (bits >> 16 & 1);
  nearest = x == x ? nearest : bits | 0x400000;  // a NaN stays one
  return nearest >> 16 & 0xffff;
}

// Write a vector of numbers into a cache: unchanged, as the nearest BF16 numbers, or as the codes of
// x / scale.
inline void keep(float* to, Floats x, float) { store(to, x); }
inline void keep(Bf16* to, Floats x, float) {
  Ints bits = nearest_bf16(x);
#ifdef __AVX512F__
  __m256i halves = _mm512_cvtepi32_epi16((__m512i)bits);
  std::memcpy(to, &halves, sizeof halves);
#else
  for (int i = 0; i < kLanes; ++i) to[i].bits = static_cast<uint16_t>(bits[i]);
#endif
}
inline void keep(CachedFp8* to, Floats x, float scale) {
  Floats value = rounded_to_fp8(x / scale);
  Ints magnitude = (Ints)value & 0x7fffffff, sign = ((Ints)value >> 24) & 0x80;
  Ints small = __builtin_convertvector((Floats)magnitude * 512.0f, Ints);
  Ints number = magnitude < 0x3c800000 ? small : (magnitude >> 20) - (120 << 3);
  Ints code = sign | (value == value ? number : Ints{} + kFp8Nan);
  for (int i = 0; i < kLanes; ++i) to[i].bits = static_cast<uint8_t>(code[i]);
}

inline Ints lanes() {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane;
}

// Reduce the lanes to one number, in halves: a few steps instead of a chain.
template <typename F>
inline float fold(Floats v, const F& join) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) v = join(v, __builtin_shuffle(v, lanes() ^ half));
  return v[0];
}

inline float sum(Floats v) {
  return fold(v, [](Floats a, Floats b) { return a + b; });
}

// e^x for x <= 0, to about one unit in the last place; below -87 the result is cut at e^-87.
inline Floats exponential(Floats x) {
  x = larger(splat(-87.0f), x);
  Floats shifted = x * 1.44269504088896341f + 0x1.8p23f;  // the low bits now hold the integer part
  Floats whole = shifted - 0x1.8p23f;
  Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return (Floats)((Ints)p + ((Ints)shifted << 23));
#endif
}

template <typename F>
void parallel(int64_t tasks, int64_t work_per_task, const F& f) {
  int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, work_per_task));
  if (tasks <= grain) {
    f(0, tasks);
  } else {
    at::parallel_for(0, tasks, grain, f);
  }
}

// Call f() in so many threads that each has `kGrain` of the work; f takes tasks from a common counter.
// So tasks of very different size are shared evenly if the largest come first.
template <typename F>
void share(int64_t tasks, int64_t work, const F& f) {
  int64_t workers = std::min({tasks, work / kGrain, static_cast<int64_t>(at::get_num_threads())});
  if (workers <= 1) return f();
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f();
  });
}

// The numbers of a tensor that may be missing.
template <typename V = float>
const V* data_or_null(const std::optional<Tensor>& t) { return t.has_value() ? t->const_data_ptr<V>() : nullptr; }

// A packed linear: weight [blocks, k, 64] float32 | bfloat16 | uint8 (E4M3 bits), whose activations
// are floats; [blocks, k/2, 64, 2] bfloat16 | uint8, whose activations are rounded, too;
// [blocks, k/4, 64, 4] int8 with a `start`, whose activations are codes, of 8 bits at input_scale or
// of 16 without. What is missing is null.
struct Linear {
  const Tensor& weight;
  const float *scale, *input_scale, *pre_scale, *bias;  // [rows] of the weights, [], [k], [rows]
  const int32_t* start;                                 // [blocks * 64]
  int64_t rows;
};

// What is done with the products: they are scaled, the bias is added, then `onto` is added.
struct Finish {
  const float *scale, *bias, *onto;  // onto [m, rows] may be `out` itself
  float factor;                      // of the scale,
  int64_t rows;
  float* out;
  const float* factors = nullptr;  // or one for each token

  // Write the outputs of m tokens for the block of weights whose rows begin at `first`. product(t, j)
  // is vector j of token t. What is read for every vector is copied first: as far as GCC knows, each
  // store may change what a pointer leads to.
  template <typename P>
  void operator()(int64_t first, int64_t m, P product) const {
    const Finish how = *this;
    for (int64_t j = 0; j < kVectors && first + j * kLanes < how.rows; ++j) {
      int64_t row = first + j * kLanes;
      if (row + kLanes > how.rows) return last(row, m, [=](int64_t t) { return product(t, j); });
      Floats of_row = how.scale ? load<Floats>(how.scale + row) : Floats{};
      Floats bias_of_row = how.bias ? load<Floats>(how.bias + row) : Floats{};
      for (int64_t t = 0; t < m; ++t) {
        Floats v = product(t, j);
        if (how.scale) v *= of_row * how.by(t);
        if (how.bias) v += bias_of_row;
        if (how.onto) v += load<Floats>(how.onto + t * how.rows + row);
        store(how.out + t * how.rows + row, v);
      }
    }
  }

 private:
  float by(int64_t t) const { return factors ? factors[t] : factor; }

  // The same for the end of the rows, which is no whole vector.
  template <typename P>
  void last(int64_t row, int64_t m, P product) const {
    for (int64_t t = 0; t < m; ++t) {
      Floats v = product(t);
      for (int64_t i = 0; row + i < rows; ++i) {
        float y = scale ? v[i] * (scale[row + i] * by(t)) : v[i];
        if (bias) y += bias[row + i];
        out[t * rows + row + i] = onto ? y + onto[t * rows + row + i] : y;
      }
    }
  }
};

// ---- linear -------------------------------------------------------------------------------------

// A kind of product is a `Dot`. A step of a block is one number, four codes or two BF16 numbers of
// each row. It is multiplied at once or, if the processor has no such product, in two parts. A part
// has a Row of numbers for each vector of rows of weights, and a Group of numbers for each row of
// activations; `add` adds their products to a vector of sums. kStepBytes are what a step takes in
// memory, kPanelBytes what it takes where `row` reads it: `panel` returns some steps as they are, or
// converts them into scratch.
//
// Rows of activations, [rows, steps, kParts], are taken kTokens at most at a time: a tile.
constexpr int64_t kPanelSteps = 64;  // they stay in the nearest cache while all tiles meet them

// Vectors of rows that are summed at a time, so that the sums of `tile` rows of activations fit
// into the registers: 32 on AVX-512, 16 elsewhere.
constexpr int64_t pass_of(int tile) {
  if (kLanes == 16) return kVectors;
  return tile == 1 ? 8 : tile == 2 ? 4 : 2;
}

// Weights of any storage type by floats. W [64] is a step.
template <typename W>
struct FloatDot {
  using Sum = Floats;
  using Row = Floats;
  using Group = float;
  static constexpr int64_t kStepBytes = kBlock * sizeof(W), kPanelBytes = kStepBytes, kParts = 1;

  static const char* panel(const char* w, int64_t, char*) { return w; }
  static Row row(const char* step, int64_t vector, int) {
    Floats row = widen(reinterpret_cast<const W*>(step) + vector * kLanes);
    keep_loaded(row);
    return row;
  }
  static void add(Sum& sum, Group x, Row row) { sum = plus_product(sum, splat(x), row); }
};

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
// Four signed codes by four unsigned ones, summed exactly in int32.
struct CodeDot {
  using Sum = Ints;
  using Row = Ints;
  using Group = uint32_t;
  static constexpr int64_t kStepBytes = kBlock * 4, kPanelBytes = kStepBytes, kParts = 1;

  static const char* panel(const char* w, int64_t, char*) { return w; }
  static Row row(const char* step, int64_t vector, int) { return load<Ints>(step + vector * kLanes * 4); }
  // The instruction is written by hand: around its own intrinsic, GCC 12 copies and spills the
  // sums, which doubles the time from four rows on.
  static void add(Sum& sum, Group x, Row row) {
    Ints all = Ints{} + static_cast<int32_t>(x);
#ifdef __AVX512VNNI__
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(all), "v"(row));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(all), "x"(row));
#endif
  }
};
#else
// The same in two parts of two codes each, as numbers of 16 bits: the first and third, then the
// second and fourth.
struct CodeDot {
  using Sum = Ints;
  using Row = Ints;
  using Group = uint32_t;
  static constexpr int64_t kStepBytes = kBlock * 4, kPanelBytes = kStepBytes, kParts = 2;

  static const char* panel(const char* w, int64_t, char*) { return w; }
  static Row row(const char* step, int64_t vector, int part) {
    Shorts fours = load<Shorts>(step + vector * kLanes * 4);
    return (Ints)(part == 1 ? fours >> 8 : fours << 8 >> 8);
  }
  static void add(Sum& sum, Group x, Row row) {
#if defined(__AVX512BW__)
    sum = in_this_order(sum + (Ints)_mm512_madd_epi16((__m512i)row, _mm512_set1_epi32(static_cast<int32_t>(x))));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sum = in_this_order(sum + (Ints)_mm256_madd_epi16((__m256i)row, _mm256_set1_epi32(static_cast<int32_t>(x))));
#else
    sum += (row << 16 >> 16) * static_cast<int32_t>(x & 0xffff) + (row >> 16) * static_cast<int32_t>(x >> 16);
#endif
  }
};
#endif

#ifdef TOOLKIT_BF16
// Two BF16 numbers by two others.
struct Bf16Dot {
  using Sum = Floats;
  using Row = Ints;
  using Group = uint32_t;
  static constexpr int64_t kStepBytes = kBlock * 4, kPanelBytes = kStepBytes, kParts = 1;

  static const char* panel(const char* w, int64_t, char*) { return w; }
  static Row row(const char* step, int64_t vector, int) { return load<Ints>(step + vector * 64); }
  static void add(Sum& sum, Group x, Row row) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(Ints{} + static_cast<int32_t>(x)), "v"(row));
  }
};

// The high and the low byte of every E4M3 number without its sign as a BF16 number, and the order
// in which bytes of two vectors are taken in turn.
struct Fp8AsBf16 {
  uint8_t high[128] = {}, low[128] = {}, in_turn[128] = {};
  constexpr Fp8AsBf16() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0 && mantissa != 0) {  // subnormal: its leading one moves to its place
        for (exponent = 1; mantissa < 8; --exponent) mantissa *= 2;
        mantissa &= 7;
      }
      int bits = code == 0 ? 0 : (exponent + 120) << 7 | mantissa << 4;
      high[code] = static_cast<uint8_t>(bits >> 8), low[code] = static_cast<uint8_t>(bits & 255);
      in_turn[code] = static_cast<uint8_t>(code / 2 + code % 2 * 64);
    }
  }
};
constexpr Fp8AsBf16 kFp8AsBf16;

// E4M3 numbers are BF16 numbers, too, and the product of two of them is exact.
struct Fp8Dot : Bf16Dot {
  static constexpr int64_t kStepBytes = kBlock * 2;

  static const char* panel(const char* w, int64_t steps, char* pairs) {
    auto table = [](const uint8_t* bytes) { return load<__m512i>(bytes); };
    const Fp8AsBf16& as = kFp8AsBf16;
    for (int64_t i = 0; i < steps * kStepBytes; i += 64) {
      __builtin_prefetch(w + i + 2 * kAheadBytes, 0, 2);
      __m512i code = load<__m512i>(w + i), sign = _mm512_and_si512(code, _mm512_set1_epi8(-128));
      __m512i low = _mm512_permutex2var_epi8(table(as.low), code, table(as.low + 64));
      __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(table(as.high), code, table(as.high + 64)), sign);
      _mm512_storeu_si512(pairs + 2 * i, _mm512_permutex2var_epi8(low, table(as.in_turn), high));
      _mm512_storeu_si512(pairs + 2 * i + 64, _mm512_permutex2var_epi8(low, table(as.in_turn + 64), high));
    }
    return pairs;
  }
};
#else
// Where the processor has no such product, pairs of BF16 numbers or E4M3 codes are multiplied by
// floats, in two parts.
template <typename W>
struct PairDot {
  using Sum = Floats;
  using Row = Floats;
  using Group = float;
  static constexpr int64_t kStepBytes = kBlock * 2 * sizeof(W), kPanelBytes = kStepBytes, kParts = 2;

  static const char* panel(const char* w, int64_t, char*) { return w; }
  static Row row(const char* step, int64_t vector, int part) {
    const char* pairs = step + vector * kLanes * 2 * sizeof(W);
    if constexpr (std::is_same_v<W, Bf16>) return (Floats)(load<Ints>(pairs) << (part == 1 ? 0 : 16) & int32_t(0xffff0000));
    return widened(halves(pairs) << (part == 1 ? 16 : 24));
  }
  static void add(Sum& sum, Group x, Row row) { sum = plus_product(sum, splat(x), row); }
};
using Bf16Dot = PairDot<Bf16>;
using Fp8Dot = PairDot<Fp8>;
#endif

// What comes next from memory, of which each step of a product prefetches so many bytes.
struct Ahead {
  const char* next;
  int64_t bytes;
};

// sums [T, kVectors] = the products of T rows of activations, which lie `stride` apart, by 64 rows of
// weights, added to what they hold if this `continues` a sum. Each step fetches a part of the weights
// that come next, so that memory works all the time: as much as it reads, if no other tile meets
// these weights (kAlone), else what `ahead` says.
template <typename D, int T, bool kAlone>
void dot_tile(const typename D::Group* x, int64_t stride, const char* panel, int64_t steps, bool continues, Ahead ahead, typename D::Sum* sums) {
  constexpr int64_t kPass = pass_of(T), kPasses = kVectors / kPass;
  if (kAlone) ahead = {panel + (kPasses == 1 ? kAheadBytes : steps * D::kPanelBytes), D::kPanelBytes};
  const int64_t lines = (kAlone ? D::kPanelBytes : ahead.bytes) / 64;
  for (int64_t first = 0; first < kVectors; first += kPass) {
    const int64_t pass = first / kPass, share = (lines * (pass + 1) / kPasses - lines * pass / kPasses) * 64;
    typename D::Sum sum[T][kPass] = {};
    if (continues) {
      for (int t = 0; t < T; ++t)
        for (int j = 0; j < kPass; ++j) sum[t][j] = sums[t * kVectors + first + j];
    }
    const char* step = panel + first * (D::kPanelBytes / kVectors);
    const typename D::Group* group = x;
    for (int64_t i = 0; i < steps; ++i, step += D::kPanelBytes, group += D::kParts) {
      prefetch(ahead.next, share), ahead.next += share;
#pragma GCC unroll 2
      for (int part = 0; part < D::kParts; ++part) {
        if constexpr (T < kPass) {
#pragma GCC unroll 8
          for (int j = 0; j < kPass; ++j) {
            auto row = D::row(step, j, part);
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) D::add(sum[t][j], group[t * stride + part], row);
          }
        } else {
          typename D::Row row[kPass];
#pragma GCC unroll 8
          for (int j = 0; j < kPass; ++j) row[j] = D::row(step, j, part);
#pragma GCC unroll 6
          for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int j = 0; j < kPass; ++j) D::add(sum[t][j], group[t * stride + part], row[j]);
        }
      }
    }
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < kPass; ++j) sums[t * kVectors + first + j] = sum[t][j];
  }
}

template <typename D, bool kAlone>
void dot_rows(int64_t rows, const typename D::Group* x, int64_t stride, const char* panel, int64_t steps, bool continues, Ahead ahead, typename D::Sum* sums) {
  switch (rows) {
    case 1: return dot_tile<D, 1, kAlone>(x, stride, panel, steps, continues, ahead, sums);
    case 2: return dot_tile<D, 2, kAlone>(x, stride, panel, steps, continues, ahead, sums);
    case 3: return dot_tile<D, 3, kAlone>(x, stride, panel, steps, continues, ahead, sums);
    case 4: return dot_tile<D, 4, kAlone>(x, stride, panel, steps, continues, ahead, sums);
    case 5: return dot_tile<D, 5, kAlone>(x, stride, panel, steps, continues, ahead, sums);
    default: return dot_tile<D, 6, kAlone>(x, stride, panel, steps, continues, ahead, sums);
  }
}

// Call finish(first, sums [rows, kVectors]) for every block of weights, whose rows begin at `first`.
// If there are several tiles, all of them meet a panel of weights before the next panel, which
// comes from memory meanwhile.
template <typename D, typename F>
void dot_linear(const typename D::Group* x, int64_t rows, int64_t steps, const void* weights, int64_t blocks, const F& finish) {
  using Sum = typename D::Sum;
  constexpr bool kConverts = D::kPanelBytes != D::kStepBytes;
  int64_t tiles = (rows + kTokens - 1) / kTokens, stride = steps * D::kParts;
  bool is_single = tiles == 1 && !kConverts && pass_of(static_cast<int>(rows)) == kVectors;
  int64_t portion = is_single ? steps : kPanelSteps;
  // The first tiles that meet a panel fetch the next one, each of them whole lines of every step, and
  // between products: prefetched at once, it would keep them waiting. `panel` fetches what it converts.
  int64_t sharers = tiles == 1 ? 0 : std::min<int64_t>(D::kStepBytes / 64, tiles < 4 ? 2 : 4);
  parallel(blocks, kBlock * stride * rows, [&](int64_t begin, int64_t end) {
    Scratch<Sum> sums(rows * kVectors);
    Scratch<char> scratch(kConverts ? kPanelSteps * D::kPanelBytes : 0);
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t s = 0; s < steps; s += portion) {
        int64_t count = std::min(portion, steps - s);
        const char* from = static_cast<const char*>(weights) + (b * steps + s) * D::kStepBytes;
        const char* panel = D::panel(from, count, scratch);
        const typename D::Group* groups = x + s * D::kParts;
        if (tiles == 1 && !kConverts) {
          dot_rows<D, true>(rows, groups, stride, panel, count, s > 0, {}, sums);
          continue;
        }
        for (int64_t i = 0, t = 0, tile = 0; t < rows; ++i, t += tile) {
          tile = (rows - t + tiles - i - 1) / (tiles - i);  // as even as possible
          int64_t share = i < sharers ? D::kStepBytes / sharers : 0;
          Ahead ahead{from + count * (D::kStepBytes + i * share), share};
          dot_rows<D, false>(tile, groups + t * stride, stride, panel, count, s > 0, ahead, sums + t * kVectors);
        }
      }
      finish(b * kBlock, static_cast<const Sum*>(sums));
    }
  });
}

// ---- linear by AMX ------------------------------------------------------------------------------

// A unit of its own (AMX) multiplies 16 rows of activations by 16 rows of weights, 64 bytes deep, in
// the time that these weights take to come from the second cache. So sixteen tokens cost little more
// than one. What it multiplies lies in registers of 1 KiB, and the weights lie in memory as it wants
// them: 16 steps of a vector of rows are a register. Here a tile is of 16 tokens.
constexpr int64_t kAmxRows = 16, kAmxSteps = 16;

// What the last tile lacks, which is read: as much of anything has to lie behind the activations.
#ifdef TOOLKIT_AMX
constexpr int64_t kRowsBehind = kAmxRows - 1;
#else
constexpr int64_t kRowsBehind = 0;
#endif

#ifdef TOOLKIT_AMX
static_assert(kVectors == 4, "the sums have four registers");

// Linux gives the registers to a process that asks for them: ARCH_REQ_XCOMP_PERM for XTILEDATA
// (Documentation/arch/x86/xstate.rst of Linux).
bool may_use_amx() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return may;
}

// Products of codes are exact, so either unit may compute them: up to six rows from the second cache
// are faster by vectors. Those of BF16 numbers are rounded, so one unit has to compute all of them.
template <typename D>
constexpr bool kHasAmx = std::is_same_v<D, CodeDot> || std::is_base_of_v<Bf16Dot, D>;
constexpr int64_t kCachedBytes = 1 << 20, kVectorRows = 6;

template <typename D>
bool is_for_amx(int64_t rows, int64_t weight_bytes) {
  bool is_slower = std::is_same_v<D, CodeDot> && rows <= (weight_bytes > kCachedBytes ? 1 : kVectorRows);
  return !is_slower && may_use_amx();
}

// The shapes of the registers, until the end of the block. Registers 0 to 3 are the sums of the four
// vectors of rows, 4 activations, 5 weights; 6 and 7 are those of what remains behind whole ones.
class AmxShapes {
 public:
  AmxShapes(int64_t tokens, int64_t remaining_steps) {
    for (int sums = 0; sums < 4; ++sums) set(sums, tokens, kAmxSteps);
    set(4, tokens, kAmxSteps), set(5, kAmxSteps, kAmxSteps);
    if (remaining_steps) set(6, tokens, remaining_steps), set(7, remaining_steps, kAmxSteps);
    asm volatile("ldtilecfg %0" ::"m"(memory_));
  }
  ~AmxShapes() { asm volatile("tilerelease"); }
  AmxShapes(const AmxShapes&) = delete;
  AmxShapes& operator=(const AmxShapes&) = delete;

 private:
  void set(int which, int64_t rows, int64_t columns) {
    memory_.rows[which] = static_cast<uint8_t>(rows);
    memory_.row_bytes[which] = static_cast<uint16_t>(columns * 4);
  }

  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } memory_;
};

// The compiler's intrinsics take the numbers of registers only as they are written.
template <int kRegister>
void amx_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
void amx_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kRegister) : "memory");
}
template <typename D, int kSums, int kX, int kWeights>
void amx_add() {
  if constexpr (std::is_same_v<D, CodeDot>) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kX), "i"(kWeights));
  }
}

// dot_tile of as many tokens as the registers have.
template <typename D>
void amx_tile(const typename D::Group* x, int64_t stride, const char* panel, int64_t steps, bool continues, Ahead ahead, typename D::Sum* sums) {
  constexpr int64_t kBytes = kAmxSteps * D::kPanelBytes, kSumStride = kVectors * sizeof(*sums);
  auto each_vector = [](auto f) {
    f(std::integral_constant<int, 0>()), f(std::integral_constant<int, 1>());
    f(std::integral_constant<int, 2>()), f(std::integral_constant<int, 3>());
  };
  auto add = [&]<int kX, int kWeights>(std::integer_sequence<int, kX, kWeights>) {
    amx_load<kX>(x, stride * sizeof(*x));
    each_vector([&](auto j) {
      prefetch(ahead.next, ahead.bytes);
      ahead.next += ahead.bytes;
      amx_load<kWeights>(panel + j * kLanes * 4, D::kPanelBytes);
      amx_add<D, j, kX, kWeights>();
    });
  };
  each_vector([&](auto j) {
    if (continues) return amx_load<j>(sums + j, kSumStride);
    asm volatile("tilezero %%tmm%c0" ::"i"(j.value));
  });
  for (int64_t i = 0; i < steps / kAmxSteps; ++i, x += kAmxSteps, panel += kBytes) add(std::integer_sequence<int, 4, 5>());
  if (steps % kAmxSteps) add(std::integer_sequence<int, 6, 7>());
  each_vector([&](auto j) { amx_store<j>(sums + j, kSumStride); });
}

// dot_linear by AMX.
template <typename D, typename F>
void amx_linear(const typename D::Group* x, int64_t rows, int64_t steps, const void* weights, int64_t blocks, const F& finish) {
  constexpr bool kConverts = D::kPanelBytes != D::kStepBytes;
  int64_t tiles = (rows + kAmxRows - 1) / kAmxRows;
  int64_t portion = tiles == 1 && !kConverts ? steps : kPanelSteps;
  parallel(blocks, kBlock * steps * tiles, [&](int64_t begin, int64_t end) {
    Scratch<typename D::Sum> sums(tiles * kAmxRows * kVectors);
    Scratch<char> scratch(kConverts ? kPanelSteps * D::kPanelBytes : 0);
    AmxShapes shapes(std::min(rows, kAmxRows), steps % kAmxSteps);
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t s = 0; s < steps; s += portion) {
        int64_t count = std::min(portion, steps - s), products = (count + kAmxSteps - 1) / kAmxSteps * kVectors;
        const char* from = static_cast<const char*>(weights) + (b * steps + s) * D::kStepBytes;
        const char* panel = D::panel(from, count, scratch);
        for (int64_t t = 0; t < tiles; ++t) {
          // Of the lines that a product of the next panel reads, each tile prefetches its share.
          int64_t lines = kConverts ? 0 : kAmxSteps, first = lines * t / tiles;
          Ahead ahead{from + (tiles == 1 ? kAheadBytes : count * D::kStepBytes) + products * first * 64, (lines * (t + 1) / tiles - first) * 64};
          amx_tile<D>(x + s + t * kAmxRows * steps, steps, panel, count, s > 0, ahead, sums + t * kAmxRows * kVectors);
        }
      }
      finish(b * kBlock, static_cast<const typename D::Sum*>(sums));
    }
  });
}
#endif

// ---- linear by either ---------------------------------------------------------------------------

// dot_linear by the unit that is the faster one.
template <typename D, typename F>
void linear_products(const typename D::Group* x, int64_t rows, int64_t steps, const void* weights, int64_t blocks, const F& finish) {
#ifdef TOOLKIT_AMX
  if constexpr (kHasAmx<D>)
    if (is_for_amx<D>(rows, blocks * steps * D::kStepBytes)) return amx_linear<D>(x, rows, steps, weights, blocks, finish);
#endif
  dot_linear<D>(x, rows, steps, weights, blocks, finish);
}

// The products of m tokens, each of which is a row of activations, and finish.
template <typename D>
void project_rows(const typename D::Group* x, int64_t m, int64_t steps, const Tensor& weight, const Finish& finish) {
  linear_products<D>(x, m, steps, weight.const_data_ptr(), weight.size(0), [&](int64_t first, const Floats* sums) {
    finish(first, m, [=](int64_t t, int64_t j) { return sums[t * kVectors + j]; });
  });
}

#ifdef TOOLKIT_BF16
// Rows of `steps` pairs of the nearest BF16 numbers, k numbers in use; with a scale, of x / scale
// rounded to E4M3.
void store_floats(const float* x, int64_t m, int64_t k, const float* fp8_scale, int64_t steps, uint32_t* rows) {
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < k; i += 2 * kLanes) {
        Floats v[2] = {load(x + t * k + i, k - i), i + kLanes < k ? load(x + t * k + i + kLanes, k - i - kLanes) : Floats{}};
        if (fp8_scale) v[0] = rounded_to_fp8(v[0] / *fp8_scale), v[1] = rounded_to_fp8(v[1] / *fp8_scale);
        Floats pairs = (Floats)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
        store(reinterpret_cast<float*>(rows) + t * steps + i / 2, pairs, steps - i / 2);
      }
  });
}
#else
// The same as floats, one to a step.
void store_floats(const float* x, int64_t m, int64_t k, const float* fp8_scale, int64_t steps, float* rows) {
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill(rows + t * steps + k, rows + (t + 1) * steps, 0.0f);
      for (int64_t i = 0; i < k; i += kLanes) {
        Floats v = load(x + t * k + i, k - i);
        if (fp8_scale) v = rounded_to_fp8(v / *fp8_scale);
        store(rows + t * steps + i, v, k - i);
      }
    }
  });
}
#endif

// Weights by float activations.
template <typename W>
void project_floats(const float* x, int64_t m, int64_t k, const Linear& linear, const Finish& finish) {
  TORCH_CHECK(linear.weight.size(1) == k && !linear.input_scale, "linear: weight does not fit the input");
  project_rows<FloatDot<W>>(x, m, k, linear.weight, finish);
}

// BF16 by BF16, or E4M3 by E4M3 if the linear has an input scale.
template <typename D>
void project_pairs(const float* x, int64_t m, int64_t k, const Linear& linear, const Finish& finish) {
  int64_t steps = linear.weight.size(1), groups = steps * D::kParts;
  TORCH_CHECK(steps == (k + 1) / 2, "linear: weight does not fit the input");
  Scratch<typename D::Group> rows((m + kRowsBehind) * groups);
  store_floats(x, m, k, linear.input_scale ? &finish.factor : nullptr, groups, static_cast<typename D::Group*>(rows));
  project_rows<D>(rows, m, steps, linear.weight, finish);
}

// A vector of codes, the low bytes of integers, as their groups, which lie at the beginning of the
// result: four bytes each or, in two parts, two codes of 16 bits each.
#if defined(__AVX512VNNI__)
inline __m128i grouped(Ints codes) { return _mm512_cvtepi32_epi8((__m512i)codes); }
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
inline Ints grouped(Ints codes) {
  using All = int8_t __attribute__((vector_size(kLanes * 4)));
  All from;
  for (int i = 0; i < kLanes * 4; ++i) from[i] = static_cast<int8_t>(i % kLanes * 4);
  return (Ints)__builtin_shuffle((All)codes, from);
}
#else
inline Ints grouped(Ints codes) {
  Shorts from;
  for (int i = 0; i < kLanes * 2; ++i) from[i] = static_cast<int16_t>(i % kLanes / 4 * 8 + i % 2 * 4 + i % 4 / 2 * 2);
  return (Ints)__builtin_shuffle((Shorts)(codes & 255), from);
}
#endif

// Store the groups of a vector of codes, of which `count` fours are in use.
inline void store_groups(CodeDot::Group* to, Ints codes, int64_t count) {
  auto groups = grouped(codes);
  if (count >= kLanes / 4) {
    std::memcpy(to, &groups, kLanes * CodeDot::kParts);
  } else {
    std::memcpy(to, &groups, count * 4 * CodeDot::kParts);
  }
}

// The codes of a token, unsigned as the products need them. With an input scale they are
// round(x * pre_scale / input_scale) in [-128, 127], plus 128. Without one they have sixteen bits,
// round(x / scale) + 2^15, where the token's largest number gets 2^15 - 1; they are two rows, of
// the high and of the low bytes. Returns the scale. No code stands for NaN or infinity, so it is
// NaN then, which makes all of the token's results NaN. Not inlined, as `softmax` below: in the loops
// around them there are too few registers left.
[[gnu::noinline]] float store_codes(const float* x, int64_t k, const Linear& linear, float input_scale, int64_t groups, CodeDot::Group* to) {
  constexpr float kLargest = 32767.0f, kTiny = 1e-30f;
  const float* pre = linear.pre_scale;
  bool is_wide = !linear.input_scale;
  float scale = input_scale;
  if (is_wide) {
    Floats largest = splat(kTiny);
    for (int64_t i = 0; i < k; i += kLanes) largest = larger((Floats)((Ints)load(x + i, k - i) & 0x7fffffff), largest);
    scale = fold(largest, larger) / kLargest;
  }
  float inverse = 1.0f / scale;
  Floats zero = {};  // NaN behind a number that is NaN, or infinite and not cut
  for (int64_t i = 0; i < k; i += kLanes) {
    Floats v = load(x + i, k - i);
    if (pre) v *= load(pre + i, k - i);
    v *= inverse;
    if (!is_wide) v = smaller(splat(127.0f), larger(splat(-128.0f), v));
    zero += v - v;
    // Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
    Ints code = (Ints)(v + 0x1.8p23f) - 0x4b400000 + (is_wide ? 32768 : 128);
    int64_t count = std::min(kLanes, k - i + 3) / 4;
    CodeDot::Group* at = to + i / 4 * CodeDot::kParts;
    if (is_wide) store_groups(at, code >> 8, count);
    store_groups(is_wide ? at + groups : at, code, count);
  }
  return scale + sum(zero);
}

// INT8 by codes of 8 or 16 bits. `start` is -128 * (sum of the row's weights), which cancels the
// 128 of the codes, or of the high bytes.
void project_codes(const float* x, int64_t m, int64_t k, const Linear& linear, const Finish& of_call) {
  int64_t steps = linear.weight.size(1), groups = steps * CodeDot::kParts, planes = linear.input_scale ? 1 : 2;
  TORCH_CHECK(steps == (k + 3) / 4, "linear: weight does not fit the input");
  Scratch<CodeDot::Group> rows((m * planes + kRowsBehind) * groups);
  Scratch<float> scales(m);
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) scales[t] = store_codes(x + t * k, k, linear, of_call.factor, groups, rows + t * planes * groups);
  });
  Finish finish = of_call;
  finish.factors = scales;
  const int32_t* start = linear.start;
  linear_products<CodeDot>(rows, m * planes, steps, linear.weight.const_data_ptr(), linear.weight.size(0), [&](int64_t first, const Ints* sums) {
    finish(first, m, [=](int64_t t, int64_t j) {
      const Ints* sum = sums + t * planes * kVectors + j;
      Floats v = __builtin_convertvector(*sum + load<Ints>(start + first + j * kLanes), Floats);
      return planes == 2 ? v * 256.0f + __builtin_convertvector(sum[kVectors], Floats) : v;
    });
  });
}

// out [m, rows] = linear(x [m, k]) + onto.
void project(const float* x, int64_t m, int64_t k, const Linear& linear, const float* onto, float* out) {
  TORCH_CHECK(linear.weight.is_contiguous() && linear.weight.size(0) * kBlock >= linear.rows, "linear: weight is not packed for its rows");
  float factor = linear.input_scale ? *linear.input_scale : 1.0f;
  Finish finish{linear.scale, linear.bias, onto, factor, linear.rows, out};
  if (linear.start) return project_codes(x, m, k, linear, finish);
  auto dtype = linear.weight.scalar_type();
  bool is_paired = linear.weight.dim() == 4;
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kByte, "linear: weight dtype ", dtype);
  if (dtype == at::kFloat) return project_floats<float>(x, m, k, linear, finish);
  if (dtype == at::kBFloat16) return is_paired ? project_pairs<Bf16Dot>(x, m, k, linear, finish) : project_floats<Bf16>(x, m, k, linear, finish);
  is_paired ? project_pairs<Fp8Dot>(x, m, k, linear, finish) : project_floats<Fp8>(x, m, k, linear, finish);
}

const float* floats(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat, "contiguous float32 input is needed");
  return x.const_data_ptr<float>();
}

// x [..., k] float32 -> [..., rows] float32.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& input_scale,
              const std::optional<Tensor>& pre_scale, const std::optional<Tensor>& bias, const std::optional<Tensor>& start, int64_t rows) {
  auto sizes = x.sizes().vec();
  int64_t k = sizes.back();
  sizes.back() = rows;
  Tensor out = at::empty(sizes, x.options());
  Linear parts{weight, data_or_null(scale), data_or_null(input_scale), data_or_null(pre_scale), data_or_null(bias), data_or_null<int32_t>(start), rows};
  project(floats(x), x.numel() / k, k, parts, nullptr, out.mutable_data_ptr<float>());
  return out;
}

// ---- what is between the linears ----------------------------------------------------------------

// Norm R rows: a row waits for its sum and its root, and the others are computed meanwhile.
template <int R>
void rms_norm_rows(const float* x, int64_t k, const float* weight, float eps, float* out) {
  Floats squares[R] = {};
  for (int64_t i = 0; i < k; i += kLanes)
    for (int r = 0; r < R; ++r) {
      Floats v = load(x + r * k + i, k - i);
      squares[r] = plus_product(squares[r], v, v);
    }
  float factor[R];
  for (int r = 0; r < R; ++r) factor[r] = 1.0f / std::sqrt(sum(squares[r]) / static_cast<float>(k) + eps);
  for (int64_t i = 0; i < k; i += kLanes)
    for (int r = 0; r < R; ++r) store(out + r * k + i, load(x + r * k + i, k - i) * factor[r] * load(weight + i, k - i), k - i);
}

// out = x / sqrt(mean(x^2) + eps) * weight, for each of m rows of k.
void rms_norm(const float* x, int64_t m, int64_t k, const float* weight, float eps, float* out) {
  parallel(m, k, [&](int64_t begin, int64_t end) {
    int64_t t = begin;
    for (; t + 4 <= end; t += 4) rms_norm_rows<4>(x + t * k, k, weight, eps, out + t * k);
    for (; t < end; ++t) rms_norm_rows<1>(x + t * k, k, weight, eps, out + t * k);
  });
}

// x / (1 + e^-x), computed from e^-|x|, which never overflows.
inline Floats silu(Floats x) {
  Floats e = exponential((Floats)((Ints)x | std::numeric_limits<int32_t>::min()));
  return x * (x < Floats{} ? e : splat(1.0f)) / (1.0f + e);
}

// out [m, k] = silu(gate) * up; each row holds k numbers of gate, then k of up.
void gated(const float* gate_up, int64_t m, int64_t k, float* out) {
  parallel(m, 8 * k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < k; i += kLanes) {
        const float* gate = gate_up + 2 * t * k + i;
        store(out + t * k + i, silu(load(gate, k - i)) * load(gate + k, k - i), k - i);
      }
  });
}

// hidden [m, k] += down(silu(gate) * up), where gate and up are computed from norm(hidden).
void feed_forward(float* hidden, int64_t m, int64_t k, const float* norm, const Linear& gate_up, const Linear& down, float eps) {
  int64_t inner = gate_up.rows / 2;
  Scratch<float> normed(m * k), both(m * gate_up.rows), mixed(m * inner);
  rms_norm(hidden, m, k, norm, eps, normed);
  project(normed, m, k, gate_up, nullptr, both);
  gated(both, m, inner, mixed);
  project(mixed, m, inner, down, hidden, hidden);
}

// ---- attention ----------------------------------------------------------------------------------

constexpr int64_t kQueries = 24;  // queries of a KV head at a time: their scores and its keys and values stay in the nearest caches
constexpr int64_t kTogether = 6;  // queries that share one load of a key or value

struct Heads {
  int64_t heads, kv_heads, dim, padded, capacity;  // padded: head_dim up to a multiple of 16
};

// How the numbers of a cache are multiplied. BF16 numbers lie in pairs: two dimensions of a key, two
// positions of a value.
template <typename C>
struct CacheDot : FloatDot<C> {
  static constexpr int64_t kNumbers = 1;  // in a step
};

template <>
struct CacheDot<Bf16> : Bf16Dot {
  static constexpr int64_t kNumbers = 2;
};

// Where a head keeps number d of the key or value at this position.
template <typename C>
inline int64_t key_at(const Heads& h, int64_t d, int64_t place) {
  constexpr int64_t n = CacheDot<C>::kNumbers;
  return (place / kBlock * h.dim + d / n * n) * kBlock + place % kBlock * n + d % n;
}

// Write the key [dim] of this position, which lies in `padded` numbers.
template <typename C>
void keep_key(C* keys, const Heads& h, int64_t place, const float* key, float scale) {
  constexpr int64_t n = CacheDot<C>::kNumbers;
  for (int64_t d = 0; d < h.dim; d += kLanes) {
    C column[kLanes];
    keep(column, load<Floats>(key + d), scale);
    for (int64_t i = 0, count = std::min(kLanes, h.dim - d); i < count; i += n)
      std::memcpy(keys + key_at<C>(h, d + i, place), column + i, n * sizeof(C));
  }
}

// The same of a value, whose row is filled up with zeros. In a pair, the next position is not yet known,
// and what an earlier sequence has left there may be no number.
template <typename C>
void keep_value(C* values, const Heads& h, int64_t place, const float* value, float scale) {
  for (int64_t d = 0; d < h.dim; d += kLanes) {
    Floats v = load(value + d, h.dim - d);
    if constexpr (CacheDot<C>::kNumbers == 1) {
      keep(values + place * h.padded + d, v, scale);
    } else {
      C* pairs = values + place / 2 * 2 * h.padded + d * 2;
      Ints bits = nearest_bf16(v);
      if (place % 2 == 1) bits = (load<Ints>(pairs) & 0xffff) | bits << 16;
      std::memcpy(pairs, &bits, sizeof bits);
    }
  }
}

// One sequence and one of its KV heads, with up to kQueries queries.
struct Queries {
  float *rotated, *scores, *mixed;  // [kQueries, padded], [kQueries, reach], [kQueries, padded]
  void* groups;                     // of `rotated`, as products take them; of scores they lie in their place
  float sums[kQueries];             // of the weights of each query
  int64_t at[kQueries];             // the position of each query
  int64_t reach;
};

// The caches of one KV head of one slot; null: none.
template <typename C>
struct Region {
  C *keys, *values;  // [capacity / kBlock, dim / n, kBlock, n], [capacity / n, padded, n], n numbers in a step
};

// Prefetch `count` numbers of a cache, unless there is none. GCC 12 takes a function that only
// prefetches for one without effects, and drops calls that it has not inlined.
template <typename C>
[[gnu::always_inline]] inline void prefetch_numbers(const C* from, int64_t at, int64_t count) {
  if (!from) return;
  for (int64_t i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(from + at + i, 0, 2);
}

// Products by BF16 numbers take the other factors in pairs, too, as BF16 numbers.
template <typename C>
constexpr bool kPairs = std::is_same_v<typename CacheDot<C>::Group, uint32_t>;

// A vector of numbers as such pairs.
inline void store_pairs([[maybe_unused]] Floats v, [[maybe_unused]] uint32_t* to) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  __m256i pairs = (__m256i)_mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &pairs, sizeof pairs);
#endif
}

// The scores of Q queries, from `first` on, at V vectors of positions within a block. The same keys of
// the region that comes next are on their way meanwhile: those of a sequence lie far from those of the
// others, so nothing else would fetch them.
template <typename C, int Q, int V>
void score(const Queries& all, const C* keys, const C* next, const Heads& h, int64_t first, int64_t place) {
  using D = CacheDot<C>;
  constexpr int64_t n = D::kNumbers;
  int64_t stride = h.padded / n * D::kParts, begin = key_at<C>(h, 0, place);
  const auto* q = static_cast<const typename D::Group*>(all.groups) + first * stride;
  Floats sum[Q][V] = {};
  for (int64_t d = 0; d < h.dim / n; ++d) {
    prefetch_numbers(next, begin + d * n * kBlock, V * n * kLanes);
    const char* step = reinterpret_cast<const char*>(keys + begin + d * n * kBlock);
#pragma GCC unroll 2
    for (int part = 0; part < D::kParts; ++part) {
      typename D::Row key[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) key[j] = D::row(step, j, part);
#pragma GCC unroll 6
      for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) D::add(sum[i][j], q[i * stride + d * D::kParts + part], key[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(all.scores + (first + i) * all.reach + place + j * kLanes, sum[i][j]);
}

// mixed[i], D vectors from d on = sum over positions of scores[i] * value. Several vectors of dims are
// summed at a time, since a single sum would have to wait for each of its additions. `next` as above.
template <typename C, int Q, int V>
void mix(const Queries& all, const C* values, const C* next, const Heads& h, int64_t first, int64_t begin, int64_t end, int64_t d) {
  using D = CacheDot<C>;
  constexpr int64_t n = D::kNumbers;
  const auto* p = reinterpret_cast<const typename D::Group*>(all.scores + first * all.reach);
  Floats sum[Q][V] = {};
  for (int64_t s = begin / n; s < (end + n - 1) / n; ++s) {
    int64_t at = (s * h.padded + d) * n;
    prefetch_numbers(next, at, V * n * kLanes);
    const char* step = reinterpret_cast<const char*>(values + at);
#pragma GCC unroll 2
    for (int part = 0; part < D::kParts; ++part) {
      typename D::Row value[V];
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) value[j] = D::row(step, j, part);
#pragma GCC unroll 6
      for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) D::add(sum[i][j], p[i * all.reach + s * D::kParts + part], value[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) store(all.mixed + (first + i) * h.padded + d + j * kLanes, sum[i][j]);
}

// Call f.template operator()<Q>(first) for all `count` queries, Q of them at a time. The number of
// portions is the smallest that kTogether allows, and they are as even as possible.
template <typename F>
void together(int64_t count, const F& f) {
  int64_t portions = (count + kTogether - 1) / kTogether, first = 0;
  for (; portions > 0; --portions) {
    int64_t size = (count - first + portions - 1) / portions;
    switch (size) {
      case 1: f.template operator()<1>(first); break;
      case 2: f.template operator()<2>(first); break;
      case 3: f.template operator()<3>(first); break;
      case 4: f.template operator()<4>(first); break;
      case 5: f.template operator()<5>(first); break;
      default: f.template operator()<6>(first);
    }
    first += size;
  }
}

// Vectors that Q queries sum at a time: enough sums that none waits for its last addition, which takes
// four cycles, and no more than there are registers.
template <int Q>
constexpr int kWide = kLanes == 16 || Q <= 3 ? 4 : 2;

// Call f.template operator()<V>(at) for vectors from `at` to `end`, V of them at a time and then fewer.
template <int V, typename F>
void by_vectors(int64_t at, int64_t end, const F& f) {
  for (; at + V * kLanes <= end; at += V * kLanes) f.template operator()<V>(at);
  if constexpr (V > 1) by_vectors<V / 2>(at, end, f);
}

// The first position that a query at position `at` sees.
inline int64_t first_seen(int64_t at, int64_t window) { return window > 0 ? std::max<int64_t>(0, at + 1 - window) : 0; }

// Turn the scores of Q queries at their visible positions [from, to) into weights, the largest of which
// is 1, and those at the other ones of [begin, end) into 0: in their place, or as pairs. Sets `sums`
// to the sums of the weights. The mixed values are divided by them, and not the weights, since there
// are fewer mixed values than positions. Several queries at a time, since each waits for its largest
// score and for its sum.
template <typename C, int Q>
[[gnu::noinline]] void softmax(Queries& all, int64_t first, int64_t begin, int64_t end, int64_t window) {
  float* scores = all.scores + first * all.reach;
  const Ints lane = lanes();
  const Floats hidden = splat(-std::numeric_limits<float>::infinity());
  Floats top[Q], total[Q] = {};
  int32_t from[Q], to[Q];
  int64_t seen_from = begin, seen_to = end;  // by all of them
  for (int i = 0; i < Q; ++i) {
    top[i] = hidden;
    from[i] = static_cast<int32_t>(first_seen(all.at[first + i], window)), to[i] = static_cast<int32_t>(all.at[first + i]) + 1;
    seen_from = std::max<int64_t>(seen_from, from[i]), seen_to = std::min<int64_t>(seen_to, to[i]);
  }
  for (int64_t s = begin; s < end; s += kLanes) {
    bool is_seen = s >= seen_from && s + kLanes <= seen_to;
#pragma GCC unroll 6
    for (int i = 0; i < Q; ++i) {
      Floats v = load<Floats>(scores + i * all.reach + s);
      if (!is_seen) {
        Ints place = lane + static_cast<int32_t>(s);
        v = (place >= from[i]) & (place < to[i]) ? v : hidden;
        store(scores + i * all.reach + s, v);
      }
      top[i] = larger(v, top[i]);
    }
  }
  float largest[Q];
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i) largest[i] = fold(top[i], larger);
  for (int64_t s = begin; s < end; s += kLanes)
#pragma GCC unroll 6
    for (int i = 0; i < Q; ++i) {
      float* of_query = scores + i * all.reach;
      Floats v = load<Floats>(of_query + s);
      Floats e = v == hidden ? Floats{} : exponential(v - largest[i]);
      total[i] += e;
      if constexpr (kPairs<C>) {
        store_pairs(e, reinterpret_cast<uint32_t*>(of_query) + s / 2);
      } else {
        store(of_query + s, e);
      }
    }
#pragma GCC unroll 6
  for (int i = 0; i < Q; ++i) all.sums[first + i] = sum(total[i]);
}

// The attention of these queries is mixed / sums. The first of them fetch the region that comes next.
template <typename C>
void attend_to(Queries& all, int64_t count, Region<C> here, Region<C> next, const Heads& h, int64_t window) {
  auto then = [&](int64_t q) { return q == 0 ? next : Region<C>{}; };
  int64_t begin = first_seen(*std::min_element(all.at, all.at + count), window), end = *std::max_element(all.at, all.at + count) + 1;
  int64_t first = begin / kBlock * kBlock, last = (end + kLanes - 1) / kLanes * kLanes;
  for (int64_t block = first; block < last; block += kBlock)
    together(count, [&]<int Q>(int64_t q) {
      by_vectors<kWide<Q>>(block, std::min(block + kBlock, last), [&]<int V>(int64_t place) { score<C, Q, V>(all, here.keys, then(q).keys, h, q, place); });
    });
  together(count, [&]<int Q>(int64_t q) { softmax<C, Q>(all, q, first, last, window); });
  together(count, [&]<int Q>(int64_t q) {
    by_vectors<kWide<Q>>(0, h.padded, [&]<int V>(int64_t d) { mix<C, Q, V>(all, here.values, then(q).values, h, q, begin, end, d); });
  });
}

// One head of one token: RMSNorm if the model family has it, then the rotation, then `scale`. Pairs are
// (i, i + dim/2).
void rotate(const float* from, const float* norm, float eps, const float* cos, const float* sin, int64_t dim, float scale, float* to) {
  float factor = 1.0f;
  if (norm) {
    float squares = 0.0f;
    for (int64_t d = 0; d < dim; ++d) squares += from[d] * from[d];
    factor = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
  }
  int64_t half = dim / 2, d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    Floats a = load<Floats>(from + d), b = load<Floats>(from + d + half), c = load<Floats>(cos + d), s = load<Floats>(sin + d);
    if (norm) a *= factor * load<Floats>(norm + d), b *= factor * load<Floats>(norm + d + half);
    store(to + d, (a * c - b * s) * scale);
    store(to + d + half, (b * c + a * s) * scale);
  }
  for (; d < half; ++d) {
    float a = norm ? from[d] * factor * norm[d] : from[d];
    float b = norm ? from[d + half] * factor * norm[d + half] : from[d + half];
    to[d] = (a * cos[d] - b * sin[d]) * scale;
    to[d + half] = (b * cos[d] + a * sin[d]) * scale;
  }
}

// The caches and settings of a layer's attention; what is missing is null. See `attention`.
struct Attention {
  const Tensor &keys, &values;
  const float *q_norm, *k_norm, *k_scale, *v_scale;  // [dim] twice, [] twice
  int64_t heads, window;
  float eps;

  int64_t dim() const { return keys.dim() == 5 ? keys.size(3) : 2 * keys.size(3); }
};

// Where a step writes its tokens: see `attention`.
struct Step {
  const Tensor &slots, &lengths, &starts, &cos, &sin;
};

// The tokens of sequence b are those from start[b] up to the start of the next one, or up to the last.
template <typename C>
void attention_heads(const float* qkv, int64_t tokens, const Attention& how, const Step& step, float* out) {
  constexpr int64_t kNumbers = CacheDot<C>::kNumbers;
  Heads h{how.heads, how.keys.size(1), how.dim(), how.values.size(3), how.values.size(2) * kNumbers};
  TORCH_CHECK(h.dim % kNumbers == 0 && how.values.dim() == (kNumbers == 1 ? 4 : 5), "attention: the caches do not fit their dtype");
  int64_t batch = step.slots.size(0), group = h.heads / h.kv_heads, window = how.window;
  const int64_t* start = step.starts.const_data_ptr<int64_t>();
  auto count_of = [&](int64_t b) { return (b + 1 < batch ? start[b + 1] : tokens) - start[b]; };
  const int64_t *slot = step.slots.const_data_ptr<int64_t>(), *length = step.lengths.const_data_ptr<int64_t>();
  const float *c = step.cos.const_data_ptr<float>(), *s = step.sin.const_data_ptr<float>();
  constexpr bool kFp8 = std::is_same_v<C, CachedFp8>;
  float k_scale = kFp8 ? *how.k_scale : 1.0f, v_scale = kFp8 ? *how.v_scale : 1.0f;
  C *key_cache = static_cast<C*>(how.keys.mutable_data_ptr()), *value_cache = static_cast<C*>(how.values.mutable_data_ptr());
  auto region = [&](int64_t b, int64_t head) {
    int64_t place = slot[b] * h.kv_heads + head;
    return Region<C>{key_cache + place * h.dim * h.capacity, value_cache + place * h.capacity * h.padded};
  };
  int64_t longest = 0, most = 1;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t n = count_of(b);
    TORCH_CHECK(start[b] >= 0 && n >= 0 && start[b] + n <= tokens, "attention: starts do not fit ", tokens, " tokens");
    longest = std::max(longest, length[b] + n);
    most = std::max(most, std::min(kQueries, group * n));
  }
  TORCH_CHECK(longest <= h.capacity && longest <= step.cos.size(0), "attention: the cache ends before position ", longest);
  int64_t reach = (longest + kLanes - 1) / kLanes * kLanes;
  int64_t half = h.dim / 2, stride = (h.heads + 2 * h.kv_heads) * h.dim;
  float scale = k_scale / std::sqrt(static_cast<float>(h.dim));
  // A task is one KV head of one sequence; those with the most work come first.
  std::vector<int64_t> order(batch), work(batch);
  for (int64_t b = 0; b < batch; ++b) work[b] = count_of(b) * (length[b] + count_of(b));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return work[a] > work[b]; });
  int64_t tasks = batch * h.kv_heads, all_work = std::accumulate(work.begin(), work.end(), int64_t{0});
  std::atomic<int64_t> next = 0;
  share(tasks, all_work * h.heads * h.padded / 4, [&] {
    Scratch<float> rotated(most * h.padded), scores(most * reach), mixed(most * h.padded);
    Scratch<uint32_t> pairs(kPairs<C> ? most * h.padded / 2 : 0);
    Queries all{rotated, scores, mixed, kPairs<C> ? static_cast<void*>(pairs) : rotated, {}, {}, reach};
    for (int64_t task = next++; task < tasks; task = next++) {
      int64_t b = order[task / h.kv_heads], head = task % h.kv_heads, n = count_of(b), queries = group * n;
      const float* of_row = qkv + start[b] * stride;
      float* to_row = out + start[b] * h.heads * h.dim;
      Region<C> here = region(b, head);
      int64_t upcoming = next;
      Region<C> then = upcoming < tasks ? region(order[upcoming / h.kv_heads], upcoming % h.kv_heads) : Region<C>{};
      for (int64_t t = 0; t < n; ++t) {
        const float* token = of_row + t * stride;
        int64_t place = length[b] + t;
        rotate(token + (h.heads + head) * h.dim, how.k_norm, how.eps, c + place * half, s + place * half, h.dim, 1.0f, all.rotated);
        keep_key<C>(here.keys, h, place, all.rotated, k_scale);
        keep_value<C>(here.values, h, place, token + (h.heads + h.kv_heads + head) * h.dim, v_scale);
      }
      for (int64_t q = 0; q < queries; q += kQueries) {
        int64_t count = std::min(kQueries, queries - q);
        int64_t result[kQueries];  // where the result of each query belongs
        for (int64_t i = 0, t = q / group, which = q % group; i < count; ++i) {
          int64_t of_head = head * group + which, at = length[b] + t;
          rotate(of_row + t * stride + of_head * h.dim, how.q_norm, how.eps, c + at * half, s + at * half, h.dim, scale, all.rotated + i * h.padded);
          all.at[i] = at, result[i] = (t * h.heads + of_head) * h.dim;
          if (++which == group) which = 0, ++t;
        }
        for (int64_t i = 0; kPairs<C> && i < count * h.padded; i += kLanes) store_pairs(load<Floats>(rotated + i), pairs + i / 2);
        attend_to(all, count, here, q == 0 ? then : Region<C>{}, h, window);
        for (int64_t i = 0; i < count; ++i) {
          float* to = to_row + result[i];
          float whole = v_scale / all.sums[i];
          for (int64_t d = 0; d < h.dim; d += kLanes) store(to + d, load<Floats>(mixed + i * h.padded + d) * whole, h.dim - d);
        }
      }
    }
  });
}

void attention_floats(const float* qkv, int64_t tokens, const Attention& how, const Step& step, float* out) {
  TORCH_CHECK(how.keys.is_contiguous() && how.values.is_contiguous(), "attention: contiguous caches");
  switch (how.keys.scalar_type()) {
    case at::kFloat: return attention_heads<float>(qkv, tokens, how, step, out);
    case at::kBFloat16: return attention_heads<Bf16>(qkv, tokens, how, step, out);
    case at::kByte: return attention_heads<CachedFp8>(qkv, tokens, how, step, out);
    default: TORCH_CHECK(false, "attention: cache dtype ", how.keys.scalar_type());
  }
}

// qkv [..., (heads + 2 kv_heads) dim] float32, the tokens of all sequences one behind the other; the
// first token of each is at `starts` [batch], so that each has its own number; keys [slots, kv_heads,
// capacity / kBlock, dim, kBlock] and values [slots, kv_heads, capacity, padded], both float32 or uint8 (E4M3 bits at k_scale,
// v_scale []), or, in bfloat16, keys [slots, kv_heads, capacity / kBlock, dim / 2, kBlock, 2] and values [slots, kv_heads,
// capacity / 2, padded, 2], which are written in place after the first `lengths` [batch] positions of `slots` [batch];
// cos, sin [positions, dim / 2]; window 0: unbounded. Returns [..., heads dim].
Tensor attention(const Tensor& qkv, const Tensor& keys, const Tensor& values, const Tensor& slots, const Tensor& lengths, const Tensor& starts,
                 const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t heads, int64_t window, double eps) {
  Attention how{keys, values, data_or_null(q_norm), data_or_null(k_norm), data_or_null(k_scale), data_or_null(v_scale),
                heads, window, static_cast<float>(eps)};
  Tensor out = at::empty({qkv.size(0), qkv.size(1), heads * how.dim()}, qkv.options());
  attention_floats(floats(qkv), qkv.size(0) * qkv.size(1), how, {slots, lengths, starts, cos, sin}, out.mutable_data_ptr<float>());
  return out;
}

// hidden [m, k] += o(attention(qkv(norm(hidden)))).
void attend(float* hidden, int64_t m, int64_t k, const float* norm, const Linear& qkv, const Linear& o, const Attention& how, const Step& step) {
  int64_t inner = how.heads * how.dim();
  Scratch<float> normed(m * k), three(m * qkv.rows), mixed(m * inner);
  rms_norm(hidden, m, k, norm, how.eps, normed);
  project(normed, m, k, qkv, nullptr, three);
  attention_floats(three, m, how, step, mixed);
  project(mixed, m, inner, o, hidden, hidden);
}

// ---- layers -------------------------------------------------------------------------------------

// Reads the tensors and numbers of layers in the order in which kernels.py writes them. Of each
// layer come the numbers first: bit i of the first one says whether the i-th tensor exists.
class Reader {
 public:
  Reader(at::TensorList tensors, at::IntArrayRef numbers) : tensors_(tensors), numbers_(numbers) {}

  int64_t number() {
    TORCH_CHECK(next_number_ < numbers_.size(), "layers: numbers are missing");
    return numbers_[next_number_++];
  }

  void begin_layer() { exists_ = number(); }

  const Tensor& tensor() {
    const Tensor* tensor = tensor_or_null();
    TORCH_CHECK(tensor, "layers: a tensor is missing");
    return *tensor;
  }

  template <typename V = float>
  const V* data() {
    const Tensor* tensor = tensor_or_null();
    return tensor ? tensor->const_data_ptr<V>() : nullptr;
  }

  Linear linear() {
    const Tensor& weight = tensor();
    const float *scale = data(), *input_scale = data(), *pre_scale = data(), *bias = data();
    const int32_t* start = data<int32_t>();
    return {weight, scale, input_scale, pre_scale, bias, start, number()};
  }

  bool is_at_end() const { return next_tensor_ == tensors_.size() && next_number_ == numbers_.size(); }

 private:
  const Tensor* tensor_or_null() {
    bool exists = exists_ & 1;
    exists_ >>= 1;
    if (!exists) return nullptr;
    TORCH_CHECK(next_tensor_ < tensors_.size(), "layers: tensors are missing");
    return &tensors_[next_tensor_++];
  }

  at::TensorList tensors_;
  at::IntArrayRef numbers_;
  size_t next_tensor_ = 0, next_number_ = 0;
  int64_t exists_ = 0;
};

// The layers of a model, with their caches, which are written in place: keys and values have one tensor
// per layer. cos, sin: as in `attention`.
class Layers {
 public:
  Layers(at::TensorList tensors, at::IntArrayRef numbers, at::TensorList keys, at::TensorList values, const Tensor& cos, const Tensor& sin, double eps)
      : tensors_(tensors.vec()), keys_(keys.vec()), values_(values.vec()), cos_(cos), sin_(sin), eps_(static_cast<float>(eps)) {
    Reader read(tensors_, numbers);
    TORCH_CHECK(keys.size() == values.size(), "layers: keys and values of each layer");
    for (size_t i = 0; i < keys.size(); ++i) {
      read.begin_layer();
      int64_t heads = read.number(), window = read.number();
      const float *input_norm = read.data(), *post_norm = read.data();
      Linear qkv = read.linear(), o = read.linear(), gate_up = read.linear(), down = read.linear();
      const float *q_norm = read.data(), *k_norm = read.data(), *k_scale = read.data(), *v_scale = read.data();
      Attention how{keys_[i], values_[i], q_norm, k_norm, k_scale, v_scale, heads, window, eps_};
      layers_.push_back({input_norm, post_norm, qkv, o, gate_up, down, how});
    }
    TORCH_CHECK(read.is_at_end(), "layers: there are tensors of more layers than caches");
  }
  Layers(const Layers&) = delete;  // the layers refer to the tensors
  Layers& operator=(const Layers&) = delete;

  // hidden [..., k] float32 after all layers, one after the other.
  Tensor run(const Tensor& hidden, const Tensor& slots, const Tensor& lengths, const Tensor& starts) const {
    int64_t k = hidden.size(-1), m = hidden.numel() / k;
    Tensor out = at::empty(hidden.sizes(), hidden.options());
    float* x = out.mutable_data_ptr<float>();
    std::copy_n(floats(hidden), m * k, x);
    Step step{slots, lengths, starts, cos_, sin_};
    for (const Layer& layer : layers_) {
      attend(x, m, k, layer.input_norm, layer.qkv, layer.o, layer.how, step);
      feed_forward(x, m, k, layer.post_norm, layer.gate_up, layer.down, eps_);
    }
    return out;
  }

 private:
  struct Layer {
    const float *input_norm, *post_norm;
    Linear qkv, o, gate_up, down;
    Attention how;
  };

  std::vector<Tensor> tensors_, keys_, values_;
  Tensor cos_, sin_;
  float eps_;
  std::vector<Layer> layers_;
};

Tensor layers(const Tensor& hidden, at::TensorList tensors, at::IntArrayRef numbers, at::TensorList keys, at::TensorList values,
              const Tensor& slots, const Tensor& lengths, const Tensor& starts, const Tensor& cos, const Tensor& sin, double eps) {
  return Layers(tensors, numbers, keys, values, cos, sin, eps).run(hidden, slots, lengths, starts);
}

// Layers that are kept under a number. A compiled package passes the tensors of an operator one by one,
// through two lists: those of thirty layers took a tenth of a small model's step.
class Held {
 public:
  int64_t add(std::shared_ptr<const Layers> layers) {
    std::lock_guard lock(mutex_);
    held_.emplace(++last_, std::move(layers));
    return last_;
  }
  void remove(int64_t number) {
    std::lock_guard lock(mutex_);
    held_.erase(number);
  }
  // Whoever has them may go on with them when they are removed.
  std::shared_ptr<const Layers> at(int64_t number) {
    std::lock_guard lock(mutex_);
    auto found = held_.find(number);
    TORCH_CHECK(found != held_.end(), "layers: none are held under number ", number);
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Layers>> held_;
  int64_t last_ = 0;
};

// Never destroyed: when a process ends, memory of Python's that tensors use may be gone before.
Held& held = *new Held;

int64_t hold(at::TensorList tensors, at::IntArrayRef numbers, at::TensorList keys, at::TensorList values, const Tensor& cos, const Tensor& sin, double eps) {
  return held.add(std::make_shared<const Layers>(tensors, numbers, keys, values, cos, sin, eps));
}

void let_go(int64_t number) { held.remove(number); }

// number [1, 1] int64: what `hold` returned.
Tensor held_layers(const Tensor& hidden, const Tensor& number, const Tensor& slots, const Tensor& lengths, const Tensor& starts) {
  return held.at(*number.const_data_ptr<int64_t>())->run(hidden, slots, lengths, starts);
}

}  // namespace

// The namespace is named after the digest of this build, so that engines of different builds can be
// in one process.
#define REGISTER(name, library) TORCH_LIBRARY(name, library)
#define REGISTER_CPU(name, library) TORCH_LIBRARY_IMPL(name, CPU, library)

REGISTER(TOOLKIT_NAMESPACE, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? input_scale, Tensor? pre_scale, Tensor? bias, Tensor? start, int rows) -> Tensor");
  library.def(
      "attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor lengths, Tensor starts, Tensor cos, Tensor sin, "
      "Tensor? q_norm, Tensor? k_norm, Tensor? k_scale, Tensor? v_scale, int heads, int window, float eps) -> Tensor");
  library.def(
      "layers(Tensor hidden, Tensor[] tensors, int[] numbers, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor slots, Tensor lengths, "
      "Tensor starts, Tensor cos, Tensor sin, float eps) -> Tensor");
  library.def("hold(Tensor[] tensors, int[] numbers, Tensor[] keys, Tensor[] values, Tensor cos, Tensor sin, float eps) -> int");
  library.def("let_go(int number) -> ()", &let_go);
  library.def("held_layers(Tensor hidden, Tensor number, Tensor slots, Tensor lengths, Tensor starts) -> Tensor");
}

REGISTER_CPU(TOOLKIT_NAMESPACE, library) {
  library.impl("linear", &linear);
  library.impl("attention", &attention);
  library.impl("layers", &layers);
  library.impl("hold", &hold);
  library.impl("held_layers", &held_layers);
}
