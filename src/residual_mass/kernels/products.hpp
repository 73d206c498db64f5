// Products of activations with weights in codes of 4, 5, 6 or 8 bits.
//
// A weight is (code - middle) * scale, or code * scale + minimum, with a scale, and a minimum, for each `group` of columns
// of a row. Activations are rounded to 16 bits by units of 16 or 32 columns, so that the sums within a unit are exact, in
// integers. What a row of activations gives does not depend on the others.
//
// Codes lie in blocks of 16 rows, one to a lane, and 32 columns, of which a lane has `bits` words. A word of 8 bits has
// columns c, c + 2, c + 1, c + 3, the lowest bits first, so that a shift and a mask give two columns that stand side by
// side as 16-bit numbers. A word of 4 bits has columns c, c + 2, c + 4, c + 6, c + 1, .., c + 7. The fifth and sixth bits
// are in words of their own, after four words of 4 bits, in the same order of pairs.
//
// Shape letters: M = rows of activations, N = rows of weights rounded up to 16, K = columns rounded up to 32.
#pragma once
#include "common.hpp"

namespace {

constexpr int ROWS_OF_BLOCK = 16, SPAN = 32;
constexpr int PAIRS = SPAN / 2;
constexpr int UNPACKED = 16;        // stands for the number of bits of codes in pairs of 16 bits, one word a pair
constexpr int VECTORS = ROWS_OF_BLOCK / W;
constexpr int TOGETHER = W == 16 ? 8 : 4;  // rows of activations whose sums are kept in registers: a tile
constexpr int MOST_AGAIN = 2 * TOGETHER;   // rows of activations for which codes are rather unpacked again than kept
constexpr int AHEAD = 4096;         // bytes of codes between what is read and what is prefetched
constexpr int IN_CACHE = 256;       // rows of activations that stay in the cache while weights pass by

// A weight, as `library.py` has it.
struct Weights {
  const int32_t* words;     // [N / 16, K / 32, bits, 16]
  const uint16_t* scales;   // [N / 16, groups, 1 or 2, 16] half precision: scales, and minimums
  const int32_t* exponents; // [N] of the powers of 2 by which they are multiplied
  int rows, columns;        // without padding
  int bits, group;          // a power of 2, from 16 on
  int middle, minimums;

  int blocks() const { return (rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK; }
  int spans() const { return (columns + SPAN - 1) / SPAN; }
  int unit() const { return std::min(group, SPAN); }
  const int32_t* words_of(int block) const { return words + (size_t)block * spans() * bits * ROWS_OF_BLOCK; }
  // The scales of the group of a column, followed by its minimums.
  const uint16_t* scales_of(int block, int column) const {
    const int shift = __builtin_ctz(group), groups = (columns + group - 1) >> shift, own = std::min(column >> shift, groups - 1);
    return scales + ((size_t)block * groups + own) * (1 + minimums) * ROWS_OF_BLOCK;
  }
};

// W half-precision numbers as floats; no infinity comes in.
inline Floats widen_half(const uint16_t* from) {
#if VNNI
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
  typedef uint16_t Narrow __attribute__((vector_size(2 * W)));
  const Ints bits = __builtin_convertvector(load<Narrow>(from), Ints);
  const Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Floats)((Ints)size | (bits & 0x8000) << 16);
#endif
}

inline Floats power_of_2(Ints exponents) { return (Floats)((exponents + 127) << 23); }

// Adds to each sum the products of its two 16-bit numbers with those of a pair.
inline Ints add_pairs(Ints sums, Ints codes, int32_t pair) {
#if VNNI
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(pair));
#elif defined(__SSE2__)
#if defined(__AVX2__)
  sums += (Ints)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(pair));
#else
  sums += (Ints)_mm_madd_epi16((__m128i)codes, _mm_set1_epi32(pair));
#endif
  asm("" : "+x"(sums));  // else compilers collect products before they add, and run out of registers
  return sums;
#else
  return sums + (codes & 0xffff) * (int32_t)(int16_t)pair + (codes >> 16) * (pair >> 16);
#endif
}

// The codes of pair q of a span, in the lanes from `words` on.
template <int BITS>
inline Ints pair_of(const int32_t* words, int q) {
  const auto word = [&](int i) { return load<Ints>(words + i * ROWS_OF_BLOCK); };
  const auto placed = [](Ints x, int from, int to) { return from > to ? x >> (from - to) : x << (to - from); };
  if constexpr (BITS == UNPACKED) return word(q);
  if constexpr (BITS == 8) return word(q / 2) >> (q % 2 * 8) & 0x00ff00ff;
  const Ints low = word(q / 4) >> (q % 4 * 4) & 0x000f000f;
  if constexpr (BITS == 5) return low | (placed(word(4), q, 4) & 0x00100010);
  if constexpr (BITS == 6) return low | (placed(word(4 + q / 8), q % 8 * 2, 4) & 0x00300030);
  return low;
}

// Activations in 16 bits, in tiles of `TOGETHER` rows, then of 4, 2 and 1. Numbers of a tile's rows stand side by side.
struct Activations {
  int32_t* pairs;   // [tiles, K / 2, T]
  float* scales;    // [tiles, units, T]
  int32_t* totals;  // sums of the 16-bit numbers
  float* sums;      // of the activations
  size_t units, words;
  int unit;         // columns of a unit

  Activations(float* memory, int unit, int spans, int count) : units(spans * (SPAN / unit)), words(spans * PAIRS), unit(unit) {
    pairs = (int32_t*)memory;
    scales = memory + count * words;
    totals = (int32_t*)(scales + count * units);
    sums = scales + 2 * count * units;
  }
  static size_t size(int unit, int spans, int count) { return (size_t)count * spans * (PAIRS + 3 * (SPAN / unit)); }

  // Rounds x [K], with zeros in place of columns that there are not, row t of the tile of T rows from m on. A unit with a
  // number that is not finite gives NaN.
  void take(int m, int T, int t, const float* x) {
    int32_t* to = pairs + m * words + t;
    for (size_t u = 0; u < units; u++, x += unit) {
      Floats most = {}, sound = {};
      for (int i = 0; i < unit; i += W) most = largest(absolute(load<Floats>(x + i)), most), sound += load<Floats>(x + i) * 0.f;
      const float size = highest(most), inverse = size > 1e-30f ? 32767.f / size : 0.f;
      int16_t numbers[SPAN];
      for (int i = 0; i < unit; i += W) store_shorts(numbers + i, rounded(load<Floats>(x + i) * inverse));
      int32_t total = 0;
      for (int i = 0; i < unit; i++) total += numbers[i];
      for (int i = 0; i < unit; i += 2, to += T) memcpy(to, numbers + i, sizeof(int32_t));
      const size_t at = m * units + u * T + t;
      scales[at] = size / 32767.f + sum(sound), totals[at] = total, sums[at] = scales[at] * total;
    }
  }
};

// Calls f(m, T) for each tile of rows from m on.
template <class F>
inline void tiles(int first, int end, F f) {
  int m = first;
  for (; m + TOGETHER <= end; m += TOGETHER) f.template operator()<TOGETHER>(m);
  for (; TOGETHER > 4 && m + 4 <= end; m += 4) f.template operator()<4>(m);
  for (; m + 2 <= end; m += 2) f.template operator()<2>(m);
  if (m < end) f.template operator()<1>(m);
}

// A row of the result, float32 or bfloat16.
struct Result {
  void* address;
  size_t width;
  bool narrow;
  void store_lanes(size_t row, int column, Floats x, int count) const {
    if (!narrow && count >= W) return store((float*)address + row * width + column, x);
    float numbers[W];
    store(numbers, x);
    count = std::min(count, W);
    if (narrow) {
      bf16* to = (bf16*)address + row * width + column;
      for (int i = 0; i < count; i++) to[i] = numbers[i] == numbers[i] ? nearest(numbers[i]) : 0x7fc0;
    } else memcpy((float*)address + row * width + column, numbers, count * sizeof(float));
  }
};

// The tile of T rows from m on, times one block of weights, whose words are at `words`. All loops over sums are unrolled:
// compilers keep an array in memory that one loop indexes by a variable.
template <int BITS, int UNIT, int T>
void multiply_tile(const Weights& w, int block, const int32_t* words, const Activations& x, int m, const Result& to) {
  constexpr int HALVES = SPAN / UNIT, SHARE = PAIRS / HALVES;
  constexpr int CHAINS = W == 16 && T < 4 ? 4 / T - 1 : 0;  // further sums, where few would wait for one another
  const int spans = w.spans();
  const int32_t* pairs = x.pairs + m * x.words;
  size_t at = m * x.units;
  Floats sums[T][VECTORS] = {};
  for (int span = 0; span < spans; span++, words += BITS * ROWS_OF_BLOCK) {
    if (BITS < UNPACKED) prefetch((const char*)words + AHEAD, BITS * ROWS_OF_BLOCK * 4);
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++, at += T, pairs += SHARE * T) {
      Ints total[T][VECTORS], other[CHAINS + 1][T][VECTORS] = {};
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
        for (int v = 0; v < VECTORS; v++) total[t][v] = all(-w.middle * x.totals[at + t]);
#pragma GCC unroll 16
      for (int q = 0; q < SHARE; q++) {
        Ints codes[VECTORS];
        for (int v = 0; v < VECTORS; v++) codes[v] = pair_of<BITS>(words + v * W, half * SHARE + q);
        for (int t = 0; t < T; t++)
          for (int v = 0; v < VECTORS; v++) {
            Ints& into = q % (CHAINS + 1) ? other[q % (CHAINS + 1) - 1][t][v] : total[t][v];
            into = add_pairs(into, codes[v], pairs[q * T + t]);
          }
      }
      for (int i = 0; i < CHAINS; i++)
        for (int t = 0; t < T; t++)
          for (int v = 0; v < VECTORS; v++) total[t][v] += other[i][t][v];
      const uint16_t* scale = w.scales_of(block, span * SPAN + half * UNIT);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        const Floats step = widen_half(scale + v * W);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[t][v] += step * (to_floats(total[t][v]) * all(x.scales[at + t]));
        if (!w.minimums) continue;
        const Floats least = widen_half(scale + ROWS_OF_BLOCK + v * W);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[t][v] += least * all(x.sums[at + t]);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; v++) {
    const int row = block * ROWS_OF_BLOCK + v * W;
    if (row >= w.rows) break;
    const Floats factor = power_of_2(load<Ints>(w.exponents + row));
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) to.store_lanes(m + t, row, sums[t][v] * factor, w.rows - row);
  }
}

// Calls f with the number of bits of codes as a constant.
template <class F>
void with_bits(int bits, F f) {
  switch (bits) {
    case 4: return f.template operator()<4>();
    case 5: return f.template operator()<5>();
    case 6: return f.template operator()<6>();
    default: return f.template operator()<8>();
  }
}

// Products of the same activations [M, columns] with one or more weights.
struct Products {
  const Weights* weights;
  const Result* results;  // of each weight
  int number, count, threads;

  int spans() const { return weights->spans(); }
  size_t kept() const { return count > MOST_AGAIN ? (size_t)spans() * PAIRS * ROWS_OF_BLOCK : 0; }
  size_t size() const {
    return (size_t)spans() * SPAN + threads * kept() + Activations::size(SPAN, spans(), count) + Activations::size(SPAN / 2, spans(), count);
  }

  // memory: `size` floats. x: float32 or bfloat16.
  void run(float* memory, const void* x, bool narrow) const {
    int32_t* unpacked = (int32_t*)memory;
    float* row = memory + threads * kept();
    float* rest = row + (size_t)spans() * SPAN;
    Activations halves(rest, SPAN / 2, spans(), count), wholes(rest + Activations::size(SPAN / 2, spans(), count), SPAN, spans(), count);
    take(halves, x, narrow, row), take(wholes, x, narrow, row);
    int blocks = 0;
    for (int i = 0; i < number; i++) blocks += weights[i].blocks();
    // Few rows wait for memory, which is fastest in long streams; many compute, and small tasks keep threads equally busy.
    const int share = kept() ? std::clamp(blocks / (4 * threads), 1, 16) : std::clamp((blocks + threads - 1) / threads, 1, 256);
    const int shares = (blocks + share - 1) / share;
    const int passes = (count + IN_CACHE - 1) / IN_CACHE;
    parallel(threads, passes * shares, [&](int task, int thread) {
      const int first = task / shares * IN_CACHE, end = std::min(count, first + IN_CACHE), from = task % shares * share;
      for (int each = from; each < std::min(blocks, from + share); each++) {
        int block = each, i = 0;
        while (block >= weights[i].blocks()) block -= weights[i++].blocks();
        with_bits(weights[i].bits, [&]<int BITS>() {
          int32_t* own = unpacked + thread * kept();
          if (weights[i].unit() == SPAN) multiply_block<BITS, SPAN>(i, block, own, wholes, first, end);
          else multiply_block<BITS, SPAN / 2>(i, block, own, halves, first, end);
        });
      }
    });
  }
  // Rounds all rows, if a weight has such units. row: as long as one.
  void take(Activations& activations, const void* x, bool narrow, float* row) const {
    const bool used = std::any_of(weights, weights + number, [&](const Weights& w) { return w.unit() == activations.unit; });
    if (!used) return;
    const int columns = weights->columns;
    memset(row, 0, sizeof(float) * spans() * SPAN);
    tiles(0, count, [&]<int T>(int m) {
      for (int t = 0; t < T; t++) {
        const size_t at = (size_t)(m + t) * columns;
        if (narrow) for (int i = 0; i < columns; i++) row[i] = widen_one((const bf16*)x + at + i);
        else memcpy(row, (const float*)x + at, sizeof(float) * columns);
        activations.take(m, T, t, row);
      }
    });
  }
  template <int BITS, int UNIT>
  void multiply_block(int i, int block, int32_t* unpacked, const Activations& x, int first, int end) const {
    const Weights& w = weights[i];
    const int32_t* words = w.words_of(block);
    if (!kept()) return tiles(first, end, [&]<int T>(int m) { multiply_tile<BITS, UNIT, T>(w, block, words, x, m, results[i]); });
    for (int span = 0; span < w.spans(); span++, words += BITS * ROWS_OF_BLOCK)
#pragma GCC unroll 16
      for (int q = 0; q < PAIRS; q++)
        for (int v = 0; v < VECTORS; v++) store(unpacked + (span * PAIRS + q) * ROWS_OF_BLOCK + v * W, pair_of<BITS>(words + v * W, q));
    tiles(first, end, [&]<int T>(int m) { multiply_tile<UNPACKED, UNIT, T>(w, block, unpacked, x, m, results[i]); });
  }
};

// Writes a weight [K, N], the columns one after the other, float32 or bfloat16.
template <int BITS>
void dequantise_all(const Weights& w, int threads, const Result& to) {
  parallel(threads, w.blocks(), [&](int block, int) {
    const int32_t* words = w.words_of(block);
    for (int span = 0; span < w.spans(); span++, words += BITS * ROWS_OF_BLOCK)
      for (int v = 0; v < VECTORS; v++) {
        const int row = block * ROWS_OF_BLOCK + v * W;
        const Floats factor = power_of_2(load<Ints>(w.exponents + row));
#pragma GCC unroll 16
        for (int q = 0; q < PAIRS; q++) {
          const int column = span * SPAN + 2 * q;
          const Ints codes = pair_of<BITS>(words + v * W, q);
          const uint16_t* scale = w.scales_of(block, column) + v * W;
          const Floats step = widen_half(scale) * factor, least = w.minimums ? widen_half(scale + ROWS_OF_BLOCK) * factor : Floats{};
          if (column < w.columns) to.store_lanes(column, row, to_floats((codes & 0xffff) - w.middle) * step + least, W);
          if (column + 1 < w.columns) to.store_lanes(column + 1, row, to_floats((codes >> 16) - w.middle) * step + least, W);
        }
      }
  });
}

}  // namespace
