// Full attention over every kind of cache, for one query of each query head or several: each block is read once for all.
#pragma once
#include "planes.hpp"

namespace {

constexpr int RANGE = 64;  // blocks of a task: sums of ranges are merged in order, whichever thread made them
constexpr int CHUNK = 8;   // blocks between two rescalings

// Vectors of channels whose sums of values are kept in registers: all of an odd number, at most 7 of the widths served.
constexpr int value_step(int vectors) { return vectors % TILE == 0 ? TILE : vectors % 2 == 0 ? 2 : vectors; }

// Keys and values in bfloat16: [D / 2, 64, 2] and [32, D, 2] of a block.
template <int D>
struct Bfloat16 {
  static constexpr int KEYS = BLOCK * D * 2, VALUES = BLOCK * D * 2;

  template <int G>
  static void scores(const Layer&, const float* query, const uint8_t* keys, size_t, float* to, size_t stride) {
    for (int start = 0; start < BLOCK; start += TILE * W) {
      Floats sums[G][TILE] = {};
#pragma GCC unroll 1
      for (int j = 0; j < D / 2; j++) {
        Ints pairs[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) pairs[t] = load<Ints>(keys + (j * BLOCK + start + t * W) * 4);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Floats one = all(query[g * D + 2 * j]), two = all(query[g * D + 2 * j + 1]);
#pragma GCC unroll 4
          for (int t = 0; t < TILE; t++) sums[g][t] = sums[g][t] + first(pairs[t]) * one + second(pairs[t]) * two;
        }
      }
      for (int g = 0; g < G; g++)
        for (int t = 0; t < TILE; t++) store(to + g * stride + start + t * W, sums[g][t]);
    }
  }

  template <int G>
  static void values(const Layer&, const float* weights, size_t stride, const uint8_t* values, size_t, Floats (*to)[D / W]) {
    constexpr int STEP = value_step(D / W);
    for (int start = 0; start < D / W; start += STEP) {
      Floats sums[G][STEP];
      for (int g = 0; g < G; g++)
        for (int j = 0; j < STEP; j++) sums[g][j] = to[g][start + j];
#pragma GCC unroll 1
      for (int i = 0; i < BLOCK / 2; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < STEP; j++) {
          const Ints pairs = load<Ints>(values + (i * D + (start + j) * W) * 4);
#pragma GCC unroll 4
          for (int g = 0; g < G; g++)
            sums[g][j] = sums[g][j] + first(pairs) * weights[g * stride + 2 * i] + second(pairs) * weights[g * stride + 2 * i + 1];
        }
      }
      for (int g = 0; g < G; g++)
        for (int j = 0; j < STEP; j++) to[g][start + j] = sums[g][j];
    }
  }
};

// Keys in 8 bits as in `planes.hpp`, [D / 4, 64, 4] of a block; values in 8 bits with a scale for each token, [32, D, 2].
// Weights are rounded to 15 bits of the largest of a block.
template <int D>
struct Eight {
  static constexpr int KEYS = BLOCK * D, VALUES = BLOCK * D;

  // Products of G queries' codes with keys or, added to the scores, of their fine codes with the high halves of keys.
  template <bool FINE, int G>
  static inline void products(const uint8_t* keys, const int8_t* codes, const float* unit, const float* base, float* to, size_t stride) {
    for (int start = 0; start < BLOCK; start += TILE * W) {
      Ints sums[G][TILE] = {};
#pragma GCC unroll 1
      for (int j = 0; j < D / 4; j++) {
        Bytes of[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) of[t] = load<Bytes>(keys + (j * BLOCK + start + t * W) * 4) >> (FINE ? 4 : 0);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Ints with = all(four(codes + g * D + 4 * j));
#pragma GCC unroll 4
          for (int t = 0; t < TILE; t++) sums[g][t] = FINE ? dot4(sums[g][t], of[t], with) : dot4_wide(sums[g][t], of[t], with);
        }
      }
      for (int g = 0; g < G; g++)
        for (int t = 0; t < TILE; t++) {
          float* at = to + g * stride + start + t * W;
          const Floats added = to_floats(sums[g][t]) * ((FINE ? 16 / 256.f : 1) * unit[g]) + base[g];
          store(at, FINE ? load<Floats>(at) + added : added);
        }
    }
  }

  template <int G>
  __attribute__((noinline)) static void refine(const float* query, const uint8_t* keys, const bf16* scales, Rounded of, float* to, size_t stride) {
    int8_t fine[G * D];
    float base[G];
    for (int g = 0; g < G; g++) base[g] = refine_query<D>(query + g * D, scales, of.codes + g * D, of.unit[g], fine + g * D);
    products<true, G>(keys, fine, of.unit, base, to, stride);
  }

  template <int G>
  static void scores(const Layer& layer, const float* query, const uint8_t* keys, size_t block, float* to, size_t stride) {
    int8_t codes[G * D];
    float unit[G], low[G], base[G];
    const Rounded rounded{codes, unit, low};
    const bf16* scales = layer.scales + block * 2 * D;
    round_queries<D, G>(query, scales, 127.5f - CENTRE, rounded, base);
    products<false, G>(keys, codes, unit, base, to, stride);
    if (coarse(unit, G)) refine<G>(query, keys, scales, rounded, to, stride);
  }

  template <int G>
  static void values(const Layer& layer, const float* weights, size_t stride, const uint8_t* values, size_t block, Floats (*to)[D / W]) {
    int16_t codes[G][BLOCK];
    float unit[G];
    const float* scales = layer.value_scales + block * BLOCK;
    for (int g = 0; g < G; g++) {
      float scaled[BLOCK];
      Floats most = all(1e-30f);
      for (int i = 0; i < BLOCK; i += W) {
        const Floats x = load<Floats>(weights + g * stride + i) * load<Floats>(scales + i);
        store(scaled + i, x), most = largest(x, most);
      }
      const float top = highest(most);
      unit[g] = top / 32767;
      for (int i = 0; i < BLOCK; i += W) store_shorts(codes[g] + i, rounded(load<Floats>(scaled + i) * (32767 / top)));
    }
    constexpr int STEP = value_step(D / W);
    for (int start = 0; start < D / W; start += STEP) {
      Ints sums[G][STEP] = {};
#pragma GCC unroll 1
      for (int i = 0; i < BLOCK / 2; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < STEP; j++) {
#pragma GCC unroll 4
          for (int g = 0; g < G; g++)
            sums[g][j] = dot2(sums[g][j], (const int8_t*)values + (i * D + (start + j) * W) * 2, load<int32_t>(codes[g] + 2 * i));
        }
      }
      for (int g = 0; g < G; g++)
        for (int j = 0; j < STEP; j++) to[g][start + j] += to_floats(sums[g][j]) * unit[g];
    }
  }
};

// Both planes, made again into keys and values as above: each block once for all queries.
template <int D>
struct Planes : Eight<D> {
  static void unpack(const uint8_t* keys, const uint8_t* rows, uint8_t* to_keys, uint8_t* to_values, float* value_scales) {
    constexpr int SIZE = D / 2 + D + 2;
    for (int c = 0; c < D / 8; c++)  // four channels of the low plane's low halves, and four of its high halves
      for (int start = 0; start < BLOCK; start += W) {
        Ints low;
        for (int i = 0; i < W; i++) low[i] = load<int32_t>(rows + (start + i) * SIZE + 4 * c);
        for (int half = 0; half < 2; half++) {
          const int j = c + half * (D / 8);
          const Ints high = load<Ints>(keys + (j / 2 * BLOCK + start) * 4) >> (j % 2 * 4);
          store(to_keys + (j * BLOCK + start) * 4, (high & 0x0f0f0f0f) << 4 | (low >> (half * 4) & 0x0f0f0f0f));
        }
      }
    for (int t = 0; t < BLOCK; t += 2) {
      const uint8_t *one = rows + t * SIZE + D / 2, *two = one + SIZE;
      uint16_t pairs[D];
      for (int d = 0; d < D; d++) pairs[d] = one[d] | two[d] << 8;
      memcpy(to_values + t * D, pairs, sizeof pairs);
      value_scales[t] = widen_one(one + D), value_scales[t + 1] = widen_one(two + D);
    }
  }
};

template <template <int> class Cache, int D>
struct FullStep {
  const Layer& layer;
  static constexpr bool PLANES = __is_same(Cache<D>, Planes<D>);
  typedef std::conditional_t<PLANES, FullStep<Eight, D>, FullStep> Unpacked;
  static constexpr size_t PART = D + 2;  // floats: top, mass and value of one query
  static constexpr size_t UNPACKED = PLANES ? CHUNK * BLOCK * (2 * D + sizeof(float)) : 0;  // bytes of a thread

  int ranges() const { return std::max(1, (layer.blocks + RANGE - 1) / RANGE); }
  size_t parts() const { return (size_t)ranges() * layer.batch * layer.heads * layer.group; }
  size_t bytes() const { return sizeof(float) * PART * parts() + UNPACKED * layer.threads; }
  float* part(int unit, int g, int range) const {
    return (float*)layer.scratch + (((size_t)unit * layer.group + g) * ranges() + range) * PART;
  }

  // Adds blocks to the sums of G queries from g on. keys, values, first: of the first block, and its number in `scaled`;
  // `ahead` is whether to prefetch those that follow.
  template <int G>
  void add(const Layer& scaled, int unit, int g, int range, int chunk, int blocks, const uint8_t* keys, const uint8_t* values, size_t first, bool ahead) const {
    const int slots = layer.slots[unit / layer.heads], *gap = layer.gap + unit / layer.heads * 2, n = blocks * BLOCK, from = chunk * BLOCK;
    const float* query = layer.query + ((size_t)unit * layer.group + g) * D;
    float scores[G][CHUNK * BLOCK];
    Floats sums[G][D / W];
    for (int b = 0; b < blocks; b++, keys += Cache<D>::KEYS) {
      if (ahead) prefetch(keys + 2 * Cache<D>::KEYS, Cache<D>::KEYS);
      Cache<D>::template scores<G>(scaled, query, keys, first + b, scores[0] + b * BLOCK, CHUNK * BLOCK);
    }
    for (int i = 0; i < G; i++) {
      for (int t = std::max(gap[0], from); t < std::min(gap[1], from + n); t++) scores[i][t - from] = LOWEST;
      for (int t = std::max(slots, from); t < from + n; t++) scores[i][t - from] = LOWEST;
      float* own = part(unit, g + i, range);
      Sums<D> so_far;
      so_far.top = own[0], so_far.mass = own[1];
      memcpy(so_far.value, own + 2, sizeof so_far.value);
      so_far.weigh(scores[i], n);
      own[0] = so_far.top, own[1] = so_far.mass;
      memcpy(sums[i], so_far.value, sizeof so_far.value);
    }
    for (int b = 0; b < blocks; b++, values += Cache<D>::VALUES) {
      if (ahead) prefetch(values + 2 * Cache<D>::VALUES, Cache<D>::VALUES);
      Cache<D>::template values<G>(scaled, scores[0] + b * BLOCK, CHUNK * BLOCK, values, first + b, sums);
    }
    for (int i = 0; i < G; i++) memcpy(part(unit, g + i, range) + 2, sums[i], sizeof sums[i]);
  }

  void read(int unit, int range, int thread) const {
    const int last = (layer.slots[unit / layer.heads] + BLOCK - 1) / BLOCK;
    const size_t start = (size_t)unit * layer.blocks;
    for (int g = 0; g < layer.group; g++) {
      float* own = part(unit, g, range);
      std::fill(own, own + PART, 0.f), own[0] = LOWEST;
    }
    for (int chunk = range * RANGE, end = std::min(last, chunk + RANGE); chunk < end; chunk += CHUNK) {
      const int blocks = std::min(CHUNK, end - chunk);
      size_t first = start + chunk;
      const uint8_t *keys = layer.keys + first * Cache<D>::KEYS, *values = layer.values + first * Cache<D>::VALUES;
      Layer scaled = layer;
      if constexpr (PLANES) {
        uint8_t* to_keys = layer.scratch + sizeof(float) * PART * parts() + UNPACKED * thread;
        uint8_t* to_values = to_keys + CHUNK * BLOCK * D;
        float* value_scales = (float*)(to_values + CHUNK * BLOCK * D);
        for (int b = 0; b < blocks; b++) {
          const uint8_t *plane = layer.keys + (first + b) * (BLOCK * D / 2), *rows = layer.rows + (first + b) * BLOCK * (D / 2 + D + 2);
          prefetch(plane + BLOCK * D / 2, BLOCK * D / 2), prefetch(rows + BLOCK * (D / 2 + D + 2), BLOCK * (D / 2 + D + 2));
          Planes<D>::unpack(plane, rows, to_keys + b * BLOCK * D, to_values + b * BLOCK * D, value_scales + b * BLOCK);
        }
        scaled.scales += first * 2 * D, scaled.value_scales = value_scales;
        keys = to_keys, values = to_values, first = 0;
      }
      const Unpacked to{layer};
      for (int g = 0; g < layer.group; g += GROUP) {
        const bool ahead = g == 0 && !PLANES;
        switch (std::min(GROUP, layer.group - g)) {
          case 1: to.template add<1>(scaled, unit, g, range, chunk, blocks, keys, values, first, ahead); break;
          case 2: to.template add<2>(scaled, unit, g, range, chunk, blocks, keys, values, first, ahead); break;
          case 3: to.template add<3>(scaled, unit, g, range, chunk, blocks, keys, values, first, ahead); break;
          default: to.template add<4>(scaled, unit, g, range, chunk, blocks, keys, values, first, ahead);
        }
      }
    }
  }

  // The t-th of T queries sees the tokens in float32 up to its own.
  void finish(int unit, int g) const {
    const size_t at = (size_t)unit * layer.group + g;
    Sums<D> sums;
    const float* recent = layer.recent + (size_t)unit * layer.room * 2 * D;
    const int later = layer.queries - 1 - g % layer.queries;
    add_recent(sums, layer.query + at * D, recent, layer.recents[unit / layer.heads] - later);
    for (int range = 0; range < ranges(); range++) {
      const float* from = part(unit, g, range);
      sums.merge(from[0], from[1], from + 2);
    }
    sums.write(layer.output + at * D, layer.log_mass + at);
  }

  void run() const {
    const int units = layer.batch * layer.heads;
    parallel(layer.threads, units * ranges(), [&](int task, int thread) { read(task / ranges(), task % ranges(), thread); });
    parallel(layer.threads, units * layer.group, [&](int task, int) { finish(task / layer.group, task % layer.group); });
  }
};

}  // namespace
