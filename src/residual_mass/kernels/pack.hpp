// Caches from keys and values: clusters, quantisation, packing. Not on a step's path, so written plainly.
#pragma once
#include "common.hpp"

namespace {

// The least bfloat16 that is not below a positive x.
inline bf16 above(float x) { return (bits_of(x) + 0xffff) >> 16; }

// Rows of D numbers, `step` numbers apart, float32 or bfloat16 (`narrow`).
struct Rows {
  const void* start;
  int64_t stride, step;
  bool narrow;

  // A row as it is, or, of other numbers than neighbouring float32, a copy in `to`.
  template <int D>
  const float* row(size_t i, float* to) const {
    const float* wide = (const float*)start + i * stride;
    if (!narrow && step == 1) return wide;
    for (int d = 0; d < D; d++) to[d] = narrow ? widen_one((const bf16*)start + i * stride + d * step) : wide[d * step];
    return to;
  }
};

// One KV head's n tokens in the order given, or as they are without one; they start a block, and fill up the last.
struct Tokens {
  Rows keys, values;
  const int32_t* order;  // [n] rows, or null
  int n;

  template <int D>
  const float* key(int i, float* to) const { return keys.row<D>(order ? order[i] : i, to); }
  template <int D>
  const float* value(int i, float* to) const { return values.row<D>(order ? order[i] : i, to); }
};

// Codes of a block's keys [64, D] and their scales [2, D], middle and step.
template <int D>
void quantise(const Tokens& tokens, int start, uint8_t* codes, bf16* scales) {
  const int count = std::min(BLOCK, tokens.n - start);
  float low[D], high[D], by[D], copy[D];
  std::fill(low, low + D, __builtin_inff()), std::fill(high, high + D, -__builtin_inff());
  for (int t = 0; t < count; t++) {
    const float* key = tokens.key<D>(start + t, copy);
    for (int d = 0; d < D; d++) low[d] = std::min(low[d], key[d]), high[d] = std::max(high[d], key[d]);
  }
  for (int d = 0; d < D; d++) {
    scales[d] = nearest(low[d] / 2 + high[d] / 2);
    const float middle = widen_one(scales + d);
    scales[D + d] = above(std::max(high[d] - middle, middle - low[d]) / 127.5f);
    const float step = widen_one(scales + D + d);
    by[d] = step > 0 ? 1 / step : 0, low[d] = middle - 127.5f * step;
  }
  memset(codes, 0, BLOCK * D);
  for (int t = 0; t < count; t++) {
    const float* key = tokens.key<D>(start + t, copy);
    for (int d = 0; d < D; d++) codes[t * D + d] = (uint8_t)std::min(255.f, std::max(0.f, (key[d] - low[d]) * by[d] + .5f));
  }
}

// A value of 8 bits, and its scale.
template <int D>
bf16 quantise_value(const float* value, int8_t* codes) {
  float most = 0;
  for (int d = 0; d < D; d++) most = std::max(most, __builtin_fabsf(value[d]));
  const bf16 scale = above(most / 127);
  const float by = most > 0 ? 1 / widen_one(&scale) : 0;
  for (int d = 0; d < D; d++) codes[d] = (int8_t)(int)(value[d] * by + (value[d] < 0 ? -.5f : .5f));
  return scale;
}

template <int D>
void pack_planes(const Tokens& tokens, uint8_t* keys, bf16* scales, uint8_t* rows) {
  uint8_t codes[BLOCK * D];
  float copy[D];
  for (int start = 0; start < tokens.n; start += BLOCK, keys += BLOCK * D / 2, scales += 2 * D) {
    quantise<D>(tokens, start, codes, scales);
    for (int j = 0; j < D / 8; j++)
      for (int t = 0; t < BLOCK; t++)
        for (int i = 0; i < 4; i++) {
          const uint8_t* code = codes + t * D + 8 * j + i;
          keys[(j * BLOCK + t) * 4 + i] = code[0] >> 4 | (code[4] & 0xf0);
        }
    for (int t = 0; t < BLOCK; t++, rows += D / 2 + D + 2) {
      for (int d = 0; d < D / 2; d++) rows[d] = (codes[t * D + d] & 15) | codes[t * D + D / 2 + d] << 4;
      if (start + t < tokens.n) store(rows + D / 2 + D, quantise_value<D>(tokens.value<D>(start + t, copy), (int8_t*)rows + D / 2));
      else memset(rows + D / 2, 0, D + 2);
    }
  }
}

template <int D>
void pack_eight(const Tokens& tokens, uint8_t* keys, bf16* scales, uint8_t* values, float* value_scales) {
  uint8_t codes[BLOCK * D];
  float copy[D];
  for (int start = 0; start < tokens.n; start += BLOCK, keys += BLOCK * D, values += BLOCK * D, scales += 2 * D) {
    quantise<D>(tokens, start, codes, scales);
    for (int j = 0; j < D / 4; j++)
      for (int t = 0; t < BLOCK; t++) memcpy(keys + (j * BLOCK + t) * 4, codes + t * D + 4 * j, 4);
    for (int t = 0; t < BLOCK; t++) {
      int8_t value[D] = {};
      bf16 scale = 0;
      if (start + t < tokens.n) scale = quantise_value<D>(tokens.value<D>(start + t, copy), value);
      *value_scales++ = widen_one(&scale);
      for (int d = 0; d < D; d++) values[(t / 2 * D + d) * 2 + t % 2] = value[d];
    }
  }
}

template <int D>
void pack_bfloat16(const Tokens& tokens, uint8_t* keys, uint8_t* values) {
  for (int start = 0; start < tokens.n; start += BLOCK, keys += 2 * BLOCK * D, values += 2 * BLOCK * D)
    for (int t = 0; t < BLOCK; t++) {
      float copies[2][D] = {};
      const bool real = start + t < tokens.n;
      const float* key = real ? tokens.key<D>(start + t, copies[0]) : copies[0];
      const float* value = real ? tokens.value<D>(start + t, copies[1]) : copies[1];
      for (int d = 0; d < D; d++) {
        store(keys + ((d / 2 * BLOCK + t) * 2 + d % 2) * 2, nearest(key[d]));
        store(values + ((t / 2 * D + d) * 2 + t % 2) * 2, nearest(value[d]));
      }
    }
}

// The nearest of P centres, of which the transposed [D, room] and half the squares [room] are given, room a multiple of
// 4 W, where squares of no centre are infinite. Four keys at once.
template <int D>
void assign(const Rows& keys, const int32_t* order, int n, const float* centres, const float* squares, int room, int32_t* to) {
  for (int i = 0; i < n; i += 4) {
    const float* key[4];
    float best[4], copies[4][D];
    int32_t at[4] = {};
    for (int a = 0; a < 4; a++) {
      const int row = std::min(i + a, n - 1);
      key[a] = keys.row<D>(order ? order[row] : row, copies[a]), best[a] = -__builtin_inff();
    }
    for (int c = 0; c < room; c += 4 * W) {
      Floats near[4][4];
      for (int a = 0; a < 4; a++)
        for (int v = 0; v < 4; v++) near[a][v] = -load<Floats>(squares + c + v * W);
#pragma GCC unroll 1
      for (int d = 0; d < D; d++) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
          const Floats centre = load<Floats>(centres + (size_t)d * room + c + v * W);
#pragma GCC unroll 4
          for (int a = 0; a < 4; a++) near[a][v] += key[a][d] * centre;
        }
      }
      for (int a = 0; a < 4; a++)
        for (int v = 0; v < 4; v++) {
          const float most = highest(near[a][v]);
          if (!(most > best[a])) continue;
          best[a] = most;
          for (int l = W - 1; l >= 0; l--)
            if (near[a][v][l] == most) at[a] = c + v * W + l;
        }
    }
    for (int a = 0; a < 4 && i + a < n; a++) to[i + a] = at[a];
  }
}

// Lloyd's algorithm on a sample, from keys at equal distances, then the nearest centre of every key, and the tokens in
// the order of their clusters: order [n], bounds [P, 2]. `work` holds room * (2 D + 1) floats and n integers.
template <int D>
void cluster(const Rows& keys, int n, int parts, int sampled, int rounds, int32_t* order, int32_t* bounds, float* work) {
  const int room = (parts + 4 * W - 1) / (4 * W) * (4 * W), sample = std::min(n, sampled);
  float *centres = work, *sums = work + (size_t)room * D, *squares = sums + (size_t)room * D;
  int32_t* part = (int32_t*)(squares + room);
  std::fill(centres, centres + (size_t)room * D, 0.f);
  float copy[D];
  for (int p = 0; p < parts; p++) {
    const float* key = keys.row<D>((int64_t)p * n / parts, copy);
    for (int d = 0; d < D; d++) centres[(size_t)d * room + p] = key[d];
  }
  for (int i = 0; i < sample; i++) order[i] = (int64_t)i * n / sample;
  for (int round = 0;; round++) {
    for (int p = 0; p < room; p++) {
      float square = 0;
      for (int d = 0; d < D; d++) square += centres[(size_t)d * room + p] * centres[(size_t)d * room + p];
      squares[p] = p < parts ? square / 2 : __builtin_inff();
    }
    if (round == rounds) break;
    assign<D>(keys, order, sample, centres, squares, room, part);
    std::fill(sums, sums + (size_t)room * D, 0.f), std::fill(bounds, bounds + parts, 0);
    for (int i = 0; i < sample; i++) {
      bounds[part[i]]++;
      const float* key = keys.row<D>(order[i], copy);
      for (int d = 0; d < D; d++) sums[(size_t)part[i] * D + d] += key[d];
    }
    for (int p = 0; p < parts; p++)
      for (int d = 0; d < D && bounds[p]; d++) centres[(size_t)d * room + p] = sums[(size_t)p * D + d] / bounds[p];
  }
  assign<D>(keys, nullptr, n, centres, squares, room, part);
  std::fill(bounds, bounds + 2 * parts, 0);
  for (int i = 0; i < n; i++) bounds[2 * part[i] + 1]++;
  for (int p = 0, at = 0; p < parts; p++) {
    const int count = bounds[2 * p + 1];
    bounds[2 * p] = bounds[2 * p + 1] = at, at += count;
  }
  for (int i = 0; i < n; i++) order[bounds[2 * part[i] + 1]++] = i;
}

// Mean values of clusters [P, D], and of all clusters together within them the covariance of keys (rows) and values [D, D]
// and the variance of values [D]; `means` holds P * D floats.
template <int D>
void summarise(const Tokens& tokens, const int32_t* bounds, int parts, float* means, float* mean_values, float* covariance, float* variance) {
  std::fill(covariance, covariance + D * D, 0.f), std::fill(variance, variance + D, 0.f);
  std::fill(means, means + (size_t)parts * D, 0.f), std::fill(mean_values, mean_values + (size_t)parts * D, 0.f);
  const float share = 1.f / std::max(tokens.n, 1);
  for (int p = 0; p < parts; p++) {
    const int start = bounds[2 * p], end = bounds[2 * p + 1];
    float *mean_key = means + (size_t)p * D, *mean_value = mean_values + (size_t)p * D;
    float copies[2][D];
    for (int i = start; i < end; i++) {
      const float *own_key = tokens.key<D>(i, copies[0]), *own_value = tokens.value<D>(i, copies[1]);
      for (int d = 0; d < D; d++) mean_key[d] += own_key[d], mean_value[d] += own_value[d];
    }
    for (int d = 0; d < D && start < end; d++) mean_key[d] /= end - start, mean_value[d] /= end - start;
    for (int i = start; i < end; i += 4) {
      float key[4][D] = {}, value[4][D] = {};
      for (int a = 0; a < std::min(4, end - i); a++) {
        const float *own_key = tokens.key<D>(i + a, copies[0]), *own_value = tokens.value<D>(i + a, copies[1]);
        for (int d = 0; d < D; d++) {
          key[a][d] = share * (own_key[d] - mean_key[d]);
          value[a][d] = own_value[d] - mean_value[d];
          variance[d] += share * value[a][d] * value[a][d];
        }
      }
      for (int d = 0; d < D; d++)
        for (int j = 0; j < D; j++)
          covariance[d * D + j] += key[0][d] * value[0][j] + key[1][d] * value[1][j] + key[2][d] * value[2][j] + key[3][d] * value[3][j];
    }
  }
}

}  // namespace
