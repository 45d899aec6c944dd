// A tile of a few dozen tokens, features as rows, while it lies in cache.
//
//     forward    m fan-out   k fan-in    n tokens    A the core as it is stored
//     backward   m fan-in    k fan-out   n tokens    A the core by columns, for many tokens transposed once a call
//     dcore      m fan-out   k tokens    n fan-in    A the rows of g, B the rows of h transposed (or the other way round)
//
// An activation lies as one row for each feature, with the tokens running along it, so that a permutation between two cores is
// only a matter of which row is written, and blocks may have any size.

#pragma once
#include "products.h"

namespace {

constexpr Index KC = 256;  // depth of blocking: rows of B that stay in the first cache
constexpr Index MIN_PRODUCTS_TO_PACK = 1 << 24;  // by a block, from which on its packed copy pays

template <class S>
struct Tile {
  using F = Wide<S>;
  using H = Held<S>;
  static constexpr int L = LANES<F>, G = GROUP<S>, LINE = BYTES / sizeof(H);
  const Program& program;
  const std::vector<Core<S>>& cores;
  const Index tokens, last, size;    // a row holds `size` tokens
  std::vector<Numbers<H>> packed_cores;  // [batch][fan_in][fan_out]
  std::vector<Layout> h, g;          // of what each core reads, forward and backward
  std::vector<Offsets> writes, reads;  // where it puts its results, forward and backward
  Indices x_places, dy_places;
  Numbers<F> biases;                 // of what the last core writes, [batch * repeat][fan_out]
  const F* bias = nullptr;           // the same, or none
  const bool wide = !has_matrix_unit();  // whether y and dx are F in the tile, and not yet H

  explicit Tile(const Layer<S>& layer)
      : program(layer.program), cores(layer.cores), tokens(layer.tokens), last(program.steps.size() - 1),
        size(layer.tile()), packed_cores(last + 1) {
    for (const Step& step : program.steps) {  // a line of the cache between two blocks: each begins a line, few lie in one set
      h.push_back({step.in, size, step.in * size + LINE});
      g.push_back({step.out, size, step.out * size + LINE});
    }
    x_places = places_of(program.steps.front().reads, h.front());
    dy_places = places_of(program.steps.back().writes, g.back());
    const Layout y{static_cast<Index>(dy_places.size()), size, 0}, dx{static_cast<Index>(x_places.size()), size, 0};
    for (Index t = 0; t <= last; t++) {
      writes.push_back((t < last ? h[t + 1] : y).at(program.steps[t].writes));
      reads.push_back((t ? g[t - 1] : dx).at(program.steps[t].reads));
    }
  }

  void prepare_forward(const F* added) {
    if (!added) return;
    const Step& step = program.steps[last];
    F* to = biases.reserve(step.pairs() * step.out);
    bias = to;
    for (Index pair = 0; pair < step.pairs(); pair++)
      for (Index o = 0, start = step.writes.block(pair); o < step.out; o++) {
        const Index feature = start + step.writes.fan[o];
        *to++ = feature < program.out ? added[feature] : F{0};
      }
  }
  void prepare_backward(bool of_x, bool) {
    for (Index t = of_x ? 0 : 1; t <= last; t++) {
      const Step& step = program.steps[t];
      if (G > 1 || tokens * step.in * step.out >= MIN_PRODUCTS_TO_PACK) pack_core(packed_cores[t], step, cores[t]);
    }
  }

  Index area(Index t) const { return program.steps[t].pairs() * h[t].block; }  // of what core t reads
  Index area() const {  // of the widest activation; x and y are wide
    Index widest = std::max(x_places.size(), dy_places.size()) * size * sizeof(F) / sizeof(H);
    for (size_t t = 0; t < h.size(); t++)
      widest = std::max(widest, program.steps[t].pairs() * std::max(h[t].block, g[t].block));
    return widest;
  }

  // Pack n rows of x, `(tokens, features)`, as columns of the tile; what x does not fill is zero
  void pack_tokens(H* tile, const S* x, Index features, Index n, const Indices& places) const {
    auto get = [=, this](Index i, Index f, Index count) {
      const S* row = x + i * G * features + f;
      __builtin_prefetch(x + size * features + f * size + i * G * L, 0, 2);  // the next tile, one line after the other
      return bits_of<Vector<F>>(load_b(row, features, i * G + G <= n, count));
    };
    auto put = [&](Index f, Index i, const Vector<F>& v) {
      store(reinterpret_cast<F*>(tile + places[f]) + i, v, size / G - i);
    };
    transpose<F, G>((n + G - 1) / G, features, size / G, get, put);
    for (size_t f = features; f < places.size(); f++) std::memset(tile + places[f], 0, size * sizeof(H));
  }

  // Unpack the columns of the tile, whose rows lie in the order of y's features, as n rows of y
  template <class T>
  void unpack_tokens(S* y, const T* tile, Index features, Index n) const {
    auto row = [&](Index f, Index t) { return load(tile + f * size + t); };
    auto get = [&](Index i, Index t, Index) {
      Index f = i * G;
      bool whole = f + 1 < features;
      if constexpr (GROUPED<T>) return bits_of<Vector<F>>(load_b(tile + f * size + t, size, whole));
      else return interleave_rows<S>(row(f, t), G > 1 && whole ? row(f + 1, t) : Vector<F>{});
    };
    auto put = [&](Index t, Index i, const Vector<F>& v) {
      S* to = y + t * features + i * G;
      if (G > 1) __builtin_prefetch(to + size * features, 1, 2);  // the next tile
      store_interleaved(to, v, features - i * G);
    };
    transpose<F>((features + G - 1) / G, n, (features + G - 1) / G, get, put);
  }

  const H* pack_x(H* tile, const S* x, Index n) const { return pack_tokens(tile, x, program.in, n, x_places), tile; }
  const H* pack_dy(H* tile, const S* dy, Index n) const { return pack_tokens(tile, dy, program.out, n, dy_places), tile; }
  void* place_y(H* memory, S*) const { return memory; }
  void* place_dx(H* memory, S*) const { return memory; }
  void unpack_y(S* y, const void* tile, Index n) const {
    if (wide) unpack_tokens(y, static_cast<const F*>(tile), program.out, n);
    else unpack_tokens(y, static_cast<const H*>(tile), program.out, n);
  }
  void unpack_dx(S* dx, const void* tile, Index n) const {
    if (wide) unpack_tokens(dx, static_cast<const F*>(tile), program.in, n);
    else unpack_tokens(dx, static_cast<const H*>(tile), program.in, n);
  }

  // C = factor A B, in parts of A and B that stay in cache, where sums lose nothing by lying in C meanwhile
  template <class T>
  void multiply(Result<T> c, const Scalars<H>& a, const H* b, Index height, Index depth, F factor) const {
    const Index deep = std::is_same_v<T, F> ? KC : depth;
    for (Index k = 0; k < depth; k += deep) {
      const Scalars<H> left{a(0, k), a.row, a.column};
      const Vectors<H> right{b + k * size, size};
      const Index some = std::min(deep, depth - k);
      if (!k) multiply_into<S, false>(c, left, right, height, size, some, factor);
      else if constexpr (std::is_same_v<T, F>) multiply_into<S, true>(c, left, right, height, size, some, factor);
      c.row_bias = nullptr;  // it has been added
    }
  }

  // h_(t+1) from h_t, for some of the blocks; y is wide
  void forward(Index t, void* to, const H* from, Index, Index begin, Index end) const {
    const Step& step = program.steps[t];
    auto run = [&]<class T>(T* to) {
      for (Index pair = begin; pair < end; pair++)
        multiply(Result<T>{to + writes[t].block(pair), writes[t].fan.data(),
                           t == last && bias ? bias + pair * step.out : nullptr},
                 Scalars<H>{cores[t].data + pair / step.repeat * step.in * step.out, step.in, 1},
                 from + pair * h[t].block, step.out, step.in, cores[t].factor);
    };
    t < last || !wide ? run(static_cast<H*>(to)) : run(static_cast<F*>(to));
  }

  // g_t from g_(t+1), for some of the blocks; dx is wide
  void backward(Index t, void* to, const H* from, Index, Index begin, Index end) const {
    const Step& step = program.steps[t];
    const H* copy = packed_cores[t].held.get();
    const Scalars<H> core = copy ? Scalars<H>{copy, step.out, 1} : Scalars<H>{cores[t].data, 1, step.in};
    auto run = [&]<class T>(T* to) {
      for (Index pair = begin; pair < end; pair++)
        multiply(Result<T>{to + reads[t].block(pair), reads[t].fan.data()},
                 Scalars<H>{core.at + pair / step.repeat * step.in * step.out, core.row, core.column},
                 from + pair * g[t].block, step.in, step.out, cores[t].factor);
    };
    t || !wide ? run(static_cast<H*>(to)) : run(static_cast<F*>(to));
  }

  // Whether the vectors of a core's gradient run along fan-out
  bool along_out(Index t) const {
    auto cost = [](Index m, Index n) { return m * round_up(n, L) + 8 * n; };  // of products, of transposing
    const Step& step = program.steps[t];
    return cost(step.in, step.out) < cost(step.out, step.in);
  }

  // `total += g h'` over the tokens of a tile, for blocks that are read from `begin` to `end`; `fresh`: total has no value yet
  void add(Index t, F* total, const Sum& sum, const H* g_tile, const H* h_tile, Index n, bool fresh, Index begin,
           Index end) const {
    using Row = std::conditional_t<GROUPED<S>, Pair, F>;  // of B: GROUP tokens
    static_assert(sizeof(Row) == sizeof(F));
    const Index repeat = program.steps[t].repeat;
    thread_local Numbers<F> memory;
    F* columns = memory.reserve(size / G * sum.padded);
    for (Index pair = begin * repeat; pair < end * repeat; pair++) {
      const H *left = g_tile + pair * g[t].block, *right = h_tile + pair * h[t].block;
      if (sum.along_out) std::swap(left, right);
      auto get = [&](Index f, Index i, Index count) {
        return load(reinterpret_cast<const F*>(right + f * size) + i, count);
      };
      auto put = [&](Index i, Index f, const Vector<F>& v) { store(columns + i * sum.padded + f, v); };
      transpose<F>(sum.columns, size / G, sum.padded, get, put);
      sum.add<S>(total, pair / repeat, fresh && pair % repeat == 0, Scalars<H>{left, size, 1},
                 Vectors<Row>{reinterpret_cast<const Row*>(columns), sum.padded}, round_up(n, G));
    }
  }
};

}  // namespace
