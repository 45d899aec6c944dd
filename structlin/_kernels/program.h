// A structure as integers: which features each core reads and writes, and where they lie in a tile of tokens.

#pragma once
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using Index = int64_t;
using Indices = std::vector<Index>;

constexpr size_t MOST_PROGRAMS = 1024;  // that a thread remembers

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
  Index in, out;  // features of x and y; the first core may read more, which are zero, and the last write more
  std::vector<Step> steps;

  // in, out, cores, then for each core batch, repeat, fan_in, fan_out and six indices, each a count and (size, stride)s
  explicit Program(const std::string& code) {
    std::istringstream from(code);
    Index cores = 0;
    from >> in >> out >> cores;
    steps.resize(cores);
    for (Step& step : steps) {
      from >> step.batch >> step.repeat >> step.in >> step.out;
      for (Offsets* side : {&step.reads, &step.writes})
        for (Indices* index : {&side->batch, &side->repeat, &side->fan}) *index = expand(from);
    }
    STD_TORCH_CHECK(from && from.peek() == EOF, "structlin: the code of a program ends in the wrong place");
  }

  static Indices expand(std::istream& from) {
    Indices offsets{0};
    Index axes = 0, size = 0, stride = 0;
    for (from >> axes; axes-- && from >> size >> stride;) {
      Indices finer;
      for (Index offset : offsets)
        for (Index i = 0; i < size; i++) finer.push_back(offset + i * stride);
      offsets = std::move(finer);
    }
    return offsets;
  }

  Index width() const {  // of the widest activation
    Index widest = 0;
    for (const Step& step : steps) widest = std::max(widest, step.pairs() * std::max(step.in, step.out));
    return widest;
  }

  Index params() const {
    Index sum = 0;
    for (const Step& step : steps) sum += step.params();
    return sum;
  }

  Index largest() const {  // numbers of a block
    Index most = 0;
    for (const Step& step : steps) most = std::max(most, step.in * step.out);
    return most;
  }

  Index fewest() const {  // products of a core
    Index least = steps.front().pairs();
    for (const Step& step : steps) least = std::min(least, step.pairs());
    return least;
  }
};

// Reading a code takes as long as the call of a small layer, so each thread remembers those of its latest calls
const Program& program_of(const std::string& code) {
  thread_local std::unordered_map<std::string, Program> known;
  auto found = known.find(code);
  if (found != known.end()) return found->second;
  if (known.size() >= MOST_PROGRAMS) known.clear();
  return known.emplace(code, code).first->second;
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
