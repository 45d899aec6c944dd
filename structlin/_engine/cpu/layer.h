// What a call works on: the program, each core's numbers as they are multiplied, and its factor under weight
// normalisation.
//
//     factor = gain * min(1, sigma / RMS(core)), NaN where the core has one

#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "dispatch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using torch::stable::Tensor;

// Numbers at a multiple of a vector, with no value yet
template <class F>
struct Numbers {
  std::unique_ptr<F, decltype(&std::free)> held{nullptr, &std::free};
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

template <class Run>
auto by_dtype(const Tensor& x, const Run& run) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return run(float{});
    case ScalarType::Double: return run(double{});
    case ScalarType::BFloat16: return run(BFloat16{});
    case ScalarType::Half: return run(Float16{});
    default: STD_TORCH_CHECK(false, "structlin: x and the gains must be float32, float64, bfloat16 or float16");
  }
}

template <class S>
struct Core {
  const S* given;                   // [batch][fan_out][fan_in]
  const Held<S>* data;              // the same as it is multiplied; nothing for few tokens
  Wide<S> factor = 1;               // gain * clip
  double gain = 1, clip = 1;        // clip = min(1, sigma / RMS)
  double squares = 0;               // n RMS^2 where it is clipped, or 0
  S* gradient = nullptr;            // where it goes, if it is wanted
  const int8_t* rounded = nullptr;  // the core is this times the scale of each row, and `given` is nothing
  const Wide<S>* scales = nullptr;  // [batch][fan_out]
};

// Runs of a thousand products are summed as F, the runs in float64; all in float64 where F overflows or underflows
template <class A, class B>
double inner_product(const A* a, const B* b, Index n) {
  using F = Wide<A>;
  constexpr Index L = LANES<F> * (std::is_same_v<A, B> ? GROUP<A> : 1), RUN = 128 * L;
  auto at = [](auto* p, Index count) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<A, B>) return load_a_row(p, count);
    else return load(p, count);
  };
  double total = 0;
  for (Index start = 0; start < n; start += RUN) {
    Vector<F> sum[4] = {};
    const Index end = std::min(start + RUN, n);
    Index i = start;
    for (; i + 4 * L <= end; i += 4 * L)
      for (int j = 0; j < 4; j++) add_product(sum[j], at(a + i + j * L, L), at(b + i + j * L, L));
    for (; i < end; i += L) add_product(sum[0], at(a + i, end - i), at(b + i, end - i));
    total += sum_lanes<F>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  if (std::isfinite(total) && std::abs(total) > 1e-20) return total;
  total = 0;
  for (Index i = 0; i < n; i++) total += static_cast<double>(load(a + i, 1)[0]) * load(b + i, 1)[0];
  return total;
}

// n numbers as T: themselves, or a wider copy
template <class T, class S>
const T* numbers_of(const S* from, Index n, Numbers<T>& memory) {
  if constexpr (std::is_same_v<S, T>) return from;
  T* to = memory.reserve(n);
  parallel_for(0, n, MIN_PRODUCTS_PER_THREAD, [&](Index begin, Index end) {
    for (Index i = begin; i < end; i += LANES<Wide<S>>) store(to + i, load(from + i, end - i), end - i);
  });
  return to;
}

// Rows of int8, `in` numbers each, times their scales
template <class H, class F>
const H* scale_rows(const int8_t* from, const F* scales, Index rows, Index in, Numbers<H>& memory) {
  H* to = memory.reserve(rows * in);
  parallel_for(0, rows, std::max<Index>(1, MIN_PRODUCTS_PER_THREAD / in), [&](Index begin, Index end) {
    for (Index row = begin; row < end; row++)
      for (Index i = 0; i < in; i += LANES<F>)
        store(to + row * in + i, scales[row] * load_bytes<F>(from + row * in + i, in - i), in - i);
  });
  return to;
}

Tensor contiguous_of(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Indices sizes_of(const Tensor& tensor) { return Indices(tensor.sizes().begin(), tensor.sizes().end()); }

// Without values, of the dtype of `like`
Tensor make_tensor(const Tensor& like, const Indices& sizes) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  Indices strides(sizes.size(), 1);
  for (Index i = static_cast<Index>(sizes.size()) - 2; i >= 0; i--)
    strides[i] = strides[i + 1] * std::max<Index>(1, sizes[i + 1]);
  AtenTensorHandle made;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// Everything that a call works on
template <class S>
struct Layer {
  using F = Wide<S>;
  const std::shared_ptr<const Program> held;  // while the call lasts
  const Program& program;
  std::vector<Tensor> tensors;
  std::vector<Numbers<Held<S>>> memory;
  std::vector<Core<S>> cores;
  const bool rounded;  // whether the cores are int8
  const Index tokens;
  const bool forward;  // or backward

  Layer(const Tensor& x, const std::vector<Tensor>& given, const std::vector<Tensor>& scales,
        const std::optional<Tensor>& gains, const std::vector<double>& sigmas, const Indices& numbers, bool forward)
      : held(program_of(numbers)),
        program(*held),
        memory(given.size()),
        rounded(!scales.empty()),
        tokens(x.numel() / program.in),
        forward(forward) {
    STD_TORCH_CHECK(given.size() == program.steps.size() && x.dim() > 0 && x.size(x.dim() - 1) == program.in,
                    "structlin: x or the cores do not fit the program");
    STD_TORCH_CHECK(
        !gains || (sizes_of(*gains) == Indices{static_cast<Index>(given.size())} && sigmas.size() == given.size()),
        "structlin: a gain and a sigma are needed for every core");
    STD_TORCH_CHECK(!rounded || scales.size() == given.size(), "structlin: scales are needed for every core");
    for (size_t t = 0; t < given.size(); t++) {
      const Step& step = program.steps[t];
      const auto dtype = rounded ? ScalarType::Char : x.scalar_type();
      STD_TORCH_CHECK(given[t].numel() == step.params() && given[t].scalar_type() == dtype, "structlin: core ", t,
                      " has another size or dtype than the program and x ask for");
      tensors.push_back(contiguous_of(given[t]));
      const void* numbers = tensors[t].data_ptr();
      Core<S> core{};
      if (rounded) {
        const Index rows = step.batch * step.out;
        const auto wide = std::is_same_v<F, double> ? ScalarType::Double : ScalarType::Float;
        STD_TORCH_CHECK(scales[t].numel() == rows && scales[t].scalar_type() == wide && scales[t].is_contiguous(),
                        "structlin: the scales of core ", t,
                        " have another size, dtype or order than the program and x ask for");
        core.rounded = static_cast<const int8_t*>(numbers);
        core.scales = static_cast<const F*>(scales[t].data_ptr());
        if (!is_gemv()) core.data = scale_rows<Held<S>>(core.rounded, core.scales, rows, step.in, memory[t]);
      } else {
        core.given = static_cast<const S*>(numbers);
        if (!is_gemv()) core.data = numbers_of<Held<S>>(core.given, step.params(), memory[t]);
      }
      cores.push_back(core);
    }
    if (gains) normalise(*gains, sigmas);
  }

  Call call() const { return {program, tokens, threads(), forward}; }
  bool is_gemv() const { return choose<S>({program, tokens, threads(), forward, false, rounded}) == Path::GEMV; }

  void normalise(const Tensor& gains, const std::vector<double>& sigmas) {
    const Index count = cores.size(), parts = threads();
    std::vector<double> squares(parts * count);
    parallel_for(0, parts, 1, [&](Index begin, Index end) {
      for (Index part = begin; part < end; part++)
        for (Index t = 0; t < count; t++) {
          const Index n = program.steps[t].params(), start = part * n / parts;
          const S* from = cores[t].given + start;
          squares[part * count + t] = inner_product(from, from, (part + 1) * n / parts - start);
        }
    });
    for (Index t = 0; t < count; t++) {
      Core<S>& core = cores[t];
      double sum = 0, n = program.steps[t].params();
      for (Index part = 0; part < parts; part++) sum += squares[part * count + t];
      by_dtype(gains, [&](auto s) {
        core.gain = load(static_cast<const decltype(s)*>(gains.data_ptr()) + t * gains.stride(0), 1)[0];
      });
      if (!(sum < sigmas[t] * sigmas[t] * n)) {  // so that a NaN in a core reaches all that it makes
        core.squares = sum;
        core.clip = sigmas[t] / std::sqrt(sum / n);
      }
      core.factor = core.gain * core.clip;
    }
  }

  Index threads() const { return std::max<Index>(1, torch::stable::get_num_threads()); }
};

}  // namespace
