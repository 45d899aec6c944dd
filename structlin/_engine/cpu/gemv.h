// The forward pass of few tokens (GEMV): dot products with the rows of the cores as they are stored.
//
//     h_0 = x        h_(t+1)[b, r, o] = sum_i core_t[b, o, i] h_t[b, r, i]        y = h_last + bias
//
// Here vectors run along fan-in, and a token is a row. Sums stay in registers, so that each core is read once: some of
// its rows times some tokens, which makes a whole vector of results. A core of int8 is widened in registers, and each
// sum times the scale of its row; instructions that multiply int8 (VNNI) would need activations of int8 too.

#pragma once
#include <tuple>

#include "layer.h"

namespace {

// R rows of a core times N tokens, of which `h` and `next` are rows, `stride` numbers apart; a result for each row of
// the core, in `columns`. Missing tokens of L / R repeat the others, which costs nothing. A row of int8 has a factor.
template <class S, int R, int N, class C, class T>
inline void gemv_rows(const C* core, Index in, const Held<S>* h, T* next, Index stride, const Index* columns,
                      const Wide<S>* factors) {
  using F = Wide<S>;
  constexpr Index STEP = LANES<F> * GROUP<S>;
  Vector<F> sum[R][N] = {}, all[LANES<F>];
  auto add = [&](Index i, Index count) __attribute__((always_inline)) {
    decltype(load_core_row<S>(core, count)) rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) rows[r] = load_core_row<S>(core + r * in + i, count);
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) {
      auto token = load_a_row(h + t * stride + i, count);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) add_product(sum[r][t], rows[r], token);
    }
  };
  Index i = 0;
  for (; i + STEP <= in; i += STEP) {  // rows read side by side hide their order from the CPU
    const char* ahead = reinterpret_cast<const char*>(core + i * R) + BYTES_AHEAD;
    for (Index line = 0; line < R * STEP * Index{sizeof(C)}; line += 64) __builtin_prefetch(ahead + line);
    add(i, STEP);
  }
  if (i < in) add(i, in - i);
#pragma GCC unroll 16
  for (int j = 0; j < LANES<F>; j++) all[j] = sum[j % R][j / R % N];
  Vector<F> factor = *factors - Vector<F>{};
  if constexpr (!std::is_same_v<C, S> && R > 1) {
    F own[LANES<F>];
    for (int j = 0; j < LANES<F>; j += R) std::memcpy(own + j, factors, R * sizeof(F));
    factor = load(own);
  }
  T found[LANES<F>];
  store(found, factor * sum_each<F>(all));
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) next[t * stride + columns[r]] = found[t * R + r];
}

struct Range {
  Index begin, end;
};
struct Share {  // of a core, for a thread: of one of its indices some values, of the others all
  Range batch, repeat, fan;
};

// Parts `part` to `end` of `parts`. The index is cut whose middle lies farthest into the results, if it has values
// enough: threads that write next to each other wait for each other's lines of the cache.
inline Share share_of(const Step& step, Index part, Index end, Index parts) {
  Share share{{0, step.batch}, {0, step.repeat}, {0, step.out}};
  auto rank = [&](Range& range, const Indices& writes) {
    return std::tuple{std::min(range.end, 4 * parts), writes[range.end / 2], &range};
  };
  Range& cut = *std::get<2>(std::max({rank(share.batch, step.writes.batch), rank(share.repeat, step.writes.repeat),
                                      rank(share.fan, step.writes.fan)}));
  cut = {part * cut.end / parts, end * cut.end / parts};
  return share;
}

// h_(t+1) from h_t, times a factor, or one for each row, for a share of a core. With 1 to 3 tokens more rows make a
// whole vector of results.
template <class S, class C, class T>
void gemv_core(const Step& step, const C* core, const Wide<S>* factors, const Held<S>* h, T* next, Index stride,
               Index tokens, const Share& share) {
  constexpr int L = LANES<Wide<S>>, R = std::min(4, L);
  constexpr bool each = !std::is_same_v<C, S>;
  for (Index block = share.batch.begin; block < share.batch.end; block++)
    for (Index r = share.repeat.begin; r < share.repeat.end; r++) {
      const Held<S>* from = h + (block * step.repeat + r) * step.in;
      T* to = next + step.writes.batch[block] + step.writes.repeat[r];
      auto multiply = [&]<int HEIGHT>(Index o) {
        const Index row = block * step.out + o;
        const C* rows = core + row * step.in;
        const Index* columns = step.writes.fan.data() + o;
        const Wide<S>* own = factors + each * row;
        auto some = [&]<int COUNT>(Index t) {
          gemv_rows<S, HEIGHT, COUNT>(rows, step.in, from + t * stride, to + t * stride, stride, columns, own);
        };
        if (tokens == 1) return some.template operator()<1>(0);
        Index t = 0;
        if constexpr (HEIGHT * 4 <= L)
          for (; t + 4 <= tokens; t += 4) some.template operator()<4>(t);
        if constexpr (HEIGHT * 2 <= L)
          for (; t + 2 <= tokens; t += 2) some.template operator()<2>(t);
        for (; t < tokens; t++) some.template operator()<1>(t);
      };
      Index o = share.fan.begin;
      if constexpr (2 * R <= L)
        for (; tokens < L / R && o + 2 * R <= share.fan.end; o += 2 * R) multiply.template operator()<2 * R>(o);
      for (; o + R <= share.fan.end; o += R) multiply.template operator()<R>(o);
      for (; o < share.fan.end; o++) multiply.template operator()<1>(o);
    }
}

// Each thread takes some tokens through all cores, or if tokens are too few or cores large, a share of each core
template <class S>
void forward_gemv(const Layer<S>& layer, const S* x, S* y, const Wide<S>* bias) {
  using F = Wide<S>;
  using H = Held<S>;
  constexpr int L = LANES<F>;
  const Program& program = layer.program;
  const Step& first = program.steps.front();
  const Index tokens = layer.tokens, threads = layer.threads(), last = program.steps.size() - 1;
  const Index stride = round_up(program.width(), 1024) + 2 * L;  // or tokens would share a line of the cache
  const Indices& fan = first.reads.fan;
  const bool straight = fan.back() == first.in - 1 && std::is_sorted(fan.begin(), fan.end());
  const Index work = program.products() * tokens;
  const Index bytes = program.params() * (layer.rounded ? 1 : Index{sizeof(S)});
  const bool large = bytes >= 2 * caches().l2;  // so that no two threads read the same
  const Index groups = tokens >= 2 * threads && work > 2 * MIN_PRODUCTS_PER_THREAD && !large ? threads : 1;
  thread_local Numbers<H> wide;
  const H* numbers = numbers_of<H>(x, tokens * program.in, wide);
  auto run = [&](Index begin, Index n) {
    thread_local Numbers<F> memory;
    F *h = memory.reserve(2 * n * stride), *next = h + n * stride;
    const H* from = numbers + begin * program.in;
    for (Index t = 0; t < n; t++, from += program.in)
      for (Index pair = 0; pair < first.pairs(); pair++) {
        H* to = reinterpret_cast<H*>(h) + t * stride + pair * first.in;
        const Index start = first.reads.block(pair);
        if (straight && start + first.in <= program.in) std::copy_n(from + start, first.in, to);
        else
          for (Index i = 0; i < first.in; i++) to[i] = start + fan[i] < program.in ? from[start + fan[i]] : H{};
      }
    for (Index t = 0; t <= last; t++, std::swap(h, next)) {
      const Step& step = program.steps[t];
      const Core<S>& core = layer.cores[t];
      const Index parts =
          std::clamp<Index>(step.params() * step.repeat * n / (2 * MIN_PRODUCTS_PER_THREAD), 1, threads / groups);
      parallel_for(0, parts, 1, [&](Index part, Index end) {
        MatrixUnit unit;
        const H* read = reinterpret_cast<const H*>(h);
        const Share share = share_of(step, part, end, parts);
        auto multiply = [&](auto* to) {
          if (core.rounded) gemv_core<S>(step, core.rounded, core.scales, read, to, stride, n, share);
          else gemv_core<S>(step, core.given, &core.factor, read, to, stride, n, share);
        };
        if (t < last) multiply(reinterpret_cast<H*>(next));
        else multiply(next);
      });
      if (t < last && program.between)
        for (Index i = 0; i < n; i++) activate_row(reinterpret_cast<H*>(next) + i * stride, step.pairs() * step.out);
    }
    S* to = y + begin * program.out;
    for (Index t = 0; t < n; t++, to += program.out)
      for (Index f = 0; f < program.out; f += L) {
        Index count = program.out - f;
        Vector<F> v = load(h + t * stride + f, count);
        store(to + f, bias ? v + load(bias + f, count) : v, count);
      }
  };
  parallel_for(0, groups, 1, [&](Index begin, Index end) {
    run(begin * tokens / groups, end * tokens / groups - begin * tokens / groups);
  });
}

}  // namespace
