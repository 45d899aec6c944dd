// SOAP's step of many small blocks (optim/_soap.py), each while it lies in cache. Of a block G (m, n):
//
//     find    G' = Ql^T G Qr    V' = beta V + (1 - beta) G'^2    N = Ql^T U Qr, where U = B + weight (G - B)
//             D = Ql (N / max(length sqrt(V'), floor)) Qr^T, shortened to the norm `longest`
//     keep    L <- beta L + (1 - beta) / n G G^T (m, m)         R <- beta R + (1 - beta) / m G^T G (n, n)
//             where bases turn: Q <- the Q of a QR of (L Q) P, where P sorts the diagonal of Q^T L Q, and V by P
//
// A side without a basis stays as it is. Each block is one thread's: its numbers have the same bits on any number of
// threads, and in any company. Rows that are read as vectors are `width` apart, whole vectors, with zeros at the end.

#pragma once
#include <cfloat>
#include <limits>
#include <numeric>

#include "microkernel.h"

namespace {

using Floats = Vector<float>;

constexpr float LARGEST = 0x1p50f;             // of a block's numbers: float32 holds their squares (WINDOW of _soap.py)
constexpr float SMALLEST_ROOT = 1e-4f;         // a root of V counts as at least so much of the largest (FLOOR)
constexpr float SMALLEST_QUOTIENT = 0x1p-40f;  // and as so much of the momentum's largest entry (SMALL)

inline Floats larger(const Floats& a, const Floats& b) { return b > a ? b : a; }  // NaN where a is

inline float largest_lane(const Floats& v) {
  float largest = v[0];
  for (int i = 1; i < LANES<float>; i++) largest = std::max<float>(largest, v[i]);
  return largest;
}

inline Floats roots_of(const Floats& v) {
#if defined(__AVX512F__)
  return bits_of<Floats>(_mm512_sqrt_ps(bits_of<__m512>(v)));
#elif defined(__AVX__)
  return bits_of<Floats>(_mm256_sqrt_ps(bits_of<__m256>(v)));
#else
  Floats roots;
  for (int i = 0; i < LANES<float>; i++) roots[i] = std::sqrt(v[i]);
  return roots;
#endif
}

// `rows` of `columns` numbers, as rows of whole vectors: in `memory`, unless they are such rows
inline const float* pad(const float* x, Index rows, Index columns, Index width, float* memory) {
  if (columns == width) return x;
  for (Index i = 0; i < rows; i++)
    for (Index j = 0; j < width; j += LANES<float>)
      store(memory + i * width + j, load(x + i * columns + j, columns - j));
  return memory;
}

// to = factor * from, without the zeros at the end of rows
inline void unpad(float* to, const float* from, Index rows, Index columns, Index width, float factor = 1) {
  for (Index i = 0; i < rows; i++)
    for (Index j = 0; j < columns; j += LANES<float>)
      store(to + i * columns + j, factor * load(from + i * width + j), columns - j);
}

// The transpose of x (rows, columns), its rows `width` apart
inline void transpose_into(float* to, const float* x, Index rows, Index columns, Index width) {
  transpose<float>(
      rows, columns, width, [&](Index i, Index j, Index count) { return load(x + i * columns + j, count); },
      [&](Index j, Index i, const Floats& v) { store(to + j * width + i, v); });
}

// ---- the Q of a QR ----------------------------------------------------------------------------------------

// N vectors of columns from `a` on: A <- A - v (tau v^T A), of the rows from `first` on
template <int N>
inline void reflect_columns(float* a, Index width, const float* v, float tau, Index first, Index size) {
  Floats sum[N] = {};
  for (Index k = first; k < size; k++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) add_product(sum[n], v[k], load(a + k * width + n * LANES<float>));
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) sum[n] *= -tau;
  for (Index k = first; k < size; k++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float* to = a + k * width + n * LANES<float>;
      Floats row = load(to);
      add_product(row, v[k], sum[n]);
      store(to, row);
    }
}

inline void reflect(float* a, Index width, const float* v, float tau, Index first, Index size, Index column) {
  constexpr Index L = LANES<float>;
  Index j = column / L * L;
  for (; j + 4 * L <= width; j += 4 * L) reflect_columns<4>(a + j, width, v, tau, first, size);
  if (j + 2 * L <= width) reflect_columns<2>(a + j, width, v, tau, first, size), j += 2 * L;
  if (j < width) reflect_columns<1>(a + j, width, v, tau, first, size);
}

// Q of the QR of A (size, size), in place: the product of the reflections H_j = I - tau_j v_j v_j^T, where v_j is zero
// above j and 1 at j, and H_j zeroes the column j of H_(j-1) ... H_0 A below its diagonal. `reflections` has room for
// all v_j and tau_j. Columns that were done before share a vector with others; nobody reads them again.
inline void orthonormalize(float* a, Index size, Index width, float* reflections) {
  float* taus = reflections + size * size;
  for (Index j = 0; j < size; j++) {
    float* v = reflections + j * size;
    double squares = 0;  // neither over- nor underflows
    for (Index k = j + 1; k < size; k++) {
      v[k] = a[k * width + j];
      squares += static_cast<double>(v[k]) * v[k];
    }
    taus[j] = 0;
    if (squares == 0) continue;  // as LAPACK does: H_j = I
    const double diagonal = a[j * width + j], norm = std::sqrt(diagonal * diagonal + squares),
                 reflected = diagonal < 0 ? norm : -norm;
    taus[j] = static_cast<float>((reflected - diagonal) / reflected);
    v[j] = 1;
    for (Index k = j + 1; k < size; k++) v[k] = static_cast<float>(v[k] / (diagonal - reflected));
    if (j + 1 < size) reflect(a, width, v, taus[j], j, size, j + 1);
  }
  std::fill(a, a + size * width, 0.0f);
  for (Index j = 0; j < size; j++) a[j * width + j] = 1;
  for (Index j = size - 1; j >= 0; j--)
    if (taus[j] != 0) reflect(a, width, reflections + j * size, taus[j], j, size, j);
}

// ---- a block ----------------------------------------------------------------------------------------------

struct SoapBlocks {
  Index m, n;
  Index longer = std::max(m, n);
  Index m_width = round_up(m, LANES<float>), n_width = round_up(n, LANES<float>);  // of rows of m and n numbers
  Index area = longer * std::max(m_width, n_width);                                // room for any of the matrices
  Indices m_rows = row_starts(longer, m_width), n_rows = row_starts(2 * m, n_width), n_square = row_starts(n, n_width);

  Index work() const { return std::max<Index>(1, m * n * (m + n)); }  // multiply-adds of a rotation

  // Whether all numbers fit the unit 1: float32 holds their squares
  bool find(const float* g, const float* b, const float* v, const float* left, const float* right, float weight,
            float beta, float length, float longest, float* direction, float* squares) const {
    constexpr Index L = LANES<float>;
    thread_local Numbers<float> memory;
    float *pair = memory.reserve(6 * area), *next = pair + 2 * area, *basis = next + 2 * area, *turned = basis + area;
    // G and U (2 m, n), and both in the bases
    float *u = pair + m * n_width, *next_u = next + m * n_width;
    for (Index i = 0; i < m; i++)
      for (Index j = 0; j < n_width; j += L) {
        const Floats gradient = load(g + i * n + j, n - j), average = load(b + i * n + j, n - j);
        store(pair + i * n_width + j, gradient);
        store(u + i * n_width + j, average + weight * (gradient - average));
      }
    const double norm_of_g = std::sqrt(inner_product(pair, pair, m * n_width)),
                 norm_of_u = std::sqrt(inner_product(u, u, m * n_width));
    bool fits = norm_of_g > std::sqrt(m * n) / LARGEST && norm_of_g < LARGEST && norm_of_u < LARGEST;  // no NaN does
    if (left) {
      multiply(next, n_rows, {left, 1, m}, pair, m, n_width, m);
      multiply(next_u, n_rows, {left, 1, m}, u, m, n_width, m);
      std::swap(pair, next);
    }
    if (right) {
      multiply(next, n_rows, {pair, n_width, 1}, pad(right, n, n, n_width, basis), 2 * m, n_width, n);
      std::swap(pair, next);
    }

    float* rotated = pair + m * n_width;  // N
    Floats largest_square{}, largest_entry{};
    for (Index i = 0; i < m; i++)
      for (Index j = 0; j < n_width; j += L) {
        const Floats gradient = load(pair + i * n_width + j), entry = load(rotated + i * n_width + j);
        Floats square = load(v + i * n + j, n - j);
        square += (1 - beta) * (gradient * gradient - square);
        store(pair + i * n_width + j, square);
        if (j < n) store(squares + i * n + j, square, n - j);
        largest_square = larger(square, largest_square);
        largest_entry = larger(entry, larger(-entry, largest_entry));
      }
    const float largest = largest_lane(largest_square);
    fits = fits && largest < LARGEST * LARGEST;
    const float floor = std::max(
        {SMALLEST_ROOT * length * std::sqrt(largest), SMALLEST_QUOTIENT * largest_lane(largest_entry), FLT_MIN});
    const Floats floors = floor - Floats{};
    for (Index i = 0; i < m * n_width; i += L)
      store(rotated + i, load(rotated + i) / larger(length * roots_of(load(pair + i)), floors));

    const float* d = rotated;
    if (left) {
      multiply(next, n_rows, {left, m, 1}, d, m, n_width, m);
      d = next;
    }
    if (right) {
      transpose_into(turned, right, n, n, n_width);
      multiply(basis, n_rows, {d, n_width, 1}, turned, m, n_width, n);
      d = basis;
    }
    const double shorter = longest / std::sqrt(inner_product(d, d, m * n_width));
    unpad(direction, d, m, n, n_width, shorter < 1 ? static_cast<float>(shorter) : 1);
    return fits;
  }

  struct Side {  // of each block a factor and a basis; null where there is none
    float *factor, *basis;
  };

  void keep(const float* g, const float* squares, float* v, const Side& left, const Side& right, float beta,
            bool turns) const {
    thread_local Numbers<float> memory;
    float* other = memory.reserve(5 * area + 2 * longer);
    float* rest = other + area;
    Indices order_of_rows(m), order_of_columns(n);
    std::iota(order_of_rows.begin(), order_of_rows.end(), 0);
    std::iota(order_of_columns.begin(), order_of_columns.end(), 0);
    if (left.factor) {
      transpose_into(other, g, m, n, m_width);
      average(left, {g, n, 1}, other, m, n, m_width, m_rows, beta, turns, order_of_rows, rest);
    }
    if (right.factor)
      average(right, {g, 1, n}, pad(g, m, n, n_width, other), n, m, n_width, n_square, beta, turns, order_of_columns,
              rest);
    for (Index i = 0; i < m; i++) {
      const float* from = squares + order_of_rows[i] * n;
      for (Index j = 0; j < n; j++) v[i * n + j] = from[order_of_columns[j]];
    }
  }

 private:
  template <bool ADD = false>
  static void multiply(float* to, const Indices& rows, const Scalars<float>& a, const float* b, Index height,
                       Index width, Index depth, float factor = 1) {
    multiply_into<float, ADD, float, float>({to, rows.data()}, a, {b, width}, height, width, depth, factor);
  }

  // The factor (size, size), by the products of A (size, depth) and its transpose, and perhaps the next basis
  static void average(const Side& side, const Scalars<float>& a, const float* transposed, Index size, Index depth,
                      Index width, const Indices& rows, float beta, bool turns, Indices& order, float* memory) {
    constexpr Index L = LANES<float>;
    const Index square = size * width;
    float *factor = memory, *product = factor + square;
    for (Index i = 0; i < size; i++)
      for (Index j = 0; j < width; j += L)
        store(factor + i * width + j, beta * load(side.factor + i * size + j, size - j));
    multiply<true>(factor, rows, a, transposed, size, width, depth, (1 - beta) / depth);
    unpad(side.factor, factor, size, size, width);
    if (!turns) return;

    float *sorted = product + square, *estimates = sorted + square;
    const float* basis = pad(side.basis, size, size, width, sorted);
    multiply(product, rows, {factor, width, 1}, basis, size, width, size);
    for (Index j = 0; j < width; j += L) {
      Floats sum{};
      for (Index k = 0; k < size; k++) sum += load(basis + k * width + j) * load(product + k * width + j);
      store(estimates + j, sum);
    }
    std::stable_sort(order.begin(), order.end(), [&](Index i, Index j) {  // NaN first, as in torch
      return estimates[i] > estimates[j] || (std::isnan(estimates[i]) && !std::isnan(estimates[j]));
    });
    for (Index i = 0; i < size; i++) {
      for (Index j = 0; j < size; j++) sorted[i * width + j] = product[i * width + order[j]];
      std::fill(sorted + i * width + size, sorted + (i + 1) * width, 0.0f);
    }
    float* reflections = factor;  // and the product's memory
    orthonormalize(sorted, size, width, reflections);
    unpad(side.basis, sorted, size, size, width);
  }
};

// ---- the operators ----------------------------------------------------------------------------------------

// The numbers of float32 blocks (batch, rows, columns), in their order; null where there is no tensor
inline float* blocks_of(const std::optional<Tensor>& tensor, Index batch, Index rows, Index columns) {
  if (!tensor) return nullptr;
  const bool fits = tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous() &&
                    sizes_of(*tensor) == Indices({batch, rows, columns});
  STD_TORCH_CHECK(fits, "structlin: SOAP takes contiguous float32 blocks of one shape");
  return static_cast<float*>(tensor->mutable_data_ptr());
}

inline SoapBlocks shape_of(const Tensor& gradient) {
  STD_TORCH_CHECK(gradient.dim() == 3, "structlin: SOAP takes stacks of blocks");
  return SoapBlocks{gradient.size(1), gradient.size(2)};
}

// `run(block)` for each, threads over blocks
template <class Run>
void over_soap_blocks(const SoapBlocks& blocks, Index batch, const Run& run) {
  parallel_for(0, batch, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / blocks.work()), [&](Index begin, Index end) {
    for (Index block = begin; block < end; block++) run(block);
  });
}

inline float* block_at(float* numbers, Index block, Index size) { return numbers ? numbers + block * size : nullptr; }

std::tuple<Tensor, Tensor, bool> soap_find(const Tensor& gradient, const Tensor& average, const Tensor& squares,
                                           std::optional<Tensor> left, std::optional<Tensor> right, double weight,
                                           double beta, double length, double longest) {
  const SoapBlocks blocks = shape_of(gradient);
  const Index batch = gradient.size(0), m = blocks.m, n = blocks.n;
  const float *g = blocks_of(gradient, batch, m, n), *b = blocks_of(average, batch, m, n),
              *v = blocks_of(squares, batch, m, n);
  float *l = blocks_of(left, batch, m, m), *r = blocks_of(right, batch, n, n);
  const Tensor directions = make_tensor(gradient, sizes_of(gradient)),
               next_squares = make_tensor(gradient, sizes_of(gradient));
  float *to = blocks_of(directions, batch, m, n), *next = blocks_of(next_squares, batch, m, n);
  std::vector<char> fits(batch);
  over_soap_blocks(blocks, batch, [&](Index block) {
    const Index at = block * m * n;
    fits[block] = blocks.find(g + at, b + at, v + at, block_at(l, block, m * m), block_at(r, block, n * n), weight,
                              beta, length, longest, to + at, next + at);
  });
  return {directions, next_squares, std::find(fits.begin(), fits.end(), 0) == fits.end()};
}

void soap_keep(const Tensor& gradient, const Tensor& squares, Tensor kept_squares, std::optional<Tensor> left,
               std::optional<Tensor> left_basis, std::optional<Tensor> right, std::optional<Tensor> right_basis,
               double beta, bool turns) {
  const SoapBlocks blocks = shape_of(gradient);
  const Index batch = gradient.size(0), m = blocks.m, n = blocks.n;
  STD_TORCH_CHECK(left.has_value() == left_basis.has_value() && right.has_value() == right_basis.has_value(),
                  "structlin: a factor has a basis");
  const float *g = blocks_of(gradient, batch, m, n), *from = blocks_of(squares, batch, m, n);
  float* v = blocks_of(kept_squares, batch, m, n);
  float *l = blocks_of(left, batch, m, m), *ql = blocks_of(left_basis, batch, m, m);
  float *r = blocks_of(right, batch, n, n), *qr = blocks_of(right_basis, batch, n, n);
  over_soap_blocks(blocks, batch, [&](Index block) {
    const Index at = block * m * n;
    blocks.keep(g + at, from + at, v + at, {block_at(l, block, m * m), block_at(ql, block, m * m)},
                {block_at(r, block, n * n), block_at(qr, block, n * n)}, beta, turns);
  });
}

}  // namespace
