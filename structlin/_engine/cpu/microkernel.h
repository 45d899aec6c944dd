// The one product of which every core is made, forward and backward:
//
//     C[m, 0:n] (+)= factor * sum_k A[m, k] B[k, 0:n]
//
// A is read as scalars, at any strides; C and B as vectors, their rows anywhere.
//
// Where the CPU multiplies bfloat16 in pairs, A[m, k:k+2] meets B[k:k+2, 0:n] in one instruction.

#pragma once
#include "layer.h"

namespace {

template <class H>
struct Scalars {  // A[m, k]; of numbers that go in groups, column is 1
  const H* at;
  Index row, column;
  const H* operator()(Index m, Index k) const { return at + m * row + k * column; }
};
template <class B>
struct Vectors {  // B[k, 0:n]
  const B* at;
  Index row;
};
template <class T>
struct Result {  // C[m, 0:n], to which a number of each row is added
  T* at;
  const Index* rows;
  const Wide<T>* row_bias = nullptr;
};

// Where the rows of a matrix begin that lie `row` numbers apart
inline Indices row_starts(Index rows, Index row) {
  Indices starts(rows);
  for (Index m = 0; m < rows; m++) starts[m] = m * row;
  return starts;
}

// The microkernel: R rows from m on and N vectors from n on; B is rows of Held<S>, or of pairs of them
template <class S, int R, int N, bool ADD, class T, class B>
inline void microkernel(const Result<T>& c, const Scalars<Held<S>>& a, const Vectors<B>& b, Index m, Index n,
                        Index depth, Wide<S> factor) {
  using F = Wide<S>;
  constexpr int G = GROUP<S>, DOWN = std::is_same_v<B, Pair> ? 1 : G;
  const Scalars<Held<S>> rows{a(m, 0), a.row, a.column};
  const B* columns = b.at + n;
  const Index b_row = b.row;
  Vector<F> sum[R][N] = {};
  auto add = [&](Index k, bool whole) __attribute__((always_inline)) {
    decltype(load_b(columns, b_row, whole)) right[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) right[j] = load_b(columns + k / G * DOWN * b_row + j * LANES<F>, b_row, whole);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      auto left = broadcast(rows(i, k), whole);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) add_product(sum[i][j], left, right[j]);
    }
  };
  Index k = 0;
  for (; k + G <= depth; k += G) add(k, true);
  if (G > 1 && k < depth) add(k, false);
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    T* to = c.at + c.rows[m + i] + n;
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) {
      sum[i][j] *= factor;
      if (ADD) sum[i][j] += load(to + j * LANES<F>);
      if (c.row_bias) sum[i][j] += c.row_bias[m + i];
    }
    store_row<N>(to, sum[i]);
  }
}

template <class S, int N, bool ADD, class T, class B>
inline void multiply_columns(const Result<T>& c, const Scalars<Held<S>>& a, const Vectors<B>& b, Index n, Index height,
                             Index depth, Wide<S> factor) {
  Index m = 0;
  const auto is_eight = [&] { return MR == 6 && height - m == 8; };  // two fours are faster than a six and a two
  for (; m + MR <= height && !is_eight(); m += MR) microkernel<S, MR, N, ADD>(c, a, b, m, n, depth, factor);
  for (; m + 4 <= height; m += 4) microkernel<S, 4, N, ADD>(c, a, b, m, n, depth, factor);
  for (; m + 2 <= height; m += 2) microkernel<S, 2, N, ADD>(c, a, b, m, n, depth, factor);
  if (m < height) microkernel<S, 1, N, ADD>(c, a, b, m, n, depth, factor);
}

#if STRUCTLIN_AMX
// B as rows of pairs, for the matrix unit
inline Vectors<Pair> pairs_of(const Vectors<Pair>& b, Index, Index) { return b; }
inline Vectors<Pair> pairs_of(const Vectors<BFloat16>& b, Index width, Index depth) {
  thread_local Numbers<Pair> memory;
  Pair* pairs = memory.reserve(width * depth / 2);
  for (Index k = 0; k < depth; k += 2)
    for (Index n = 0; n < width; n += SIDE)
      _mm512_store_si512(pairs + k / 2 * width + n, bits_of<__m512i>(load_b(b.at + k * b.row + n, b.row, true)));
  return {pairs, width};
}
#endif

// C (+)= factor A B, of `height` rows and `width` columns, which are whole vectors
template <class S, bool ADD, class T, class B>
void multiply_into(Result<T> c, Scalars<Held<S>> a, const Vectors<B>& b, Index height, Index width, Index depth,
                   Wide<S> factor) {
  constexpr int L = LANES<Wide<S>>;
#if STRUCTLIN_AMX
  if constexpr (GROUPED<S>)
    if (height >= SIDE && depth_of_tiles(depth) && has_matrix_unit()) {  // the rest of the rows is left for below
      const Vectors<Pair> pairs = pairs_of(b, width, depth);
      const Index done = multiply_by_tiles<ADD>(c.at, c.rows, c.row_bias, a.at, a.row, pairs.at, pairs.row, height,
                                                width, depth, factor);
      c.rows += done, a.at += done * a.row, height -= done;
      if (c.row_bias) c.row_bias += done;
    }
#endif
  Index n = 0;
  for (; n + NR * L <= width; n += NR * L) multiply_columns<S, NR, ADD>(c, a, b, n, height, depth, factor);
  if (n < width) multiply_columns<S, 1, ADD>(c, a, b, n, height, depth, factor);
}

}  // namespace
