// One step over keys in two planes of 4 bits: scan of the high plane, exact top K, exact rows, the rest by regression.
#pragma once
#include "common.hpp"

namespace {

// A channel of a key is middle + step * (code - 127.5), with code = 16 * high + low. The queries times the steps of a block
// are rounded to 8 bits, unit * rounded, so that
//   query . key = query . middle + unit * rounded . (code - 127.5),
// and in the scan 7.5 stands for the low part.
//
// The channel with the largest range in a block takes the resolution of all others. Where the unit exceeds COARSE, the
// queries have 15 bits, unit * (rounded + fine / 256), of which `fine` multiplies 16 * high + 7.5 alone: rounding the keys
// costs more than what it leaves out.
constexpr float COARSE = 1 / 2048.f;  // the rounded queries' scores then have errors of some 0.05

// The queries of a KV head against one block.
struct Rounded {
  int8_t* codes;  // [G, D]
  float* unit;    // [G]
  float* low;     // [G] 7.5 * the sum of the codes
};

// Rounds G queries for a block. base: query . middle - unit * rounded . `less` of each. Lanes are added for all queries at
// once: one by one, these sums would take longer than the products with the block's keys.
template <int D, int G>
void round_queries(const float* query, const bf16* scales, float less, Rounded to, float* base) {
  Floats scaled[G][D / W], most[GROUP], score[GROUP] = {}, totals[GROUP] = {};
  for (Floats& x : most) x = all(1e-30f);
  for (int i = 0; i < D; i += W) {
    const Floats middle = widen(scales + i), step = widen(scales + D + i);
    for (int g = 0; g < G; g++) {
      const Floats x = load<Floats>(query + g * D + i);
      scaled[g][i / W] = x * step, score[g] += x * middle;
      most[g] = largest(absolute(scaled[g][i / W]), most[g]);
    }
  }
  const Floats4 top = folded(most, [](Floats a, Floats b) { return largest(a, b); }), inverse = 127 / top, unit = top / 127;
  for (int g = 0; g < G; g++)
    for (int i = 0; i < D; i += W) {
      const Ints code = rounded(scaled[g][i / W] * inverse[g]);
      store_bytes(to.codes + g * D + i, code);
      totals[g] += to_floats(code);
    }
  const auto added = [](Floats a, Floats b) { return a + b; };
  const Floats4 total = folded(totals, added), bases = folded(score, added) - less * unit * total;
  for (int g = 0; g < G; g++) to.unit[g] = unit[g], to.low[g] = 7.5f * total[g], base[g] = bases[g];
}

// The fine codes of one rounded query, and what is added to its products with 16 * high; 0 where the unit is not coarse.
template <int D>
float refine_query(const float* query, const bf16* scales, const int8_t* codes, float unit, int8_t* fine) {
  memset(fine, 0, D);
  if (!(unit > COARSE)) return 0;
  Floats total = {};
  for (int i = 0; i < D; i += W) {
    const Floats whole = to_floats(rounded(load<Floats>(query + i) * widen(scales + D + i) * (256 / unit)));
    const Floats below = largest(whole - 256 * widen(codes + i), all(-127.f)), rest = below < 127 ? below : all(127.f);
    store_bytes(fine + i, rounded(rest));
    total += rest;
  }
  return (7.5f - 127.5f) / 256 * unit * sum(total);
}

inline bool coarse(const float* unit, int n) {
  float most = 0;
  for (int g = 0; g < n; g++) most = std::max(most, unit[g]);
  return most > COARSE;
}

inline int32_t four(const int8_t* codes) { return load<int32_t>(codes); }

// Products of G queries' codes with a block's high plane [D / 8, 64, 4], in units of unit / 16: byte i of a token has channel
// 8 j + i of its j-th four in the low half, and channel 8 j + 4 + i in the high half. `fine` codes have units of unit / 256
// more, and their products are added to the scores.
template <int D, int G>
__attribute__((noinline)) void scan_products(bool fine, const uint8_t* keys, const int8_t* codes, const float* unit, const float* base, float* scores, size_t stride) {
  for (int start = 0; start < BLOCK; start += TILE * W) {
    Ints sums[G][TILE] = {};
    for (int from = 0; from < D / 8; from += FEW / 2) {
      const int end = std::min(D / 8, from + FEW / 2);
      Shorts few[G][TILE] = {};
#pragma GCC unroll 1
      for (int j = from; j < end; j++) {
        Bytes low[TILE], high[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) {
          const Bytes pair = load<Bytes>(keys + (j * BLOCK + start + t * W) * 4);
          low[t] = pair & 15, high[t] = pair >> 4;
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
          const Ints one = all(four(codes + g * D + 8 * j)), two = all(four(codes + g * D + 8 * j + 4));
#pragma GCC unroll 4
          for (int t = 0; t < TILE; t++) few[g][t] = dot4(dot4(few[g][t], low[t], one), high[t], two);
        }
      }
      for (int g = 0; g < G; g++)
        for (int t = 0; t < TILE; t++) sums[g][t] += widened(few[g][t]);
    }
    for (int g = 0; g < G; g++)
      for (int t = 0; t < TILE; t++) {
        float* to = scores + g * stride + start + t * W;
        const Floats added = to_floats(sums[g][t]) * ((fine ? 16 / 256.f : 16) * unit[g]) + base[g];
        store(to, fine ? load<Floats>(to) + added : added);
      }
  }
}

// Adds the products of fine codes to the scores of a block.
template <int D, int G>
__attribute__((noinline)) void refine_scan(const float* query, const uint8_t* keys, const bf16* scales, Rounded of, float* scores, size_t stride) {
  int8_t fine[G * D];
  float base[G];
  for (int g = 0; g < G; g++) base[g] = refine_query<D>(query + g * D, scales, of.codes + g * D, of.unit[g], fine + g * D);
  scan_products<D, G>(true, keys, fine, of.unit, base, scores, stride);
}

// Scores of a block's tokens by the high plane.
template <int D, int G>
void scan_block(const float* query, const uint8_t* keys, const bf16* scales, Rounded to, float* scores, size_t stride) {
  float base[G];
  round_queries<D, G>(query, scales, 127.5f - 7.5f, to, base);
  scan_products<D, G>(false, keys, to.codes, to.unit, base, scores, stride);
  if (coarse(to.unit, G)) refine_scan<D, G>(query, keys, scales, to, scores, stride);
}

// Floats as integers of the same order, and back.
inline Ints ordered(Floats x) { return (Ints)x ^ (((Ints)x >> 31) & 0x7fffffff); }
inline int32_t ordered(float x) {
  const int32_t bits = load<int32_t>(&x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float unordered(int32_t x) {
  x ^= (x >> 31) & 0x7fffffff;
  return load<float>(&x);
}

// The largest t of which at least k of n numbers are not below it, or the first t found of which k to `most` are not; n is
// a multiple of W, at least k.
inline int32_t threshold_of(const int32_t* x, int n, int k, int most) {
  Ints least = load<Ints>(x), greatest = least;
  for (int i = W; i < n; i += W) {
    const Ints next = load<Ints>(x + i);
    least = next < least ? next : least, greatest = next > greatest ? next : greatest;
  }
  int64_t low = lowest(least), high = highest(greatest);
  for (high++; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    const int found = count_from(x, n, (int32_t)middle);
    if (found >= k && found <= most) return (int32_t)middle;
    (found < k ? high : low) = middle;
  }
  return (int32_t)low;
}

struct Chosen {
  int count, ties;    // tokens chosen, and those of equal score as the last that were not
  float threshold;    // no token of a higher score is left, and none below it was chosen
};

// The k highest of n scores, 0 < k < n, the first of equal ones: their places go to `places` in ascending order, those of
// ties that are left to `values`. n is below a multiple of BLOCK to which scores are set.
inline Chosen choose(const float* scores, int n, int k, int32_t* values, int32_t* places) {
  const int vectors = (n + W - 1) / W, step = std::max(1, vectors / (1536 / W));
  int sampled = 0;
  for (int i = step / 2; i < vectors; i += step, sampled += W) store(values + sampled, ordered(load<Floats>(scores + i * W)));
  const float expected = (float)k / n * sampled;
  const int rank = (int)(1.1f * expected + 1.5f * __builtin_sqrtf(expected)) + 3;  // a little too many
  int32_t bound = INT32_MIN;
  if (step > 1 && rank < sampled / 2) bound = threshold_of(values, sampled, rank, rank + rank / 8 + 1);
  int found = 0;
  if (bound > INT32_MIN) {
    const Floats least = all(unordered(bound));
    for (int start = 0; start < n; start += BLOCK) {
      uint64_t some = 0;  // a bit for each token
      for (int j = 0; j < BLOCK; j += W) some |= (uint64_t)not_below(load<Floats>(scores + start + j), least) << j;
      if (n - start < BLOCK) some &= (1ull << (n - start)) - 1;
      const int count = __builtin_popcountll(some);
      for (int i = 0; i == 0 || i < count; i += 2)  // two a turn, even if there are none: a branch less to foresee
        for (int j = 0; j < 2; j++, some &= some - 1) places[found + i + j] = start + __builtin_ctzll(some | 1ull << (BLOCK - 1));
      found += count;
    }
  }
  if (found < k) {  // without a bound, or with too high a one, all are taken
    for (int i = 0; i < n; i += W) store(places + i, lanes() + i);
    found = n;
  }
  for (int i = 0; i < found && step > 1; i++) values[i] = ordered(scores[places[i]]);  // else they are all there
  store(values + found, all(INT32_MIN));
  const int padded = (found + W - 1) / W * W;
  const int32_t threshold = threshold_of(values, padded, k, k);
  int count = 0, ties = 0;
  if (count_from(values, padded, threshold) == k) {
    for (int i = 0; i < padded; i += W) count += append(places + count, load<Ints>(places + i), load<Ints>(values + i) >= threshold);
    return {k, 0, unordered(threshold)};
  }
  int left = k;
  for (int i = 0; i < found; i++) left -= values[i] > threshold;
  for (int i = 0; i < found; i++) {
    const int32_t value = values[i], place = places[i];
    if (value > threshold || (value == threshold && left-- > 0)) places[count++] = place;
    else if (value == threshold) values[ties++] = place;
  }
  return {count, ties, unordered(threshold)};
}

// Rows of the chosen tokens, in the order of their places.
template <int D>
struct ChosenRows {
  static constexpr int SIZE = D / 2 + D + 2;  // bytes: low plane, value, scale of the value
  const uint8_t* first;                       // of the first token
  const int32_t* places;
  int count;
  const uint8_t* operator[](int i) const { return first + (size_t)places[i] * SIZE; }
  __attribute__((always_inline)) void fetch(int i) const { prefetch((*this)[i], SIZE), prefetch((*this)[i] + SIZE - 1, 1); }
};

// Scores x of the unread tokens, weights w = 2^(x - shift), and mean scores m of all tokens of a cluster:
//   Z = sum w,  nu = sum_p Z_p v_p + sum w (x - m) C q / var(x),
// as `ScanRegression.terms` has it, slopes limited by the values' own deviations. Meanwhile the rows of the chosen tokens
// are fetched: computing is most of this, and waiting for memory most of what adds them.
template <int D>
Sums<D> regression(const Layer& layer, int row, int head, const float* query, const float* scores, const Chosen& chosen, const int32_t* ties, const ChosenRows<D>& rows) {
  constexpr float LEAST_VARIANCE = 1e-8f * 2.0813690f, ROUNDING = 64 * 1.1920929e-7f;  // of scores in nats, in (log 2)^2
  const size_t unit = (size_t)row * layer.heads + head;
  const int32_t* bounds = layer.bounds + unit * layer.segments * 2;
  Sums<D> sums;
  sums.top = chosen.threshold;
  Floats products = {}, squares = {};
  float along = 0, most = 0, count = 0;
  int tie = 0, fetched = 0;
  for (int p = 0; p < layer.segments; p++) {
    for (const int end = (int64_t)rows.count * (p + 1) / layer.segments; fetched < end;) rows.fetch(fetched++);
    const int start = bounds[2 * p], end = bounds[2 * p + 1];
    if (start >= end) continue;
    Floats total = {}, mass = {};
    const auto each = [&](auto body) {  // whole vectors, and what is left of one
      int i = start;
      for (; i + W <= end; i += W) body(load<Floats>(scores + i), all(-1));
      if (i < end) body(load<Floats>(scores + i), first_lanes(end - i));
    };
    each([&](Floats x, Ints inside) { total += (Floats)((Ints)x & inside); });
    const float mean = sum(total) / (end - start);
    each([&](Floats x, Ints inside) {
      const Floats offset = (Floats)((Ints)(x - mean) & inside);
      const Floats weights = (Floats)((Ints)exp2_rough(x - sums.top) & (x < sums.top) & inside);
      mass += weights, products += weights * offset, squares += offset * offset;
    });
    float own = sum(mass);
    for (; tie < chosen.ties && ties[tie] < end; tie++) own += 1, along += sums.top - mean;
    count += end - start, most = std::max(most, __builtin_fabsf(mean));
    sums.mass += own;
    sums.add(own, layer.mean_values + (unit * layer.segments + p) * D);
  }
  if (sums.mass == 0) return sums;
  along += sum(products);
  const float deviation = std::max(__builtin_sqrtf(std::max(sum(squares) / count, LEAST_VARIANCE)), ROUNDING * most);
  Floats slope[D / W] = {};
  for (int d = 0; d < D; d++)
    for (int j = 0; j < D / W; j++) slope[j] += query[d] / deviation * widen(layer.slope + (unit * D + d) * D + j * W);
  for (int j = 0; j < D / W; j++) {
    const Floats steepest = load<Floats>(layer.deviations + unit * D + j * W);
    const Floats below = slope[j] < steepest ? slope[j] : steepest;
    sums.value[j] += along / deviation * largest(below, -steepest);
  }
  return sums;
}

// Adds the chosen tokens: the low plane completes their scores, and values are rows of 8 bits.
template <int D>
void add_rows(Sums<D>& sums, const ChosenRows<D>& rows, const float* scores, Rounded queries, int g, int group) {
  float weights[ROWS];
  for (int i = 0; i < rows.count; i += ROWS) {
    const int count = std::min(ROWS, rows.count - i);
    for (int a = 0; a < count; a++) {
      if (i + a + ROWS < rows.count) rows.fetch(i + a + ROWS);
      const int place = rows.places[i + a], at = place / BLOCK * group + g;
      const uint8_t* row = rows[i + a];
      const int8_t* codes = queries.codes + at * D;
      Ints4 low = {};
      const auto add = [&](Bytes16 pair, Ints4 one, Ints4 two) { low = dot4(dot4(low, pair & 15, one), pair >> 4, two); };
      for (int j = 0; j + 16 <= D / 2; j += 16) add(load<Bytes16>(row + j), load<Ints4>(codes + j), load<Ints4>(codes + D / 2 + j));
      if constexpr (D / 2 % 16 != 0)
        add(load_half<Bytes16>(row + D / 2 - 8), load_half<Ints4>(codes + D / 2 - 8), load_half<Ints4>(codes + D - 8));
      weights[a] = scores[place] + queries.unit[at] * ((float)sum(low) - queries.low[at]);
    }
    sums.weigh(weights, count);
    for (int a = 0; a < count; a++) {
      const uint8_t* row = rows[i + a];
      sums.add(weights[a] * widen_one(row + D / 2 + D), (const int8_t*)row + D / 2);
    }
  }
}

// Buffers for the scan of one KV head, and for the choice of one query head.
struct Scratch {
  int blocks, group, width, units;
  uint8_t* at;
  size_t scores() const { return sizeof(float) * (group * (size_t)blocks * BLOCK + W); }
  size_t numbers() const { return (size_t)group * blocks; }
  size_t codes() const { return numbers() * width; }
  size_t unit() const { return (scores() + 2 * sizeof(float) * numbers() + codes() + 63) / 64 * 64; }
  size_t places() const { return sizeof(int32_t) * ((size_t)blocks * BLOCK + 2 * W); }
  size_t bytes(int threads) const { return units * unit() + 2 * threads * places(); }
  float* scores_of(int u) const { return (float*)(at + u * unit()); }
  Rounded queries_of(int u) const {
    float* after = (float*)(at + u * unit() + scores());
    return {(int8_t*)(after + 2 * numbers()), after, after + numbers()};
  }
  int32_t* places_of(int thread) const { return (int32_t*)(at + units * unit() + 2 * thread * places()); }
};

// With as many KV heads as threads can share, each scan is used before the next is made, so that it stays in the cache.
inline bool one_by_one(const Layer& layer) { return layer.batch * layer.heads % layer.threads == 0; }
inline Scratch scratch_of(const Layer& layer) {
  const int units = one_by_one(layer) ? layer.threads : layer.batch * layer.heads;
  return {layer.blocks, layer.group, layer.width, units, layer.scratch};
}

template <int D>
struct Step {
  const Layer& layer;
  Scratch scratch = scratch_of(layer);
  size_t stride = (size_t)layer.blocks * BLOCK;

  // Scores of the blocks [from, to) of one KV head for its query heads.
  void scan(int unit, int slot, int from, int to) const {
    const Rounded queries = scratch.queries_of(slot);
    float* scores = scratch.scores_of(slot);
    for (int b = from; b < to; b++) {
      const uint8_t* keys = layer.keys + ((size_t)unit * layer.blocks + b) * (BLOCK * D / 2);
      const bf16* scales = layer.scales + ((size_t)unit * layer.blocks + b) * 2 * D;
      prefetch(keys + 2 * BLOCK * D, BLOCK * D / 2), prefetch(scales + 8 * D, 4 * D);
      for (int g = 0; g < layer.group; g += GROUP) {
        const size_t at = (size_t)b * layer.group + g;
        const Rounded to{queries.codes + at * D, queries.unit + at, queries.low + at};
        const float* query = layer.query + ((size_t)unit * layer.group + g) * D;
        float* block = scores + g * stride + b * BLOCK;
        switch (std::min(GROUP, layer.group - g)) {
          case 1: scan_block<D, 1>(query, keys, scales, to, block, stride); break;
          case 2: scan_block<D, 2>(query, keys, scales, to, block, stride); break;
          case 3: scan_block<D, 3>(query, keys, scales, to, block, stride); break;
          default: scan_block<D, 4>(query, keys, scales, to, block, stride);
        }
      }
    }
  }

  void finish(int unit, int slot, int g, int thread) const {
    const int row = unit / layer.heads, head = unit % layer.heads, query_head = unit * layer.group + g;
    const int slots = layer.slots[row], *gap = layer.gap + 2 * row, tokens = slots - (gap[1] - gap[0]);
    const float* query = layer.query + (size_t)query_head * D;
    float* scores = scratch.scores_of(slot) + g * stride;
    std::fill(scores + gap[0], scores + gap[1], LOWEST);
    int32_t* places = scratch.places_of(thread);
    int32_t* ties = places + scratch.places() / sizeof(int32_t);
    const int k = std::min(layer.k[row], tokens);
    Chosen chosen{0, 0, LOWEST};
    if (k == tokens) {
      for (int i = 0; i < slots; i++)
        if (i < gap[0] || i >= gap[1]) places[chosen.count++] = i;
    } else if (k > 0) {
      chosen = choose(scores, slots, k, ties, places);
    } else if (layer.residual) {
      chosen = choose(scores, slots, 1, ties, places);  // the highest score is the threshold, and no token is read
      chosen.threshold = scores[places[0]];
      for (int i = chosen.ties++; i > 0; i--) ties[i] = ties[i - 1];
      ties[0] = places[0], chosen.count = 0;
    }
    const ChosenRows<D> rows{layer.rows + (size_t)unit * layer.blocks * BLOCK * ChosenRows<D>::SIZE, places, chosen.count};
    Sums<D> sums, rest;
    if (layer.residual && k < tokens) rest = regression(layer, row, head, query, scores, chosen, ties, rows);
    add_recent(sums, query, layer.recent + (size_t)unit * layer.room * 2 * D, layer.recents[row]);
    add_rows(sums, rows, scores, scratch.queries_of(slot), g, layer.group);
    sums.merge(rest.top, rest.mass, (const float*)rest.value);
    sums.write(layer.output + (size_t)query_head * D, layer.log_mass + query_head);
  }

  size_t bytes() const { return scratch.bytes(layer.threads); }
  int used(int unit) const { return (layer.slots[unit / layer.heads] + BLOCK - 1) / BLOCK; }

  void run() const {
    const int units = layer.batch * layer.heads;
    if (one_by_one(layer))
      return parallel(layer.threads, units, [&](int unit, int thread) {
        scan(unit, thread, 0, used(unit));
        for (int g = 0; g < layer.group; g++) finish(unit, thread, g, thread);
      });
    constexpr int CUTS = 8;
    parallel(layer.threads, units * CUTS, [&](int task, int) {
      const int unit = task / CUTS, cut = task % CUTS, blocks = used(unit);
      scan(unit, unit, blocks * cut / CUTS, blocks * (cut + 1) / CUTS);
    });
    parallel(layer.threads, units * layer.group, [&](int task, int thread) {
      finish(task / layer.group, task / layer.group, task % layer.group, thread);
    });
  }
};

}  // namespace
