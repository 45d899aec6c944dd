// Tiles of a few dozen tokens, features as rows, each while it lies in cache.
//
//     forward    m fan-out   k fan-in    n tokens    A the core as it is stored
//     backward   m fan-in    k fan-out   n tokens    A the core by columns, for many tokens transposed once a call
//     dcore      m fan-out   k tokens    n fan-in    A the rows of g, B the rows of h transposed, or in turn
//
// An activation lies as one row for each feature, with the tokens running along it, so that a permutation between two
// cores is only a matter of which row is written, and blocks may have any size. Where the cores are larger than the
// second cache, some tiles go through a core together, block by block, and a block is read once for all of them.

#pragma once
#include "microkernel.h"

namespace {

// `run(begin, end)` until all `count` blocks of a core have been run: batch * repeat where it multiplies by them, batch
// where it sums into them, for those that share a sum are one thread's. Where threads share tiles this is one call;
// where they share the blocks of the only tile, each has as many as are worth a thread by two tokens.
template <class Run>
void over_blocks(const Step& step, Index count, const Run& run) {
  parallel_for(0, count, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / (step.in * step.out * 2)),
               [&](Index begin, Index end) {
                 MatrixUnit unit;
                 run(begin, end);
               });
}

// Pack a core transposed: [batch][fan_in][fan_out]. To move a number takes as long as some sixteen products.
template <class S>
void pack_core(Numbers<Held<S>>& memory, const Step& step, const Core<S>& core) {
  using F = Wide<S>;
  const Index block = step.in * step.out;
  Held<S>* to = memory.reserve(step.params());
  parallel_for(0, step.batch, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / 16 / block), [&](Index begin, Index end) {
    for (Index b = begin * block; b < end * block; b += block)
      transpose<F>(
          step.out, step.in, step.out,
          [&](Index o, Index i, Index count) { return load(core.data + b + o * step.in + i, count); },
          [&](Index i, Index o, const Vector<F>& v) { store(to + b + i * step.out + o, v, step.out - o); });
  });
}

// Where the sum of a core's gradient lies: [batch][rows][columns], columns padded to whole vectors. Where that is the
// gradient's own order and type, the first part is summed in the gradient itself.
template <class S>
struct Sum {
  using F = Wide<S>;
  const Step& step;
  Index start;     // behind the sums of the cores before
  bool along_out;  // columns are fan-out, not fan-in
  Index rows = along_out ? step.in : step.out, columns = along_out ? step.out : step.in;
  Index padded = round_up(columns, LANES<F>), size = step.batch * rows * padded;
  Indices row_offsets = row_starts(rows, padded);
  F* at = nullptr;  // the sum of all parts

  bool is_gradient() const { return !along_out && padded == columns; }  // in order

  // `C (+)= A B` for one block of the core; `fresh`: C has no value yet
  template <class B>
  void add(F* total, Index batch, bool fresh, const Scalars<Held<S>>& a, const Vectors<B>& b, Index depth) const {
    const Result<F> c{total + batch * rows * padded, row_offsets.data()};
    (fresh ? multiply_into<S, false, F, B> : multiply_into<S, true, F, B>)(c, a, b, rows, padded, depth, 1);
  }
};

template <class S>
struct Tiles {
  using F = Wide<S>;
  using H = Held<S>;
  static constexpr int L = LANES<F>, G = GROUP<S>, LINE = BYTES / sizeof(H);
  const Program& program;
  const std::vector<Core<S>>& cores;
  const Tiling tiling;
  const Index last, width, size;         // tokens of a tile, and of the tiles that go together
  std::vector<Numbers<H>> packed_cores;  // [batch][fan_in][fan_out]
  std::vector<Layout> h, g;              // of what each core reads, forward and backward
  std::vector<Offsets> writes, reads;    // where it puts its results, forward and backward
  Indices x_places, dy_places;
  Numbers<F> biases;                     // of what the last core writes, [batch * repeat][fan_out]
  const F* bias = nullptr;               // the same, or none
  const bool wide = !has_matrix_unit();  // whether y and dx are F in the tile, and not yet H

  explicit Tiles(const Layer<S>& layer)
      : program(layer.program),
        cores(layer.cores),
        tiling(find_tiling<S>(layer.call())),
        last(program.steps.size() - 1),
        width(tiling.width),
        size(width * tiling.together),
        packed_cores(last + 1) {
    // A line of the cache lies between two blocks: each begins a line, and few lie in one set
    for (const Step& step : program.steps) {
      h.push_back({step.in, width, step.in * width + LINE});
      g.push_back({step.out, width, step.out * width + LINE});
    }
    x_places = places_of(program.steps.front().reads, h.front());
    dy_places = places_of(program.steps.back().writes, g.back());
    const Layout y{static_cast<Index>(dy_places.size()), width, 0}, dx{static_cast<Index>(x_places.size()), width, 0};
    for (Index t = 0; t <= last; t++) {
      writes.push_back((t < last ? h[t + 1] : y).at(program.steps[t].writes));
      reads.push_back((t ? g[t - 1] : dx).at(program.steps[t].reads));
    }
  }

  // The bias in the order in which the last core writes
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

  // The cores transposed, where that pays
  void prepare_backward(Index tokens, bool of_x) {
    for (Index t = of_x ? 0 : 1; t <= last; t++) {
      const Step& step = program.steps[t];
      if (G > 1 || tokens * step.in * step.out >= MIN_PRODUCTS_TO_PACK) pack_core(packed_cores[t], step, cores[t]);
    }
  }

  // ---- how much memory: of one tile, then of all that go together -----------------------------------------

  Index count_tiles(Index tokens) const { return (tokens + width - 1) / width; }
  Index h_area(Index t) const { return program.steps[t].pairs() * h[t].block; }  // of what core t reads
  Index g_area(Index t) const { return program.steps[t].pairs() * g[t].block; }
  Index end_area(const Indices& places) const { return static_cast<Index>(places.size()) * width; }  // of y or dx
  Index area(Index t) const { return tiling.together * h_area(t); }
  Index slope_area(Index t) const { return program.between && t < last ? tiling.together * g_area(t) : 0; }
  Index area() const {  // of the widest activation; y and dx may be wide
    Index widest = std::max(end_area(x_places), end_area(dy_places)) * sizeof(F) / sizeof(H);
    for (Index t = 0; t <= last; t++) widest = std::max({widest, h_area(t), g_area(t)});
    return tiling.together * widest;
  }

  // `run(tile, first, n)` for each tile: its number, that of its first token, and how many it has
  template <class Run>
  void over_tiles(Index tokens, const Run& run) const {
    for (Index tile = 0; tile < count_tiles(tokens); tile++)
      run(tile, tile * width, std::min(width, tokens - tile * width));
  }

  // ---- packing --------------------------------------------------------------------------------------------

  // Pack n rows as columns of the tile; what they do not fill is zero. The next tile is fetched meanwhile.
  void pack_rows(H* tile, const S* rows, Index features, Index n, const Indices& places) const {
    auto get = [=, this](Index i, Index f, Index count) {
      const Index t = i * G;
      __builtin_prefetch(rows + width * features + f * width + t * L, 0, 2);
      return bits_of<Vector<F>>(load_b(rows + t * features + f, features, t + G <= n, count));
    };
    auto put = [&](Index f, Index i, const Vector<F>& v) {
      store(reinterpret_cast<F*>(tile + places[f]) + i, v, width / G - i);
    };
    transpose<F, G>((n + G - 1) / G, features, width / G, get, put);
    for (size_t f = features; f < places.size(); f++) std::memset(tile + places[f], 0, width * sizeof(H));
  }

  // Unpack the columns of the tile, which lie in the order of the rows' features, as n rows
  template <class T>
  void unpack_rows(S* rows, Index features, const T* tile, Index n) const {
    auto row = [&](Index f, Index t) { return load(tile + f * width + t); };
    auto get = [&](Index i, Index t, Index) {
      Index f = i * G;
      bool whole = f + 1 < features;
      if constexpr (GROUPED<T>) return bits_of<Vector<F>>(load_b(tile + f * width + t, width, whole));
      else return interleave_rows<S>(row(f, t), G > 1 && whole ? row(f + 1, t) : Vector<F>{});
    };
    auto put = [&](Index t, Index i, const Vector<F>& v) {
      const Index f = i * G;
      S* to = rows + t * features + f;
      if (G > 1) __builtin_prefetch(to + width * features, 1, 2);  // the next tile
      store_interleaved(to, v, features - f);
    };
    transpose<F>((features + G - 1) / G, n, (features + G - 1) / G, get, put);
  }

  // x: (tokens, program.in); dy: (tokens, program.out)
  void pack_x(H* to, const S* x, Index tokens) const {
    over_tiles(tokens, [&](Index tile, Index first, Index n) {
      pack_rows(to + tile * h_area(0), x + first * program.in, program.in, n, x_places);
    });
  }
  void pack_dy(H* to, const S* dy, Index tokens) const {
    over_tiles(tokens, [&](Index tile, Index first, Index n) {
      pack_rows(to + tile * g_area(last), dy + first * program.out, program.out, n, dy_places);
    });
  }

  // The last rows of the tiles as y's, or dx's
  void unpack(S* rows, Index features, const H* tiles, const Indices& places, Index tokens) const {
    over_tiles(tokens, [&](Index tile, Index first, Index n) {
      S* to = rows + first * features;
      if (wide) unpack_rows(to, features, reinterpret_cast<const F*>(tiles) + tile * end_area(places), n);
      else unpack_rows(to, features, tiles + tile * end_area(places), n);
    });
  }
  void unpack_y(S* y, const H* tiles, Index tokens) const { unpack(y, program.out, tiles, dy_places, tokens); }
  void unpack_dx(S* dx, const H* tiles, Index tokens) const { unpack(dx, program.in, tiles, x_places, tokens); }

  // ---- the products ---------------------------------------------------------------------------------------

  // C = factor A B, in parts of A and B that stay in cache, where sums lose nothing by lying in C meanwhile
  template <class T>
  void multiply(Result<T> c, const Scalars<H>& a, const H* b, Index height, Index depth, F factor) const {
    const Index deep = std::is_same_v<T, F> ? find_depth() : depth;
    for (Index k = 0; k < depth; k += deep) {
      const Scalars<H> left{a(0, k), a.row, a.column};
      const Vectors<H> right{b + k * width, width};
      const Index some = std::min(deep, depth - k);
      if (!k) multiply_into<S, false>(c, left, right, height, width, some, factor);
      else if constexpr (std::is_same_v<T, F>) multiply_into<S, true>(c, left, right, height, width, some, factor);
      c.row_bias = nullptr;  // it has been added
    }
  }

  // The same for one block and all tiles, `b_area` and `c_area` apart, by as many rows of A at a time as stay in cache
  template <class T>
  void multiply_tiles(const Result<T>& c, Index c_area, const Scalars<H>& a, const H* b, Index b_area, Index tiles,
                      Index height, Index depth, F factor) const {
    const Index some = tiles > 1 ? find_height<H>(depth) : height;
    for (Index m = 0; m < height; m += some)
      for (Index tile = 0; tile < tiles; tile++)
        multiply(Result<T>{c.at + tile * c_area, c.rows + m, c.row_bias ? c.row_bias + m : nullptr},
                 Scalars<H>{a(m, 0), a.row, a.column}, b + tile * b_area, std::min(some, height - m), depth, factor);
  }

  // Applies the activation to the rows that block `pair` of core t has made. Writes its slopes, if they are wanted,
  // where g lies.
  void activate_rows(Index t, H* to, H* slopes, Index tiles, Index pair) const {
    const Index out = program.steps[t].out, count = width, area = h_area(t + 1), slope_area = g_area(t);
    const Index* fan = writes[t].fan.data();
    to += writes[t].block(pair);
    if (slopes) slopes += pair * g[t].block;
    for (Index tile = 0; tile < tiles; tile++)
      for (Index o = 0; o < out; o++)
        activate_row(to + tile * area + fan[o], count, slopes ? slopes + tile * slope_area + o * count : nullptr);
  }

  // The rows of g that block `pair` of core t has made, times the slopes
  void multiply_by_slopes(Index t, H* to, const H* slopes, Index tiles, Index pair) const {
    const Index in = program.steps[t].in, count = width, area = g_area(t - 1), start = reads[t].block(pair);
    const Index* fan = reads[t].fan.data();
    for (Index tile = 0; tile < tiles; tile++)
      for (Index i = 0; i < in; i++)
        for (Index n = 0, row = tile * area + start + fan[i]; n < count; n += L)
          store(to + row + n, load(to + row + n) * load(slopes + row + n));
  }

  // h_(t+1) from h_t, for some of the blocks; y may be wide
  void forward(Index t, H* to, const H* from, Index tokens, Index begin, Index end, H* slopes = nullptr) const {
    const Step& step = program.steps[t];
    auto run = [&]<class T>(T* to, Index area) {
      for (Index pair = begin; pair < end; pair++) {  // (fan_out, tokens) = (fan_out, fan_in) (fan_in, tokens)
        multiply_tiles(Result<T>{to + writes[t].block(pair), writes[t].fan.data(),
                                 t == last && bias ? bias + pair * step.out : nullptr},
                       area, Scalars<H>{cores[t].data + pair / step.repeat * step.in * step.out, step.in, 1},
                       from + pair * h[t].block, h_area(t), count_tiles(tokens), step.out, step.in, cores[t].factor);
        if constexpr (std::is_same_v<T, H>)
          if (t < last && program.between) activate_rows(t, to, slopes, count_tiles(tokens), pair);
      }
    };
    if (t < last) run(to, h_area(t + 1));
    else if (wide) run(reinterpret_cast<F*>(to), end_area(dy_places));
    else run(to, end_area(dy_places));
  }

  // g_t from g_(t+1), for some of the blocks, times the slopes between core t - 1 and core t, if any; dx may be wide
  void backward(Index t, H* to, const H* from, Index tokens, Index begin, Index end, const H* slopes = nullptr) const {
    const Step& step = program.steps[t];
    const H* copy = packed_cores[t].held.get();
    const Scalars<H> core = copy ? Scalars<H>{copy, step.out, 1} : Scalars<H>{cores[t].data, 1, step.in};
    auto run = [&]<class T>(T* to, Index area) {
      for (Index pair = begin; pair < end; pair++) {  // (fan_in, tokens) = (fan_in, fan_out) (fan_out, tokens)
        multiply_tiles(Result<T>{to + reads[t].block(pair), reads[t].fan.data()}, area,
                       Scalars<H>{core.at + pair / step.repeat * step.in * step.out, core.row, core.column},
                       from + pair * g[t].block, g_area(t), count_tiles(tokens), step.in, step.out, cores[t].factor);
        if constexpr (std::is_same_v<T, H>)
          if (slopes) multiply_by_slopes(t, to, slopes, count_tiles(tokens), pair);
      }
    };
    if (t) run(to, g_area(t - 1));
    else if (wide) run(reinterpret_cast<F*>(to), end_area(x_places));
    else run(to, end_area(x_places));
  }

  // Whether the vectors of a core's gradient run along fan-out
  bool along_out(Index t, Index tokens) const {
    auto cost = [=](Index m, Index n) { return tokens * (m * round_up(n, L) + 8 * n); };  // of products, of transposing
    const Step& step = program.steps[t];
    return cost(step.in, step.out) + 16 * step.in * step.out < cost(step.out, step.in);  // the sum is transposed
  }

  // `total += g h'` over the tokens, for blocks that are read from `begin` to `end`; `fresh`: total has no value yet
  void add(Index t, F* total, const Sum<S>& sum, const H* g_tiles, const H* h_tiles, Index tokens, bool fresh,
           Index begin, Index end) const {
    using Row = std::conditional_t<GROUPED<S>, Pair, F>;  // of B: GROUP tokens
    static_assert(sizeof(Row) == sizeof(F));
    const Index repeat = program.steps[t].repeat;
    thread_local Numbers<F> memory;
    F* columns = memory.reserve(width / G * sum.padded);  // [tokens][columns], of the tile at hand
    auto add_tile = [&](Index pair, const H* left, const H* right, Index n, bool fresh) {
      if (sum.along_out) std::swap(left, right);  // left: [rows][tokens], right: [columns][tokens]
      auto get = [&](Index f, Index i, Index count) {
        return load(reinterpret_cast<const F*>(right + f * width) + i, count);
      };
      auto put = [&](Index i, Index f, const Vector<F>& v) { store(columns + i * sum.padded + f, v); };
      transpose<F>(sum.columns, width / G, sum.padded, get, put);
      sum.add(total, pair / repeat, fresh && pair % repeat == 0, Scalars<H>{left, width, 1},
              Vectors<Row>{reinterpret_cast<const Row*>(columns), sum.padded}, round_up(n, G));
    };
    for (Index pair = begin * repeat; pair < end * repeat; pair++)
      over_tiles(tokens, [&](Index tile, Index, Index n) {
        add_tile(pair, g_tiles + tile * g_area(t) + pair * g[t].block, h_tiles + tile * h_area(t) + pair * h[t].block,
                 n, fresh && !tile);
      });
  }
};

}  // namespace
