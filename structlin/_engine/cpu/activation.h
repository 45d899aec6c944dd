// What may stand between two cores: h -> silu(h) / sqrt(E silu(z)^2) for z ~ N(0, 1), which keeps unit RMS.

#pragma once
#include "vectors.h"

namespace {

enum Between : Index { NOTHING = 0, SILU = 1 };  // ACTIVATIONS in axes.py

constexpr double SILU_RMS = 0.5964692111227136;  // as in structure.py

// exp(x) of x <= 0 as 2^n exp(r), |r| <= ln(2) / 2, by as many terms of the Taylor series of exp(r) as S has digits
// for. NaN stays NaN; what would be a denormal is zero.
template <class S>
inline Vector<Wide<S>> exp_of_negative(Vector<Wide<S>> x) {
  using F = Wide<S>;
  constexpr bool single = sizeof(F) == 4;
  using Integer = std::conditional_t<single, int32_t, int64_t>;
  typedef Integer Integers __attribute__((vector_size(BYTES)));
  constexpr int DEGREE = sizeof(S) == 2 ? 4 : single ? 7 : 13, MANTISSA = single ? 23 : 52, BIAS = single ? 127 : 1023;
  constexpr F MAGIC = static_cast<F>(3 * (Integer{1} << (MANTISSA - 1)));  // a number plus this is an integer plus this
  constexpr F LN2 = single ? 0x1.63p-1 : 0x1.62e4p-1;                      // few digits, so that n times it is exact
  constexpr F LN2_REST = static_cast<F>(0.693147180559945309417L - static_cast<long double>(LN2));
  constexpr F LOG2_E = 1.44269504088896340736L;
  const Vector<F> least = Vector<F>{} - (single ? F(88) : F(709));  // where n = -BIAS, of which 2^n is zero below
  x = x < least ? least : x;
  const Vector<F> magic = Vector<F>{} + MAGIC, shifted = magic + LOG2_E * x, n = shifted - magic;
  const Vector<F> r = (x - LN2 * n) - LN2_REST * n;
  F inverse[DEGREE + 1] = {1};  // 1 / k!, known to the compiler
  for (int k = 1; k <= DEGREE; k++) inverse[k] = inverse[k - 1] / k;
  Vector<F> sum = Vector<F>{} + inverse[DEGREE];
#pragma GCC unroll 16
  for (int k = DEGREE - 1; k >= 0; k--) sum = inverse[k] + r * sum;
  const Integers power = bits_of<Integers>(shifted) - bits_of<Integers>(magic) + Integer{BIAS};
  return sum * bits_of<Vector<F>>(power << Integer{MANTISSA});
}

// 1 / d for d from 1 to 2
template <class S>
inline Vector<Wide<S>> invert(const Vector<Wide<S>>& d) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Wide<S>) == 4) {
    const Vector<float> r = bits_of<Vector<float>>(_mm512_rcp14_ps(bits_of<__m512>(d)));
    return sizeof(S) == 2 ? r : r + r * (1 - d * r);
  }
#endif
  return 1 / d;
}

// The activation of h in its place, and its slope there if `SLOPE` asks for it
template <class S, bool SLOPE>
inline void activate(Vector<Wide<S>>& h, [[maybe_unused]] Vector<Wide<S>>& slope) {
  using F = Wide<S>;
  constexpr F scale = static_cast<F>(1 / SILU_RMS);
  const Vector<F> t = exp_of_negative<S>(h < 0 ? h : -h), large = invert<S>(1 + t), small = t * large;
  const Vector<F> s = h < 0 ? small : large, rest = h < 0 ? large : small;  // 1 / (1 + exp(-h)), and 1 less that
  if constexpr (SLOPE) slope = scale * s * (1 + h * rest);
  h = scale * h * s;
}

// The same of `count` numbers in a row, two vectors at a time
template <class S>
inline void activate_row(S* h, Index count, S* slopes = nullptr) {
  using F = Wide<S>;
  constexpr Index L = LANES<F>;
  Index i = 0;
  for (; i + 2 * L <= count; i += 2 * L) {
    Vector<F> v[2] = {load(h + i), load(h + i + L)}, slope[2];
    for (int n = 0; n < 2; n++) (slopes ? activate<S, true> : activate<S, false>)(v[n], slope[n]);
    if (slopes) store_row<2>(slopes + i, slope);
    store_row<2>(h + i, v);
  }
  for (; i < count; i += L) {
    Vector<F> v = load(h + i, count - i), slope;
    activate<S, true>(v, slope);
    if (slopes) store(slopes + i, slope, count - i);
    store(h + i, v, count - i);
  }
}

}  // namespace
