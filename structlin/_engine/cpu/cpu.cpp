// A structured layer on a CPU, forward and backward, in one pass over the tokens.
//
//     h_0 = x        h_(t+1)[b, r, o] = sum_i core_t[b, o, i] h_t[b, r, i]        y = h_last + bias
//     g_last = dy    g_t[b, r, i] = sum_o core_t[b, o, i] g_(t+1)[b, r, o]        dx = g_0
//     dcore_t[b, o, i] = sum over tokens and r of g_(t+1)[b, r, o] h_t[b, r, i]
//
// With an activation f between the cores (activation.h), h_(t+1) is f of that sum but for y, and g_t for t > 0 is the
// sum times f' there. The backward pass computes f' beside h.
//
// A tile of tokens goes through all cores while it lies in cache (tiles.h); each core is products of one kind
// (microkernel.h), of blocks of any size. What runs when is in dispatch.h. Few tokens would leave a tile mostly empty;
// the forward pass takes them by gemv.h. Two-byte numbers are widened to float32, unless the CPU multiplies bfloat16 in
// pairs, or has a matrix unit (amx.h). A core is stored (batch, fan_out, fan_in). Sums are in float32, for float64 in
// float64. Every part of the tokens is summed by itself and the parts are summed in their order: the same call on as
// many threads gives the same bits. Only x is saved. A core under weight normalisation is multiplied by factor = gain *
// min(1, sigma / RMS(core)), which is never stored. An optimizer's polar factors of cores are in polar.h,
// SOAP's step of them in soap.h.

#include <numeric>

#include "gemv.h"
#include "polar.h"
#include "soap.h"
#include "tiles.h"

namespace {

// ---- forward ----------------------------------------------------------------------------------------------

template <class S>
void forward_tiles(const Layer<S>& layer, const S* x, S* y, const Wide<S>* bias) {
  using H = Held<S>;
  Tiles<S> tiles(layer);
  tiles.prepare_forward(bias);
  const Program& program = tiles.program;
  const Index tokens = layer.tokens, size = tiles.size, area = tiles.area();
  parallel_for(0, (tokens + size - 1) / size, 1, [&](Index begin, Index end) {
    thread_local Numbers<H> memory;
    H *h = memory.reserve(2 * area), *next = h + area;
    for (Index first = begin * size; first < std::min(end * size, tokens); first += size) {
      const Index n = std::min(size, tokens - first);
      tiles.pack_x(h, x + first * program.in, n);
      for (Index t = 0; t <= tiles.last; t++, std::swap(h, next)) {
        const Step& step = program.steps[t];
        over_blocks(step, step.pairs(), [&](Index begin, Index end) { tiles.forward(t, next, h, n, begin, end); });
      }
      tiles.unpack_y(y + first * program.out, h, n);
    }
  });
}

template <class S>
Tensor forward(const Tensor& given, const std::vector<Tensor>& cores, const std::vector<Tensor>& scales,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& gains, const std::vector<double>& sigmas,
               const Indices& numbers) {
  using F = Wide<S>;
  Tensor x = contiguous_of(given);
  Layer<S> layer(x, cores, scales, gains, sigmas, numbers, true);
  const Program& program = layer.program;
  Indices shape = sizes_of(x);
  shape.back() = program.out;
  Tensor y = make_tensor(x, shape);
  STD_TORCH_CHECK(!bias || (bias->numel() == program.out && bias->scalar_type() == x.scalar_type()),
                  "structlin: the bias does not fit x and the program");
  if (!layer.tokens) return y;
  Numbers<F> memory;
  const Tensor held = contiguous_of(bias.value_or(x));
  const F* added = bias ? numbers_of<F>(static_cast<const S*>(held.data_ptr()), program.out, memory) : nullptr;
  const S* from = static_cast<const S*>(x.data_ptr());
  S* to = static_cast<S*>(y.mutable_data_ptr());
  if (layer.is_gemv()) forward_gemv(layer, from, to, added);
  else forward_tiles(layer, from, to, added);
  return y;
}

// ---- backward ---------------------------------------------------------------------------------------------

enum Wants { OF_X = 1, OF_CORES = 2, OF_GAINS = 4, OF_BIAS = 8 };

template <class S>
struct Totals {
  std::vector<Sum<S>> sums;  // of each core
  Index bias_at;
  Numbers<Wide<S>> memory;
};

// The sum of the rows of dy, onto `to`
template <class S>
void add_rows(Wide<S>* to, const S* dy, Index features, Index rows) {
  constexpr Index L = LANES<Wide<S>>;
  for (Index first = 0; first < rows; first += 4)  // four at a time: `to` is read and written less often
    for (Index f = 0; f < features; f += L) {
      const Index width = std::min(L, features - f);
      Vector<Wide<S>> sum = load(to + f, width);
      for (Index i = first; i < std::min(first + 4, rows); i++) sum += load(dy + i * features + f, width);
      store(to + f, sum, width);
    }
}

// The sums over tokens, and dx, unless it is null
template <class S>
Totals<S> add_tiles(const Layer<S>& layer, const S* dy, const S* x, S* dx, bool of_cores, bool of_bias) {
  using F = Wide<S>;
  using H = Held<S>;
  Tiles<S> tiles(layer);
  const Program& program = layer.program;
  const bool of_x = dx;
  const Index tokens = layer.tokens, size = tiles.size, last = tiles.last, area = tiles.area(),
              count = (tokens + size - 1) / size;
  tiles.prepare_backward(tokens, of_x);
  Totals<S> found;
  std::vector<Sum<S>>& sums = found.sums;
  Index summed = 0, middle = 0, sloped = 0;
  for (Index t = 0; t <= last; t++) {
    sums.push_back({program.steps[t], summed, tiles.along_out(t, tokens)});
    summed += of_cores ? round_up(sums.back().size, 16) : 0;
    middle += tiles.area(t);
    sloped += tiles.slope_area(t);
  }
  found.bias_at = summed;
  summed += of_bias ? round_up(program.out, 16) : 0;
  const Index most = MAX_SUM_BYTES / std::max<Index>(1, summed * sizeof(F));
  const Index parts = tiles.tiling.shared ? 1 : std::max<Index>(1, std::min({layer.threads(), count, most}));
  F* total = found.memory.reserve(std::max<Index>(1, parts * summed));
  for (Index t = 0; t <= last; t++) {
    sums[t].at = total + sums[t].start;
    if constexpr (std::is_same_v<S, F>)
      if (count && layer.cores[t].gradient && sums[t].is_gradient()) sums[t].at = layer.cores[t].gradient;
  }

  // The tokens from `first` on, of the tiles that go together; `own` has no value yet if they are `fresh`
  auto add = [&](F* own, Index first, bool fresh, H* h) {
    const Index n = std::min(size, tokens - first);
    if (of_bias) add_rows<S>(own + found.bias_at, dy + first * program.out, program.out, n);
    if (!of_x && !of_cores) return;
    std::vector<const H*> read(last + 1, h);  // by each core
    std::vector<const H*> slopes(last + 1);   // of what each core read, behind what made it
    H *g = h + middle, *next = g + area, *slope = next + area;
    if (of_cores || program.between) {
      tiles.pack_x(h, x + first * program.in, n);
      for (Index t = 0; t < last; t++) {
        h += tiles.area(t);
        H* own_slopes = program.between ? slope : nullptr;
        over_blocks(program.steps[t], program.steps[t].pairs(),
                    [&](Index begin, Index end) { tiles.forward(t, h, read[t], n, begin, end, own_slopes); });
        read[t + 1] = h, slopes[t + 1] = own_slopes;
        slope += tiles.slope_area(t);
      }
    }
    tiles.pack_dy(g, dy + first * program.out, n);
    for (Index t = last; t >= 0; t--, std::swap(g, next)) {
      const Step& step = program.steps[t];
      if (of_cores)
        over_blocks(step, step.batch,
                    [&, to = own == total ? sums[t].at : own + sums[t].start](Index begin, Index end) {
                      tiles.add(t, to, sums[t], g, read[t], n, fresh, begin, end);
                    });
      if (!t && !of_x) return;
      over_blocks(step, step.pairs(),
                  [&](Index begin, Index end) { tiles.backward(t, next, g, n, begin, end, slopes[t]); });
    }
    tiles.unpack_dx(dx + first * program.in, g, n);
  };
  parallel_for(0, parts, 1, [&](Index begin, Index end) {
    MatrixUnit unit;
    thread_local Numbers<H> memory;
    H* h = memory.reserve(middle + 2 * area + sloped);
    for (Index part = begin; part < end; part++) {
      F* own = total + part * summed;
      const Index start = part * count / parts;
      std::fill(count ? own + found.bias_at : own, own + summed, F{0});
      for (Index number = start; number < (part + 1) * count / parts; number++)
        add(own, number * size, number == start, h);
    }
  });

  auto add_parts = [&](F* to, Index start, Index size) {  // in their order
    if (parts > 1)
      parallel_for(0, size, MIN_PRODUCTS_PER_THREAD, [&](Index begin, Index end) {
        for (Index part = 1; part < parts; part++)
          for (Index i = begin; i < end; i++) to[i] += total[part * summed + start + i];
      });
  };
  for (const Sum<S>& sum : sums)
    if (of_cores) add_parts(sum.at, sum.start, sum.size);
  if (of_bias) add_parts(total + found.bias_at, found.bias_at, program.out);
  return found;
}

template <class S>
std::vector<Tensor> backward(const Tensor& given_dy, const Tensor& given, const std::vector<Tensor>& cores,
                             const std::optional<Tensor>& gains, const std::vector<double>& sigmas,
                             const Indices& numbers, Index wants) {
  using F = Wide<S>;
  Tensor x = contiguous_of(given), dy = contiguous_of(given_dy);
  Layer<S> layer(x, cores, {}, gains, sigmas, numbers, false);
  const Program& program = layer.program;
  const Index count = program.steps.size();
  STD_TORCH_CHECK(gains ? gains->scalar_type() == ScalarType::Double : !(wants & OF_GAINS),
                  "structlin: the gains must be float64, and there must be some for their gradient");
  STD_TORCH_CHECK(dy.numel() == layer.tokens * program.out && dy.scalar_type() == x.scalar_type(),
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
  for (Index t = 0; (wants & OF_CORES) && t < count; t++)
    layer.cores[t].gradient = static_cast<S*>(found[1 + t].mutable_data_ptr());
  const Totals<S> totals = add_tiles(layer, dy_data, x_data, dx_data, of_cores, of_bias);

  if (of_bias) {
    const F* from = totals.memory.held.get() + totals.bias_at;
    S* to = static_cast<S*>(found[2 + count].mutable_data_ptr());
    for (Index f = 0; f < program.out; f += LANES<F>) store(to + f, load(from + f, program.out - f), program.out - f);
  }
  for (Index t = 0; of_cores && t < count; t++) {
    // M~ = factor M: dM = factor (dM~ - <dM~, M> / (n RMS^2) M), the second term where it is clipped; dgain = clip
    // <dM~, M>
    const Step& step = program.steps[t];
    const Core<S>& core = layer.cores[t];
    const Sum<S>& sum = totals.sums[t];
    auto over_rows = [&](const auto& run) {  // `run(index, row)` for each row of the gradient, in the core's own order
      constexpr Index L = LANES<F>;
      const Index groups = (step.out + L - 1) / L, width = round_up(step.in, L);
      parallel_for(
          0, step.batch * groups, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / (width * L)),
          [&](Index begin, Index end) {
            thread_local Numbers<F> memory;
            F* lines = memory.reserve(L * width);
            for (Index group = begin; group < end; group++) {
              const Index block = group / groups, first = group % groups * L;
              const Index n = std::min(L, step.out - first);
              const F* from = sum.at + block * sum.rows * sum.padded;
              auto get = [&](Index i, Index o, Index count) { return load(from + i * sum.padded + first + o, count); };
              auto put = [&](Index o, Index i, const Vector<F>& v) { store(lines + o * width + i, v); };
              if (sum.along_out) transpose<F>(step.in, n, width, get, put);
              for (Index o = 0; o < n; o++)
                run(block * step.out + first + o, sum.along_out ? lines + o * width : from + (first + o) * sum.padded);
            }
          });
    };
    std::vector<double> parts_along(gains ? step.batch * step.out : 0);
    if (gains)
      over_rows([&](Index index, const F* row) {
        parts_along[index] = inner_product(row, core.data + index * step.in, step.in);
      });
    const double along = std::accumulate(parts_along.begin(), parts_along.end(), 0.0);
    if (wants & OF_GAINS) static_cast<double*>(found[1 + count].mutable_data_ptr())[t] = along * core.clip;
    if (!(wants & OF_CORES)) continue;
    const F back = core.squares ? along / core.squares : 0;
    over_rows([&](Index index, const F* row) {
      S* to = core.gradient + index * step.in;
      if (!back && core.factor == 1 && static_cast<const void*>(row) == to) return;
      for (Index i = 0; i < step.in; i += LANES<F>) {
        Index width = std::min<Index>(LANES<F>, step.in - i);
        Vector<F> own = load(core.data + index * step.in + i, width);
        Vector<F> gradient = load(row + i, width);
        if (back) gradient -= back * own;
        store(to + i, core.factor * gradient, width);
      }
    });
  }
  return found;
}

// ---- the operators ----------------------------------------------------------------------------------------

Tensor multiply(const Tensor& x, std::vector<Tensor> cores, std::optional<Tensor> bias, std::optional<Tensor> gains,
                std::vector<double> sigmas, Indices numbers) {
  return by_dtype(x, [&](auto s) { return forward<decltype(s)>(x, cores, {}, bias, gains, sigmas, numbers); });
}

Tensor multiply_int8(const Tensor& x, std::vector<Tensor> cores, std::vector<Tensor> scales, std::optional<Tensor> bias,
                     Indices numbers) {
  STD_TORCH_CHECK(!scales.empty(), "structlin: scales are needed for every core");
  return by_dtype(x, [&](auto s) { return forward<decltype(s)>(x, cores, scales, bias, {}, {}, numbers); });
}

std::vector<Tensor> gradients(const Tensor& dy, const Tensor& x, std::vector<Tensor> cores, std::optional<Tensor> gains,
                              std::vector<double> sigmas, Indices numbers, int64_t wants) {
  return by_dtype(x, [&](auto s) { return backward<decltype(s)>(dy, x, cores, gains, sigmas, numbers, wants); });
}

// Which way a call takes, as a number of `Path`; `like` has its dtype
int64_t choose_path(const Tensor& like, Indices numbers, int64_t tokens, bool trains) {
  STD_TORCH_CHECK(tokens >= 0, "structlin: there are ", tokens, " tokens; 0 and more work");
  const std::shared_ptr<const Program> program = program_of(numbers);
  const Call call{*program, tokens, torch::stable::get_num_threads(), true, trains};
  return by_dtype(like, [&](auto s) { return static_cast<int64_t>(choose<decltype(s)>(call)); });
}

// Bytes of the first and second cache by which tiles are sized, and bits of a vector; `like` is on the CPU
std::tuple<int64_t, int64_t, int64_t> describe_machine(const Tensor&) { return {caches().l1, caches().l2, 8 * BYTES}; }

}  // namespace

// Their schemas are in operators.py, polar.py, soap.py and library.py
STABLE_TORCH_LIBRARY_IMPL(structlin, CPU, library) {
  library.impl("multiply", TORCH_BOX(&multiply));
  library.impl("layer", TORCH_BOX(&multiply));
  library.impl("multiply_int8", TORCH_BOX(&multiply_int8));
  library.impl("gradients", TORCH_BOX(&gradients));
  library.impl("choose", TORCH_BOX(&choose_path));
  library.impl("machine", TORCH_BOX(&describe_machine));
  library.impl("polar", TORCH_BOX(&polar));
  library.impl("soap_find", TORCH_BOX(&soap_find));
  library.impl("soap_keep", TORCH_BOX(&soap_keep));
}
