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
//     C[m, 0:n] (+)= factor * sum_k A[m, k] B[k, 0:n]        A in scalars, row by row; C and B in vectors, rows anywhere
//
//     forward    m fan-out   k fan-in    n tokens    A the core as it is stored
//     backward   m fan-in    k fan-out   n tokens    A the core, transposed once a call
//     dcore      m fan-out   k tokens    n fan-in    A the rows of g, B the rows of h transposed (or the other way round)
//
// Where the CPU multiplies bfloat16 in pairs, A[m, k:k+2] meets B[k:k+2, 0:n] in one instruction, and activations stay in
// bfloat16; other two-byte numbers are widened to float32.
// Of few tokens a vector would be mostly empty; the forward pass takes them by few.h.
// A core is stored (batch, fan_out, fan_in). Sums are in float32, for float64 in float64. Every part of the tokens is summed
// by itself and the parts are summed in their order: the same call on as many threads gives the same bits. Only x is saved.
// A core under weight normalisation is multiplied by factor = gain * min(1, sigma / RMS(core)), which is never stored.

#include <numeric>

#include "few.h"
#include "layer.h"

namespace {

constexpr int ROWS = BYTES == 32 ? 4 : 8;  // of C in registers, two vectors of each
constexpr Index MOST = 1 << 30;  // bytes of all threads' sums of gradients
constexpr Index DEEP = 256;      // rows of B that stay in the first cache

// ---- the products ----------------------------------------------------------------------------------------------------

// R rows and N vectors of C, stored as T; B is rows of Held<S>, or of pairs of them
template <class S, class B, class T, int R, int N, bool ADD>
inline void multiply_tile(const Held<S>* a, Index a_m, const B* b, Index b_k, T* c, const Index* rows, Index depth,
                          Wide<S> factor) {
  using F = Wide<S>;
  constexpr int G = GROUP<S>, DOWN = std::is_same_v<B, Pair> ? 1 : G;
  Vector<F> sum[R][N] = {};
  auto add = [&](Index k, bool whole) __attribute__((always_inline)) {
    decltype(meet(b, b_k, whole)) right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = meet(b + k / G * DOWN * b_k + n * LANES<F>, b_k, whole);
#pragma GCC unroll 8
    for (int m = 0; m < R; m++) {
      auto left = spread(a + m * a_m + k, whole);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) add_product(sum[m][n], left, right[n]);
    }
  };
  Index k = 0;
  for (; k + G <= depth; k += G) add(k, true);
  if (G > 1 && k < depth) add(k, false);
#pragma GCC unroll 8
  for (int m = 0; m < R; m++) {
    T* to = c + rows[m];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      sum[m][n] *= factor;
      if (ADD) sum[m][n] += load(to + n * LANES<F>);
    }
    store_row<N>(to, sum[m]);
  }
}

template <class S, class B, class T, int N, bool ADD>
inline void multiply_columns(Index height, const Held<S>* a, Index a_m, const B* b, Index b_k, T* c, const Index* rows,
                             Index depth, Wide<S> factor) {
  Index m = 0;
  for (; m + ROWS <= height; m += ROWS)
    multiply_tile<S, B, T, ROWS, N, ADD>(a + m * a_m, a_m, b, b_k, c, rows + m, depth, factor);
  for (; m + 4 <= height; m += 4)
    multiply_tile<S, B, T, 4, N, ADD>(a + m * a_m, a_m, b, b_k, c, rows + m, depth, factor);
  for (; m + 2 <= height; m += 2)
    multiply_tile<S, B, T, 2, N, ADD>(a + m * a_m, a_m, b, b_k, c, rows + m, depth, factor);
  if (m < height) multiply_tile<S, B, T, 1, N, ADD>(a + m * a_m, a_m, b, b_k, c, rows + m, depth, factor);
}

// C[m, 0:width] (+)= factor * sum_k A[m, k] B[k, 0:width]: row m of C at c + rows[m]; width in whole vectors
template <class S, bool ADD, class B, class T>
void multiply_into(T* c, const Index* rows, Index height, Index width, const Held<S>* a, Index a_m, const B* b, Index b_k,
                   Index depth, Wide<S> factor) {
  constexpr int L = LANES<Wide<S>>;
  Index n = 0;
  for (; n + 2 * L <= width; n += 2 * L)
    multiply_columns<S, B, T, 2, ADD>(height, a, a_m, b + n, b_k, c + n, rows, depth, factor);
  if (n < width) multiply_columns<S, B, T, 1, ADD>(height, a, a_m, b + n, b_k, c + n, rows, depth, factor);
}

// The same in parts of A and B that stay in cache, where sums lose nothing by lying in C meanwhile
template <class S, class T>
void multiply_block(T* c, const Index* rows, Index height, Index width, const Held<S>* a, Index a_m, const Held<S>* b,
                    Index b_k, Index depth, Wide<S> factor) {
  const Index deep = std::is_same_v<T, Wide<S>> ? DEEP : depth;
  multiply_into<S, false>(c, rows, height, width, a, a_m, b, b_k, std::min(deep, depth), factor);
  if constexpr (std::is_same_v<T, Wide<S>>)
    for (Index k = deep; k < depth; k += deep)
      multiply_into<S, true>(c, rows, height, width, a + k, a_m, b + k * b_k, b_k, std::min(deep, depth - k), factor);
}

// ---- a tile of tokens ------------------------------------------------------------------------------------------------

template <class S>
struct Tile {
  using F = Wide<S>;
  using H = Held<S>;
  static constexpr int L = LANES<F>, G = GROUP<S>;
  const Program& program;
  const std::vector<Core<S>>& cores;
  Index size;                        // tokens that a row holds
  std::vector<Layout> h, g;          // of what each core reads, forward and backward
  std::vector<Offsets> writes, reads;  // where it puts its results, forward and backward
  Indices x_places, dy_places;

  Tile(const Layer<S>& layer, Index size) : program(layer.program), cores(layer.cores), size(size) {
    for (const Step& step : program.steps) {  // a vector between two blocks, or many would share a line of the cache
      h.push_back({step.in, size, step.in * size + L});
      g.push_back({step.out, size, step.out * size + L});
    }
    x_places = places_of(program.steps.front().reads, h.front());
    dy_places = places_of(program.steps.back().writes, g.back());
    const size_t last = program.steps.size() - 1;
    const Layout y{static_cast<Index>(dy_places.size()), size, 0}, dx{static_cast<Index>(x_places.size()), size, 0};
    for (size_t t = 0; t <= last; t++) {
      writes.push_back((t < last ? h[t + 1] : y).at(program.steps[t].writes));
      reads.push_back((t ? g[t - 1] : dx).at(program.steps[t].reads));
    }
  }

  Index area() const {  // of the widest activation; x and y are wide
    Index widest = std::max(x_places.size(), dy_places.size()) * size * sizeof(F) / sizeof(H);
    for (size_t t = 0; t < h.size(); t++)
      widest = std::max(widest, program.steps[t].pairs() * std::max(h[t].block, g[t].block));
    return widest;
  }

  // n rows of x, `(tokens, features)`, as columns of the tile; the rest of it, and features beyond those of x, are zero
  void enter(H* tile, const S* x, Index features, Index n, const Indices& places) const {
    auto get = [=, this](Index i, Index f, Index count) {
      const S* row = x + i * G * features + f;
      for (int k = 0; k < G; k++) __builtin_prefetch(row + (size + k) * features, 0, 2);  // of the next tile
      return bits_of<Vector<F>>(meet(row, features, i * G + G <= n, count));
    };
    auto put = [&](Index f, Index i, const Vector<F>& v) {
      store(reinterpret_cast<F*>(tile + places[f]) + i, v, size / G - i);
    };
    transpose<F, G>((n + G - 1) / G, features, size / G, get, put);
    for (size_t f = features; f < places.size(); f++) std::memset(tile + places[f], 0, size * sizeof(H));
  }

  // The columns of the tile, whose rows lie in the order of y's features, as n rows of y
  void leave(S* y, const F* tile, Index features, Index n, const F* bias) const {
    auto row = [&](Index f, Index t) {
      Vector<F> v = load(tile + f * size + t);
      return bias ? v + bias[f] : v;
    };
    auto get = [&](Index i, Index t, Index) {
      Index f = i * G;
      return join<S>(row(f, t), G > 1 && f + 1 < features ? row(f + 1, t) : Vector<F>{});
    };
    auto put = [&](Index t, Index i, const Vector<F>& v) { store_joined(y + t * features + i * G, v, features - i * G); };
    transpose<F>((features + G - 1) / G, n, (features + G - 1) / G, get, put);
  }

  // h_(t+1) from h_t, for some of the blocks; y is wide
  void forward(size_t t, void* to, const H* from, Index begin, Index end) const {
    const Step& step = program.steps[t];
    auto run = [&](auto* to) {
      for (Index pair = begin; pair < end; pair++)
        multiply_block<S>(to + writes[t].block(pair), writes[t].fan.data(), step.out, size,
                          cores[t].data + pair / step.repeat * step.out * step.in, step.in, from + pair * h[t].block,
                          size, step.in, cores[t].factor);
    };
    t + 1 < program.steps.size() ? run(static_cast<H*>(to)) : run(static_cast<F*>(to));
  }

  // g_t from g_(t+1), by the transposed core, for some of the blocks; dx is wide
  void backward(size_t t, void* to, const H* from, const H* core, Index begin, Index end) const {
    const Step& step = program.steps[t];
    auto run = [&](auto* to) {
      for (Index pair = begin; pair < end; pair++)
        multiply_block<S>(to + reads[t].block(pair), reads[t].fan.data(), step.in, size,
                          core + pair / step.repeat * step.in * step.out, step.out, from + pair * g[t].block, size,
                          step.out, cores[t].factor);
    };
    t ? run(static_cast<H*>(to)) : run(static_cast<F*>(to));
  }
};

// `run(begin, end)` for some of the `count` blocks of a core. Within a tile that is one of many this is one call; all threads
// share what is the only one.
template <class Run>
void over_blocks(const Step& step, Index count, const Run& run) {
  parallel_for(0, count, std::max<Index>(1, GRAIN / (step.in * step.out * 2)), [&](Index begin, Index end) {
    FlushDenormals flush;
    run(begin, end);
  });
}

// Where the sum of a core's gradient lies: [batch][rows][columns], columns padded to whole vectors
template <class S>
struct Sum {
  using F = Wide<S>;
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

  // `total += g h'` over the tokens of a tile, for blocks that are read from `begin` to `end`; `fresh`: total has no value yet
  void add(F* total, const Step& step, const Held<S>* g, Index g_block, const Held<S>* h, Index h_block, Index size,
           Index n, F* turned, bool fresh, Index begin, Index end) const {
    using Row = std::conditional_t<GROUPED<S>, Pair, F>;  // of B: GROUP tokens
    static_assert(sizeof(Row) == sizeof(F));
    for (Index pair = begin * step.repeat; pair < end * step.repeat; pair++) {
      const Held<S>*left = g + pair * g_block, *right = h + pair * h_block;
      if (swapped) std::swap(left, right);
      auto get = [&](Index f, Index t, Index count) {
        return load(reinterpret_cast<const F*>(right + f * size) + t, count);
      };
      auto put = [&](Index t, Index f, const Vector<F>& v) { store(turned + t * padded + f, v); };
      transpose<F>(columns, size / GROUP<S>, padded, get, put);
      auto multiply = fresh && pair % step.repeat == 0 ? multiply_into<S, false, Row, F> : multiply_into<S, true, Row, F>;
      multiply(total + start + pair / step.repeat * rows * padded, row_offsets.data(), rows, padded, left, size,
               reinterpret_cast<const Row*>(turned), padded, round_up(n, GROUP<S>), F{1});
    }
  }
};

// ---- forward ---------------------------------------------------------------------------------------------------------

template <class S>
void forward_tiles(const Layer<S>& layer, const Tensor& given, S* y, const Wide<S>* bias) {
  using F = Wide<S>;
  const S* x = static_cast<const S*>(given.data_ptr());
  const Program& program = layer.program;
  const Index tokens = layer.tokens, size = layer.tile(), tiles = (tokens + size - 1) / size;
  const Tile<S> tile(layer, size);
  const Index area = tile.area();
  parallel_for(0, tiles, 1, [&](Index begin, Index end) {
    thread_local Numbers<Held<S>> memory;
    Held<S>*h = memory.reserve(2 * area), *next = h + area;
    for (Index number = begin; number < end; number++) {
      Index first = number * size, n = std::min(size, tokens - first);
      tile.enter(h, x + first * program.in, program.in, n, tile.x_places);
      for (size_t t = 0; t < program.steps.size(); t++, std::swap(h, next)) {
        const Step& step = program.steps[t];
        over_blocks(step, step.pairs(), [&](Index begin, Index end) { tile.forward(t, next, h, begin, end); });
      }
      tile.leave(y + first * program.out, reinterpret_cast<F*>(h), program.out, n, bias);
    }
  });
}

template <class S>
Tensor forward(const Tensor& given, const std::vector<Tensor>& cores, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& code) {
  using F = Wide<S>;
  Tensor x = packed(given);
  Layer<S> layer(x, cores, gains, sigmas, code, true);
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
    added = numbers_of<F, S>(*held, memory);
  }
  S* to = static_cast<S*>(y.mutable_data_ptr());
  (layer.few ? forward_few<S> : forward_tiles<S>)(layer, x, to, added);
  return y;
}

// ---- backward --------------------------------------------------------------------------------------------------------

enum Wants { OF_X = 1, OF_CORES = 2, OF_GAINS = 4, OF_BIAS = 8 };

template <class S>
std::vector<Tensor> backward(const Tensor& given_dy, const Tensor& given, const std::vector<Tensor>& cores,
                             const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& code,
                             Index wants) {
  using F = Wide<S>;
  using H = Held<S>;
  Tensor x = packed(given), dy = packed(given_dy);
  Layer<S> layer(x, cores, gains, sigmas, code, false);
  const Program& program = layer.program;
  const Index count = program.steps.size(), tokens = layer.tokens, size = layer.tile();
  STD_TORCH_CHECK(!gains || gains->scalar_type() == ScalarType::Double, "structlin: the gains must be float64");
  STD_TORCH_CHECK(dy.numel() == tokens * program.out && dy.scalar_type() == x.scalar_type(),
                  "structlin: dy does not fit x and the program");
  const bool of_x = wants & OF_X, of_cores = wants & (OF_CORES | OF_GAINS), of_bias = wants & OF_BIAS;

  std::vector<Tensor> found{torch::stable::new_empty(x, of_x ? x.sizes() : Indices{0})};
  for (const Tensor& core : layer.tensors)
    found.push_back(torch::stable::new_empty(x, wants & OF_CORES ? core.sizes() : Indices{0}));
  found.push_back(torch::stable::new_empty(gains ? *gains : x, {wants & OF_GAINS ? count : 0}));
  found.push_back(torch::stable::new_empty(x, {of_bias ? program.out : 0}));

  std::vector<Sum<S>> sums;
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

  // Each core transposed: [batch][fan_in][fan_out]
  std::vector<Numbers<H>> turned_cores(count);
  for (Index t = of_x ? 0 : 1; t < count; t++) {
    const Step& step = program.steps[t];
    H* to = turned_cores[t].reserve(step.params());
    parallel_for(0, step.batch, std::max<Index>(1, GRAIN / (step.in * step.out)), [&](Index begin, Index end) {
      for (Index b = begin * step.in * step.out; b < end * step.in * step.out; b += step.in * step.out)
        transpose<F>(
            step.out, step.in, step.out,
            [&](Index o, Index i, Index count) { return load(layer.cores[t].data + b + o * step.in + i, count); },
            [&](Index i, Index o, const Vector<F>& v) { store(to + b + i * step.out + o, v, step.out - o); });
    });
  }

  auto run = [&](Index part) {
    thread_local Numbers<H> memory;
    H* h = memory.reserve(middle + 2 * area);
    F* own = total + part * summed;
    const Index start = part * tiles / parts;
    std::fill(tiles ? own + bias_at : own, own + summed, F{0});
    for (Index number = start; number < (part + 1) * tiles / parts; number++) {
      Index first = number * size, n = std::min(size, tokens - first);
      std::vector<H*> read{h};  // by each core
      for (Index t = 0; t < count; t++) read.push_back(read.back() + program.steps[t].pairs() * tile.h[t].block);
      H *g = read.back(), *next = g + area;
      if (of_cores) {
        tile.enter(h, x_data + first * program.in, program.in, n, tile.x_places);
        for (Index t = 0; t + 1 < count; t++)
          over_blocks(program.steps[t], program.steps[t].pairs(),
                      [&](Index begin, Index end) { tile.forward(t, read[t + 1], read[t], begin, end); });
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
        const Step& step = program.steps[t];
        if (of_cores)
          over_blocks(step, step.batch, [&](Index begin, Index end) {
            thread_local Numbers<F> turned_memory;
            sums[t].add(own, step, g, tile.g[t].block, read[t], tile.h[t].block, size, n, turned_memory.reserve(turned),
                        number == start, begin, end);
          });
        if (!t && !of_x) break;
        over_blocks(step, step.pairs(), [&](Index begin, Index end) {
          tile.backward(t, next, g, turned_cores[t].held.get(), begin, end);
        });
        std::swap(g, next);
      }
      if (of_x) tile.leave(dx_data + first * program.in, reinterpret_cast<F*>(g), program.in, n, nullptr);
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
    const Sum<S>& sum = sums[t];
    const Core<S>& core = layer.cores[t];
    const Index m_stride = sum.swapped ? 1 : sum.padded, n_stride = sum.swapped ? sum.padded : 1;
    const Index height = step.batch * step.out;
    auto over_rows = [&](const auto& run) {  // `run(index, row)` for each row of the gradient, in the core's own order
      parallel_for(0, height, std::max<Index>(1, GRAIN / step.in), [&](Index begin, Index end) {
        thread_local Numbers<F> line;
        F* row = line.reserve(round_up(step.in, LANES<F>));
        for (Index index = begin; index < end; index++) {
          const F* from = total + sum.start + index / step.out * sum.rows * sum.padded + index % step.out * m_stride;
          for (Index i = 0; i < step.in; i++) row[i] = from[i * n_stride];
          run(index, row);
        }
      });
    };
    std::vector<double> parts_along(gains ? height : 0);
    if (gains)
      over_rows([&](Index index, const F* row) {
        parts_along[index] = inner_product(row, core.data + index * step.in, step.in);
      });
    const double along = std::accumulate(parts_along.begin(), parts_along.end(), 0.0);
    if (wants & OF_GAINS) static_cast<double*>(found[1 + count].mutable_data_ptr())[t] = along * core.clip;
    if (!(wants & OF_CORES)) continue;
    S* to = static_cast<S*>(found[1 + t].mutable_data_ptr());
    const F back = core.squares ? along / core.squares : 0;
    over_rows([&](Index index, const F* row) {
      for (Index i = 0; i < step.in; i += LANES<F>) {
        Index width = std::min<Index>(LANES<F>, step.in - i);
        Vector<F> own = load(core.data + index * step.in + i, width);
        Vector<F> gradient = load(row + i, width);
        if (back) gradient -= back * own;
        store(to + index * step.in + i, core.factor * gradient, width);
      }
    });
  }
  return found;
}

// ---- the operators ---------------------------------------------------------------------------------------------------

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
