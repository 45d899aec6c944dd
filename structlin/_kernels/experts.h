// A mixture: which rows of x each expert reads, and what its products are worth to y.
//
//     y_t = bias + sum_k w_tk W_e x_t        e = chosen_tk
//
// A row is one token at one of its experts. Rows are sorted by expert, those of an expert by token. They are never
// stored: x_t is read where it lies when a tile is packed, and w_tk W_e x_t is added to y_t when the tile is unpacked.
// An expert has a token once and the experts run one after the other, so no two threads add to the same y_t, and the
// order of a sum is that of the experts' numbers.

#pragma once
#include <concepts>

#include "layer.h"

namespace {

constexpr Index MAX_TILE_WIDTH = 64;  // rows that a prefetch may look ahead

// The rows of x, dy, y or dx of a layer alone: one after the other
template <class S>
struct Rows {
  S* at;
  Index features;
  S* row(Index i) const { return at + i * features; }
  Rows from(Index first) const { return {row(first), features}; }
};

// The rows of some tokens
template <class S>
struct TokenRows {
  S* at;
  Index features;
  const Index* tokens;
  S* row(Index i) const { return at + tokens[i] * features; }
  TokenRows from(Index first) const { return {at, features, tokens + first}; }
};

// The same, each times its weight
template <class S>
struct WeightedRows {
  S* at;
  Index features;
  const Index* tokens;
  const Wide<std::remove_const_t<S>>* weights;
  S* row(Index i) const { return at + tokens[i] * features; }
  WeightedRows from(Index first) const { return {at, features, tokens + first, weights + first}; }
};

// The rows of some tokens, to each of which a row is added times its weight; and, if there is an x, the inner product
// of what is added with x's row
template <class S>
struct RowSums {
  S* at;
  Index features;
  const Index* tokens;
  const Wide<S>* weights;
  const uint8_t* fresh;         // whether the sum has no value yet
  const S* start;               // the row at which each sum starts
  const S* x = nullptr;         // rows of the same tokens
  Wide<S>* products = nullptr;  // one for each row
  S* row(Index i) const { return at + tokens[i] * features; }
  const S* before(Index i) const { return fresh[i] ? start : row(i); }
  RowSums from(Index first) const {
    return {
        at, features, tokens + first, weights + first, fresh + first, start, x, products ? products + first : nullptr};
  }
};

// What tiles are packed from and unpacked to: row i, and the rows from one on
template <class Any>
concept AnyRows = requires(const Any rows, Index i) {
  *rows.row(i);
  rows.features;
  { rows.from(i) } -> std::same_as<Any>;
};
template <class Any>
concept OfTokens = AnyRows<Any> && requires(Any rows) { rows.tokens; };
template <class Any>
concept Weighted = OfTokens<Any> && requires(Any rows) { rows.weights; };

// Where a token's experts say that its rows are
template <class F>
struct Routes {
  Indices loads;               // rows of each expert
  Indices tokens, places;      // of each row: its token, and where its weight stands among those given
  std::vector<F> weights;      // of each row
  std::vector<uint8_t> fresh;  // whether no row before has the same token

  // Sort by counting. `chosen` and `given` are (tokens, top_k).
  Routes(const Tensor& given, const Tensor& chosen, Index count, Index experts) {
    STD_TORCH_CHECK(chosen.dim() == 2 && chosen.size(0) == count && sizes_of(given) == sizes_of(chosen),
                    "structlin: weights and chosen must be (tokens, top_k), of as many tokens as x");
    STD_TORCH_CHECK(chosen.scalar_type() == ScalarType::Long, "structlin: chosen must be int64");
    STD_TORCH_CHECK(given.scalar_type() == (std::is_same_v<F, double> ? ScalarType::Double : ScalarType::Float),
                    "structlin: the weights must be float32, or float64 where x is");
    const Tensor held = contiguous_of(chosen), held_weights = contiguous_of(given);
    const int64_t* expert = static_cast<const int64_t*>(held.data_ptr());
    const F* weight = static_cast<const F*>(held_weights.data_ptr());
    const Index rows = chosen.numel(), top = chosen.size(1);
    STD_TORCH_CHECK(top > 0 || !count, "structlin: a token needs an expert");
    loads.assign(experts, 0);
    for (Index i = 0; i < rows; i++) {
      STD_TORCH_CHECK(0 <= expert[i] && expert[i] < experts, "structlin: there is no expert ", expert[i],
                      "; there are ", experts);
      for (Index j = i - i % top; j < i; j++)
        STD_TORCH_CHECK(expert[j] != expert[i], "structlin: a token has expert ", expert[i], " twice");
      loads[expert[i]]++;
    }
    Indices next(experts, 0);
    for (Index e = 1; e < experts; e++) next[e] = next[e - 1] + loads[e - 1];
    tokens.assign(rows + MAX_TILE_WIDTH + 1, 0);  // a prefetch looks beyond the last
    places.resize(rows), weights.resize(rows), fresh.resize(rows);
    for (Index i = 0; i < rows; i++) {
      const Index row = next[expert[i]]++, token = i / top;
      tokens[row] = token, places[row] = i, weights[row] = weight[i];
      fresh[row] = expert[i] == *std::min_element(expert + token * top, expert + (token + 1) * top);
    }
  }
};

template <class F>
std::optional<Routes<F>> read_routes(const std::optional<Tensor>& weights, const std::optional<Tensor>& chosen,
                                     Index tokens, Index experts) {
  STD_TORCH_CHECK(weights.has_value() == chosen.has_value(), "structlin: weights and chosen belong together");
  return chosen ? std::optional<Routes<F>>(std::in_place, *weights, *chosen, tokens, experts) : std::nullopt;
}

}  // namespace
