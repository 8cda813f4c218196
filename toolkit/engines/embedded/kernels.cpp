// The operations that decide the speed of a decode step on a CPU, as torch custom operators.
//
// One rule holds for all of them: the result for a token does not depend on how many other tokens,
// sequences or threads take part. Every sum is computed in one fixed order (over k in a linear,
// over positions in attention), each in its own vector lane, and each output is computed by one
// thread. So verifying five tokens at once gives, bit by bit, the same as five single steps.
//
// Weights are packed in blocks of 64 rows, [blocks, k, 64] ([blocks, k/4, 64, 4] for INT8 x INT8),
// so that one pass over memory, from front to back, feeds four vectors of 16 rows. GCC compiles its
// vector types to the instructions that the machine has; VNNI is used if the machine has it.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = int8_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(32)));

constexpr int64_t kLanes = 16;
constexpr int64_t kBlock = 64;   // rows in a packed block
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kTokens = 6;   // tokens per pass over the weights: 24 accumulators fit into the registers
constexpr int64_t kGrain = 1 << 17;  // with fewer multiply-adds, a second thread costs more than it saves
constexpr float kFp8Max = 448.0f;

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

// The same for the last vector of a row, which may have fewer than sixteen numbers; the others are
// zeros. It is not inlined, because a copy of unknown length is a call, and around a call every
// vector is written to memory.
[[gnu::noinline, gnu::cold]] Floats load_few(const float* from, int64_t count) {
  Floats v = {};
  std::memcpy(&v, from, count * sizeof(float));
  return v;
}

[[gnu::noinline, gnu::cold]] void store_few(float* to, Floats v, int64_t count) { std::memcpy(to, &v, count * sizeof(float)); }

inline Floats load(const float* from, int64_t count) { return count >= kLanes ? load<Floats>(from) : load_few(from, count); }

inline void store(float* to, Floats v, int64_t count) { count >= kLanes ? store(to, v) : store_few(to, v, count); }

// Uninitialized memory for one call. It begins at the start of a cache line.
template <typename V>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(static_cast<V*>(std::aligned_alloc(64, (count * sizeof(V) + 127) / 64 * 64))) {
    TORCH_CHECK(data_, "no memory for ", count, " numbers of scratch");
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator V*() const { return data_; }

 private:
  V* data_;
};

// Subtract zero rather than add it: x - 0 is x for every x, -0 included, so that the compiler keeps
// only the broadcast.
inline Floats splat(float x) { return x - Floats{}; }

// Keep a loaded value in a register. Otherwise GCC loads it again for every product, and the loads
// limit the speed of the loop.
inline void keep_loaded(Floats& v) {
#ifdef __AVX512F__
  asm("" : "+v"(v));
#endif
}

// Prefetch the weights that are 3 KiB ahead. Only this way are weights that exceed the caches read
// at the speed of memory: the hardware's own prefetcher stops at every 4 KiB page, and its pauses
// cost time as soon as there is arithmetic between the loads.
inline void ahead(const void* weights, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(weights) + 3072 + i);
}

// Sixteen weights of any storage type as floats; all of these conversions are exact. GCC 12
// compiles __builtin_convertvector on bytes lane by lane (14 times slower), so for AVX-512 machines
// the instruction is named.
struct Fp8 { uint8_t bits; };
struct Bf16 { uint16_t bits; };

#ifdef __AVX512F__
inline Ints signed_bytes(const void* w) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(w)); }
inline Ints halves(const void* w) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(w)); }
#else
inline Ints signed_bytes(const void* w) { return __builtin_convertvector(load<Bytes>(w), Ints); }
inline Ints halves(const void* w) { return __builtin_convertvector(load<Halves>(w), Ints); }
#endif

inline Floats widen(const float* w) { return load<Floats>(w); }
inline Floats widen(const int8_t* w) { return __builtin_convertvector(signed_bytes(w), Floats); }
inline Floats widen(const Bf16* w) { return (Floats)(halves(w) << 16); }

// The exponent bias of E4M3 is 7, that of float is 127: move the sign and the seven other bits into
// their places, and multiply by 2^120. This is correct for subnormals, too. Weights hold no NaN.
inline Floats widen(const Fp8* w) { return (Floats)((signed_bytes(w) << 20) & int32_t(0x87f00000)) * 0x1p120f; }

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
  x = x < splat(-kFp8Max) ? splat(-kFp8Max) : x;
  x = x > splat(kFp8Max) ? splat(kFp8Max) : x;
  Ints bits = (Ints)x;
  Floats normal = (Floats)((bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffff);
  Floats small = (x + 0x1.8p14f) - 0x1.8p14f;
  Floats rounded = (bits & 0x7fffffff) < 0x3c800000 ? small : normal;
  return x == x ? rounded : x;
}

// Write sixteen numbers into a cache: unchanged, or as the codes of x / scale.
inline void keep(float* to, Floats x, float) { store(to, x); }
inline void keep(CachedFp8* to, Floats x, float scale) {
  Floats value = rounded_to_fp8(x / scale);
  Ints magnitude = (Ints)value & 0x7fffffff, sign = ((Ints)value >> 24) & 0x80;
  Ints small = __builtin_convertvector((Floats)magnitude * 512.0f, Ints);
  Ints number = magnitude < 0x3c800000 ? small : (magnitude >> 20) - (120 << 3);
  Ints code = sign | (value == value ? number : Ints{} + kFp8Nan);
  for (int i = 0; i < kLanes; ++i) to[i].bits = static_cast<uint8_t>(code[i]);
}

// Reduce sixteen lanes to one number, in halves: four steps instead of a chain of fifteen.
template <typename F>
inline float fold(Floats v, const F& join) {
  v = join(v, __builtin_shuffle(v, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  v = join(v, __builtin_shuffle(v, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  v = join(v, __builtin_shuffle(v, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  v = join(v, __builtin_shuffle(v, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return v[0];
}

// e^x for x <= 0, to about one unit in the last place; below -87 the result is cut at e^-87.
inline Floats exponential(Floats x) {
  Floats low = splat(-87.0f);
  x = x < low ? low : x;
  Floats shifted = x * 1.44269504088896341f + 0x1.8p23f;  // the low bits now hold the integer part
  Ints power = (Ints)shifted;
  Floats whole = shifted - 0x1.8p23f;
  Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (Floats)((Ints)p + (power << 23));
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

const float* data_or_null(const std::optional<Tensor>& t) { return t.has_value() ? t->const_data_ptr<float>() : nullptr; }

// A packed linear, as an operator gets it: weight [blocks, k, 64] float32 | bfloat16 | int8 | uint8
// (E4M3 bits), or, if there is a `start`, [blocks, k/4, 64, 4] int8 for INT8 x INT8; scale [rows]
// of the weights; input_scale []; pre_scale [k]; bias [rows].
struct Linear {
  const Tensor& weight;
  const std::optional<Tensor>&scale, &input_scale, &pre_scale, &bias, &start;
  int64_t rows;
};

// What is done with a row of products: it is scaled, the bias is added, then `onto` is added.
struct Finish {
  const float *scale, *bias, *onto;  // onto [m, rows] may be `out` itself
  float factor;
  int64_t rows;
  float* out;

  // Write sixteen numbers of token t, or fewer at the end of the row.
  void operator()(int64_t t, int64_t row, Floats v) const {
    int64_t place = t * rows + row;
    if (row + kLanes <= rows) {
      if (scale) v *= load<Floats>(scale + row) * factor;
      if (bias) v += load<Floats>(bias + row);
      if (onto) v += load<Floats>(onto + place);
      store(out + place, v);
      return;
    }
    for (int64_t i = 0; row + i < rows; ++i) {
      float y = scale ? v[i] * (scale[row + i] * factor) : v[i];
      if (bias) y += bias[row + i];
      out[place + i] = onto ? y + onto[place + i] : y;
    }
  }
};

// ---- linear with float activations: weights float32, bfloat16, int8 or E4M3 ---------------------

template <typename W, int T>
void float_block(const float* x, const W* w, int64_t k, Floats (*acc)[kVectors]) {
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kVectors; ++j) acc[t][j] = Floats{};
  Floats sum[T][kVectors] = {};
  for (int64_t i = 0; i < k; ++i) {
    Floats row[kVectors];
    ahead(w + i * kBlock, kBlock * sizeof(W));
    for (int j = 0; j < kVectors; ++j) row[j] = widen(w + i * kBlock + j * kLanes), keep_loaded(row[j]);
    for (int t = 0; t < T; ++t) {
      Floats value = splat(x[t * k + i]);
      for (int j = 0; j < kVectors; ++j) sum[t][j] += value * row[j];
    }
  }
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kVectors; ++j) acc[t][j] = sum[t][j];
}

template <typename W>
void float_tokens(int64_t tokens, const float* x, const W* w, int64_t k, Floats (*acc)[kVectors]) {
  switch (tokens) {
    case 1: return float_block<W, 1>(x, w, k, acc);
    case 2: return float_block<W, 2>(x, w, k, acc);
    case 3: return float_block<W, 3>(x, w, k, acc);
    case 4: return float_block<W, 4>(x, w, k, acc);
    case 5: return float_block<W, 5>(x, w, k, acc);
    default: return float_block<W, 6>(x, w, k, acc);
  }
}

template <typename W>
void float_linear(const float* x, const W* w, int64_t m, int64_t k, int64_t blocks, const Finish& finish) {
  parallel(blocks, kBlock * k * m, [&](int64_t begin, int64_t end) {
    Floats acc[kTokens][kVectors];
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t t = 0; t < m; t += kTokens) {
        int64_t tokens = std::min(kTokens, m - t);
        float_tokens<W>(tokens, x + t * k, w + b * k * kBlock, k, acc);
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < kVectors && b * kBlock + j * kLanes < finish.rows; ++j)
            finish(t + i, b * kBlock + j * kLanes, acc[i][j]);
      }
    }
  });
}

// If the linear has an input scale, activations are rounded to E4M3 first.
void project_floats(const float* x, int64_t m, int64_t k, const Linear& linear, const Finish& finish) {
  TORCH_CHECK(linear.weight.size(1) == k, "linear: weight does not fit the input");
  Scratch<float> rounded(linear.input_scale.has_value() ? m * k : 0);
  if (linear.input_scale.has_value()) {
    for (int64_t i = 0; i < m * k; i += kLanes) store(rounded + i, rounded_to_fp8(load(x + i, m * k - i) / finish.factor), m * k - i);
    x = rounded;
  }
  const void* w = linear.weight.const_data_ptr();
  int64_t blocks = linear.weight.size(0);
  switch (linear.weight.scalar_type()) {
    case at::kFloat: return float_linear(x, static_cast<const float*>(w), m, k, blocks, finish);
    case at::kBFloat16: return float_linear(x, static_cast<const Bf16*>(w), m, k, blocks, finish);
    case at::kChar: return float_linear(x, static_cast<const int8_t*>(w), m, k, blocks, finish);
    case at::kByte: return float_linear(x, static_cast<const Fp8*>(w), m, k, blocks, finish);
    default: TORCH_CHECK(false, "linear: weight dtype ", linear.weight.scalar_type());
  }
}

// ---- linear INT8 x INT8, summed exactly in int32 ------------------------------------------------

#ifdef __AVX512VNNI__
// sum += four products per lane. The instruction is written by hand: around its own intrinsic, GCC
// 12 copies and spills the accumulators, which doubles the time from four tokens on.
inline void count(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
#endif

// Activations are unsigned here (code + 128), as VNNI needs them. `start` is -128 * (sum of the
// row's weights), which cancels the 128.
template <int T>
void int8_block(const uint8_t* x, const int8_t* w, int64_t quads, const int32_t* start, Ints (*acc)[kVectors]) {
#ifdef __AVX512VNNI__
  __m512i sum[T][kVectors];
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kVectors; ++j) sum[t][j] = _mm512_loadu_si512(start + j * kLanes);
  for (int64_t i = 0; i < quads; ++i) {
    __m512i row[kVectors];
    ahead(w + i * kBlock * 4, kBlock * 4);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) row[j] = _mm512_loadu_si512(w + (i * kBlock + j * kLanes) * 4);
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      int32_t four;
      std::memcpy(&four, x + (t * quads + i) * 4, 4);
      __m512i value = _mm512_set1_epi32(four);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) count(sum[t][j], value, row[j]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kVectors; ++j) acc[t][j] = (Ints)sum[t][j];
#else
  for (int t = 0; t < T; ++t) {
    int32_t sum[kBlock];
    std::memcpy(sum, start, sizeof(sum));
    for (int64_t i = 0; i < quads; ++i) {
      const uint8_t* four = x + (t * quads + i) * 4;
      const int8_t* row = w + i * kBlock * 4;
      for (int64_t r = 0; r < kBlock; ++r)
        sum[r] += four[0] * row[4 * r] + four[1] * row[4 * r + 1] + four[2] * row[4 * r + 2] + four[3] * row[4 * r + 3];
    }
    std::memcpy(acc[t], sum, sizeof(sum));
  }
#endif
}

void int8_tokens(int64_t tokens, const uint8_t* x, const int8_t* w, int64_t quads, const int32_t* start, Ints (*acc)[kVectors]) {
  switch (tokens) {
    case 1: return int8_block<1>(x, w, quads, start, acc);
    case 2: return int8_block<2>(x, w, quads, start, acc);
    case 3: return int8_block<3>(x, w, quads, start, acc);
    case 4: return int8_block<4>(x, w, quads, start, acc);
    case 5: return int8_block<5>(x, w, quads, start, acc);
    default: return int8_block<6>(x, w, quads, start, acc);
  }
}

// round(v) in [-128, 127], plus 128. Adding 1.5 * 2^23 rounds half to even and leaves the integer
// in the low bits.
inline void store_codes(uint8_t* to, Floats v, int64_t n) {
  v = v < splat(-128.0f) ? splat(-128.0f) : v;
  v = v > splat(127.0f) ? splat(127.0f) : v;
  Ints code = (Ints)(v + 0x1.8p23f) - 0x4b400000 + 128;
#ifdef __AVX512F__
  if (n >= kLanes) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)code));
#endif
  for (int i = 0; i < std::min(n, kLanes); ++i) to[i] = static_cast<uint8_t>(code[i]);
}

// Codes are round(x * pre_scale / input_scale) in [-128, 127]. No code stands for NaN, so a token
// with a NaN in it gets NaN as all of its results.
void project_codes(const float* x, int64_t m, int64_t k, const Linear& linear, const Finish& finish) {
  int64_t blocks = linear.weight.size(0), quads = linear.weight.size(1), padded = quads * 4;
  TORCH_CHECK(padded >= k && padded < k + 4, "linear: weight does not fit the input");
  const float *pre = data_or_null(linear.pre_scale), inverse = 1.0f / finish.factor;
  Scratch<uint8_t> codes(m * padded), has_nan(m);
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Ints nan = {};
      for (int64_t i = 0; i < k; i += kLanes) {
        Floats v = load(x + t * k + i, k - i);
        if (pre) v *= load(pre + i, k - i);
        nan |= v != v;
        store_codes(codes + t * padded + i, v * inverse, padded - i);
      }
      has_nan[t] = 0;
      for (int i = 0; i < kLanes; ++i) has_nan[t] |= nan[i] != 0;
    }
  });
  const int8_t* w = linear.weight.const_data_ptr<int8_t>();
  const int32_t* first = linear.start->const_data_ptr<int32_t>();
  parallel(blocks, kBlock * k * m / 4, [&](int64_t begin, int64_t end) {
    Ints acc[kTokens][kVectors];
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t t = 0; t < m; t += kTokens) {
        int64_t tokens = std::min(kTokens, m - t);
        int8_tokens(tokens, codes + t * padded, w + n * padded * kBlock, quads, first + n * kBlock, acc);
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < kVectors && n * kBlock + j * kLanes < finish.rows; ++j)
            finish(t + i, n * kBlock + j * kLanes, __builtin_convertvector(acc[i][j], Floats));
      }
    }
  });
  for (int64_t t = 0; t < m; ++t)
    if (has_nan[t]) std::fill_n(finish.out + t * finish.rows, finish.rows, std::numeric_limits<float>::quiet_NaN());
}

// out [m, rows] = linear(x [m, k]) + onto.
void project(const float* x, int64_t m, int64_t k, const Linear& linear, const float* onto, float* out) {
  TORCH_CHECK(linear.weight.is_contiguous() && linear.weight.size(0) * kBlock >= linear.rows, "linear: weight is not packed for its rows");
  float factor = linear.input_scale.has_value() ? *linear.input_scale->const_data_ptr<float>() : 1.0f;
  Finish finish{data_or_null(linear.scale), data_or_null(linear.bias), onto, factor, linear.rows, out};
  linear.start.has_value() ? project_codes(x, m, k, linear, finish) : project_floats(x, m, k, linear, finish);
}

const float* floats(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat, "contiguous float32 input is needed");
  return x.const_data_ptr<float>();
}

// x [..., k] float32 -> [..., rows] float32.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& input_scale,
              const std::optional<Tensor>& pre_scale, const std::optional<Tensor>& bias, const std::optional<Tensor>& start,
              int64_t rows) {
  auto sizes = x.sizes().vec();
  int64_t k = sizes.back();
  sizes.back() = rows;
  Tensor out = at::empty(sizes, x.options());
  project(floats(x), x.numel() / k, k, {weight, scale, input_scale, pre_scale, bias, start, rows}, nullptr, out.mutable_data_ptr<float>());
  return out;
}

// ---- what is between the linears ----------------------------------------------------------------

inline float sum(Floats v) {
  return fold(v, [](Floats a, Floats b) { return a + b; });
}

// out = x / sqrt(mean(x^2) + eps) * weight, for each of m rows of k.
void rms_norm(const float* x, int64_t m, int64_t k, const float* weight, float eps, float* out) {
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      Floats squares = {};
      for (int64_t i = 0; i < k; i += kLanes) {
        Floats v = load(x + t * k + i, k - i);
        squares += v * v;
      }
      float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(k) + eps);
      for (int64_t i = 0; i < k; i += kLanes)
        store(out + t * k + i, load(x + t * k + i, k - i) * factor * load(weight + i, k - i), k - i);
    }
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

// hidden [..., k] + down(silu(gate) * up), where gate and up are computed from norm(hidden).
Tensor feed_forward(const Tensor& hidden, const Tensor& norm,  //
                    const Tensor& gate_up, const std::optional<Tensor>& gate_up_scale, const std::optional<Tensor>& gate_up_input_scale,
                    const std::optional<Tensor>& gate_up_pre_scale, const std::optional<Tensor>& gate_up_bias,
                    const std::optional<Tensor>& gate_up_start, int64_t gate_up_rows,  //
                    const Tensor& down, const std::optional<Tensor>& down_scale, const std::optional<Tensor>& down_input_scale,
                    const std::optional<Tensor>& down_pre_scale, const std::optional<Tensor>& down_bias,
                    const std::optional<Tensor>& down_start, int64_t down_rows, double eps) {
  const float* x = floats(hidden);
  int64_t k = hidden.size(-1), m = hidden.numel() / k, inner = gate_up_rows / 2;
  Tensor out = at::empty(hidden.sizes(), hidden.options());
  Scratch<float> normed(m * k), both(m * gate_up_rows), mixed(m * inner);
  rms_norm(x, m, k, floats(norm), static_cast<float>(eps), normed);
  project(normed, m, k, {gate_up, gate_up_scale, gate_up_input_scale, gate_up_pre_scale, gate_up_bias, gate_up_start, gate_up_rows},
          nullptr, both);
  gated(both, m, inner, mixed);
  project(mixed, m, inner, {down, down_scale, down_input_scale, down_pre_scale, down_bias, down_start, down_rows}, x,
          out.mutable_data_ptr<float>());
  return out;
}

// ---- attention ----------------------------------------------------------------------------------

constexpr int64_t kQueries = 24;  // queries of a KV head at a time: their scores and its keys and values stay in the nearest caches
constexpr int64_t kTogether = 6;  // queries that share one load of a key or value

struct Heads {
  int64_t heads, kv_heads, dim, padded, capacity;  // padded: head_dim up to a multiple of 16
};

// One sequence and one of its KV heads, with up to kQueries queries.
struct Queries {
  float *rotated, *scores, *mixed;  // [kQueries, padded], [kQueries, reach], [kQueries, padded]
  float sums[kQueries];             // of the weights of each query
  int64_t at[kQueries];             // the position of each query
  int64_t reach;
};

// The scores of Q queries, from `first` on, at 16 V positions. The head's keys are stored [dim,
// capacity].
template <typename C, int Q, int V>
void score(const Queries& all, const C* keys, const Heads& h, int64_t first, int64_t place) {
  const float* q = all.rotated + first * h.padded;
  Floats sum[Q][V] = {};
  for (int64_t d = 0; d < h.dim; ++d) {
    Floats key[V];
    for (int j = 0; j < V; ++j) key[j] = widen(keys + d * h.capacity + place + j * kLanes), keep_loaded(key[j]);
    for (int i = 0; i < Q; ++i)
      for (int j = 0; j < V; ++j) sum[i][j] += splat(q[i * h.padded + d]) * key[j];
  }
  for (int i = 0; i < Q; ++i)
    for (int j = 0; j < V; ++j) store(all.scores + (first + i) * all.reach + place + j * kLanes, sum[i][j]);
}

// mixed[i] [d, d + 16 D) = sum over positions of scores[i] * value; values are stored [capacity,
// padded]. Several columns of 16 dims are summed at a time, since a single sum would have to wait
// for each of its additions.
template <typename C, int Q, int D>
void mix(const Queries& all, const C* values, const Heads& h, int64_t first, int64_t begin, int64_t end, int64_t d) {
  const float* p = all.scores + first * all.reach;
  Floats sum[Q][D] = {};
  for (int64_t s = begin; s < end; ++s) {
    Floats value[D];
    for (int j = 0; j < D; ++j) value[j] = widen(values + s * h.padded + d + j * kLanes), keep_loaded(value[j]);
    for (int i = 0; i < Q; ++i)
      for (int j = 0; j < D; ++j) sum[i][j] += splat(p[i * all.reach + s]) * value[j];
  }
  for (int i = 0; i < Q; ++i)
    for (int j = 0; j < D; ++j) store(all.mixed + (first + i) * h.padded + d + j * kLanes, sum[i][j]);
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

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Turn the scores of the visible positions [from, to) into weights, the largest of which is 1, and
// the other scores of [begin, end) into 0. Returns the sum of the weights. The mixed values are
// divided by it, and not the weights, since there are fewer mixed values than positions.
inline float softmax(float* scores, int64_t begin, int64_t end, int64_t from, int64_t to) {
  Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats hidden = splat(-std::numeric_limits<float>::infinity()), top = hidden, total = {};
  for (int64_t s = begin; s < end; s += kLanes) {
    Floats v = load<Floats>(scores + s);
    if (s < from || s + kLanes > to) {
      Ints place = lane + static_cast<int32_t>(s);
      v = (place >= static_cast<int32_t>(from)) & (place < static_cast<int32_t>(to)) ? v : hidden;
      store(scores + s, v);
    }
    top = larger(v, top);
  }
  float largest = fold(top, larger);
  for (int64_t s = begin; s < end; s += kLanes) {
    Floats v = load<Floats>(scores + s);
    Floats e = v == hidden ? Floats{} : exponential(v - largest);
    total += e;
    store(scores + s, e);
  }
  return sum(total);
}

// The attention of these queries is mixed / sums.
template <typename C>
void attend_to(Queries& all, int64_t count, const C* keys, const C* values, const Heads& h, int64_t window) {
  auto from = [&](int64_t at) { return window > 0 ? std::max<int64_t>(0, at + 1 - window) : 0; };
  int64_t begin = from(*std::min_element(all.at, all.at + count)), end = *std::max_element(all.at, all.at + count) + 1;
  int64_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes, place = first;
  for (; place + kBlock <= last; place += kBlock)
    together(count, [&]<int Q>(int64_t q) { score<C, Q, kVectors>(all, keys, h, q, place); });
  for (; place < last; place += kLanes) together(count, [&]<int Q>(int64_t q) { score<C, Q, 1>(all, keys, h, q, place); });
  for (int64_t i = 0; i < count; ++i) all.sums[i] = softmax(all.scores + i * all.reach, first, last, from(all.at[i]), all.at[i] + 1);
  together(count, [&]<int Q>(int64_t q) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= h.padded; d += 4 * kLanes) mix<C, Q, 4>(all, values, h, q, begin, end, d);
    for (; d + 2 * kLanes <= h.padded; d += 2 * kLanes) mix<C, Q, 2>(all, values, h, q, begin, end, d);
    for (; d < h.padded; d += kLanes) mix<C, Q, 1>(all, values, h, q, begin, end, d);
  });
}

// One head of one token: RMSNorm if the model family has it, then the rotation. Pairs are
// (i, i + dim/2).
void rotate(const float* from, const float* norm, float eps, const float* cos, const float* sin, int64_t dim, float* to) {
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
    store(to + d, a * c - b * s);
    store(to + d + half, b * c + a * s);
  }
  for (; d < half; ++d) {
    float a = norm ? from[d] * factor * norm[d] : from[d];
    float b = norm ? from[d + half] * factor * norm[d + half] : from[d + half];
    to[d] = a * cos[d] - b * sin[d];
    to[d + half] = b * cos[d] + a * sin[d];
  }
}

// The caches of a layer and where a step writes in them; see `attention`.
struct Cache {
  const Tensor &keys, &values, &slots, &lengths, &cos, &sin;
  const std::optional<Tensor>&q_norm, &k_norm, &k_scale, &v_scale;
  int64_t heads, window;
  float eps;
};

template <typename C>
void attention_heads(const float* qkv, int64_t batch, int64_t n, const Cache& cache, float* out) {
  Heads h{cache.heads, cache.keys.size(1), cache.keys.size(2), cache.values.size(3), cache.keys.size(3)};
  int64_t group = h.heads / h.kv_heads, queries = group * n, window = cache.window;
  const int64_t *slot = cache.slots.const_data_ptr<int64_t>(), *length = cache.lengths.const_data_ptr<int64_t>();
  const float *q_norm = data_or_null(cache.q_norm), *k_norm = data_or_null(cache.k_norm);
  const float *c = cache.cos.const_data_ptr<float>(), *s = cache.sin.const_data_ptr<float>();
  constexpr bool kFp8 = std::is_same_v<C, CachedFp8>;
  float k_scale = kFp8 ? *cache.k_scale->const_data_ptr<float>() : 1.0f, v_scale = kFp8 ? *cache.v_scale->const_data_ptr<float>() : 1.0f;
  C *key_cache = static_cast<C*>(cache.keys.mutable_data_ptr()), *value_cache = static_cast<C*>(cache.values.mutable_data_ptr());
  int64_t longest = *std::max_element(length, length + batch) + n;
  TORCH_CHECK(longest <= h.capacity && longest <= cache.cos.size(0), "attention: the cache ends before position ", longest);
  int64_t reach = (longest + kLanes - 1) / kLanes * kLanes;
  int64_t half = h.dim / 2, stride = (h.heads + 2 * h.kv_heads) * h.dim;
  float scale = k_scale / std::sqrt(static_cast<float>(h.dim));
  parallel(batch * h.kv_heads, queries * longest * h.padded / 4, [&](int64_t first, int64_t last) {
    int64_t most = std::min(kQueries, queries);
    Scratch<float> rotated(most * h.padded), scores(most * reach), mixed(most * h.padded);
    Queries all{rotated, scores, mixed, {}, {}, reach};
    for (int64_t task = first; task < last; ++task) {
      int64_t b = task / h.kv_heads, head = task % h.kv_heads;
      C* keys = key_cache + (slot[b] * h.kv_heads + head) * h.dim * h.capacity;
      C* values = value_cache + (slot[b] * h.kv_heads + head) * h.capacity * h.padded;
      for (int64_t t = 0; t < n; ++t) {
        const float* token = qkv + (b * n + t) * stride;
        int64_t place = length[b] + t;
        rotate(token + (h.heads + head) * h.dim, k_norm, cache.eps, c + place * half, s + place * half, h.dim, all.rotated);
        const float* v = token + (h.heads + h.kv_heads + head) * h.dim;
        for (int64_t d = 0; d < h.dim; d += kLanes) {
          int64_t count = std::min(kLanes, h.dim - d);
          keep(values + place * h.padded + d, load(v + d, count), v_scale);
          C column[kLanes];
          keep(column, load<Floats>(all.rotated + d), k_scale);
          for (int64_t i = 0; i < count; ++i) keys[(d + i) * h.capacity + place] = column[i];
        }
      }
      for (int64_t q = 0; q < queries; q += kQueries) {
        int64_t count = std::min(kQueries, queries - q);
        for (int64_t i = 0; i < count; ++i) {
          int64_t t = (q + i) / group, which = head * group + (q + i) % group, at = length[b] + t;
          float* to = all.rotated + i * h.padded;
          rotate(qkv + (b * n + t) * stride + which * h.dim, q_norm, cache.eps, c + at * half, s + at * half, h.dim, to);
          for (int64_t d = 0; d < h.dim; ++d) to[d] *= scale;
          all.at[i] = at;
        }
        attend_to(all, count, keys, values, h, window);
        for (int64_t i = 0; i < count; ++i) {
          int64_t t = (q + i) / group, which = head * group + (q + i) % group;
          float* to = out + ((b * n + t) * h.heads + which) * h.dim;
          float whole = v_scale / all.sums[i];
          for (int64_t d = 0; d < h.dim; ++d) to[d] = all.mixed[i * h.padded + d] * whole;
        }
      }
    }
  });
}

void attention_floats(const float* qkv, int64_t batch, int64_t n, const Cache& cache, float* out) {
  TORCH_CHECK(cache.keys.is_contiguous() && cache.values.is_contiguous(), "attention: contiguous caches");
  cache.keys.scalar_type() == at::kFloat ? attention_heads<float>(qkv, batch, n, cache, out) : attention_heads<CachedFp8>(qkv, batch, n, cache, out);
}

// qkv [batch, n, (heads + 2 kv_heads) dim] float32; keys [slots, kv_heads, dim, capacity] and
// values [slots, kv_heads, capacity, padded], both float32 or uint8 (E4M3 bits at k_scale, v_scale
// []), which are written in place after the first `lengths` [batch] positions of `slots` [batch];
// cos, sin [positions, dim / 2]; window 0: unbounded. Returns [batch, n, heads dim].
Tensor attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& slots, const Tensor& lengths, const Tensor& cos,
                 const Tensor& sin, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t heads, int64_t window, double eps) {
  Tensor out = at::empty({qkv.size(0), qkv.size(1), heads * keys.size(2)}, qkv.options());
  Cache cache{keys, values, slots, lengths, cos, sin, q_norm, k_norm, k_scale, v_scale, heads, window, static_cast<float>(eps)};
  attention_floats(floats(qkv), qkv.size(0), qkv.size(1), cache, out.mutable_data_ptr<float>());
  return out;
}

// hidden [batch, n, k] + o(attention(qkv(norm(hidden)))).
Tensor attend(const Tensor& hidden, const Tensor& norm,  //
              const Tensor& qkv, const std::optional<Tensor>& qkv_scale, const std::optional<Tensor>& qkv_input_scale,
              const std::optional<Tensor>& qkv_pre_scale, const std::optional<Tensor>& qkv_bias, const std::optional<Tensor>& qkv_start,
              int64_t qkv_rows,  //
              const Tensor& o, const std::optional<Tensor>& o_scale, const std::optional<Tensor>& o_input_scale,
              const std::optional<Tensor>& o_pre_scale, const std::optional<Tensor>& o_bias, const std::optional<Tensor>& o_start,
              int64_t o_rows,  //
              Tensor keys, Tensor values, const Tensor& slots, const Tensor& lengths, const Tensor& cos, const Tensor& sin,
              const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, const std::optional<Tensor>& k_scale,
              const std::optional<Tensor>& v_scale, int64_t heads, int64_t window, double eps) {
  const float* x = floats(hidden);
  int64_t batch = hidden.size(0), n = hidden.size(1), m = batch * n, k = hidden.size(2), inner = heads * keys.size(2);
  Cache cache{keys, values, slots, lengths, cos, sin, q_norm, k_norm, k_scale, v_scale, heads, window, static_cast<float>(eps)};
  Tensor out = at::empty(hidden.sizes(), hidden.options());
  Scratch<float> normed(m * k), three(m * qkv_rows), mixed(m * inner);
  rms_norm(x, m, k, floats(norm), cache.eps, normed);
  project(normed, m, k, {qkv, qkv_scale, qkv_input_scale, qkv_pre_scale, qkv_bias, qkv_start, qkv_rows}, nullptr, three);
  attention_floats(three, batch, n, cache, mixed);
  project(mixed, m, inner, {o, o_scale, o_input_scale, o_pre_scale, o_bias, o_start, o_rows}, x, out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

// The namespace is named after the digest of this build, so that engines of different builds can be
// in one process.
#define REGISTER(name, library) TORCH_LIBRARY(name, library)
#define REGISTER_CPU(name, library) TORCH_LIBRARY_IMPL(name, CPU, library)

// A packed linear among the arguments of an operator.
#define LINEAR(name) \
  "Tensor " name ", Tensor? " name "_scale, Tensor? " name "_input_scale, Tensor? " name "_pre_scale, Tensor? " name "_bias, Tensor? " \
  name "_start, int " name "_rows"
#define ATTENTION \
  "Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor lengths, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, " \
  "Tensor? k_scale, Tensor? v_scale, int heads, int window, float eps"

REGISTER(TOOLKIT_NAMESPACE, library) {
  library.def("linear(Tensor x, " LINEAR("weight") ") -> Tensor");
  library.def("attention(Tensor qkv, " ATTENTION ") -> Tensor");
  library.def("attend(Tensor hidden, Tensor norm, " LINEAR("qkv") ", " LINEAR("o") ", " ATTENTION ") -> Tensor");
  library.def("feed_forward(Tensor hidden, Tensor norm, " LINEAR("gate_up") ", " LINEAR("down") ", float eps) -> Tensor");
}

REGISTER_CPU(TOOLKIT_NAMESPACE, library) {
  library.impl("linear", &linear);
  library.impl("attention", &attention);
  library.impl("attend", &attend);
  library.impl("feed_forward", &feed_forward);
}
