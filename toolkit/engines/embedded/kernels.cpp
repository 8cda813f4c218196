// The operations that decide the speed of a decode step on a CPU, as torch custom operators.
//
// One rule holds for all of them: the result for one token does not depend on how many other tokens, sequences or threads take part.
// Every sum runs in one fixed order (over k in a linear, over positions in attention), each in its own vector lane, and a thread owns
// whole outputs. So verifying five tokens at once gives, bit by bit, what five single steps give.
//
// Weights come packed in blocks of 64 rows, [blocks, k, 64] ([blocks, k/4, 64, 4] for INT8 x INT8), so that one pass over memory,
// front to back, feeds four vectors of 16 rows. GCC's vector types lower to whatever the machine has; VNNI is used where it is there.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

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
constexpr int64_t kBlock = 64;   // rows of a packed block
constexpr int64_t kVectors = kBlock / kLanes;
constexpr int64_t kTokens = 6;   // tokens that share one pass over the weights: 24 accumulators fit the register file
constexpr int64_t kGrain = 1 << 17;  // multiply-adds below which a second thread costs more than it brings
constexpr float kFp8Max = 448.0f;

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

// Minus zero and not plus zero: x - 0 is x whatever its sign, so that nothing is left of it but the broadcast.
inline Floats splat(float x) { return x - Floats{}; }

// Keep what was loaded in a register. GCC otherwise loads it once more for every product, and loads are what then limits the loop.
inline void keep_loaded(Floats& v) {
#ifdef __AVX512F__
  asm("" : "+v"(v));
#endif
}

// Ask for the weights that come 3 KiB later. Weights larger than the caches come at the speed of memory only this way: the hardware's own
// prefetcher stops at every 4 KiB page, and its gaps show as soon as there is arithmetic between the loads.
inline void ahead(const void* weights, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(weights) + 3072 + i);
}

// Sixteen weights of any storage type as floats; all of these conversions are exact. GCC 12 takes __builtin_convertvector on bytes
// apart lane by lane (14 times slower), so AVX-512 machines get the instruction by name.
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

// E4M3 keeps a bias of 7 where float has 127: sign and the seven bits moved into place, times 2^120. Subnormals come out right as well.
inline Floats widen(const Fp8* w) { return (Floats)((signed_bytes(w) << 20) & int32_t(0x87f00000)) * 0x1p120f; }

// The nearest number that E4M3 has, half to even and saturating, like torch's clamp and cast. From 2^-6 on a code keeps three bits behind
// the leading one, and the twenty below them are rounded away. Smaller ones are multiples of 2^-9, which is what is left of an addition
// to 1.5 * 2^14.
inline Floats rounded_to_fp8(Floats x) {
  x = x < splat(-kFp8Max) ? splat(-kFp8Max) : x;
  x = x > splat(kFp8Max) ? splat(kFp8Max) : x;
  Ints bits = (Ints)x;
  Floats normal = (Floats)((bits + 0x7ffff + ((bits >> 20) & 1)) & ~0xfffff);
  Floats small = (x + 0x1.8p14f) - 0x1.8p14f;
  return (bits & 0x7fffffff) < 0x3c800000 ? small : normal;
}

// Sixteen numbers into a cache: as they are, or as the codes of x / scale.
inline void keep(float* to, Floats x, float) { store(to, x); }
inline void keep(Fp8* to, Floats x, float scale) {
  Floats value = rounded_to_fp8(x / scale);
  Ints magnitude = (Ints)value & 0x7fffffff, sign = ((Ints)value >> 24) & 0x80;
  Ints small = __builtin_convertvector((Floats)magnitude * 512.0f, Ints);
  Ints code = sign | (magnitude < 0x3c800000 ? small : (magnitude >> 20) - (120 << 3));
  for (int i = 0; i < kLanes; ++i) to[i].bits = static_cast<uint8_t>(code[i]);
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

// Write one vector of results for rows [row, row + 16), cut at the last row.
inline void finish(float* out, int64_t row, int64_t rows, Floats v, const float* scale, float factor, const float* bias) {
  int64_t count = std::min(kLanes, rows - row);
  if (count == kLanes) {
    if (scale) v *= load<Floats>(scale + row) * factor;
    if (bias) v += load<Floats>(bias + row);
    store(out + row, v);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    float y = v[i];
    if (scale) y *= scale[row + i] * factor;
    out[row + i] = bias ? y + bias[row + i] : y;
  }
}

// ---- linear with float activations: weights float32, bfloat16, int8 or E4M3 -------------------------------------------------------

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
void float_linear(const float* x, const W* w, int64_t m, int64_t k, int64_t rows, int64_t blocks, const float* scale, float factor,
                  const float* bias, float* out) {
  parallel(blocks, kBlock * k * m, [&](int64_t begin, int64_t end) {
    Floats acc[kTokens][kVectors];
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t t = 0; t < m; t += kTokens) {
        int64_t tokens = std::min(kTokens, m - t);
        float_tokens<W>(tokens, x + t * k, w + b * k * kBlock, k, acc);
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < kVectors && b * kBlock + j * kLanes < rows; ++j)
            finish(out + (t + i) * rows, b * kBlock + j * kLanes, rows, acc[i][j], scale, factor, bias);
      }
    }
  });
}

Tensor output_like(const Tensor& x, int64_t rows) {
  auto sizes = x.sizes().vec();
  sizes.back() = rows;
  return at::empty(sizes, x.options());
}

// x [..., k] float32; weight packed [blocks, k, 64] float32 | bfloat16 | int8 | uint8 (E4M3 bits); scale [rows], bias [rows];
// input_scale []: x is rounded to E4M3 at that scale first. Returns [..., rows] float32.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& input_scale,
              const std::optional<Tensor>& bias, int64_t rows) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.scalar_type() == at::kFloat, "linear: contiguous float32 input");
  int64_t k = x.size(-1), m = x.numel() / k, blocks = weight.size(0);
  TORCH_CHECK(weight.size(1) == k && blocks * kBlock >= rows, "linear: weight does not fit the input");
  Tensor out = output_like(x, rows);
  const float* in = x.const_data_ptr<float>();
  float factor = 1.0f;
  std::vector<float> rounded;
  if (input_scale.has_value()) {
    factor = *input_scale->const_data_ptr<float>();
    rounded.resize(m * k);
    int64_t i = 0;
    for (; i + kLanes <= m * k; i += kLanes) store(rounded.data() + i, rounded_to_fp8(load<Floats>(in + i) / factor));
    if (i < m * k) {
      Floats last = {};
      std::memcpy(&last, in + i, (m * k - i) * sizeof(float));
      last = rounded_to_fp8(last / factor);
      std::memcpy(rounded.data() + i, &last, (m * k - i) * sizeof(float));
    }
    in = rounded.data();
  }
  const float *s = data_or_null(scale), *b = data_or_null(bias);
  float* o = out.mutable_data_ptr<float>();
  const void* w = weight.const_data_ptr();
  switch (weight.scalar_type()) {
    case at::kFloat: float_linear(in, static_cast<const float*>(w), m, k, rows, blocks, s, factor, b, o); break;
    case at::kBFloat16: float_linear(in, static_cast<const Bf16*>(w), m, k, rows, blocks, s, factor, b, o); break;
    case at::kChar: float_linear(in, static_cast<const int8_t*>(w), m, k, rows, blocks, s, factor, b, o); break;
    case at::kByte: float_linear(in, static_cast<const Fp8*>(w), m, k, rows, blocks, s, factor, b, o); break;
    default: TORCH_CHECK(false, "linear: weight dtype ", weight.scalar_type());
  }
  return out;
}

// ---- linear INT8 x INT8, counted exactly in int32 ---------------------------------------------------------------------------------

#ifdef __AVX512VNNI__
// sum += four products per lane. The instruction by hand: GCC 12 copies and spills the accumulators around its own intrinsic, which
// doubles the time from four tokens on.
inline void count(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}
#endif

// Activations are unsigned here (code + 128), as VNNI wants them; `start` holds -128 * (sum of the row's weights), which takes it back.
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

// round(v) in [-128, 127], plus 128. Adding 1.5 * 2^23 rounds to the nearest even and leaves the integer in the low bits.
inline void store_codes(uint8_t* to, Floats v) {
  v = v < splat(-128.0f) ? splat(-128.0f) : v;
  v = v > splat(127.0f) ? splat(127.0f) : v;
  Ints code = (Ints)(v + 0x1.8p23f) - 0x4b400000 + 128;
#ifdef __AVX512F__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)code));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<uint8_t>(code[i]);
#endif
}

// x [..., k] float32; weight packed [blocks, quads, 64, 4] int8; start [blocks * 64] int32 (see int8_block); scale [rows] of the
// weights; input_scale []; pre_scale [k]. Codes are round(x * pre_scale / input_scale) in [-128, 127]. Returns [..., rows] float32.
Tensor linear_w8a8(const Tensor& x, const Tensor& weight, const Tensor& start, const Tensor& scale, const Tensor& input_scale,
                   const std::optional<Tensor>& pre_scale, const std::optional<Tensor>& bias, int64_t rows) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && x.scalar_type() == at::kFloat, "linear_w8a8: contiguous float32 input");
  int64_t k = x.size(-1), m = x.numel() / k, blocks = weight.size(0), quads = weight.size(1);
  TORCH_CHECK(quads * 4 >= k && blocks * kBlock >= rows, "linear_w8a8: weight does not fit the input");
  Tensor out = output_like(x, rows);
  const float *in = x.const_data_ptr<float>(), *pre = data_or_null(pre_scale), *b = data_or_null(bias);
  const float factor = *input_scale.const_data_ptr<float>(), inverse = 1.0f / factor;
  std::vector<uint8_t> codes(m * quads * 4, 128);
  parallel(m, k, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* from = in + t * k;
      uint8_t* to = codes.data() + t * quads * 4;
      int64_t i = 0;
      for (; i + kLanes <= k; i += kLanes) {
        Floats v = load<Floats>(from + i);
        if (pre) v *= load<Floats>(pre + i);
        store_codes(to + i, v * inverse);
      }
      if (i < k) {
        Floats v = {};
        for (int64_t j = i; j < k; ++j) v[j - i] = pre ? from[j] * pre[j] : from[j];
        uint8_t last[kLanes];
        store_codes(last, v * inverse);
        std::memcpy(to + i, last, k - i);
      }
    }
  });
  const int8_t* w = weight.const_data_ptr<int8_t>();
  const int32_t* first = start.const_data_ptr<int32_t>();
  const float* s = scale.const_data_ptr<float>();
  float* o = out.mutable_data_ptr<float>();
  parallel(blocks, kBlock * k * m / 4, [&](int64_t begin, int64_t end) {
    Ints acc[kTokens][kVectors];
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t t = 0; t < m; t += kTokens) {
        int64_t tokens = std::min(kTokens, m - t);
        int8_tokens(tokens, codes.data() + t * quads * 4, w + n * quads * kBlock * 4, quads, first + n * kBlock, acc);
        for (int64_t i = 0; i < tokens; ++i)
          for (int64_t j = 0; j < kVectors && n * kBlock + j * kLanes < rows; ++j)
            finish(o + (t + i) * rows, n * kBlock + j * kLanes, rows, __builtin_convertvector(acc[i][j], Floats), s, factor, b);
      }
    }
  });
  return out;
}

// ---- attention --------------------------------------------------------------------------------------------------------------------

constexpr int64_t kQueries = 24;  // queries of a KV head at a time: their scores, and its keys and values, stay in the nearest caches
constexpr int64_t kTogether = 6;  // queries that share one load of a key or value

// e^x for x <= 0, to about one unit in the last place; below -87 the result is cut at e^-87.
inline Floats exponential(Floats x) {
  Floats low = splat(-87.0f);
  x = x < low ? low : x;
  Floats shifted = x * 1.44269504088896341f + 0x1.8p23f;  // the integer part ends up in the low bits
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

struct Heads {
  int64_t heads, kv_heads, dim, padded, capacity;  // padded: head_dim up to a multiple of 16
};

// One sequence and KV head with up to kQueries of its queries.
struct Queries {
  float *rotated, *scores, *mixed, *sums;  // [kQueries, padded], [kQueries, reach], [kQueries, padded], [kQueries]
  int64_t at[kQueries];                    // a query's own position
  int64_t reach;
};

// Scores of Q queries, from `first` on, against 16 V positions; the head's keys are stored [dim, capacity].
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

// mixed[i] [d, d + 16 D) = sum over positions of scores[i] * value; values are stored [capacity, padded]. Several columns of 16 dims at
// a time, since one sum alone would wait for each of its additions.
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

// f.template operator()<Q>(first) for all `count` queries, Q of them at a time: as few and as even portions as kTogether allows.
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

// One number out of sixteen lanes, by halves: four steps instead of a chain of fifteen.
template <typename F>
inline float fold(Floats v, const F& join) {
  v = join(v, __builtin_shuffle(v, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  v = join(v, __builtin_shuffle(v, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  v = join(v, __builtin_shuffle(v, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  v = join(v, __builtin_shuffle(v, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return v[0];
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Turn the scores of the visible positions [from, to) into weights, the largest of them 1; the rest of [begin, end) into 0. Returns
// their sum, which the mixed values are divided by: there are fewer of those than there are positions.
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
  return fold(total, [](Floats a, Floats b) { return a + b; });
}

// mixed / sums is what attention gives for these queries.
template <typename C>
void attend(const Queries& all, int64_t count, const C* keys, const C* values, const Heads& h, int64_t window) {
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

// One head of one token: RMSNorm where the family has it, then the rotation. Pairs are (i, i + dim/2).
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

template <typename C>
void attention_heads(const Tensor& qkv, C* key_cache, C* value_cache, const Tensor& slots, const Tensor& lengths, const Tensor& cos,
                     const Tensor& sin, const float* q_norm, const float* k_norm, float k_scale, float v_scale, const Heads& h,
                     int64_t window, float eps, Tensor& out) {
  int64_t batch = qkv.size(0), n = qkv.size(1), group = h.heads / h.kv_heads, queries = group * n;
  const int64_t *slot = slots.const_data_ptr<int64_t>(), *length = lengths.const_data_ptr<int64_t>();
  int64_t longest = *std::max_element(length, length + batch) + n;
  TORCH_CHECK(longest <= h.capacity && longest <= cos.size(0), "attention: the cache ends before position ", longest);
  const float *in = qkv.const_data_ptr<float>(), *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  float* result = out.mutable_data_ptr<float>();
  int64_t reach = (longest + kLanes - 1) / kLanes * kLanes;
  int64_t half = h.dim / 2, stride = (h.heads + 2 * h.kv_heads) * h.dim;
  float scale = k_scale / std::sqrt(static_cast<float>(h.dim));
  parallel(batch * h.kv_heads, queries * longest * h.padded / 4, [&](int64_t first, int64_t last) {
    int64_t most = std::min(kQueries, queries);
    std::unique_ptr<float[]> scratch(new float[most * (2 * h.padded + reach + 1)]);
    Queries all{scratch.get(), scratch.get() + 2 * most * h.padded, scratch.get() + most * h.padded, nullptr, {}, reach};
    all.sums = all.scores + most * reach;
    for (int64_t task = first; task < last; ++task) {
      int64_t b = task / h.kv_heads, head = task % h.kv_heads;
      C* keys = key_cache + (slot[b] * h.kv_heads + head) * h.dim * h.capacity;
      C* values = value_cache + (slot[b] * h.kv_heads + head) * h.capacity * h.padded;
      for (int64_t t = 0; t < n; ++t) {
        const float* token = in + (b * n + t) * stride;
        int64_t place = length[b] + t;
        rotate(token + (h.heads + head) * h.dim, k_norm, eps, c + place * half, s + place * half, h.dim, all.rotated);
        const float* v = token + (h.heads + h.kv_heads + head) * h.dim;
        for (int64_t d = 0; d < h.dim; d += kLanes) {
          int64_t count = std::min(kLanes, h.dim - d);
          Floats value = {};
          std::memcpy(&value, v + d, count * sizeof(float));
          keep(values + place * h.padded + d, value, v_scale);
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
          rotate(in + (b * n + t) * stride + which * h.dim, q_norm, eps, c + at * half, s + at * half, h.dim, to);
          for (int64_t d = 0; d < h.dim; ++d) to[d] *= scale;
          all.at[i] = at;
        }
        attend(all, count, keys, values, h, window);
        for (int64_t i = 0; i < count; ++i) {
          int64_t t = (q + i) / group, which = head * group + (q + i) % group;
          float* to = result + ((b * n + t) * h.heads + which) * h.dim;
          float whole = v_scale / all.sums[i];
          for (int64_t d = 0; d < h.dim; ++d) to[d] = all.mixed[i * h.padded + d] * whole;
        }
      }
    }
  });
}

// qkv [batch, n, (heads + 2 kv_heads) dim] float32; keys [slots, kv_heads, dim, capacity] and values [slots, kv_heads, capacity,
// padded], both float32 or uint8 (E4M3 bits at k_scale, v_scale []), written in place behind `lengths` [batch] of `slots` [batch];
// cos, sin [positions, dim / 2]; window 0: unbounded. Returns [batch, n, heads dim].
Tensor attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& slots, const Tensor& lengths, const Tensor& cos,
                 const Tensor& sin, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                 const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale, int64_t heads, int64_t window, double eps) {
  TORCH_CHECK(qkv.is_contiguous() && keys.is_contiguous() && values.is_contiguous(), "attention: contiguous tensors");
  Heads h{heads, keys.size(1), keys.size(2), values.size(3), keys.size(3)};
  Tensor out = at::empty({qkv.size(0), qkv.size(1), heads * h.dim}, qkv.options());
  float ks = k_scale.has_value() ? *k_scale->const_data_ptr<float>() : 1.0f;
  float vs = v_scale.has_value() ? *v_scale->const_data_ptr<float>() : 1.0f;
  const float *qn = data_or_null(q_norm), *kn = data_or_null(k_norm);
  if (keys.scalar_type() == at::kFloat) {
    attention_heads<float>(qkv, keys.mutable_data_ptr<float>(), values.mutable_data_ptr<float>(), slots, lengths, cos, sin, qn, kn, 1.0f,
                           1.0f, h, window, static_cast<float>(eps), out);
  } else {
    attention_heads<Fp8>(qkv, reinterpret_cast<Fp8*>(keys.mutable_data_ptr<uint8_t>()),
                         reinterpret_cast<Fp8*>(values.mutable_data_ptr<uint8_t>()), slots, lengths, cos, sin, qn, kn, ks, vs, h, window,
                         static_cast<float>(eps), out);
  }
  return out;
}

}  // namespace

// The namespace is named after the digest of this build, so that engines of different builds live side by side in one process.
#define REGISTER(name, library) TORCH_LIBRARY(name, library)
#define REGISTER_CPU(name, library) TORCH_LIBRARY_IMPL(name, CPU, library)

REGISTER(TOOLKIT_NAMESPACE, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? scale, Tensor? input_scale, Tensor? bias, int rows) -> Tensor");
  library.def(
      "linear_w8a8(Tensor x, Tensor weight, Tensor start, Tensor scale, Tensor input_scale, Tensor? pre_scale, Tensor? bias, int rows) "
      "-> Tensor");
  library.def(
      "attention(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor lengths, Tensor cos, Tensor sin, Tensor? q_norm, "
      "Tensor? k_norm, Tensor? k_scale, Tensor? v_scale, int heads, int window, float eps) -> Tensor");
}

REGISTER_CPU(TOOLKIT_NAMESPACE, library) {
  library.impl("linear", &linear);
  library.impl("linear_w8a8", &linear_w8a8);
  library.impl("attention", &attention);
}
