// A structured layer on a CPU, forward and backward, in one pass over the tokens.
//
//     h_0 = x        h_(t+1)[b, r, o] = sum_i core_t[b, o, i] h_t[b, r, i]        y = h_last + bias
//     g_last = dy    g_t[b, r, i] = sum_o core_t[b, o, i] g_(t+1)[b, r, o]        dx = g_0
//     dcore_t[b, o, i] = sum over tokens and r of g_(t+1)[b, r, o] h_t[b, r, i]
//
// A tile of tokens goes through all cores while it lies in cache (rows.h, tile.h); each core is products of one kind
// (products.h), of blocks of any size. Of few tokens a tile would be mostly empty; the forward pass takes them by gemv.h.
// Two-byte numbers are widened to float32, unless the CPU multiplies bfloat16 in pairs, or has a matrix unit (amx.h).
// A core is stored (batch, fan_out, fan_in). Sums are in float32, for float64 in float64. Every part of the tokens is summed
// by itself and the parts are summed in their order: the same call on as many threads gives the same bits. Only x is saved.
// A core under weight normalisation is multiplied by factor = gain * min(1, sigma / RMS(core)), which is never stored.
// An optimizer's polar factors of cores are in polar.h.

#include <numeric>

#include "gemv.h"
#include "polar.h"
#include "rows.h"
#include "tile.h"

namespace {

constexpr Index MAX_SUM_BYTES = 1 << 30;  // bytes of all threads' sums of gradients

// ---- forward ---------------------------------------------------------------------------------------------------------

// `run(path)` with the way in which a tile goes through the cores
template <class S, class Run>
void by_path(const Layer<S>& layer, const Run& run) {
  if constexpr (std::is_same_v<S, Wide<S>>)
    if (Rows<S>::serve(layer)) {
      Rows<S> rows(layer);
      return run(rows);
    }
  Tile<S> tile(layer);
  run(tile);
}

template <class S, class Path>
void forward_tiles(const Layer<S>& layer, Path& path, const S* x, S* y, const Wide<S>* bias) {
  using H = typename Path::H;
  const Program& program = layer.program;
  const Index tokens = layer.tokens, size = path.size, tiles = (tokens + size - 1) / size, area = path.area();
  path.prepare_forward(bias);
  parallel_for(0, tiles, 1, [&](Index begin, Index end) {
    thread_local Numbers<H> memory;
    H *h = memory.reserve(2 * area), *next = h + area;
    for (Index number = begin; number < end; number++) {
      const Index first = number * size, n = std::min(size, tokens - first);
      S* y_rows = y + first * program.out;
      const H* read = path.pack_x(h, x + first * program.in, n);
      for (Index t = 0; t <= path.last; t++, std::swap(h, next)) {
        const Step& step = program.steps[t];
        auto to = t < path.last ? next : path.place_y(next, y_rows);
        over_blocks(step, step.pairs(), [&](Index begin, Index end) { path.forward(t, to, read, n, begin, end); });
        read = static_cast<H*>(to);
      }
      path.unpack_y(y_rows, read, n);
    }
  });
}

template <class S>
Tensor forward(const Tensor& given, const std::vector<Tensor>& cores, const std::optional<Tensor>& bias,
               const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& numbers,
               const std::optional<Tensor>& loads) {
  using F = Wide<S>;
  Tensor x = contiguous_of(given);
  Layer<S> layer(x, cores, gains, sigmas, numbers, loads, true);
  Indices shape = sizes_of(x);
  shape.back() = layer.program.out;
  Tensor y = make_tensor(x, shape);
  if (!layer.tokens) return y;
  Numbers<F> memory;
  std::optional<Tensor> held;
  const F* added = nullptr;
  if (bias) {
    STD_TORCH_CHECK(bias->numel() == layer.program.out && bias->scalar_type() == x.scalar_type(),
                    "structlin: the bias does not fit x and the program");
    held = contiguous_of(*bias);
    added = numbers_of<F, S>(*held, memory);
  }
  layer.over_experts([&](Index, Index first) {
    if (!layer.tokens) return;
    const S* from = static_cast<const S*>(x.data_ptr()) + first * layer.program.in;
    S* to = static_cast<S*>(y.mutable_data_ptr()) + first * layer.program.out;
    if (layer.is_gemv()) forward_gemv<S>(layer, from, to, added);
    else by_path(layer, [&](auto& path) { forward_tiles(layer, path, from, to, added); });
  });
  return y;
}

// ---- backward --------------------------------------------------------------------------------------------------------

enum Wants { OF_X = 1, OF_CORES = 2, OF_GAINS = 4, OF_BIAS = 8 };

template <class F>
struct Totals {
  std::vector<Sum> sums;  // of each core
  Index bias_at;
  Numbers<F> memory;
};

// The sums over tokens, and dx, unless it is null
template <class S, class Path>
Totals<Wide<S>> add_tiles(const Layer<S>& layer, Path& path, const S* dy_data, const S* x_data, S* dx_data, bool of_cores,
                          bool of_bias) {
  using F = Wide<S>;
  using H = typename Path::H;
  const Program& program = layer.program;
  const bool of_x = dx_data;
  Totals<F> found;
  std::vector<Sum>& sums = found.sums;
  Index summed = 0, middle = 0;
  path.prepare_backward(of_x, of_cores);
  for (Index t = 0; t <= path.last; t++) {
    sums.emplace_back(program.steps[t], summed, path.along_out(t), LANES<F>);
    summed += of_cores ? round_up(sums.back().size, 16) : 0;
    middle += path.area(t);
  }
  found.bias_at = summed;
  const Index area = path.area(), size = path.size, tokens = layer.tokens,
              tiles = (tokens + size - 1) / size;
  summed += of_bias ? round_up(program.out, 16) : 0;
  const Index most = MAX_SUM_BYTES / std::max<Index>(1, summed * sizeof(F));
  const Index parts = layer.shares_tiles() ? 1 : std::max<Index>(1, std::min({layer.threads(), tiles, most}));
  F* total = found.memory.reserve(std::max<Index>(1, parts * summed));

  auto run = [&](Index part) {
    thread_local Numbers<H> memory;
    H* h = memory.reserve(middle + 2 * area);
    F* own = total + part * summed;
    const Index start = part * tiles / parts;
    std::fill(tiles ? own + found.bias_at : own, own + summed, F{0});
    for (Index number = start; number < (part + 1) * tiles / parts; number++) {
      const Index first = number * size, n = std::min(size, tokens - first);
      std::vector<const H*> read;  // by each core
      H* next = h;
      if (of_cores) {
        read.push_back(path.pack_x(h, x_data + first * program.in, n));
        for (Index t = 0; t < path.last; t++) {
          next += path.area(t);
          over_blocks(program.steps[t], program.steps[t].pairs(),
                      [&](Index begin, Index end) { path.forward(t, next, read[t], n, begin, end); });
          read.push_back(next);
        }
      }
      const S* dy_rows = dy_data + first * program.out;
      if (of_bias)
        for (Index t = 0; t < n; t += 4)
          for (Index f = 0; f < program.out; f += LANES<F>) {
            Index width = std::min<Index>(LANES<F>, program.out - f);
            F* to = own + found.bias_at + f;
            Vector<F> sum = load(to, width);
            for (Index i = t; i < std::min(t + 4, n); i++) sum += load(dy_rows + i * program.out + f, width);
            store(to, sum, width);
          }
      if (!of_x && !of_cores) continue;
      H *free = h + middle, *other = free + area;
      const H* g = path.pack_dy(free, dy_rows, n);
      for (Index t = path.last; t >= 0; t--, std::swap(free, other)) {
        const Step& step = program.steps[t];
        if (of_cores)
          over_blocks(step, step.batch, [&](Index begin, Index end) {
            path.add(t, own, sums[t], g, read[t], n, number == start, begin, end);
          });
        if (!t && !of_x) break;
        auto to = t ? other : path.place_dx(other, dx_data + first * program.in);
        over_blocks(step, step.pairs(), [&](Index begin, Index end) { path.backward(t, to, g, n, begin, end); });
        g = static_cast<H*>(to);
      }
      if (of_x) path.unpack_dx(dx_data + first * program.in, g, n);
    }
  };
  parallel_for(0, parts, 1, [&](Index begin, Index end) {
    Settings settings;
    for (Index part = begin; part < end; part++) run(part);
  });

  parallel_for(0, summed, MIN_PRODUCTS_PER_THREAD, [&](Index begin, Index end) {  // the parts in their order
    for (Index part = 1; part < parts; part++)
      for (Index i = begin; i < end; i++) total[i] += total[part * summed + i];
  });
  return found;
}

template <class S>
std::vector<Tensor> backward(const Tensor& given_dy, const Tensor& given, const std::vector<Tensor>& cores,
                             const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& numbers,
                             Index wants, const std::optional<Tensor>& loads) {
  using F = Wide<S>;
  Tensor x = contiguous_of(given), dy = contiguous_of(given_dy);
  Layer<S> layer(x, cores, gains, sigmas, numbers, loads, false);
  const Program& program = layer.program;
  const Index count = program.steps.size(), tokens = layer.tokens;
  STD_TORCH_CHECK(gains ? gains->scalar_type() == ScalarType::Double : !(wants & OF_GAINS),
                  "structlin: the gains must be float64, and there must be some for their gradient");
  STD_TORCH_CHECK(dy.numel() == tokens * program.out && dy.scalar_type() == x.scalar_type(),
                  "structlin: dy does not fit x and the program");
  const bool of_x = wants & OF_X, of_cores = wants & (OF_CORES | OF_GAINS), of_bias = wants & OF_BIAS;

  std::vector<Tensor> found{make_tensor(x, of_x ? sizes_of(x) : Indices{0})};
  for (const Tensor& core : layer.tensors)
    found.push_back(make_tensor(x, wants & OF_CORES ? sizes_of(core) : Indices{0}));
  found.push_back(make_tensor(gains ? *gains : x, {wants & OF_GAINS ? count : 0}));
  found.push_back(make_tensor(x, {of_bias ? program.out : 0}));

  const S* x_data = static_cast<const S*>(x.data_ptr());
  const S* dy_data = static_cast<const S*>(dy.data_ptr());
  S* dx_data = of_x ? static_cast<S*>(found[0].mutable_data_ptr()) : nullptr;
  std::vector<Totals<F>> totals(layer.experts());
  layer.over_experts([&](Index expert, Index first) {
    by_path(layer, [&](auto& path) {
      totals[expert] = add_tiles(layer, path, dy_data + first * program.out, x_data + first * program.in,
                                 of_x ? dx_data + first * program.in : nullptr, of_cores, of_bias);
    });
  });

  if (of_bias) {
    S* to = static_cast<S*>(found.back().mutable_data_ptr());
    for (Index f = 0; f < program.out; f += LANES<F>) {
      Index width = std::min<Index>(LANES<F>, program.out - f);
      Vector<F> sum = {};
      for (const Totals<F>& own : totals) sum += load(own.memory.held.get() + own.bias_at + f, width);
      store(to + f, sum, width);
    }
  }
  for (Index t = 0; of_cores && t < count; t++) {
    // M~ = factor M: dM = factor (dM~ - <dM~, M> / (n RMS^2) M), the second term where it is clipped; dgain = clip <dM~, M>
    const Step& step = program.steps[t];
    const Core<S>& core = layer.cores[t];
    const Index each = step.batch * step.out, height = layer.experts() * each;
    auto over_rows = [&](const auto& run) {  // `run(index, row)` for each row of the gradient, in the core's own order
      parallel_for(0, height, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / step.in), [&](Index begin, Index end) {
        thread_local Numbers<F> line;
        F* column = line.reserve(round_up(step.in, LANES<F>));
        for (Index index = begin; index < end; index++) {
          const Totals<F>& own = totals[index / each];
          const Sum& sum = own.sums[t];
          const Index m_stride = sum.along_out ? 1 : sum.padded, n_stride = sum.along_out ? sum.padded : 1;
          const F* from = own.memory.held.get() + sum.start + index % each / step.out * sum.rows * sum.padded +
                          index % step.out * m_stride;
          for (Index i = 0; sum.along_out && i < step.in; i++) column[i] = from[i * n_stride];
          run(index, sum.along_out ? column : from);
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
                std::optional<std::vector<double>> given_sigmas, Indices numbers, std::optional<Tensor> loads) {
  const std::vector<double> sigmas = given_sigmas.value_or(std::vector<double>());
  return by_dtype(x, [&](auto s) { return forward<decltype(s)>(x, cores, bias, gains, sigmas, numbers, loads); });
}

std::vector<Tensor> gradients(const Tensor& dy, const Tensor& x, std::vector<Tensor> cores, std::optional<Tensor> gains,
                              std::optional<std::vector<double>> given_sigmas, Indices numbers, int64_t wants,
                              std::optional<Tensor> loads) {
  const std::vector<double> sigmas = given_sigmas.value_or(std::vector<double>());
  return by_dtype(x, [&](auto s) { return backward<decltype(s)>(dy, x, cores, gains, sigmas, numbers, wants, loads); });
}

}  // namespace

// Their schemas are in op.py
STABLE_TORCH_LIBRARY_IMPL(structlin_cpu, CPU, library) {
  library.impl("multiply", TORCH_BOX(&multiply));
  library.impl("layer", TORCH_BOX(&multiply));
  library.impl("gradients", TORCH_BOX(&gradients));
  library.impl("polar", TORCH_BOX(&polar));
}
