// Numbers and vectors of them: how they are stored, widened, transposed, and multiplied.
//
// A number is stored as S, computed with as Wide<S> (float, or double for double) and, in a tile of activations, held
// as Held<S>: as it is stored where the CPU multiplies such numbers in groups of GROUP<S>, else wide.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Index = int64_t;

#if defined(__AVX512F__)
constexpr int BYTES = 64;  // of a vector
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define STRUCTLIN_BF16 1  // a product of 16 pairs of bfloat16, summed in float32
#else
#define STRUCTLIN_BF16 0
#endif

template <class F>
constexpr int LANES = BYTES / sizeof(F);

template <class F>
struct VectorOf {
  typedef F type __attribute__((vector_size(BYTES)));
};
template <class F>
using Vector = typename VectorOf<F>::type;

#if defined(__aarch64__)
using NativeHalf = __fp16;
#elif !defined(__F16C__)  // which needs none; nor has clang one before version 15
using NativeHalf = _Float16;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
template <class S>
using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;  // what S is computed in

// Products of numbers stored as S are summed GROUP<S> at a time, of numbers held in a tile as Held<S>
template <class S>
constexpr bool GROUPED = STRUCTLIN_BF16 && std::is_same_v<S, BFloat16>;
template <class S>
constexpr int GROUP = GROUPED<S> ? 2 : 1;
template <class S>
using Held = std::conditional_t<GROUPED<S>, S, Wide<S>>;

typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));

template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Vector<float> widen(const Halves& h, BFloat16) {
  return bits_of<Vector<float>>(__builtin_convertvector(h, Words) << 16);
}

inline Halves narrow(const Vector<float>& v, BFloat16) {  // to the nearest, ties to even
#if STRUCTLIN_BF16
  return bits_of<Halves>(_mm512_cvtneps_pbh(bits_of<__m512>(v)));
#else
  Words u = bits_of<Words>(v);
  Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  Words nan = (u >> 16) | 0x40;
  return __builtin_convertvector((u & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
#endif
}

inline Vector<float> widen(const Halves& h, Float16) {
#if defined(__AVX512F__)
  return bits_of<Vector<float>>(_mm512_cvtph_ps(bits_of<__m256i>(h)));
#elif defined(__F16C__) && defined(__AVX__)
  return bits_of<Vector<float>>(_mm256_cvtph_ps(bits_of<__m128i>(h)));
#else
  Vector<float> v;
  for (int i = 0; i < LANES<float>; i++) v[i] = static_cast<float>(bits_of<NativeHalf>(static_cast<uint16_t>(h[i])));
  return v;
#endif
}

inline Halves narrow(const Vector<float>& v, Float16) {
#if defined(__AVX512F__)
  return bits_of<Halves>(_mm512_cvtps_ph(bits_of<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX__)
  return bits_of<Halves>(_mm256_cvtps_ph(bits_of<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  Halves h;
  for (int i = 0; i < LANES<float>; i++) h[i] = bits_of<uint16_t>(static_cast<NativeHalf>(v[i]));
  return h;
#endif
}

template <class S>
inline Vector<Wide<S>> load(const S* p) {
  if constexpr (sizeof(S) == 2) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return widen(h, S{});
  } else {
    Vector<S> v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
}

template <class S>
inline void store(S* p, const Vector<Wide<S>>& v) {
  if constexpr (sizeof(S) == 2) {
    Halves h = narrow(v, S{});
    std::memcpy(p, &h, sizeof h);
  } else {
    std::memcpy(p, &v, sizeof v);
  }
}

// N vectors side by side
template <int N, class S>
inline void store_row(S* p, const Vector<Wide<S>>* v) {
#if STRUCTLIN_BF16
  if constexpr (N == 2 && std::is_same_v<S, BFloat16>)
    return _mm512_storeu_si512(p, bits_of<__m512i>(_mm512_cvtne2ps_pbh(bits_of<__m512>(v[1]), bits_of<__m512>(v[0]))));
#endif
  for (int n = 0; n < N; n++) store(p + n * LANES<Wide<S>>, v[n]);
}

// The first `count` lanes; the others are zero
template <class S>
inline Vector<Wide<S>> load(const S* p, Index count) {
  if (count >= LANES<Wide<S>>) return load(p);
#if defined(__AVX512F__)
  if constexpr (sizeof(S) == 4) return bits_of<Vector<S>>(_mm512_maskz_loadu_ps((1 << count) - 1, p));
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(S) == 2) return widen(bits_of<Halves>(_mm256_maskz_loadu_epi16((1 << count) - 1, p)), S{});
#endif
  S lanes[LANES<Wide<S>>] = {};
  for (Index i = 0; i < count; i++) lanes[i] = p[i];
  return load(lanes);
}

// `count` numbers of int8 as F; the other lanes are zero
template <class F>
inline Vector<F> load_bytes(const int8_t* p, Index count) {
  constexpr int L = LANES<F>;
  int8_t lanes[L] = {};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(F) == 4) {
    const __m128i* all = reinterpret_cast<const __m128i*>(p);
    const __m128i bytes = count < L ? _mm_maskz_loadu_epi8((1 << count) - 1, p) : _mm_loadu_si128(all);
    return bits_of<Vector<F>>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  }
#endif
  for (Index i = 0; i < count && count < L; i++) lanes[i] = p[i];
  if (count < L) p = lanes;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(F) == 4) return bits_of<Vector<F>>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p))));
#elif defined(__SSE4_1__) && !defined(__AVX__)
  if constexpr (sizeof(F) == 4) return bits_of<Vector<F>>(_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_loadu_si32(p))));
#endif
  Vector<F> v;
  for (int i = 0; i < L; i++) v[i] = p[i];
  return v;
}

template <class S>
inline void store(S* p, const Vector<Wide<S>>& v, Index count) {
  if (count >= LANES<Wide<S>>) return store(p, v);
#if defined(__AVX512F__)
  if constexpr (sizeof(S) == 4) return _mm512_mask_storeu_ps(p, (1 << count) - 1, bits_of<__m512>(v));
#endif
  S lanes[LANES<Wide<S>>];
  store(lanes, v);
  for (Index i = 0; i < count; i++) p[i] = lanes[i];
}

template <class F>
inline F sum_lanes(const Vector<F>& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(F) == 4) return _mm512_reduce_add_ps(bits_of<__m512>(v));
  else return _mm512_reduce_add_pd(bits_of<__m512d>(v));
#else
  F total = 0;
  for (int i = 0; i < LANES<F>; i++) total += v[i];
  return total;
#endif
}

inline Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }

// ---- what one instruction multiplies and sums -------------------------------------------------------------

struct Pair {  // two rows of B as one
  BFloat16 of[2];
};

// broadcast: GROUP numbers of A in every lane. load_a_row: a row of them. load_b: GROUP rows of B, interleaved, a lane
// for each column. `whole` is false where the last row of the group is missing.
template <class F>
inline F broadcast(const F* a, bool) {
  return *a;
}
template <class S>
inline Vector<Wide<S>> load_a_row(const S* a, Index count) {
  return load(a, count);
}
template <class S>
inline Vector<Wide<S>> load_b(const S* b, Index, bool, Index count = LANES<Wide<S>>) {
  return load(b, count);
}
// sum += left * right in one rounding; `left` is a number or a vector. Left to itself a compiler tuned for some CPUs
// takes two instructions where sums form a chain, which is slower and gives other bits in one microkernel than in
// another.
template <class V, class Left>
inline void add_product(V& sum, const Left& left, const V& right) {
  const V factor = left - V{};
#if defined(__FMA__)
  constexpr bool single = sizeof(factor[0]) == 4;
#if defined(__AVX512F__)
  if constexpr (single && sizeof(V) == 64)
    sum = bits_of<V>(_mm512_fmadd_ps(bits_of<__m512>(factor), bits_of<__m512>(right), bits_of<__m512>(sum)));
  else if constexpr (sizeof(V) == 64)
    sum = bits_of<V>(_mm512_fmadd_pd(bits_of<__m512d>(factor), bits_of<__m512d>(right), bits_of<__m512d>(sum)));
#else
  if constexpr (single && sizeof(V) == 32)
    sum = bits_of<V>(_mm256_fmadd_ps(bits_of<__m256>(factor), bits_of<__m256>(right), bits_of<__m256>(sum)));
  else if constexpr (sizeof(V) == 32)
    sum = bits_of<V>(_mm256_fmadd_pd(bits_of<__m256d>(factor), bits_of<__m256d>(right), bits_of<__m256d>(sum)));
#endif
#else
  sum += factor * right;
#endif
}

#if STRUCTLIN_BF16
inline __m512bh broadcast(const BFloat16* a, bool whole) {
  uint32_t pair = a->bits;
  if (whole) std::memcpy(&pair, a, sizeof pair);
  return bits_of<__m512bh>(_mm512_set1_epi32(pair));
}

inline __m512bh load_a_row(const BFloat16* a, Index count) {
  return bits_of<__m512bh>(_mm512_maskz_loadu_epi16(count < 32 ? (uint32_t{1} << count) - 1 : ~uint32_t{0}, a));
}

inline __m512i interleave(const __m512i& first, const __m512i& second) {  // the lower halves of two vectors of bfloat16
  Words order;
  for (uint32_t i = 0; i < 16; i++) order[i] = i | (32 + i) << 16;
  return _mm512_permutex2var_epi16(first, bits_of<__m512i>(order), second);
}

inline __m512bh load_b(const BFloat16* b, Index row, bool whole, Index count = 16) {
  const __mmask16 some = count < 16 ? (1 << count) - 1 : 0xffff;
  auto at = [&](const BFloat16* p) { return _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(some, p)); };
  return bits_of<__m512bh>(interleave(at(b), whole ? at(b + row) : _mm512_setzero_si512()));
}

inline __m512bh load_b(const Pair* b, Index, bool) { return bits_of<__m512bh>(_mm512_loadu_si512(b)); }

inline void add_product(Vector<float>& sum, const __m512bh& left, const __m512bh& right) {
  sum = bits_of<Vector<float>>(_mm512_dpbf16_ps(bits_of<__m512>(sum), left, right));
}
#endif

// A row of a core, stored as S or as int8, to be multiplied by numbers held as Held<S>
template <class S, class C>
inline auto load_core_row(const C* p, Index count) {
  if constexpr (std::is_same_v<C, S>) return load_a_row(p, count);
#if STRUCTLIN_BF16
  else if constexpr (GROUPED<S>) {
    const Vector<float> low = load_bytes<float>(p, count),
                        high = load_bytes<float>(p + 16, std::max<Index>(0, count - 16));
    return bits_of<__m512bh>(_mm512_cvtne2ps_pbh(bits_of<__m512>(high), bits_of<__m512>(low)));
  }
#endif
  else
    return load_bytes<Wide<S>>(p, count);
}

// Interleave two rows of sums as one of pairs, where S goes in pairs; store `count` numbers of such a vector
template <class S>
inline Vector<Wide<S>> interleave_rows(const Vector<Wide<S>>& first, [[maybe_unused]] const Vector<Wide<S>>& second) {
#if STRUCTLIN_BF16
  if constexpr (GROUPED<S>) {
    __m256i low = bits_of<__m256i>(narrow(first, S{})), high = bits_of<__m256i>(narrow(second, S{}));
    return bits_of<Vector<float>>(interleave(_mm512_castsi256_si512(low), _mm512_castsi256_si512(high)));
  }
#endif
  return first;
}

template <class S>
inline void store_interleaved(S* p, const Vector<Wide<S>>& v, Index count) {
#if STRUCTLIN_BF16
  if constexpr (GROUPED<S>)
    return _mm512_mask_storeu_epi16(p, count < 32 ? (uint32_t{1} << count) - 1 : ~uint32_t{0}, bits_of<__m512i>(v));
#endif
  store(p, v, count);
}

// ---- transposing ------------------------------------------------------------------------------------------

// The first halves of two vectors, one lane of each in turn; with START = LANES / 2, the second halves
template <class F, int START, int... I>
inline Vector<F> mix(const Vector<F>& a, const Vector<F>& b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (START + I / 2 + I % 2 * LANES<F>)...);
#else
  using Order = Vector<std::conditional_t<sizeof(F) == 4, int32_t, int64_t>>;
  return __builtin_shuffle(a, b, Order{(START + I / 2 + I % 2 * LANES<F>)...});
#endif
}

// The vectors of a square, as its columns
template <class F>
inline void transpose_square(Vector<F>* v) {
  constexpr int L = LANES<F>;
  constexpr std::make_integer_sequence<int, L> lanes;
#pragma GCC unroll 4
  for (int step = 1; step < L; step *= 2) {
    Vector<F> w[L];
#pragma GCC unroll 8
    for (int i = 0; i < L / 2; i++) {
      w[2 * i] = mix<F, 0>(v[i], v[i + L / 2], lanes);
      w[2 * i + 1] = mix<F, L / 2>(v[i], v[i + L / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) v[i] = w[i];
  }
}

// The sums of the lanes of each of LANES vectors
template <class F, int HALF = LANES<F> / 2>
__attribute__((always_inline)) inline Vector<F> sum_each(Vector<F>* v) {
  constexpr std::make_integer_sequence<int, LANES<F>> lanes;
#pragma GCC unroll 8
  for (int i = 0; i < HALF; i++)
    v[i] = mix<F, 0>(v[i], v[i + HALF], lanes) + mix<F, LANES<F> / 2>(v[i], v[i + HALF], lanes);
  if constexpr (HALF > 1) return sum_each<F, HALF / 2>(v);
  return v[0];
}

// A matrix by its columns: `get(i, j, count)` gives `count` numbers of row i from column j on, `put(j, i, v)` takes a
// vector of column j from row i on. Rows up to `padded` are zero. W vectors of a row are read together, a line of the
// cache. A whole square is code of its own, without a branch inside, so that it stays in registers.
template <class F, int W = 1, class Get, class Put>
inline void transpose(Index rows, Index columns, Index padded, const Get& get, const Put& put) {
  constexpr int L = LANES<F>;
  for (Index j = 0; j < columns; j += W * L)
    for (Index i = 0; i < padded; i += L) {
      if (j + W * L <= columns && i + L <= rows) {
        Vector<F> v[W][L];
#pragma GCC unroll 16
        for (int k = 0; k < L; k++)
          for (int w = 0; w < W; w++) v[w][k] = get(i + k, j + w * L, L);
        for (int w = 0; w < W; w++) {
          transpose_square<F>(v[w]);
#pragma GCC unroll 16
          for (int k = 0; k < L; k++) put(j + w * L + k, i, v[w][k]);
        }
        continue;
      }
      for (Index f = j; f < std::min(j + W * L, columns); f += L) {
        Vector<F> v[L];
        const Index width = std::min<Index>(L, columns - f);
        for (int k = 0; k < L; k++) v[k] = i + k < rows ? get(i + k, f, width) : Vector<F>{};
        transpose_square<F>(v);
        for (Index k = 0; k < width; k++) put(f + k, i, v[k]);
      }
    }
}

}  // namespace
