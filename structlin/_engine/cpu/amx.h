// Products of bfloat16 on the matrix unit of Intel's CPUs (AMX), where there is one that this process may use.
//
//     C[m, 0:n] (+)= factor * sum_k A[m, k] B[k, 0:n]        of 16 rows and columns at least
//
// A tile register holds 16 rows of 64 bytes: 16 x 32 numbers of A, 16 pairs of rows of B times 16 columns, 16 x 16
// sums. A is read as it lies, B in pairs of rows. Sums of 32 x 32 stay in the unit.

#pragma once
#include "vectors.h"

#if STRUCTLIN_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define STRUCTLIN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define STRUCTLIN_AMX 0
#endif

namespace {

#if STRUCTLIN_AMX
constexpr Index SIDE = 16;  // of a tile of sums

// Whether Linux lets this process use the unit, which it has to ask for
inline bool has_matrix_unit() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return granted;
}

thread_local Index tiles_deep = 0;  // as this thread's unit is configured; 0: it is not

// Tiles for `deep` numbers of a row of A: 0 to 3 hold sums, 4 and 5 A, 6 and 7 B
inline void configure_tiles(Index deep) {
  if (tiles_deep == deep) return;
  tiles_deep = deep;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } tiles;
  for (int i = 0; i < 8; i++) {
    tiles.bytes[i] = i == 4 || i == 5 ? deep * sizeof(BFloat16) : SIDE * sizeof(float);
    tiles.rows[i] = i < 6 ? SIDE : deep / 2;
  }
  _tile_loadconfig(&tiles);
}

// The most numbers that divide `depth`; 0: there are none that are worth it
inline Index depth_of_tiles(Index depth) {
  for (Index deep = 32; deep >= 8; deep -= 2)
    if (depth % deep == 0) return deep;
  return 0;
}

// 16 R rows and 16 N columns of C
template <bool ADD, int R, int N, class T>
inline void multiply_tiles(T* c, const Index* rows, const float* row_bias, const BFloat16* a, Index a_row,
                           const Pair* b, Index b_row, Index depth, Index deep, float factor) {
  alignas(64) float sums[R * SIDE][N * SIDE];
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (R > 1) _tile_zero(2);
  if constexpr (R > 1 && N > 1) _tile_zero(3);
  for (Index k = 0; k < depth; k += deep, a += deep, b += deep / 2 * b_row) {
    _tile_loadd(6, b, b_row * sizeof(Pair));
    _tile_loadd(4, a, a_row * sizeof(BFloat16));
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) _tile_loadd(7, b + SIDE, b_row * sizeof(Pair));
    if constexpr (N > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 1) _tile_loadd(5, a + SIDE * a_row, a_row * sizeof(BFloat16));
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (R > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], sizeof sums[0]);
  if constexpr (N > 1) _tile_stored(1, sums[0] + SIDE, sizeof sums[0]);
  if constexpr (R > 1) _tile_stored(2, sums[SIDE], sizeof sums[0]);
  if constexpr (R > 1 && N > 1) _tile_stored(3, sums[SIDE] + SIDE, sizeof sums[0]);
  asm volatile("" ::: "memory");
  for (Index i = 0; i < R * SIDE; i++) {
    Vector<float> row[N];
    T* to = c + rows[i];
    for (int j = 0; j < N; j++) {
      row[j] = factor * load(sums[i] + j * SIDE);
      if constexpr (ADD) row[j] += load(to + j * SIDE);
      if (row_bias) row[j] += row_bias[i];
    }
    store_row<N>(to, row);
  }
}

// How many rows of C it has found: a multiple of 16. There are tiles for `depth`.
template <bool ADD, class T>
Index multiply_by_tiles(T* c, const Index* rows, const float* row_bias, const BFloat16* a, Index a_row, const Pair* b,
                        Index b_row, Index height, Index width, Index depth, float factor) {
  const Index deep = depth_of_tiles(depth);
  configure_tiles(deep);
  asm volatile("" ::: "memory");
  Index m = 0;
  auto over_columns = [&]<int R>() {
    const float* added = row_bias ? row_bias + m : nullptr;
    const BFloat16* left = a + m * a_row;
    Index n = 0;
    for (; n + 2 * SIDE <= width; n += 2 * SIDE)
      multiply_tiles<ADD, R, 2>(c + n, rows + m, added, left, a_row, b + n, b_row, depth, deep, factor);
    if (n < width) multiply_tiles<ADD, R, 1>(c + n, rows + m, added, left, a_row, b + n, b_row, depth, deep, factor);
  };
  for (; m + 2 * SIDE <= height; m += 2 * SIDE) over_columns.template operator()<2>();
  if (m + SIDE <= height) over_columns.template operator()<1>(), m += SIDE;
  return m;
}
#else
constexpr bool has_matrix_unit() { return false; }
#endif

// ---- giving it back -----------------------------------------------------------------------------------------

// Gives the matrix unit back, at the end of its scope and on its thread. How the CPU rounds, and what it does with
// denormal numbers, is left as the caller has it.
struct MatrixUnit {
  ~MatrixUnit() {
#if STRUCTLIN_AMX
    if (tiles_deep) _tile_release();
    tiles_deep = 0;
#endif
  }
};

}  // namespace
