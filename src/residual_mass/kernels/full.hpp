// One step of full attention over the same kinds of cache: every key and value read, in bfloat16 or 8 bits.
#pragma once
#include "planes.hpp"

namespace {

constexpr int RANGE = 64;  // blocks of a task: sums of ranges are merged in order, whichever thread made them
constexpr int CHUNK = 8;   // blocks between two rescalings

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
    constexpr int STEP = D / W % TILE ? 2 : TILE;
    for (int start = 0; start < D / W; start += STEP) {
      Floats sums[G][STEP];
      for (int g = 0; g < G; g++)
        for (int j = 0; j < STEP; j++) sums[g][j] = to[g][start + j];
#pragma GCC unroll 1
      for (int i = 0; i < BLOCK / 2; i++) {
#pragma GCC unroll 4
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

  template <int G>
  static void scores(const Layer& layer, const float* query, const uint8_t* keys, size_t block, float* to, size_t stride) {
    int8_t codes[G * D];
    float unit[G], base[G];
    const bf16* scales = layer.scales + block * 2 * D;
    for (int g = 0; g < G; g++) base[g] = round_query<D>(query + g * D, scales, 127.5f, codes + g * D, unit[g]);
    for (int start = 0; start < BLOCK; start += TILE * W) {
      Ints sums[G][TILE] = {};
#pragma GCC unroll 1
      for (int j = 0; j < D / 4; j++) {
        Bytes of[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) of[t] = load<Bytes>(keys + (j * BLOCK + start + t * W) * 4);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Ints with = all(four(codes + g * D + 4 * j));
#pragma GCC unroll 4
          for (int t = 0; t < TILE; t++) sums[g][t] = dot4_wide(sums[g][t], of[t], with);
        }
      }
      for (int g = 0; g < G; g++)
        for (int t = 0; t < TILE; t++) store(to + g * stride + start + t * W, to_floats(sums[g][t]) * unit[g] + base[g]);
    }
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
    constexpr int STEP = D / W % TILE ? 2 : TILE;
    for (int start = 0; start < D / W; start += STEP) {
      Ints sums[G][STEP] = {};
#pragma GCC unroll 1
      for (int i = 0; i < BLOCK / 2; i++) {
#pragma GCC unroll 4
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

template <template <int> class Cache, int D>
struct FullStep {
  const Layer& layer;
  static constexpr size_t PART = D + 2;  // floats: top, mass and value of one query head

  int ranges() const { return std::max(1, (layer.blocks + RANGE - 1) / RANGE); }
  size_t bytes() const { return sizeof(float) * PART * ranges() * layer.batch * layer.heads * layer.group; }
  float* part(int unit, int g, int range) const {
    return (float*)layer.scratch + (((size_t)unit * layer.group + g) * ranges() + range) * PART;
  }

  // Reads a range of blocks for G query heads from g on.
  template <int G>
  void read(int unit, int g, int range) const {
    const int slots = layer.slots[unit / layer.heads], last = (slots + BLOCK - 1) / BLOCK, *gap = layer.gap + unit / layer.heads * 2;
    const float* query = layer.query + ((size_t)unit * layer.group + g) * D;
    const size_t start = (size_t)unit * layer.blocks;
    Sums<D> sums[G];
    Floats values[G][D / W] = {};
    float scores[G][CHUNK * BLOCK];
    for (int chunk = range * RANGE, end = std::min(last, chunk + RANGE); chunk < end; chunk += CHUNK) {
      const int blocks = std::min(CHUNK, end - chunk), n = blocks * BLOCK, from = chunk * BLOCK;
      for (int b = 0; b < blocks; b++) {
        const uint8_t* keys = layer.keys + (start + chunk + b) * Cache<D>::KEYS;
        prefetch(keys + 2 * Cache<D>::KEYS, Cache<D>::KEYS);
        Cache<D>::template scores<G>(layer, query, keys, start + chunk + b, scores[0] + b * BLOCK, CHUNK * BLOCK);
      }
      for (int i = 0; i < G; i++) {
        for (int t = std::max(gap[0], from); t < std::min(gap[1], from + n); t++) scores[i][t - from] = LOWEST;
        for (int t = std::max(slots, from); t < from + n; t++) scores[i][t - from] = LOWEST;
        const float before = sums[i].top;
        sums[i].weigh(scores[i], n);
        if (sums[i].top > before)
          for (Floats& x : values[i]) x *= exp2(before - sums[i].top);
      }
      for (int b = 0; b < blocks; b++) {
        const uint8_t* rows = layer.values + (start + chunk + b) * Cache<D>::VALUES;
        prefetch(rows + 2 * Cache<D>::VALUES, Cache<D>::VALUES);
        Cache<D>::template values<G>(layer, scores[0] + b * BLOCK, CHUNK * BLOCK, rows, start + chunk + b, values);
      }
    }
    for (int i = 0; i < G; i++) {
      float* to = part(unit, g + i, range);
      to[0] = sums[i].top, to[1] = sums[i].mass;
      memcpy(to + 2, values[i], sizeof values[i]);
    }
  }

  void finish(int unit, int g) const {
    const size_t at = (size_t)unit * layer.group + g;
    Sums<D> sums;
    const bf16* recent = layer.recent + (size_t)unit * layer.room * 2 * D;
    add_recent(sums, layer.query + at * D, recent, layer.recents[unit / layer.heads]);
    for (int range = 0; range < ranges(); range++) {
      const float* from = part(unit, g, range);
      sums.merge(from[0], from[1], from + 2);
    }
    sums.write(layer.output + at * D, layer.log_mass + at);
  }

  void run() const {
    const int units = layer.batch * layer.heads;
    parallel(layer.threads, units * ranges(), [&](int task, int) {
      const int unit = task / ranges(), range = task % ranges();
      for (int g = 0; g < layer.group; g += GROUP) switch (std::min(GROUP, layer.group - g)) {
          case 1: read<1>(unit, g, range); break;
          case 2: read<2>(unit, g, range); break;
          case 3: read<3>(unit, g, range); break;
          default: read<4>(unit, g, range);
        }
    });
    parallel(layer.threads, units * layer.group, [&](int task, int) { finish(task / layer.group, task % layer.group); });
  }
};

}  // namespace
