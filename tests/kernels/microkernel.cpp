// The products of microkernel.h, of every dtype, height, width, depth, stride and alignment, against loops over
// scalars.

#include "microkernel.h"

#include <cstdio>
#include <random>

namespace {

std::mt19937 generator(0);

template <class T>
double number(const T& value) {
  if constexpr (sizeof(T) == 2) return load(&value, 1)[0];
  else return value;
}

// Numbers that fill their memory to its end, so that a sanitizer sees what is read beyond it
template <class T>
std::vector<T> draw(Index n) {
  std::vector<T> found(n);
  std::normal_distribution<double> normal;
  for (T& value : found) {
    const Vector<Wide<T>> v = Vector<Wide<T>>{} + static_cast<Wide<T>>(normal(generator));
    store(&value, v, 1);
  }
  return found;
}

template <class T>
double epsilon() {
  if constexpr (std::is_same_v<T, BFloat16>) return 0x1p-8;
  else if constexpr (std::is_same_v<T, Float16>) return 0x1p-11;
  else return std::numeric_limits<T>::epsilon();
}

// C (+)= factor A B in both ways; whether they differ by more than rounding
template <class S, class T, bool ADD>
bool differs(Index height, Index width, Index depth, bool across, bool biased, Index shift) {
  using F = Wide<S>;
  using H = Held<S>;
  const F factor = 0.75;
  const Index row = across ? 1 : depth + shift, column = across ? height + shift : 1;
  const std::vector<H> a = draw<H>((height - 1) * row + (depth - 1) * column + 1);
  const Index b_row = width + shift;
  const std::vector<H> b = draw<H>((depth - 1) * b_row + width + shift);
  const std::vector<F> bias = draw<F>(height);
  std::vector<T> c = draw<T>(height * (width + 3) + shift);
  Indices rows;
  for (Index m = 0; m < height; m++) rows.push_back((m * 7 + 3) % height * (width + 3));  // in another order
  if (height % 7 == 0)
    for (Index m = 0; m < height; m++) rows[m] = m * (width + 3);
  const std::vector<T> before = c;
  multiply_into<S, ADD, T, H>(Result<T>{c.data() + shift, rows.data(), biased ? bias.data() : nullptr},
                              Scalars<H>{a.data(), row, column}, Vectors<H>{b.data() + shift, b_row}, height, width,
                              depth, factor);
  std::vector<double> wanted(c.size());
  for (size_t i = 0; i < c.size(); i++) wanted[i] = number(before[i]);
  for (Index m = 0; m < height; m++)
    for (Index n = 0; n < width; n++) {
      double sum = 0;
      for (Index k = 0; k < depth; k++) sum += number(a[m * row + k * column]) * number(b[k * b_row + n + shift]);
      double& to = wanted[shift + rows[m] + n];
      to = factor * sum + (ADD ? to : 0) + (biased ? bias[m] : 0);
    }
  const double tolerance = (epsilon<T>() + depth * epsilon<F>()) * 4 * std::sqrt(depth + 4.0);
  for (size_t i = 0; i < c.size(); i++)
    if (!(std::abs(number(c[i]) - wanted[i]) <= tolerance)) return true;
  return false;
}

template <class S, class T, bool ADD>
Index check(const char* name) {
  constexpr Index L = LANES<Wide<S>>;
  Index cases = 0;
  for (Index height : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 33})
    for (Index width : {L, 2 * L, 3 * L, 4 * L, 5 * L})
      for (Index depth : {1, 2, 3, 7, 8, 16, 31, 64, 257})
        for (bool across : {false, true})
          for (Index shift : {0, 1}) {
            if (across && GROUP<S> > 1) continue;  // of numbers that go in groups, column is 1
            const bool biased = (height + depth) % 2;
            cases++;
            if (!differs<S, T, ADD>(height, width, depth, across, biased, shift)) continue;
            std::printf("%s %s: %ld x %ld x %ld, across %d, shift %ld\n", name, ADD ? "added" : "set", height, width,
                        depth, across, shift);
            std::exit(1);
          }
  return cases;
}

}  // namespace

int main() {
  Index cases = check<float, float, false>("float32") + check<float, float, true>("float32");
  cases += check<double, double, false>("float64") + check<double, double, true>("float64");
  cases += check<Float16, float, false>("float16") + check<Float16, float, true>("float16");
  cases += check<BFloat16, float, false>("bfloat16") + check<BFloat16, float, true>("bfloat16");
  cases += check<BFloat16, Held<BFloat16>, false>("bfloat16, held");
  std::printf("%ld products, vectors of %d bytes, %d rows in registers\n", cases, BYTES, MR);
}
