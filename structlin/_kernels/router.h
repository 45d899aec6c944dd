// A mixture's routing: the experts of each token, their weights, and what is small where all experts get tokens.
//
//     chosen = the top_k largest logits        weights = softmax(logits[chosen])        p = softmax(logits)
//     balance = experts * sum_e mean_t(p_te) f_e + z * mean_t(size_t^2)
//     slope = dbalance / dlogits = p / tokens * (experts * (f - sum_e p_e f_e) + 2 z size)
//
// f are the experts' shares of all that is chosen, size is logsumexp(logits). The first of equal logits is the larger,
// and NaN is larger than any number. What a token adds to the balance is kept, and summed in the tokens' order.

#pragma once
#include "layer.h"

namespace {

constexpr Index MIN_LOGITS_PER_THREAD = 1 << 12;

// The largest logits of a token, the largest first, and their softmax
template <class F>
void choose_experts(const F* logits, Index experts, Index top_k, int64_t* chosen, F* weights) {
  auto larger = [](F a, F b) { return a > b || (std::isnan(a) && !std::isnan(b)); };
  F sum = 0;
  for (Index k = 0; k < top_k; k++) {
    Index best = -1;
    for (Index e = 0; e < experts; e++)
      if (std::find(chosen, chosen + k, e) == chosen + k && (best < 0 || larger(logits[e], logits[best]))) best = e;
    chosen[k] = best;
    weights[k] = k ? std::exp(logits[best] - logits[*chosen]) : F{1};
    sum += weights[k];
  }
  for (Index k = 0; k < top_k; k++) weights[k] /= sum;
}

// What a token adds to the balance, times `tokens`; and its slope
template <class F>
double add_balance(const F* logits, const std::vector<double>& shares, double z, Index tokens, F* slope) {
  const Index experts = shares.size();
  const double largest = *std::max_element(logits, logits + experts);
  double sum = 0, along = 0;
  for (Index e = 0; e < experts; e++) sum += slope[e] = std::exp(static_cast<F>(logits[e] - largest));
  for (Index e = 0; e < experts; e++) along += shares[e] * (slope[e] /= sum);
  const double size = largest + std::log(sum);
  for (Index e = 0; e < experts; e++) slope[e] *= (experts * (shares[e] - along) + 2 * z * size) / tokens;
  return experts * along + z * size * size;
}

template <class F>
std::vector<Tensor> route_by(const Tensor& given, Index top_k, double z, bool balanced) {
  const Tensor logits = contiguous_of(given);
  const Index tokens = logits.size(0), experts = logits.size(1);
  Tensor weights = make_tensor(logits, {tokens, top_k}),
         chosen = make_tensor(aoti_torch_dtype_int64(), {tokens, top_k});
  Tensor balance = make_tensor(logits, {}), slope = make_tensor(logits, {balanced ? tokens : 0, experts});
  const F* from = static_cast<const F*>(logits.data_ptr());
  F* weight = static_cast<F*>(weights.mutable_data_ptr());
  int64_t* expert = static_cast<int64_t*>(chosen.mutable_data_ptr());
  F* slopes = static_cast<F*>(slope.mutable_data_ptr());
  const Index each = std::max<Index>(1, MIN_LOGITS_PER_THREAD / std::max<Index>(1, experts));
  parallel_for(0, tokens, each, [&](Index begin, Index end) {
    for (Index t = begin; t < end; t++)
      choose_experts(from + t * experts, experts, top_k, expert + t * top_k, weight + t * top_k);
  });
  double total = 0;
  if (balanced && tokens) {
    std::vector<double> shares(experts, 0), added(tokens);
    for (Index i = 0; i < tokens * top_k; i++) shares[expert[i]] += 1.0 / (tokens * top_k);
    parallel_for(0, tokens, each, [&](Index begin, Index end) {
      for (Index t = begin; t < end; t++)
        added[t] = add_balance(from + t * experts, shares, z, tokens, slopes + t * experts);
    });
    total = std::accumulate(added.begin(), added.end(), 0.0) / tokens;
  }
  *static_cast<F*>(balance.mutable_data_ptr()) = total;
  return {weights, chosen, balance, slope};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route(const Tensor& logits, int64_t top_k, double z, bool balanced) {
  STD_TORCH_CHECK(logits.dim() == 2 && 0 < top_k && top_k <= logits.size(1),
                  "structlin: logits must be (tokens, experts), with at least top_k=", top_k, " experts");
  const bool wide = logits.scalar_type() == ScalarType::Double;
  STD_TORCH_CHECK(wide || logits.scalar_type() == ScalarType::Float, "structlin: logits must be float32 or float64");
  auto found = wide ? route_by<double>(logits, top_k, z, balanced) : route_by<float>(logits, top_k, z, balanced);
  return {found[0], found[1], found[2], found[3]};
}

}  // namespace
