// A tile of tokens as they lie in memory, a row each, where vectors run along a core's fan.
//
//     forward    m tokens    k fan-in    n fan-out    A h_t, at any stride; B the core, transposed once a call
//     backward   m tokens    k fan-out   n fan-in     A g_(t+1), at any stride; B the core as it is stored
//     dcore      m fan-out   k tokens    n fan-in     A g, B x (of the last core A h, B dy: m fan-in, n fan-out)
//
// x and dy are read, y and dx written, where they are. A core writes its blocks one after the other, and the next reads them as
// they lie: no number is moved. This serves one core, or two, where a token of x and y is block after block and fans are whole
// pairs of vectors; for everything else there is tile.h.

#pragma once
#include "products.h"

namespace {

template <class S>
struct Rows {
  using F = Wide<S>;
  using H = F;
  static constexpr int L = LANES<F>;

  struct Reads {  // where a core finds the numbers of each block, in the row that the core before it has written
    Indices block;
    Index stride = 0;  // none: they do not lie at one
  };

  const Program& program;
  const std::vector<Core<S>>& cores;
  const Index last;
  Index size = 2 * MR;                // tokens
  std::vector<Reads> h_reads, g_reads;  // of core t: of h_t, and of g_(t+1)
  Indices length;                       // of a token's row of h_t, g_t
  std::vector<Indices> rows;            // where they start
  std::vector<Numbers<F>> packed_cores;  // [batch][fan_in][fan_out]
  const F* bias = nullptr;              // of y

  explicit Rows(const Layer<S>& layer)
      : program(layer.program), cores(layer.cores), last(program.steps.size() - 1), packed_cores(last + 1) {
    if (program.params() * sizeof(F) >= L2_BYTES) size = 4 * MR;  // so that they are read less often
    for (Index t = 0; t <= last; t++) {
      const Step& step = program.steps[t];
      h_reads.push_back(t ? find(program.steps[t - 1].writes, step.in) : in_order(step.pairs(), step.in));
      g_reads.push_back(t < last ? find(program.steps[t + 1].reads, step.out) : in_order(step.pairs(), step.out));
    }
    for (Index t = 0; t <= last + 1; t++) {
      length.push_back(t > last ? program.out : program.steps[t].pairs() * program.steps[t].in + (t ? L : 0));
      rows.emplace_back();
      for (Index i = 0; i < size; i++) rows[t].push_back(i * length[t]);
    }
  }

  static bool serve(const Layer<S>& layer) {
    // Forward, one thread packs the cores for all, which pays for many tokens. Backward, one core or none is packed.
    if (layer.tokens < (layer.forward ? 24 : 4) * MR) return false;
    const std::vector<Step>& steps = layer.program.steps;
    for (const Step& step : steps)
      if (step.in % (2 * L) || step.out % (2 * L)) return false;
    const Step &first = steps.front(), &last = steps.back();
    return steps.size() <= 2 && straight(first.reads, layer.program.in) && straight(last.writes, layer.program.out) &&
           (steps.size() == 1 || (find(first.writes, last.in).stride && find(last.reads, first.out).stride));
  }

  // Whether a token is block after block
  static bool straight(const Offsets& side, Index features) {
    const Index fan = side.fan.size(), pairs = side.batch.size() * side.repeat.size();
    bool in_order = pairs * fan == features;
    for (Index i = 0; i < fan; i++) in_order &= side.fan[i] == i;
    for (Index p = 0; p < pairs; p++) in_order &= side.block(p) == p * fan;
    return in_order;
  }

  static Reads in_order(Index pairs, Index fan) {
    Reads reads{{}, 1};
    for (Index p = 0; p < pairs; p++) reads.block.push_back(p * fan);
    return reads;
  }

  // `side` says to which number of which block each result of the core before goes; a block has `fan` numbers
  static Reads find(const Offsets& side, Index fan) {
    const Index written = side.fan.size(), pairs = side.batch.size() * side.repeat.size();
    Indices at(pairs * written);
    for (Index p = 0; p < pairs; p++)
      for (Index i = 0, start = side.block(p); i < written; i++) at[start + side.fan[i]] = p * written + i;
    Reads reads{{}, at[1] - at[0]};
    for (Index f = 0; f < pairs * written; f++) {
      if (f % fan == 0) reads.block.push_back(at[f]);
      if (at[f] != reads.block.back() + f % fan * reads.stride) return {};
    }
    return reads;
  }

  void prepare_forward(const F* added) {
    bias = added;
    for (Index t = 0; t <= last; t++) pack_core(packed_cores[t], program.steps[t], cores[t]);
  }
  void prepare_backward(bool, bool of_cores) {
    for (Index t = 0; of_cores && t < last; t++) pack_core(packed_cores[t], program.steps[t], cores[t]);
  }

  Index area(Index t) const { return round_up(size * length[t], L); }  // of h_t, g_t
  Index area() const { return last ? area(1) : 0; }                    // of the widest that is not x or y

  const F* pack_x(F*, const F* x, Index) const { return x; }
  const F* pack_dy(F*, const F* dy, Index) const { return dy; }
  F* place_y(F*, F* y) const { return y; }
  F* place_dx(F*, F* dx) const { return dx; }
  void unpack_dx(F*, const F*, Index) const {}
  void unpack_y(F*, const F*, Index) const {}

  // h_(t+1) from h_t, of n tokens, for some of the blocks
  void forward(Index t, F* to, const F* from, Index n, Index begin, Index end) const {
    const Step& step = program.steps[t];
    for (Index pair = begin; pair < end; pair++)
      multiply_into<F, false>(Result<F>{to + pair * step.out, rows[t + 1].data(), nullptr,
                                        t == last && bias ? bias + pair * step.out : nullptr},
                              Scalars<F>{from + h_reads[t].block[pair], length[t], h_reads[t].stride},
                              Vectors<F>{packed_cores[t].held.get() + pair / step.repeat * step.in * step.out, step.out}, n,
                              step.out, step.in, cores[t].factor);
  }

  // g_t from g_(t+1)
  void backward(Index t, F* to, const F* from, Index n, Index begin, Index end) const {
    const Step& step = program.steps[t];
    for (Index pair = begin; pair < end; pair++)
      multiply_into<F, false>(Result<F>{to + pair * step.in, rows[t].data()},
                              Scalars<F>{from + g_reads[t].block[pair], length[t + 1], g_reads[t].stride},
                              Vectors<F>{cores[t].data + pair / step.repeat * step.in * step.out, step.in}, n, step.in,
                              step.out, cores[t].factor);
  }

  // Of the gradient's vectors: they run along dy or along x
  bool along_out(Index t) const { return t; }

  void add(Index t, F* total, const Sum& sum, const F* g, const F* h, Index n, bool fresh, Index begin, Index end) const {
    const Index repeat = program.steps[t].repeat;
    for (Index pair = begin * repeat; pair < end * repeat; pair++) {
      const Scalars<F> g_columns{g + g_reads[t].block[pair], g_reads[t].stride, length[t + 1]};
      const Scalars<F> h_columns{h + h_reads[t].block[pair], h_reads[t].stride, length[t]};
      const Vectors<F> g_rows{g + pair * sum.columns, length[t + 1]}, h_rows{h + pair * sum.columns, length[t]};
      sum.add<F>(total, pair / repeat, fresh && pair % repeat == 0, sum.along_out ? h_columns : g_columns,
                 sum.along_out ? g_rows : h_rows, n);
    }
  }
};

}  // namespace
