// The polar factors of many small matrices X, each taken through all steps of an iteration while it lies in cache.
//
//     Y = X / |X|_F, or its transpose where X is wide
//     G = Y^T Y        Y <- Y (a I + b G + c G^2) for every (a, b, c)
//
// So G is of the short side, and vectors run along it. |X|_F neither overflows nor underflows: it is summed in float64
// where it might. Each matrix is one thread's: its factor has the same bits on any number of threads, and in any
// company.

#pragma once
#include "microkernel.h"

namespace {

struct Iteration {
  const std::vector<double>& coefficients;  // (a, b, c) of every step
  Index m, n;                               // of X
  Index side = std::min(m, n), length = std::max(m, n);
  Index width = round_up(side, LANES<float>);  // the short side in whole vectors
  Indices rows = row_starts(length, width);    // where those of Y, G and the polynomial begin

  Index work() const { return coefficients.size() / 3 * side * side * (2 * length + side); }  // multiply-adds

  void run(const float* x, float* factor) const {
    thread_local Numbers<float> memory;
    const Index area = length * width, square = side * width;
    float *y = memory.reserve(2 * area + 2 * square), *next = y + area, *gram = next + area,
          *polynomial = gram + square;
    pack(x, next, y);
    for (auto step = coefficients.begin(); step != coefficients.end(); step += 3, std::swap(y, next)) {
      const float a = step[0], b = step[1], c = step[2];
      multiply<false>(gram, {y, 1, width}, y, side, length, 1);
      for (Index i = 0; i < square; i++) polynomial[i] = b * gram[i];
      for (Index i = 0; i < side; i++) polynomial[i * width + i] += a;
      multiply<true>(polynomial, {gram, width, 1}, gram, side, side, c);
      multiply<false>(next, {y, width, 1}, polynomial, length, side, 1);
    }
    unpack(y, factor);
  }

  // to (+)= factor * a b, of whole rows
  template <bool ADD>
  void multiply(float* to, const Scalars<float>& a, const float* b, Index height, Index depth, float factor) const {
    multiply_into<float, ADD, float, float>({to, rows.data()}, a, {b, width}, height, width, depth, factor);
  }

  void pack(const float* x, float* scaled, float* y) const {
    const double square = inner_product(x, x, m * n), scale = square == 0 ? 1 : 1 / std::sqrt(square);
    for (Index i = 0; i < m * n; i++) scaled[i] = static_cast<float>(x[i] * scale);
    if (m < n)
      transpose<float>(
          m, n, width, [&](Index i, Index j, Index count) { return load(scaled + i * n + j, count); },
          [&](Index j, Index i, const Vector<float>& v) { store(y + j * width + i, v); });
    else
      for (Index i = 0; i < m; i++)
        for (Index j = 0; j < width; j += LANES<float>) store(y + i * width + j, load(scaled + i * n + j, n - j));
  }

  void unpack(const float* y, float* factor) const {
    if (m < n)
      transpose<float>(
          n, m, n, [&](Index j, Index i, Index count) { return load(y + j * width + i, count); },
          [&](Index i, Index j, const Vector<float>& v) { store(factor + i * n + j, v, n - j); });
    else
      for (Index i = 0; i < m; i++)
        for (Index j = 0; j < n; j += LANES<float>) store(factor + i * n + j, load(y + i * width + j), n - j);
  }
};

std::vector<Tensor> polar(std::vector<Tensor> stacks, std::vector<double> coefficients) {
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, "structlin: every step has three coefficients");
  std::vector<Tensor> factors;
  for (const Tensor& given : stacks) {
    STD_TORCH_CHECK(given.dim() == 3 && given.scalar_type() == ScalarType::Float,
                    "structlin: polar takes stacks of float32 matrices");
    const Tensor x = contiguous_of(given);
    factors.push_back(make_tensor(x, sizes_of(x)));
    const Index size = x.size(1) * x.size(2);
    const Iteration iteration{coefficients, x.size(1), x.size(2)};
    const float* from = static_cast<const float*>(x.data_ptr());
    float* to = static_cast<float*>(factors.back().mutable_data_ptr());
    parallel_for(0, x.size(0), std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / std::max<Index>(1, iteration.work())),
                 [&](Index begin, Index end) {
                   for (Index i = begin * size; i < end * size; i += size) iteration.run(from + i, to + i);
                 });
  }
  return factors;
}

}  // namespace
