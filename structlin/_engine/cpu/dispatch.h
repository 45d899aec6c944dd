// What runs when: every threshold of the engine, and what the CPU says of itself.
//
// Registers and tiles follow from the CPU's vectors and caches. The thresholds were found by trying, on these machines:
//
//     CPU                      vectors         L1     L2      matrix unit
//     AMD EPYC, Zen 1, 2       AVX2            32 KB  512 KB  no
//     AMD EPYC, Zen 4          AVX-512         32 KB  1 MB    no
//     Intel Xeon, 4th          AVX-512, AMX    48 KB  2 MB    yes

#pragma once
#include <algorithm>
#include <fstream>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__unix__)
#include <unistd.h>
#endif

#include "amx.h"
#include "program.h"
#include "vectors.h"

namespace {

constexpr Index MIN_PRODUCTS_PER_THREAD = 1 << 16;  // multiply-adds that are worth a thread
constexpr Index MIN_PRODUCTS_TO_PACK = 1 << 24;     // multiply-adds by a block that are worth its transposed copy
constexpr Index LARGE_BLOCK = 1 << 18;              // numbers of a block that BLAS multiplies faster by many tokens
constexpr Index LARGE_BLOCK_OF_UNIT = 1 << 20;      // the same, of bfloat16 on a matrix unit by more tokens
constexpr Index MAX_GEMV_TOKENS = 16;               // tokens that the engine takes where BLAS takes more
constexpr Index LARGE_ALONE = 1 << 16;              // numbers of the only core's block: BLAS for tokens up to fan-in
constexpr Index LARGE_PLAIN = 1 << 16;              // products by one core, or shared blocks: BLAS for few tokens
constexpr Index LARGE_PLAIN_PAIRS = 1 << 19;        // the same, of bfloat16 in pairs
constexpr Index LARGE_TRANSPOSED = 3 << 19;  // products in training, of two-byte numbers the CPU multiplies: the same
constexpr Index MAX_TILES_TOGETHER = 8;      // tiles for which a block beyond the second cache is read once
constexpr Index MAX_SUM_BYTES = 1 << 30;     // bytes of all threads' sums of gradients
constexpr Index BYTES_AHEAD = 1 << 12;       // bytes from what GEMV reads to what it fetches meanwhile
constexpr Index MAX_REGISTER_ROWS = 8;       // rows of sums in registers

// ---- the machine ------------------------------------------------------------------------------------------

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int NR = 2;  // vectors of a row of sums in registers
// Rows of sums in registers, beside a row of B and a number of A
constexpr int MR = std::min<int>(MAX_REGISTER_ROWS, (REGISTERS - NR - 1) / NR / 2 * 2);

struct Caches {
  Index l1, l2;  // bytes of a core's own
};

// Bytes of a cache of the first processor by Linux's files, which know those of ARM too; 0: they do not say
inline Index read_cache_file(int level) {
  for (int index = 0; index < 4; index++) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    std::string type;
    int found = 0;
    Index kilobytes = 0;
    std::ifstream(folder + "level") >> found;
    std::ifstream(folder + "type") >> type;
    std::ifstream(folder + "size") >> kilobytes;
    if (found == level && type != "Instruction") return kilobytes << 10;
  }
  return 0;
}

inline Index read_cache(int level) {
#if defined(__APPLE__)
  int64_t bytes = 0;
  size_t size = sizeof bytes;
  const char* name = level == 1 ? "hw.perflevel0.l1dcachesize" : "hw.perflevel0.l2cachesize";
  return sysctlbyname(name, &bytes, &size, nullptr, 0) ? 0 : bytes;
#else
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const Index bytes = sysconf(level == 1 ? _SC_LEVEL1_DCACHE_SIZE : _SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return read_cache_file(level);
#endif
}

// The caches of this machine; 32 and 512 KB where it does not say
inline const Caches& caches() {
  static const Caches found = [] {
    const Index l1 = read_cache(1), l2 = read_cache(2);
    return Caches{l1 > 0 ? l1 : 32 << 10, l2 > 0 ? l2 : 512 << 10};
  }();
  return found;
}

// Depth of blocking: so many rows of B, NR vectors wide, fill half of the first cache
inline Index find_depth() {
  static const Index depth = std::max<Index>(64, caches().l1 / 2 / (NR * BYTES));
  return depth;
}

// Rows of A, `depth` numbers each, that fill a quarter of the second cache
template <class H>
Index find_height(Index depth) {
  return std::max<Index>(MR, caches().l2 / 4 / (depth * sizeof(H)) / MR * MR);
}

// Whether the CPU has products of float16, which torch takes and the engine does not
inline bool has_half_products() {
#if defined(__x86_64__)
  static const bool found = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);  // AVX512-FP16
  }();
  return found;
#else
  return false;
#endif
}

// ---- the call ---------------------------------------------------------------------------------------------

struct Call {
  const Program& program;
  Index tokens, threads;
  bool forward;          // or backward
  bool trains = true;    // whether a backward pass may follow, or is run
  bool rounded = false;  // whether the cores are int8, which a tile needs wide
};

enum class Path { BLAS, GEMV, TILES };

// BLAS: torch's own products, of large blocks and chains of matrices; of few tokens where a backward pass would mostly
// transpose cores, where there is one core, or where blocks are shared. GEMV (gemv.h): forward, of so few tokens that
// much of a tile would be empty, that widening the cores would take longer than their products, or that some threads
// would have no block. TILES (tiles.h): everything else.
template <class S>
Path choose(const Call& call) {
  constexpr Index L = LANES<Wide<S>>;
  const Program& program = call.program;
  const bool few = call.tokens <= program.steps[0].in, large = program.largest_block() >= LARGE_BLOCK;
  const bool unit = GROUPED<S> && has_matrix_unit(), pays = unit && !(call.trains && few);
  if (program.is_chain() || program.largest_block() >= (pays ? LARGE_BLOCK_OF_UNIT : LARGE_BLOCK))
    if (call.trains || call.tokens > MAX_GEMV_TOKENS) return Path::BLAS;
  const Index products = program.products();
  const bool native = GROUPED<S> || (std::is_same_v<S, Float16> && has_half_products());
  if (native && call.trains && call.tokens <= L && products >= LARGE_TRANSPOSED) return Path::BLAS;
  Index most = L;
  if (large && !unit) most = MAX_GEMV_TOKENS;
  else if (GROUPED<S>) most = L / 2;
  else if (std::is_same_v<S, Held<S>> && !call.rounded && program.fewest_pairs() >= call.threads) most = L * 3 / 4;
  if (call.forward && call.tokens <= most) return Path::GEMV;
  const bool alone = program.steps.size() == 1;
  if (alone && few && program.largest_block() >= LARGE_ALONE) return Path::BLAS;
  const bool plain = (alone || program.shares()) && products >= (GROUPED<S> ? LARGE_PLAIN_PAIRS : LARGE_PLAIN);
  return plain && call.tokens <= L ? Path::BLAS : Path::TILES;
}

// How tokens go through the cores on the path TILES
struct Tiling {
  Index width;     // tokens of a tile
  Index together;  // tiles that go through a core block by block, so that a block is read once for all
  bool shared;     // whether threads share each tile's blocks, and not the tiles
};

template <class S>
Tiling find_tiling(const Call& call) {
  using F = Wide<S>;
  constexpr Index L = LANES<F>;
  const Program& program = call.program;
  const Index l2 = caches().l2, tokens = call.tokens;
  const bool beyond = program.params() * Index{sizeof(F)} >= l2,
             large = program.largest_core() * Index{sizeof(F)} >= l2;
  // Threads share a tile where few tokens meet many cores. Then there is one sum of gradients, no core is read by all,
  // and no thread has two of three tiles.
  const bool shared = beyond && tokens <= (call.forward ? 4 : 6) * L && program.fewest_pairs() >= call.threads;
  if (shared) return {tokens > L ? 2 * L : L, 1, true};
  // A tile has one vector of tokens. It has two where a core is large, where numbers go in groups, and where tokens are
  // so many that threads' shares stay alike; four for the matrix unit, where a core is large.
  const Index vectors = GROUPED<S> && large && has_matrix_unit() ? 4 : 2, each = tokens / (vectors * L) / call.threads;
  const Index width = (GROUPED<S> || large || each >= 4) && each ? vectors * L : L;
  if (!beyond) return {width, 1, false};
  auto shares = [](Index n, Index of) { return std::max<Index>(1, (n + of - 1) / of); };
  const Index tiles = shares(tokens, width), rounds = shares(tiles, call.threads * MAX_TILES_TOGETHER);
  return {width, shares(tiles, call.threads * rounds), false};  // as many for each thread
}

}  // namespace
