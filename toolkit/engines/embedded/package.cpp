// A compiled package as an object that torch's dispatcher calls. Before such a call torch releases
// the lock of the interpreter, so that other threads of Python work during a forward. The binding
// of AOTInductor's own loader holds the lock the whole time.
//
// It is compiled behind kernels.cpp, in one translation unit.

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <unistd.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kNotFinite = -1;  // instead of a token
// Instead of a token, too: where float arithmetic in another order might choose another one. A request
// with a seed has the same text however its steps are taken, so the caller has to choose, always in
// the same way. kDoubt is far above what rounding does to a sum of probabilities, kRatioDoubt to a
// quotient of two.
constexpr int64_t kUndecided = -2;
constexpr double kDoubt = 5e-6, kRatioDoubt = 1e-4;
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

// How a request shapes its distribution: temperature, then top-k, then top-p. 0 and 1 for none.
struct Shape {
  float temperature;
  int64_t top_k;
  double top_p;

  explicit Shape(const double* numbers) : temperature(numbers[0]), top_k(numbers[1]), top_p(numbers[2]) {}
};

// The sum of some weights; NaN if there are none. is_clear: whether which of them are 0 would be the
// same if they were rounded otherwise.
struct Weighed {
  double total;
  bool is_clear = true;
};

// Set those of the weights [vocab] to 0 that top_k and top_p leave out, as
// toolkit.speculative.sampling.weights does.
Weighed cut(float* weights, int64_t vocab, double total, const Shape& shape) {
  constexpr int64_t kSorted = 128;  // most nuclei are smaller
  const std::greater<float> falls;
  int64_t most = shape.top_k > 0 ? std::min(shape.top_k, vocab) : vocab, last = most - 1;
  Scratch<float> falling(vocab);
  float *first = falling, *end = first + vocab;
  std::copy_n(weights, vocab, first);
  // Put the `count` largest of the `of` largest in front.
  auto select = [&](int64_t count, int64_t of) {
    if (count < of) std::nth_element(first, first + count, first + of, falls);
  };
  select(most, vocab);
  bool is_clear = true;
  if (shape.top_p < 1.0) {
    double needed = shape.top_p * (most < vocab ? std::accumulate(first, first + most, 0.0) : total), passed = 0.0;
    for (int64_t sorted = std::min(kSorted, most);; sorted = most) {
      select(sorted, most);
      std::sort(first, first + sorted, falls);
      for (last = 0, passed = first[0]; passed < needed && last + 1 < sorted;) passed += first[++last];
      if (passed >= needed || sorted == most) break;
    }
    is_clear = std::min(std::abs(passed - needed), std::abs(needed - (passed - first[last]))) > kDoubt * total;
  } else {
    std::iter_swap(first + last, std::min_element(first, first + most));
  }
  float smallest = first[last];
  if (last + 1 < vocab) is_clear &= *std::max_element(first + last + 1, end) < smallest * (1.0 - kRatioDoubt);
  double kept = 0.0;
  for (int64_t i = 0; i < vocab; ++i) kept += weights[i] = weights[i] < smallest ? 0.0f : weights[i];
  return {kept, is_clear};
}

// weights [vocab] = e^((logits - the best one) / temperature), without what the filters leave out.
// There are none if the best logit is no finite number.
Weighed weigh(const float* logits, int64_t vocab, const Shape& shape, float* weights) {
  int64_t best = most_likely(logits, vocab);
  if (best == kNotFinite) return {std::numeric_limits<double>::quiet_NaN()};
  float top = logits[best], inverse = 1.0f / shape.temperature;
  double total = 0.0;
  for (int64_t b = 0; b < vocab; b += kDrawBlock) {
    Floats sums = {};
    for (int64_t i = b, end = std::min(b + kDrawBlock, vocab); i < end; i += kLanes) {
      int64_t count = std::min(kLanes, end - i);
      Floats weight = exponential((load(logits + i, count) - top) * inverse);
      if (count < kLanes) weight = lanes() < static_cast<int32_t>(count) ? weight : Floats{};
      sums += weight;
      store(weights + i, weight, count);
    }
    total += sum(sums);
  }
  bool is_filtered = (0 < shape.top_k && shape.top_k < vocab) || shape.top_p < 1.0;
  return is_filtered ? cut(weights, vocab, total, shape) : Weighed{total};
}

void scale(float* numbers, int64_t count, double factor) {
  float share = static_cast<float>(factor);
  for (int64_t i = 0; i < count; ++i) numbers[i] *= share;
}

// A token, and how far the number that picked it is from the nearer end of its weight.
struct Pick {
  int64_t token;
  double margin;
};

// The token at which the running sum of weights [vocab] passes `uniform`, in [0, 1), of the whole.
Pick picked(const float* weights, int64_t vocab, double uniform) {
  int64_t blocks = (vocab + kDrawBlock - 1) / kDrawBlock;
  Scratch<double> until(blocks);  // the end of each block, as a sum of weights
  double total = 0.0;
  for (int64_t b = 0; b < blocks; ++b) {
    Floats sums = {};
    for (int64_t i = b * kDrawBlock, end = std::min(i + kDrawBlock, vocab); i < end; i += kLanes) sums += load(weights + i, std::min(kLanes, end - i));
    until[b] = total += sum(sums);
  }
  double threshold = uniform * total;
  int64_t block = std::upper_bound(&until[0], &until[blocks], threshold) - &until[0];
  block = std::min(block, blocks - 1);
  int64_t token = block * kDrawBlock, last = std::min(token + kDrawBlock, vocab) - 1;
  double passed = block ? until[block - 1] : 0.0;
  while (passed + weights[token] <= threshold && token < last) passed += weights[token++];
  // Rounding may have put the threshold behind the block's own sum: then its last token is drawn.
  while (token > 0 && weights[token] == 0.0f) --token;
  return {token, std::min(threshold - passed, passed + weights[token] - threshold)};
}

// probabilities [vocab] of the tokens, and the token that `uniform` picks of them. kNotFinite if the
// best logit is no finite number.
int64_t drawn(const float* logits, int64_t vocab, const Shape& shape, double uniform, float* probabilities) {
  double total = weigh(logits, vocab, shape, probabilities).total;
  if (std::isnan(total)) return kNotFinite;
  scale(probabilities, vocab, 1.0 / total);
  return picked(probabilities, vocab, uniform).token;
}

// The token whose probability is largest after it is multiplied by its number in race; kNotFinite if
// the best logit is no finite number, and kUndecided if another one is as large but for `doubt`.
int64_t winner(const float* logits, int64_t vocab, const Shape& shape, const float* race, double doubt = 0.0) {
  Scratch<float> arrivals(vocab);
  Weighed weighed = weigh(logits, vocab, shape, arrivals);
  if (std::isnan(weighed.total)) return kNotFinite;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    int64_t count = std::min(kLanes, vocab - i);
    store(arrivals + i, load(arrivals + i, count) * load(race + i, count), count);
  }
  int64_t first = most_likely(arrivals, vocab);
  if (doubt == 0.0) return first;
  if (first == kNotFinite || !weighed.is_clear) return kUndecided;  // not finite: beyond float32
  double nearly = arrivals[first] * (1.0 - doubt);
  arrivals[first] = 0.0f;
  return arrivals[most_likely(arrivals, vocab)] < nearly ? first : kUndecided;
}

// How many drafts are kept, and the target's own token behind them, or what stands instead of one.
struct Decision {
  int64_t accepted, token;
};

// The drafts that are the target's own choices: choose(i) is the one behind drafts[:i].
template <typename F>
Decision match(const int64_t* drafts, int64_t count, const F& choose) {
  int64_t accepted = 0, token = choose(0);
  while (accepted < count && token == drafts[accepted]) token = choose(++accepted);
  return {accepted, token};
}

// Speculative sampling, as toolkit.speculative.acceptance.reject. draft [count, vocab]: the
// probabilities that the drafts were drawn from; logits [count + 1, vocab]: the target's; uniforms
// [count + 1].
Decision reject(const int64_t* drafts, int64_t count, const float* draft, const float* logits, int64_t vocab, const Shape& shape, const double* uniforms) {
  Scratch<float> target(vocab);
  auto pick = [&](int64_t accepted) -> Decision {
    Pick pick = picked(target, vocab, uniforms[count]);
    return {accepted, pick.margin < kDoubt ? kUndecided : pick.token};
  };
  for (int64_t i = 0; i <= count; ++i) {
    Weighed weighed = weigh(logits + i * vocab, vocab, shape, target);
    if (std::isnan(weighed.total)) return {i, kNotFinite};
    if (!weighed.is_clear) return {i, kUndecided};
    scale(target, vocab, 1.0 / weighed.total);
    if (i == count) break;
    const float* of_draft = draft + i * vocab;
    double kept = target[drafts[i]], asked = uniforms[i] * of_draft[drafts[i]];
    if (std::abs(kept - asked) <= kRatioDoubt * std::max(kept, asked)) return {i, kUndecided};
    if (asked < kept) continue;
    for (int64_t j = 0; j < vocab; ++j) target[j] = std::max(target[j] - of_draft[j], 0.0f);
    return pick(i);
  }
  return pick(count);
}

int64_t monotonic_ns() {  // Python's time.monotonic_ns
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
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
  // shapes [b, 3] float64: temperature, top_k and top_p. At temperature 0 it is the most likely token;
  // the others are drawn: with races[i] [counts[i], vocab] float32 if it has any numbers, else with
  // uniforms [b, counts[0]] float64.
  // Returns the tokens [b, counts[0]] int64 and, if uniforms were used, the probabilities
  // [b, counts[0], vocab] from which they were drawn. Behind a token that cannot be chosen
  // (kNotFinite) come only others of its kind.
  std::tuple<Tensor, Tensor> chain(Tensor tokens, Tensor slots, const Tensor& first_lengths, Tensor starts, Tensor columns, const Tensor& counts,
                                   const Tensor& shapes, const Tensor& uniforms, const std::vector<Tensor>& races) {
    const int64_t *count = counts.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
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
        Shape shape(shapes.const_data_ptr<double>() + 3 * i);
        if (shape.temperature == 0.0f) {
          id[at] = most_likely(of_row, vocab);
        } else if (races[i].numel()) {
          id[at] = winner(of_row, vocab, shape, races[i].const_data_ptr<float>() + depth * vocab);
        } else {
          float* of_token = probabilities.mutable_data_ptr<float>() + at * vocab;
          id[at] = drawn(of_row, vocab, shape, uniforms.const_data_ptr<double>()[at], of_token);
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
    return {ids, probabilities.defined() ? probabilities : at::empty({0}, shapes.options())};
  }

  // Verify steps of one sequence, one after the other without a return to Python. This is the target;
  // `drafts` are the draft engine, or none: then each step is plain.
  //
  // tokens [t] int64: the sequence's last ones, as far as the draft has not read them; the target has
  // read all but the last. slot, target_length, draft_length: what the caches hold. end_ids [e] int64.
  // It ends after max_steps or max_ns, at an end token, without room, behind logits that are not
  // finite, and when `stop` is not 0. flags [3] int64: stop; done, which counts the rows; and the
  // tokens to draft in a step, which are fewer where less than `room` is left, and draft_len at most.
  // Another thread may set the first and the last one.
  //
  // shape: as in `chain`, [1, 3]. At temperature 0 the most likely tokens are kept. Above, it is
  // speculative sampling with uniforms [n] float64, for each step those of its drafts, then those of
  // its decision; or, if it has any rows, with races [n, vocab] float32, one for each position, shared
  // by draft and target. It ends before a step for which they do not suffice, and before one that is
  // kUndecided.
  //
  // steps [max_steps, draft_len + 7] int64 gets a row for each step: tokens to draft, drafted ones,
  // accepted ones, ns in the draft, ns in the target, the time when its tokens were known, the drafts,
  // and the target's own token (kNotFinite: none). After each row but one that ends the burst, event_fd
  // is written to, if it is one. Returns done, the tokens that both caches hold then, and whether the
  // next step was undecided.
  std::tuple<int64_t, int64_t, int64_t, bool> burst(const std::optional<c10::intrusive_ptr<Package>>& drafts, Tensor tokens, int64_t slot,
                                                    int64_t target_length, int64_t draft_length, int64_t draft_len, int64_t room, const Tensor& end_ids,
                                                    int64_t max_steps, int64_t max_ns, Tensor steps, Tensor flags, int64_t event_fd, const Tensor& shape,
                                                    const Tensor& uniforms, const Tensor& races) {
    const int64_t *ends = end_ids.const_data_ptr<int64_t>(), started = monotonic_ns();
    int64_t *stop = flags.mutable_data_ptr<int64_t>(), *done = stop + 1, *asked = stop + 2, width = steps.size(1), count = 0;
    auto numbers = tokens.options();
    Tensor slots = at::full({1}, slot, numbers), zero = at::zeros({1}, numbers), most = at::empty({1}, numbers);
    Tensor place = at::empty({1}, numbers), last = at::empty({1}, numbers), every = at::arange(draft_len + 1, numbers);
    Tensor no_uniforms = at::empty({0}, shape.options());
    const std::vector<Tensor> no_race{at::empty({0}, numbers.dtype(at::kFloat))};
    const Shape of_tokens(shape.const_data_ptr<double>());
    bool is_greedy = of_tokens.temperature == 0.0f, has_races = races.numel() > 0, draws = !is_greedy && !has_races;
    bool goes_on = room > 0, is_undecided = false;
    int64_t used = 0;  // of the uniforms, or of the races
    while (goes_on && count < max_steps && monotonic_ns() - started < max_ns && !__atomic_load_n(stop, __ATOMIC_RELAXED)) {
      int64_t* step = steps.mutable_data_ptr<int64_t>() + count * width;
      int64_t wanted = drafts ? std::min({draft_len, room - 1, __atomic_load_n(asked, __ATOMIC_RELAXED)}) : 0;
      int64_t begun = monotonic_ns(), drafted = 0;
      if (draws && used + 2 * wanted + 1 > uniforms.size(0)) break;
      if (has_races && used + wanted + 1 > races.size(0)) break;
      Tensor block = at::empty({wanted + 1}, numbers), probabilities;
      int64_t* fed = block.mutable_data_ptr<int64_t>();
      fed[0] = tokens.const_data_ptr<int64_t>()[tokens.size(0) - 1];
      if (wanted > 0) {
        *most.mutable_data_ptr<int64_t>() = wanted;
        *place.mutable_data_ptr<int64_t>() = draft_length;
        *last.mutable_data_ptr<int64_t>() = tokens.size(0) - 1;
        Tensor of_drafts = draws ? uniforms.narrow(0, used, wanted).unsqueeze(0) : no_uniforms;
        try {
          Tensor ids;
          std::tie(ids, probabilities) = (*drafts)->chain(tokens, slots, place, zero, last, most, shape, of_drafts,
                                                          has_races ? std::vector<Tensor>{races.narrow(0, used, wanted)} : no_race);
          const int64_t* id = ids.const_data_ptr<int64_t>();
          while (drafted < wanted && id[drafted] != kNotFinite) ++drafted;
          std::copy_n(id, drafted, fed + 1);
        } catch (const std::exception&) {
          // A draft that fails has no drafts; the target goes on, and this is the burst's last step.
        }
      }
      int64_t proposed = monotonic_ns();
      *place.mutable_data_ptr<int64_t>() = target_length;
      Tensor logits = run(block.narrow(0, 0, drafted + 1), slots, place, zero, every.narrow(0, 0, drafted + 1));
      const float* rows = logits.const_data_ptr<float>();
      int64_t vocab = logits.size(1);
      auto [accepted, token] =
          is_greedy   ? match(fed + 1, drafted, [&](int64_t i) { return most_likely(rows + i * vocab, vocab); })
          : has_races ? match(fed + 1, drafted, [&](int64_t i) { return winner(rows + i * vocab, vocab, of_tokens, races.const_data_ptr<float>() + (used + i) * vocab, kRatioDoubt); })
                      : reject(fed + 1, drafted, drafted ? probabilities.const_data_ptr<float>() : nullptr, rows, vocab, of_tokens,
                               uniforms.const_data_ptr<double>() + used + wanted);
      if ((is_undecided = token == kUndecided)) break;
      used += draws ? wanted + drafted + 1 : accepted + 1;
      int64_t known = monotonic_ns();
      const int64_t head[] = {wanted, drafted, accepted, proposed - begun, known - proposed, known};
      step = std::copy_n(fed + 1, drafted, std::copy_n(head, std::size(head), step));
      *step = token;
      // The draft has read its own drafts but the last.
      if (wanted > 0) draft_length += tokens.size(0) + std::min(accepted, drafted - 1);
      target_length += accepted + 1;
      room -= accepted + 1;
      goes_on = token != kNotFinite && room > 0 && drafted == wanted;
      for (int64_t i = 0; i <= accepted && goes_on; ++i)
        goes_on = std::find(ends, ends + end_ids.size(0), i < accepted ? fed[i + 1] : token) == ends + end_ids.size(0);
      bool is_behind = wanted > 0 && accepted == drafted && drafted > 0;  // the last draft was not read
      // Without drafts the draft falls behind, which is caught up with when it is asked again.
      Tensor next = at::empty({is_behind ? 2 : 1}, numbers);
      int64_t* unread = next.mutable_data_ptr<int64_t>();
      if (is_behind) *unread++ = fed[drafted];
      *unread = token;
      tokens = next;
      __atomic_store_n(done, ++count, __ATOMIC_RELEASE);
      const uint64_t one = 1;  // the caller takes the last row: to wake another thread would hold it up
      if (event_fd >= 0 && goes_on && count < max_steps && write(static_cast<int>(event_fd), &one, sizeof one) < 0) event_fd = -1;
    }
    return {count, target_length, draft_length, is_undecided};
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
      .def("chain", &Package::chain)
      .def("burst", &Package::burst);
}
