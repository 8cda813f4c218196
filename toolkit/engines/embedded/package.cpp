// A compiled package as an object that torch's dispatcher calls. Before such a call torch releases
// the lock of the interpreter, so that other threads of Python work during a forward. The binding
// of AOTInductor's own loader holds the lock the whole time.
//
// It is compiled behind kernels.cpp, in one translation unit.

#include <ATen/ops/arange.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kNotFinite = -1;  // instead of a token
constexpr int64_t kDrawBlock = 64;  // tokens whose weights are summed before one of them is looked for
static_assert(kDrawBlock % kLanes == 0);

// The most likely token, of equal ones the first; kNotFinite if a logit is NaN or the best is infinite.
int64_t most_likely(const float* logits, int64_t vocab) {
  constexpr int64_t kBlockTokens = 512;
  float best = -std::numeric_limits<float>::infinity();
  int64_t best_block = 0;
  for (int64_t block = 0; block < vocab; block += kBlockTokens) {
    int64_t end = std::min(block + kBlockTokens, vocab), i = block;
    Floats top = splat(best);
    Ints nan = {};
    for (; i + kLanes <= end; i += kLanes) {
      Floats v = load<Floats>(logits + i);
      top = larger(v, top);
      nan |= v != v;
    }
    float largest = fold(top, larger);
    bool is_bad = false;
    for (int lane = 0; lane < kLanes; ++lane) is_bad |= nan[lane] != 0;
    for (; i < end; ++i) largest = std::max(largest, logits[i]), is_bad |= logits[i] != logits[i];
    if (is_bad) return kNotFinite;
    if (largest > best) best = largest, best_block = block;
  }
  if (!std::isfinite(best)) return kNotFinite;
  return std::find(logits + best_block, logits + vocab, best) - logits;
}

// probabilities [vocab] = softmax(logits / temperature), and the token at which their running sum
// passes `uniform` in [0, 1). kNotFinite if the best logit is no finite number.
int64_t drawn(const float* logits, int64_t vocab, float temperature, double uniform, float* probabilities) {
  int64_t best = most_likely(logits, vocab);
  if (best == kNotFinite) return best;
  int64_t blocks = (vocab + kDrawBlock - 1) / kDrawBlock;
  Scratch<double> until(blocks);  // the end of each block, as a sum of weights
  float top = logits[best], inverse = 1.0f / temperature;
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    Floats sums = {};
    for (int64_t i = b * kDrawBlock, end = std::min(i + kDrawBlock, vocab); i < end; i += kLanes) {
      int64_t count = std::min(kLanes, end - i);
      Floats weight = exponential((load(logits + i, count) - top) * inverse);
      if (count < kLanes) weight = lanes() < static_cast<int32_t>(count) ? weight : Floats{};
      sums += weight;
      store(probabilities + i, weight, count);
    }
    until[b] = total += sum(sums);
  }
  double threshold = uniform * total;
  int64_t block = std::upper_bound(&until[0], &until[blocks], threshold) - &until[0];
  block = std::min(block, blocks - 1);
  int64_t token = block * kDrawBlock, last = std::min(token + kDrawBlock, vocab) - 1;
  // Rounding may put the threshold behind the block's own sum: then its last token is drawn.
  for (double passed = block ? until[block - 1] : 0.0; token < last; ++token)
    if ((passed += probabilities[token]) > threshold) break;
  float share = static_cast<float>(1.0 / total);
  for (int64_t i = 0; i < vocab; ++i) probabilities[i] *= share;
  return token;
}

// The token that is largest in softmax(logits / temperature) * race; kNotFinite if the best logit is
// no finite number.
int64_t winner(const float* logits, int64_t vocab, float temperature, const float* race) {
  int64_t best = most_likely(logits, vocab);
  if (best == kNotFinite) return best;
  Scratch<float> arrivals(vocab);
  float top = logits[best], inverse = 1.0f / temperature;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    int64_t count = std::min(kLanes, vocab - i);
    store(arrivals + i, exponential((load(logits + i, count) - top) * inverse) * load(race + i, count), count);
  }
  return most_likely(arrivals, vocab);
}

// Not thread-safe. Methods rather than operators that take the object: torch looks for Python in the
// arguments of such an operator, which takes 10 microseconds more per call.
class Package : public torch::CustomClassHolder {
 public:
  explicit Package(const std::string& file) : loader_(file, "model", /*run_single_threaded=*/false, /*num_runners=*/1, /*device_index=*/-1) {}

  // The names of the tensors that the package needs.
  std::vector<std::string> names() { return loader_.get_constant_fqns(); }

  // Let the package work on these tensors, without a copy. It has bare pointers to them, so they
  // are kept here.
  void bind(const c10::Dict<std::string, Tensor>& tensors) {
    for (const auto& entry : tensors) tensors_.insert_or_assign(entry.key(), entry.value());
    loader_.load_constants(tensors_, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  // tokens [t], slots [b], lengths [b], starts [b], columns [c], all int64 -> logits [c, vocab].
  Tensor run(const Tensor& tokens, const Tensor& slots, const Tensor& lengths, const Tensor& starts, const Tensor& columns) {
    return loader_.boxed_run({tokens, slots, lengths, starts, columns})[0];
  }

  // Run these tokens, choose a token for each sequence from the logits at its column, run that, and
  // so on, until counts[i] tokens are chosen for sequence i; the last one is not run. counts fall.
  // temperatures [b] float32, 0 for the most likely token; the others are drawn: with races[i]
  // [counts[i], vocab] float32 if it has any numbers, else with uniforms [b, counts[0]] float64.
  // Returns the tokens [b, counts[0]] int64 and, if uniforms were used, the probabilities
  // [b, counts[0], vocab] from which they were drawn. Behind a token that cannot be chosen
  // (kNotFinite) come only others of its kind.
  std::tuple<Tensor, Tensor> chain(Tensor tokens, Tensor slots, const Tensor& first_lengths, Tensor starts, Tensor columns, const Tensor& counts,
                                   const Tensor& temperatures, const Tensor& uniforms, const std::vector<Tensor>& races) {
    const int64_t *count = counts.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
    const float* temperature = temperatures.const_data_ptr<float>();
    int64_t rows = slots.size(0), most = rows ? count[0] : 0;
    bool draws = uniforms.numel() > 0;
    Tensor ids = at::empty({rows, most}, slots.options()), lengths = first_lengths.clone(), probabilities;
    int64_t *id = ids.mutable_data_ptr<int64_t>(), *length = lengths.mutable_data_ptr<int64_t>();
    std::fill_n(id, rows * most, kNotFinite);
    for (int64_t i = 0; i < rows; ++i) length[i] += (i + 1 < rows ? start[i + 1] : tokens.size(0)) - start[i];
    Tensor places = first_lengths, every = at::arange(rows, slots.options());
    for (int64_t depth = 0; depth < most; ++depth) {
      Tensor logits = run(tokens, slots, places, starts, columns);
      int64_t vocab = logits.size(1);
      if (draws && !depth) probabilities = at::empty({rows, most, vocab}, logits.options());
      rows = logits.size(0);
      for (int64_t i = 0; i < rows; ++i) {
        int64_t at = i * most + depth;
        if (depth && id[at - 1] == kNotFinite) continue;
        const float* of_row = logits.const_data_ptr<float>() + i * vocab;
        if (temperature[i] == 0.0f) {
          id[at] = most_likely(of_row, vocab);
        } else if (races[i].numel()) {
          id[at] = winner(of_row, vocab, temperature[i], races[i].const_data_ptr<float>() + depth * vocab);
        } else {
          float* of_token = probabilities.mutable_data_ptr<float>() + at * vocab;
          id[at] = drawn(of_row, vocab, temperature[i], uniforms.const_data_ptr<double>()[at], of_token);
        }
      }
      while (rows && count[rows - 1] <= depth + 1) --rows;
      if (!rows) break;
      tokens = ids.narrow(0, 0, rows).select(1, depth).clamp_min(0);
      slots = slots.narrow(0, 0, rows), starts = columns = every.narrow(0, 0, rows);
      if (depth)
        for (int64_t i = 0; i < rows; ++i) ++length[i];
      places = lengths.narrow(0, 0, rows);
    }
    return {ids, probabilities.defined() ? probabilities : at::empty({0}, temperatures.options())};
  }

 private:
  std::unordered_map<std::string, Tensor> tensors_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

}  // namespace

#define REGISTER_MORE(name, library) TORCH_LIBRARY_FRAGMENT(name, library)

REGISTER_MORE(TOOLKIT_NAMESPACE, library) {
  library.class_<Package>("Package")
      .def(torch::init<const std::string&>())
      .def("names", &Package::names)
      .def("bind", &Package::bind)
      .def("run", &Package::run)
      .def("chain", &Package::chain);
}
