// A structured layer on a CPU, forward and backward, in one pass over the tokens.
//
//     h_0 = x        h_(t+1)[b, r, o] = sum_i core_t[b, o, i] h_t[b, r, i]        y = h_last + bias
//     g_last = dy    g_t[b, r, i] = sum_o core_t[b, o, i] g_(t+1)[b, r, o]        dx = g_0
//     dcore_t[b, o, i] = sum over tokens and r of g_(t+1)[b, r, o] h_t[b, r, i]
//
// A tile of a few dozen tokens goes through all cores while it lies in cache. There an activation lies as one row for each
// feature, with the tokens running along it, so that a permutation between two cores is only a matter of which row is
// written, and blocks of any size are products of one kind:
//
//     C[m, 0:n] (+)= factor * sum_k A[m, k] B[k, 0:n]        A scalars at any strides, C and B rows in vectors
//
//     forward    m fan-out   k fan-in    n tokens    A the core as it is stored
//     backward   m fan-in    k fan-out   n tokens    A the core, seen transposed
//     dcore      m fan-out   k tokens    n fan-in    A the rows of g, B the rows of h transposed (or the other way round)
//
// Of very few tokens a vector would be mostly empty; there it runs along fan-in, in dot products with the core's rows.
// A core is stored (batch, fan_out, fan_in). Sums are in float32, for float64 in float64. Every part of the tokens is summed
// by itself and the parts are summed in their order: the same call on as many threads gives the same bits. Only x is saved.
// A core under weight normalisation is multiplied by factor = gain * min(1, sigma / RMS(core)), which is never stored.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using torch::stable::Tensor;
using Index = int64_t;
using Indices = std::vector<Index>;

#if defined(__AVX512F__)
constexpr int BYTES = 64, ROWS = 8;  // of a vector; of C in registers, twice two vectors of each
#elif defined(__AVX__)
constexpr int BYTES = 32, ROWS = 4;
#else
constexpr int BYTES = 16, ROWS = 8;
#endif
constexpr Index LARGE = 1 << 20;  // bytes of a core that does not stay in the second cache
constexpr Index MOST = 1 << 30;   // bytes of all threads' sums of gradients
constexpr Index DEEP = 256;      // rows of B that stay in the first cache
constexpr Index GRAIN = 1 << 16;  // multiply-adds that are worth a thread

// ---- vectors and numbers ---------------------------------------------------------------------------------------------

template <class F>
constexpr int LANES = BYTES / sizeof(F);

template <class F>
struct VectorOf {
  typedef F type __attribute__((vector_size(BYTES)));
};
template <class F>
using Vector = typename VectorOf<F>::type;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
template <class S>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <class S>
using Wide = typename WideOf<S>::type;  // what numbers stored as S are computed in

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
  Words u = bits_of<Words>(v);
  Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  Words nan = (u >> 16) | 0x40;
  return __builtin_convertvector((u & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
}

inline Vector<float> widen(const Halves& h, Float16) {
#if defined(__AVX512F__)
  return bits_of<Vector<float>>(_mm512_cvtph_ps(bits_of<__m256i>(h)));
#elif defined(__F16C__) && defined(__AVX__)
  return bits_of<Vector<float>>(_mm256_cvtph_ps(bits_of<__m128i>(h)));
#else
  Vector<float> v;
  for (int i = 0; i < LANES<float>; i++) v[i] = static_cast<float>(bits_of<_Float16>(static_cast<uint16_t>(h[i])));
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
  for (int i = 0; i < LANES<float>; i++) h[i] = bits_of<uint16_t>(static_cast<_Float16>(v[i]));
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

template <class S>
inline Vector<Wide<S>> load(const S* p, Index count) {  // the first `count` lanes; the others are zero
  if (count >= LANES<Wide<S>>) return load(p);
  S lanes[LANES<Wide<S>>] = {};
  for (Index i = 0; i < count; i++) lanes[i] = p[i];
  return load(lanes);
}

template <class S>
inline void store(S* p, const Vector<Wide<S>>& v, Index count) {
  if (count >= LANES<Wide<S>>) return store(p, v);
  S lanes[LANES<Wide<S>>];
  store(lanes, v);
  for (Index i = 0; i < count; i++) p[i] = lanes[i];
}

template <class F>
using Lanes = Vector<std::conditional_t<sizeof(F) == 4, int32_t, int64_t>>;  // indices of lanes

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

// Denormal numbers are taken for zero while one of these lives: they may cost a hundred times as much as others.
struct FlushDenormals {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(saved | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" ::"r"(saved | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved)); }
#endif
};

// ---- memory ----------------------------------------------------------------------------------------------------------

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Numbers at a multiple of a vector, with no value yet
template <class F>
struct Numbers {
  std::unique_ptr<F, Free> held;
  Index size = 0;
  F* reserve(Index n) {
    if (n > size) {
      held.reset();
      held.reset(static_cast<F*>(std::aligned_alloc(64, round_up(n * sizeof(F), 64))));
      size = held ? n : 0;
      STD_TORCH_CHECK(held, "structlin: out of memory");
    }
    return held.get();
  }
};

// ---- the products ----------------------------------------------------------------------------------------------------

// R rows and N vectors of C
template <class F, int R, int N, bool ADD>
inline void multiply_tile(const F* a, Index a_m, Index a_k, const F* b, Index b_k, F* c, const Index* rows, Index depth,
                          F factor) {
  Vector<F> sum[R][N] = {};
  for (Index k = 0; k < depth; k++) {
    Vector<F> right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = load(b + k * b_k + n * LANES<F>);
#pragma GCC unroll 8
    for (int m = 0; m < R; m++) {
      F left = a[m * a_m + k * a_k];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      F* to = c + rows[m] + n * LANES<F>;
      Vector<F> total = factor * sum[m][n];
      store(to, ADD ? load(to) + total : total);
    }
}

template <class F, int N, bool ADD>
inline void multiply_columns(Index height, const F* a, Index a_m, Index a_k, const F* b, Index b_k, F* c,
                             const Index* rows, Index depth, F factor) {
  Index m = 0;
  for (; m + ROWS <= height; m += ROWS)
    multiply_tile<F, ROWS, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c, rows + m, depth, factor);
  for (; m + 4 <= height; m += 4)
    multiply_tile<F, 4, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c, rows + m, depth, factor);
  for (; m + 2 <= height; m += 2)
    multiply_tile<F, 2, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c, rows + m, depth, factor);
  if (m < height) multiply_tile<F, 1, N, ADD>(a + m * a_m, a_m, a_k, b, b_k, c, rows + m, depth, factor);
}

// C[m, 0:width] (+)= factor * sum_k A[m, k] B[k, 0:width]: row m of C at c + rows[m]; width in whole vectors
template <class F, bool ADD>
void multiply_into(F* c, const Index* rows, Index height, Index width, const F* a, Index a_m, Index a_k, const F* b,
                   Index b_k, Index depth, F factor) {
  Index n = 0;
  for (; n + 2 * LANES<F> <= width; n += 2 * LANES<F>)
    multiply_columns<F, 2, ADD>(height, a, a_m, a_k, b + n, b_k, c + n, rows, depth, factor);
  if (n < width) multiply_columns<F, 1, ADD>(height, a, a_m, a_k, b + n, b_k, c + n, rows, depth, factor);
}

template <class F>
void multiply_block(F* c, const Index* rows, Index height, Index width, const F* a, Index a_m, Index a_k, const F* b,
                    Index b_k, Index depth, F factor, bool add) {
  for (Index k = 0; k < std::max<Index>(depth, 1); k += DEEP, add = true) {
    Index part = std::min(DEEP, depth - k);
    auto run = add ? multiply_into<F, true> : multiply_into<F, false>;
    run(c, rows, height, width, a + k * a_k, a_m, a_k, b + k * b_k, b_k, part, factor);
  }
}

// The vectors of a square, as its columns
template <class F>
inline void transpose_square(Vector<F>* v) {
  Lanes<F> low, high;
  for (int i = 0; i < LANES<F>; i++) {
    low[i] = i / 2 + i % 2 * LANES<F>;
    high[i] = low[i] + LANES<F> / 2;
  }
#pragma GCC unroll 4
  for (int step = 1; step < LANES<F>; step *= 2) {
    Vector<F> w[LANES<F>];
#pragma GCC unroll 8
    for (int i = 0; i < LANES<F> / 2; i++) {
      w[2 * i] = __builtin_shuffle(v[i], v[i + LANES<F> / 2], low);
      w[2 * i + 1] = __builtin_shuffle(v[i], v[i + LANES<F> / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES<F>; i++) v[i] = w[i];
  }
}

// ---- the program -----------------------------------------------------------------------------------------------------

// Of the indices of one side of a core: where each value of batch, repeat and fan lies among the features of a token
struct Offsets {
  Indices batch, repeat, fan;
  Index block(Index pair) const {  // of block and repetition `pair`, numbered batch * repeats + repeat
    Index repeats = repeat.size();
    return batch[pair / repeats] + repeat[pair % repeats];
  }
};

struct Step {
  Index batch, repeat, in, out;
  Offsets reads, writes;
  Index pairs() const { return batch * repeat; }
  Index params() const { return batch * out * in; }
};

struct Program {
  Index in, out;
  std::vector<Step> steps;

  // in, out, cores, then for each core batch, repeat, fan_in, fan_out and six indices, each a count and (size, stride)s
  explicit Program(const Indices& code) {
    const Index* at = code.data();
    in = *at++, out = *at++;
    steps.resize(*at++);
    for (Step& step : steps) {
      step.batch = *at++, step.repeat = *at++, step.in = *at++, step.out = *at++;
      for (Offsets* side : {&step.reads, &step.writes})
        for (Indices* index : {&side->batch, &side->repeat, &side->fan}) *index = expand(at);
    }
    STD_TORCH_CHECK(at == code.data() + code.size(), "structlin: the code of a program ends in the wrong place");
  }

  static Indices expand(const Index*& at) {
    Indices offsets{0};
    for (Index axes = *at++; axes--; at += 2) {
      Indices finer;
      for (Index offset : offsets)
        for (Index i = 0; i < at[0]; i++) finer.push_back(offset + i * at[1]);
      offsets = std::move(finer);
    }
    return offsets;
  }

  Index flops() const {  // multiply-adds a token
    Index total = 0;
    for (const Step& step : steps) total += step.params() * step.repeat;
    return total;
  }
  Index width() const {  // of the widest activation
    Index widest = std::max(in, out);
    for (const Step& step : steps) widest = std::max(widest, step.pairs() * std::max(step.in, step.out));
    return widest;
  }
};

// Where the features of an activation lie that a core reads block by block: [batch * repeat][fan], a block at a time
struct Layout {
  Index fan, row, block;
  Index at(Index feature) const { return feature / fan * block + feature % fan * row; }
  Offsets at(const Offsets& side) const {  // the digits of a feature's number are apart, so this may be said of each
    Offsets placed(side);
    for (Indices* index : {&placed.batch, &placed.repeat, &placed.fan})
      for (Index& offset : *index) offset = at(offset);
    return placed;
  }
};

// For each feature of x or y, in its own order: where it lies in `layout`, as the core next to it reads it
Indices places_of(const Offsets& side, Index features, const Layout& layout) {
  Indices places(features);
  Index pairs = side.batch.size() * side.repeat.size(), count = side.fan.size();
  for (Index pair = 0; pair < pairs; pair++)
    for (Index i = 0, start = side.block(pair); i < count; i++)
      places[start + side.fan[i]] = pair * layout.block + i * layout.row;
  return places;
}

// ---- one core's parameters -------------------------------------------------------------------------------------------

template <class F>
struct Core {
  const F* data;
  F factor = 1;         // gain * clip
  double gain = 1, clip = 1;  // clip = min(1, sigma / RMS)
  double squares = 0;   // n RMS^2 where it is clipped, or 0
};

// In float64, where the square of no float32 overflows
template <class F>
double sum_products(const F* a, const F* b, Index n) {
  constexpr int D = LANES<double>;
  typedef F Few __attribute__((vector_size(D * sizeof(F))));
  Vector<double> sum[4] = {};
  Index i = 0;
  for (; i + 4 * D <= n; i += 4 * D)
    for (int j = 0; j < 4; j++) {
      Few left, right;
      std::memcpy(&left, a + i + j * D, sizeof left);
      std::memcpy(&right, b + i + j * D, sizeof right);
      sum[j] += __builtin_convertvector(left, Vector<double>) * __builtin_convertvector(right, Vector<double>);
    }
  double total = sum_lanes<double>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < n; i++) total += static_cast<double>(a[i]) * b[i];
  return total;
}

template <class S>
const Wide<S>* widened(const Tensor& tensor, Numbers<Wide<S>>& memory) {
  using F = Wide<S>;
  const S* from = static_cast<const S*>(tensor.data_ptr());
  if constexpr (std::is_same_v<S, F>) return from;
  Index n = tensor.numel();
  F* to = memory.reserve(n);
  parallel_for(0, n, GRAIN, [&](Index begin, Index end) {
    for (Index i = begin; i < end; i += LANES<F>) store(to + i, load(from + i, end - i), end - i);
  });
  return to;
}

Tensor packed(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Everything that a call works on
template <class S>
struct Layer {
  using F = Wide<S>;
  Program program;
  std::vector<Tensor> tensors;
  std::vector<Numbers<F>> memory;
  std::vector<Core<F>> cores;
  Index tokens;

  Layer(const Tensor& x, const std::vector<Tensor>& given, const std::optional<Tensor>& gains,
        const std::vector<double>& sigmas, const Indices& code)
      : program(code), memory(given.size()) {
    STD_TORCH_CHECK(given.size() == program.steps.size() && x.dim() > 0 && x.size(x.dim() - 1) == program.in,
                    "structlin: x or the cores do not fit the program");
    STD_TORCH_CHECK(!gains || (gains->scalar_type() == ScalarType::Double && sigmas.size() == given.size()),
                    "structlin: a float64 gain and a sigma are needed for every core");
    tokens = x.numel() / program.in;
    for (size_t t = 0; t < given.size(); t++) {
      const Step& step = program.steps[t];
      STD_TORCH_CHECK(given[t].numel() == step.params() && given[t].scalar_type() == x.scalar_type(),
                      "structlin: core ", t, " has another size or dtype than the program and x ask for");
      tensors.push_back(packed(given[t]));
      Core<F> core{widened<S>(tensors[t], memory[t])};
      if (gains) {
        double squares = sum_products(core.data, core.data, step.params()), n = step.params();
        core.gain = static_cast<const double*>(gains->data_ptr())[t * gains->stride(0)];
        if (squares >= sigmas[t] * sigmas[t] * n) {
          core.squares = squares;
          core.clip = sigmas[t] / std::sqrt(squares / n);
        }
        core.factor = core.gain * core.clip;
      }
      cores.push_back(core);
    }
  }

  Index threads() const { return std::max<Index>(1, torch::stable::get_num_threads()); }

  // Tokens of a tile: a vector, more where a core is large, so that it is read less often
  Index tile() const {
    Index largest = 0, wide = 2 * LANES<F>;
    for (const Step& step : program.steps) largest = std::max(largest, step.params());
    return largest * sizeof(F) < LARGE || tokens < wide * threads() ? LANES<F> : wide;
  }
};

// ---- a tile of tokens ------------------------------------------------------------------------------------------------

template <class S>
struct Tile {
  using F = Wide<S>;
  static constexpr int L = LANES<F>;
  const Program& program;
  const std::vector<Core<F>>& cores;
  Index size;                        // tokens that a row holds
  std::vector<Layout> h, g;          // of what each core reads, forward and backward
  std::vector<Offsets> writes, reads;  // where it puts its results, forward and backward
  Indices x_places, dy_places;

  Tile(const Layer<S>& layer, Index size) : program(layer.program), cores(layer.cores), size(size) {
    for (const Step& step : program.steps) {  // a vector between two blocks, or many would share a line of the cache
      h.push_back({step.in, size, step.in * size + L});
      g.push_back({step.out, size, step.out * size + L});
    }
    x_places = places_of(program.steps.front().reads, program.in, h.front());
    dy_places = places_of(program.steps.back().writes, program.out, g.back());
    const size_t last = program.steps.size() - 1;
    const Layout y{program.out, size, 0}, dx{program.in, size, 0};
    for (size_t t = 0; t <= last; t++) {
      writes.push_back((t < last ? h[t + 1] : y).at(program.steps[t].writes));
      reads.push_back((t ? g[t - 1] : dx).at(program.steps[t].reads));
    }
  }

  Index area() const {  // of the widest activation
    Index widest = std::max(program.in, program.out) * size;
    for (size_t t = 0; t < h.size(); t++)
      widest = std::max(widest, program.steps[t].pairs() * std::max(h[t].block, g[t].block));
    return widest;
  }

  // n rows of x, `(tokens, features)`, as columns of the tile; the rest of it is zero
  void enter(F* tile, const S* x, Index features, Index n, const Indices& places) const {
    for (Index f = 0; f < features; f += L) {
      Index width = std::min<Index>(L, features - f);
      for (Index t = 0; t < size; t += L) {
        Vector<F> v[L];
        if (width == L && t + L <= n) {
#pragma GCC unroll 16
          for (int i = 0; i < L; i++) v[i] = load(x + (t + i) * features + f);
        } else
          for (int i = 0; i < L; i++) v[i] = t + i < n ? load(x + (t + i) * features + f, width) : Vector<F>{};
        transpose_square<F>(v);
        for (Index i = 0; i < width; i++) store(tile + places[f + i] + t, v[i]);
      }
    }
  }

  // The columns of the tile, whose rows lie in the order of y's features, as n rows of y
  void leave(S* y, const F* tile, Index features, Index n, const F* bias) const {
    for (Index f = 0; f < features; f += L) {
      Index width = std::min<Index>(L, features - f);
      Vector<F> added = bias ? load(bias + f, width) : Vector<F>{};
      for (Index t = 0; t < n; t += L) {
        Vector<F> v[L];
        for (int i = 0; i < L; i++) v[i] = i < width ? load(tile + (f + i) * size + t) : Vector<F>{};
        transpose_square<F>(v);
        for (Index i = 0; i < std::min<Index>(L, n - t); i++) store(y + (t + i) * features + f, v[i] + added, width);
      }
    }
  }

  // h_(t+1) from h_t, for some of the blocks
  void forward(size_t t, F* to, const F* from, Index begin, Index end) const {
    const Step& step = program.steps[t];
    for (Index pair = begin; pair < end; pair++) {
      multiply_block(to + writes[t].block(pair), writes[t].fan.data(), step.out, size,
                     cores[t].data + pair / step.repeat * step.out * step.in, step.in, Index{1},
                     from + pair * h[t].block, size, step.in, cores[t].factor, false);
    }
  }

  // g_t from g_(t+1)
  void backward(size_t t, F* to, const F* from) const {
    const Step& step = program.steps[t];
    for (Index pair = 0; pair < step.pairs(); pair++) {
      multiply_block(to + reads[t].block(pair), reads[t].fan.data(), step.in, size,
                     cores[t].data + pair / step.repeat * step.out * step.in, Index{1}, step.in,
                     from + pair * g[t].block, size, step.out, cores[t].factor, false);
    }
  }
};

// Where the sum of a core's gradient lies: [batch][rows][columns], columns padded to whole vectors
template <class F>
struct Sum {
  bool swapped;  // rows are fan-in, not fan-out
  Index rows, columns, padded, start;
  Indices row_offsets;

  Sum(const Step& step, Index start) : start(start) {
    auto cost = [](Index m, Index n) { return m * round_up(n, LANES<F>) + 8 * n; };  // of products, of transposing
    swapped = cost(step.in, step.out) < cost(step.out, step.in);
    rows = swapped ? step.in : step.out;
    columns = swapped ? step.out : step.in;
    padded = round_up(columns, LANES<F>);
    for (Index m = 0; m < rows; m++) row_offsets.push_back(m * padded);
  }

  // `total += g h'` over the n tokens of a tile
  void add(F* total, const Step& step, const F* g, Index g_block, const F* h, Index h_block, Index size, Index n,
           F* turned) const {
    for (Index pair = 0; pair < step.pairs(); pair++) {
      const F *left = g + pair * g_block, *right = h + pair * h_block;
      if (swapped) std::swap(left, right);
      for (Index f = 0; f < columns; f += LANES<F>)
        for (Index t = 0; t < n; t += LANES<F>) {
          Vector<F> v[LANES<F>];
          for (int i = 0; i < LANES<F>; i++) v[i] = f + i < columns ? load(right + (f + i) * size + t) : Vector<F>{};
          transpose_square<F>(v);
          for (int i = 0; i < LANES<F>; i++) store(turned + (t + i) * padded + f, v[i]);
        }
      multiply_block(total + start + pair / step.repeat * rows * padded, row_offsets.data(), rows, padded, left, size,
                     Index{1}, turned, padded, n, F{1}, true);
    }
  }
};

// ---- forward ---------------------------------------------------------------------------------------------------------

// h_(t+1) from h_t for some rows of a core, `batch * fan_out`, and N tokens, in rows of `width`: vectors run along fan-in
template <class S, int N>
void dot_rows(const Step& step, const S* core, Wide<S> factor, const Wide<S>* h, Wide<S>* next, Index width, Index begin,
              Index end) {
  using F = Wide<S>;
  for (Index row = begin; row < end;) {
    const Index block = row / step.out, stop = std::min(end, (block + 1) * step.out);
    for (Index r = 0; r < step.repeat; r++) {
      const F* from = h + (block * step.repeat + r) * step.in;
      F* to = next + step.writes.batch[block] + step.writes.repeat[r];
      for (Index o = row; o < stop; o++) {
        const S* weights = core + o * step.in;
        Vector<F> sum[N] = {};
        for (Index i = 0; i < step.in; i += LANES<F>) {
          Vector<F> w = load(weights + i, step.in - i);
          for (int t = 0; t < N; t++) sum[t] += w * load(from + t * width + i, step.in - i);
        }
        for (int t = 0; t < N; t++) to[t * width + step.writes.fan[o - block * step.out]] = factor * sum_lanes<F>(sum[t]);
      }
    }
    row = stop;
  }
}

template <class S>
void forward_few(const Layer<S>& layer, const S* x, S* y, const Wide<S>* bias) {
  using F = Wide<S>;
  const Program& program = layer.program;
  Index n = layer.tokens, width = program.width();
  thread_local Numbers<F> memory;
  F *h = memory.reserve(2 * n * width), *next = h + n * width;
  const Indices places = places_of(program.steps.front().reads, program.in, {program.steps[0].in, 1, program.steps[0].in});
  for (Index t = 0; t < n; t++)
    for (Index f = 0; f < program.in; f += LANES<F>) {
      F lanes[LANES<F>];
      store(lanes, load(x + t * program.in + f, program.in - f));
      for (Index i = 0; i < std::min<Index>(LANES<F>, program.in - f); i++) h[t * width + places[f + i]] = lanes[i];
    }
  for (size_t t = 0; t < program.steps.size(); t++, std::swap(h, next)) {
    const Step& step = program.steps[t];
    const S* core = static_cast<const S*>(layer.tensors[t].data_ptr());
    Index grain = std::max<Index>(1, GRAIN / (step.in * step.repeat));
    parallel_for(0, step.batch * step.out, grain, [&](Index begin, Index end) {
      FlushDenormals flush;
      auto run = n == 1 ? dot_rows<S, 1> : n == 2 ? dot_rows<S, 2> : n == 3 ? dot_rows<S, 3> : dot_rows<S, 4>;
      run(step, core, layer.cores[t].factor, h, next, width, begin, end);
    });
  }
  constexpr int L = LANES<F>;
  for (Index t = 0; t < n; t++)
    for (Index f = 0; f < program.out; f += L) {
      Index count = std::min<Index>(L, program.out - f);
      Vector<F> v = load(h + t * width + f, count);
      store(y + t * program.out + f, bias ? v + load(bias + f, count) : v, count);
    }
}

template <class S>
void forward_tiles(const Layer<S>& layer, const S* x, S* y, const Wide<S>* bias) {
  using F = Wide<S>;
  const Program& program = layer.program;
  const Index tokens = layer.tokens, size = layer.tile(), tiles = (tokens + size - 1) / size;
  const Tile<S> tile(layer, size);
  const Index area = tile.area();
  auto run = [&](Index number, bool alone) {
    thread_local Numbers<F> memory;
    F *h = memory.reserve(2 * area), *next = h + area;
    Index first = number * size, n = std::min(size, tokens - first);
    tile.enter(h, x + first * program.in, program.in, n, tile.x_places);
    for (size_t t = 0; t < program.steps.size(); t++, std::swap(h, next)) {
      const Step& step = program.steps[t];
      if (!alone) {
        tile.forward(t, next, h, 0, step.pairs());
        continue;
      }
      parallel_for(0, step.pairs(), std::max<Index>(1, GRAIN / (step.in * step.out * 2)), [&](Index begin, Index end) {
        FlushDenormals flush;
        tile.forward(t, next, h, begin, end);
      });
    }
    tile.leave(y + first * program.out, h, program.out, n, bias);
  };
  if (tiles == 1) return run(0, true);
  parallel_for(0, tiles, 1, [&](Index begin, Index end) {
    FlushDenormals flush;
    for (Index number = begin; number < end; number++) run(number, false);
  });
}

template <class S>
Tensor forward(const Tensor& given, const std::vector<Tensor>& cores, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& code) {
  using F = Wide<S>;
  Tensor x = packed(given);
  Layer<S> layer(x, cores, gains, sigmas, code);
  Indices shape(x.sizes().begin(), x.sizes().end());
  shape.back() = layer.program.out;
  Tensor y = torch::stable::new_empty(x, shape);
  if (!layer.tokens) return y;
  Numbers<F> memory;
  std::optional<Tensor> held;
  const F* added = nullptr;
  if (bias) {
    STD_TORCH_CHECK(bias->numel() == layer.program.out && bias->scalar_type() == x.scalar_type(),
                    "structlin: the bias does not fit x and the program");
    held = packed(*bias);
    added = widened<S>(*held, memory);
  }
  const S* from = static_cast<const S*>(x.data_ptr());
  S* to = static_cast<S*>(y.mutable_data_ptr());
  Index dots = 0;  // multiply-adds, with those of empty lanes and the time that it takes to sum lanes
  for (const Step& step : layer.program.steps)
    dots += step.pairs() * step.out * (round_up(step.in, LANES<F>) + 8 * LANES<F>);
  bool few = layer.tokens <= 4 && dots * layer.tokens < layer.program.flops() * LANES<F>;
  (few ? forward_few<S> : forward_tiles<S>)(layer, from, to, added);
  return y;
}

// ---- backward --------------------------------------------------------------------------------------------------------

enum Wants { OF_X = 1, OF_CORES = 2, OF_GAINS = 4, OF_BIAS = 8 };

template <class S>
std::vector<Tensor> backward(const Tensor& given_dy, const Tensor& given, const std::vector<Tensor>& cores,
                             const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& code,
                             Index wants) {
  using F = Wide<S>;
  Tensor x = packed(given), dy = packed(given_dy);
  Layer<S> layer(x, cores, gains, sigmas, code);
  const Program& program = layer.program;
  const Index count = program.steps.size(), tokens = layer.tokens, size = layer.tile();
  STD_TORCH_CHECK(dy.numel() == tokens * program.out && dy.scalar_type() == x.scalar_type(),
                  "structlin: dy does not fit x and the program");
  const bool of_x = wants & OF_X, of_cores = wants & (OF_CORES | OF_GAINS), of_bias = wants & OF_BIAS;

  std::vector<Tensor> found{torch::stable::new_empty(x, of_x ? x.sizes() : Indices{0})};
  for (const Tensor& core : layer.tensors)
    found.push_back(torch::stable::new_empty(x, wants & OF_CORES ? core.sizes() : Indices{0}));
  found.push_back(torch::stable::new_empty(gains ? *gains : x, {wants & OF_GAINS ? count : 0}));
  found.push_back(torch::stable::new_empty(x, {of_bias ? program.out : 0}));

  std::vector<Sum<F>> sums;
  Index summed = 0, turned = 0, middle = 0;
  for (const Step& step : program.steps) {
    sums.emplace_back(step, summed);
    summed += of_cores ? round_up(step.batch * sums.back().rows * sums.back().padded, 16) : 0;
    turned = std::max(turned, round_up(size, LANES<F>) * sums.back().padded);
  }
  const Index bias_at = summed;
  summed += of_bias ? round_up(program.out, 16) : 0;
  const Tile<S> tile(layer, size);
  const Index area = tile.area();
  for (Index t = 0; t < count; t++) middle += program.steps[t].pairs() * tile.h[t].block;
  const Index tiles = (tokens + size - 1) / size;
  const Index most = MOST / std::max<Index>(1, summed * sizeof(F));
  const Index parts = std::max<Index>(1, std::min({layer.threads(), tiles, most}));
  Numbers<F> totals;
  F* total = totals.reserve(std::max<Index>(1, parts * summed));
  const S* x_data = static_cast<const S*>(x.data_ptr());
  const S* dy_data = static_cast<const S*>(dy.data_ptr());
  S* dx_data = of_x ? static_cast<S*>(found[0].mutable_data_ptr()) : nullptr;

  auto run = [&](Index part) {
    thread_local Numbers<F> memory;
    F* h = memory.reserve(middle + 2 * area + turned);
    F* own = total + part * summed;
    std::fill(own, own + summed, F{0});
    for (Index number = part * tiles / parts; number < (part + 1) * tiles / parts; number++) {
      Index first = number * size, n = std::min(size, tokens - first);
      std::vector<F*> read{h};  // by each core
      for (Index t = 0; t < count; t++) read.push_back(read.back() + program.steps[t].pairs() * tile.h[t].block);
      F *g = read.back(), *next = g + area, *turn = next + area;
      if (of_cores) {
        tile.enter(h, x_data + first * program.in, program.in, n, tile.x_places);
        for (Index t = 0; t + 1 < count; t++) tile.forward(t, read[t + 1], read[t], 0, program.steps[t].pairs());
      }
      const S* dy_rows = dy_data + first * program.out;
      if (of_bias)
        for (Index t = 0; t < n; t++)
          for (Index f = 0; f < program.out; f += LANES<F>) {
            Index width = std::min<Index>(LANES<F>, program.out - f);
            F* to = own + bias_at + f;
            store(to, load(to, width) + load(dy_rows + t * program.out + f, width), width);
          }
      if (!of_x && !of_cores) continue;
      tile.enter(g, dy_rows, program.out, n, tile.dy_places);
      for (Index t = count - 1; t >= 0; t--) {
        if (of_cores) sums[t].add(own, program.steps[t], g, tile.g[t].block, read[t], tile.h[t].block, size, n, turn);
        if (!t && !of_x) break;
        tile.backward(t, next, g);
        std::swap(g, next);
      }
      if (of_x) tile.leave(dx_data + first * program.in, g, program.in, n, nullptr);
    }
  };
  parallel_for(0, parts, 1, [&](Index begin, Index end) {
    FlushDenormals flush;
    for (Index part = begin; part < end; part++) run(part);
  });

  parallel_for(0, summed, GRAIN, [&](Index begin, Index end) {  // the parts in their order
    for (Index part = 1; part < parts; part++)
      for (Index i = begin; i < end; i++) total[i] += total[part * summed + i];
  });
  if (of_bias) {
    S* to = static_cast<S*>(found.back().mutable_data_ptr());
    for (Index f = 0; f < program.out; f += LANES<F>) {
      Index width = std::min<Index>(LANES<F>, program.out - f);
      store(to + f, load(total + bias_at + f, width), width);
    }
  }
  for (Index t = 0; of_cores && t < count; t++) {
    // M~ = factor M: dM = factor (dM~ - <dM~, M> / (n RMS^2) M), the second term where it is clipped; dgain = clip <dM~, M>
    const Step& step = program.steps[t];
    const Sum<F>& sum = sums[t];
    const Core<F>& core = layer.cores[t];
    const Index m_stride = sum.swapped ? 1 : sum.padded, n_stride = sum.swapped ? sum.padded : 1;
    Numbers<F> line;
    F* row = line.reserve(round_up(step.in, LANES<F>));
    auto gather = [&](Index index) {  // row `index` of the gradient, in the core's own order
      const F* from = total + sum.start + index / step.out * sum.rows * sum.padded + index % step.out * m_stride;
      for (Index i = 0; i < step.in; i++) row[i] = from[i * n_stride];
    };
    double along = 0;
    for (Index index = 0; gains && index < step.batch * step.out; index++) {
      gather(index);
      along += sum_products(row, core.data + index * step.in, step.in);
    }
    if (wants & OF_GAINS) static_cast<double*>(found[1 + count].mutable_data_ptr())[t] = along * core.clip;
    if (!(wants & OF_CORES)) continue;
    S* to = static_cast<S*>(found[1 + t].mutable_data_ptr());
    const F back = core.squares ? along / core.squares : 0;
    for (Index index = 0; index < step.batch * step.out; index++) {
      gather(index);
      for (Index i = 0; i < step.in; i += LANES<F>) {
        Index width = std::min<Index>(LANES<F>, step.in - i);
        Vector<F> own = load(core.data + index * step.in + i, width);
        Vector<F> gradient = load(row + i, width);
        if (back) gradient -= back * own;
        store(to + index * step.in + i, core.factor * gradient, width);
      }
    }
  }
  return found;
}

// ---- the operators ---------------------------------------------------------------------------------------------------

template <class Run>
auto by_dtype(const Tensor& x, const Run& run) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return run(float{});
    case ScalarType::Double: return run(double{});
    case ScalarType::BFloat16: return run(BFloat16{});
    case ScalarType::Half: return run(Float16{});
    default: STD_TORCH_CHECK(false, "structlin: x must be float32, float64, bfloat16 or float16");
  }
}

Tensor multiply(const Tensor& x, std::vector<Tensor> cores, std::optional<Tensor> bias, std::optional<Tensor> gains,
                std::vector<double> sigmas, Indices code) {
  return by_dtype(x, [&](auto s) { return forward<decltype(s)>(x, cores, bias, gains, sigmas, code); });
}

std::vector<Tensor> gradients(const Tensor& dy, const Tensor& x, std::vector<Tensor> cores, std::optional<Tensor> gains,
                              std::vector<double> sigmas, Indices code, int64_t wants) {
  return by_dtype(x, [&](auto s) { return backward<decltype(s)>(dy, x, cores, gains, sigmas, code, wants); });
}

}  // namespace

// Their schemas are in op.py
STABLE_TORCH_LIBRARY_IMPL(structlin_cpu, CPU, library) {
  library.impl("multiply", TORCH_BOX(&multiply));
  library.impl("layer", TORCH_BOX(&multiply));
  library.impl("gradients", TORCH_BOX(&gradients));
}
