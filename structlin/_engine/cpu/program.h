// A structure as integers: which features each core reads and writes, and where they lie in a tile of tokens.

#pragma once
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "activation.h"

namespace {

using Index = int64_t;
using Indices = std::vector<Index>;

constexpr size_t MAX_PROGRAMS = 1024;  // that a thread remembers

// Where each value of batch, repeat and fan lies among the features of a token, for one side of a core
struct Offsets {
  Indices batch, repeat, fan;
  Offsets() = default;
  Offsets(const Indices& places, Index batches, Index repeats, Index fans) {  // of all features, in this order
    for (Index b = 0; b < batches; b++) batch.push_back(places[b * repeats * fans]);
    for (Index r = 0; r < repeats; r++) repeat.push_back(places[r * fans]);
    fan.assign(places.begin(), places.begin() + fans);
  }
  Index block(Index pair) const {  // of block and repetition `pair`, numbered batch * repeats + repeat
    Index repeats = repeat.size();
    return batch[pair / repeats] + repeat[pair % repeats];
  }
  // Whether all of `places` are sums of these offsets, and so are their places within blocks of `size` features
  bool add_up(const Indices& places, Index size) const {
    const Index fans = fan.size(), repeats = repeat.size(), count = places.size();
    for (Index i = 0; i < count; i++) {
      const Index b = batch[i / fans / repeats], r = repeat[i / fans % repeats], f = fan[i % fans];
      if (b + r + f != places[i] || b % size + r % size + f % size >= size) return false;
    }
    return true;
  }
};

struct Step {
  Index batch, repeat, in, out;
  Offsets reads, writes;
  Index pairs() const { return batch * repeat; }
  Index params() const { return batch * out * in; }
};

struct Program {
  Index in, out;  // features of x and y; the first core may read more, which are zero, and the last write more
  std::vector<Step> steps;
  Index between;  // a number of `Between`: what is applied after each core but the last

  // in, out, cores; batch, repeat, fan_in, fan_out of each core; a move before each core and after the last; between
  explicit Program(const Indices& numbers) {
    size_t at = 0;
    auto next = [&] {
      require(at < numbers.size());
      return numbers[at++];
    };
    in = next(), out = next();
    const Index cores = next();
    require(0 < cores && cores < static_cast<Index>(numbers.size()));
    steps.resize(cores);
    for (Step& step : steps) {
      step.batch = next(), step.repeat = next(), step.in = next(), step.out = next();
      require(std::min({step.batch, step.repeat, step.in, step.out}) > 0);
      require(1.0 * step.batch * step.repeat * std::max(step.in, step.out) < 0x1p31);  // features of an activation
    }
    for (Index t = 0; t <= cores; t++) {
      const Step& step = steps[std::min(t, cores - 1)];
      const Indices made_at = read_move(next, step.pairs() * (t < cores ? step.in : step.out));
      const Index features = made_at.size();
      if (t < cores) {
        steps[t].reads = Offsets(made_at, steps[t].batch, steps[t].repeat, steps[t].in);
        require(steps[t].reads.add_up(made_at, t ? steps[t - 1].out : features));
      }
      if (!t) continue;
      Indices read_at(features);
      for (Index i = 0; i < features; i++) read_at[made_at[i]] = i;
      Step& before = steps[t - 1];
      require(before.pairs() * before.out == features);
      before.writes = Offsets(read_at, before.batch, before.repeat, before.out);
      require(before.writes.add_up(read_at, t < cores ? step.in : features));
    }
    between = next();
    require(at == numbers.size() && NOTHING <= between && between <= SILU);
    const Step &first = steps.front(), &last = steps.back();
    require(0 < in && in <= first.pairs() * first.in && 0 < out && out <= last.pairs() * last.out);
  }

  static void require(bool fits) { STD_TORCH_CHECK(fits, "structlin: these numbers are no program"); }

  // For each of `width` features in the order in which they are read, its number in the order in which they were made.
  // A move is a count of axes, their sizes as they were made, and the order in which they are read; none is no move.
  template <class Next>
  static Indices read_move(const Next& next, Index width) {
    const Index axes = next();
    require(0 <= axes && axes <= 64);
    Indices sizes(axes), strides(axes), places{0};
    for (Index& size : sizes) size = next();
    Index product = 1;
    for (Index axis = axes - 1; axis >= 0; product *= sizes[axis--]) {
      require(0 < sizes[axis] && sizes[axis] <= width / product);
      strides[axis] = product;
    }
    if (!axes) sizes = {width}, strides = {1};
    require(!axes || product == width);
    for (size_t level = 0; level < sizes.size(); level++) {
      const Index axis = axes ? next() : 0;
      require(0 <= axis && axis < static_cast<Index>(sizes.size()) && sizes[axis]);
      Indices finer;
      for (Index place : places)
        for (Index i = 0; i < sizes[axis]; i++) finer.push_back(place + i * strides[axis]);
      sizes[axis] = 0;  // each axis is read once
      places = std::move(finer);
    }
    return places;
  }

  template <class Of>
  Index sum(const Of& of) const {
    Index total = 0;
    for (const Step& step : steps) total += of(step);
    return total;
  }
  template <class Of>
  Index largest(const Of& of) const {
    Index most = of(steps.front());
    for (const Step& step : steps) most = std::max<Index>(most, of(step));
    return most;
  }

  Index params() const {
    return sum([](const Step& s) { return s.params(); });
  }
  Index products() const {  // of a token
    return sum([](const Step& s) { return s.params() * s.repeat; });
  }
  Index width() const {
    return largest([](const Step& s) { return s.pairs() * std::max(s.in, s.out); });
  }
  Index largest_core() const {
    return largest([](const Step& s) { return s.params(); });
  }
  Index largest_block() const {
    return largest([](const Step& s) { return s.in * s.out; });
  }
  Index fewest_pairs() const {  // of a core
    return -largest([](const Step& s) { return -s.pairs(); });
  }
  bool shares() const {  // blocks, within a token
    return largest([](const Step& s) { return s.repeat; }) > 1;
  }

  bool is_chain() const {  // of matrices, with no permutation in between
    for (const Step& step : steps)
      if (step.pairs() != 1 || !std::is_sorted(step.reads.fan.begin(), step.reads.fan.end())) return false;
    return std::is_sorted(steps.back().writes.fan.begin(), steps.back().writes.fan.end());
  }
};

struct Hash {
  size_t operator()(const Indices& numbers) const {
    size_t hash = numbers.size();
    for (Index number : numbers) hash = (hash ^ number) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32;
    return hash;
  }
};

// Expanding the indices takes as long as the call of a small layer, so each thread remembers those of its latest calls
std::shared_ptr<const Program> program_of(const Indices& numbers) {
  thread_local std::unordered_map<Indices, std::shared_ptr<const Program>, Hash> known;
  auto found = known.find(numbers);
  if (found != known.end()) return found->second;
  if (known.size() >= MAX_PROGRAMS) known.clear();
  return known.emplace(numbers, std::make_shared<const Program>(numbers)).first->second;
}

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

// For each feature that the first core reads, or the last writes: where it lies in `layout`
Indices places_of(const Offsets& side, const Layout& layout) {
  const Index pairs = side.batch.size() * side.repeat.size(), count = side.fan.size();
  Indices places(pairs * count);
  for (Index pair = 0; pair < pairs; pair++)
    for (Index i = 0, start = side.block(pair); i < count; i++)
      places[start + side.fan[i]] = pair * layout.block + i * layout.row;
  return places;
}

}  // namespace
