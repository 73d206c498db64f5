// Causal attention of many tokens in float32: of a prompt, or of a further piece over all tokens before it.
//
// A task is a tile: up to 384 queries of a KV head, its query heads side by side, token by token. Vectors hold queries:
// scores are [keys, queries] and outputs [channels, queries], so that maxima, sums and rescalings need no reduction, and
// both products are the same: numbers of keys or values, each for all lanes, times rows of queries or weights. A tile is
// cut into panels, whose sums stay in registers; a block of keys and values is copied once for all of them.
#pragma once
#include <type_traits>

#include "full.hpp"

namespace {

constexpr int LANES = W == 4 ? 2 : 3;      // vectors of a panel
constexpr int PANEL = LANES * W;           // queries of a panel
constexpr int SIDE = W == 16 ? 8 : 4;      // keys, or channels, whose sums are in registers at once
constexpr int PROMPT_ROWS = 384;           // queries of a tile

typedef float Floats4 __attribute__((vector_size(16)));

// Two forms of products: of numbers in float32, or of pairs of bfloat16, for CPUs that multiply these. P numbers a word.
template <class Word>
constexpr int PER = std::is_same_v<Word, float> ? 1 : 2;
template <class Word>
using Words = std::conditional_t<PER<Word> == 1, Floats, Ints>;

#if VNNI
#define WITH_PAIRS __attribute__((target("avx512bf16")))
WITH_PAIRS inline Floats plus_product(Floats sums, Ints a, Ints b) { return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }
inline bool multiplies_pairs() { return __builtin_cpu_supports("avx512bf16"); }
#else
#define WITH_PAIRS
#endif
inline Floats plus_product(Floats sums, Floats a, Floats b) { return sums + a * b; }

// to[a, PANEL] = sum over i of left[a * ROW + i * STEP] right[i, PANEL] for SIDE rows a, plus, with `by`, to[a] * by.
template <int ROW, int STEP, bool ADD, class Word>
WITH_PAIRS void panel_product(const Word* left, int inner, const Word* right, const Floats* by, float* to) {
  Floats sums[SIDE][LANES] = {};
  if constexpr (ADD)
    for (int a = 0; a < SIDE; a++)
      for (int l = 0; l < LANES; l++) sums[a][l] = load<Floats>(to + a * PANEL + l * W) * by[l];
#pragma GCC unroll 4
  for (int i = 0; i < inner; i++) {
    Words<Word> of[LANES];
#pragma GCC unroll 4
    for (int l = 0; l < LANES; l++) of[l] = load<Words<Word>>(right + i * PANEL + l * W);
#pragma GCC unroll 8
    for (int a = 0; a < SIDE; a++) {
      const Words<Word> one = all(left[a * ROW + i * STEP]);
#pragma GCC unroll 4
      for (int l = 0; l < LANES; l++) sums[a][l] = plus_product(sums[a][l], one, of[l]);
    }
  }
  for (int a = 0; a < SIDE; a++)
    for (int l = 0; l < LANES; l++) store(to + a * PANEL + l * W, sums[a][l]);
}

// Pairs of two vectors of bfloat16, in the upper halves of lanes; and of the nearest such numbers of weights.
typedef uint32_t Unsigned __attribute__((vector_size(4 * W)));
inline Ints paired(Floats one, Floats two) { return (Ints)two | (Ints)((Unsigned)one >> 16); }
inline Ints rounded_pairs(Floats one, Floats two) { return paired((Floats)((Ints)one + 0x8000), (Floats)((Ints)two + 0x8000 & (int32_t)0xffff0000)); }

// A block of keys and values, as the products read them.
template <class Word, int D>
struct PromptBlock {
  static constexpr int P = PER<Word>;
  Word keys[BLOCK * D / P];    // [64, D / P]
  Word values[BLOCK * D / P];  // [D / SIDE, 64 / P, SIDE]

  void put_value(int i, int d, Words<Word> x) {
    for (int b = 0; b < W; b += SIDE) memcpy(values + ((d + b) / SIDE * (BLOCK / P) + i) * SIDE, (const Word*)&x + b, SIDE * sizeof(Word));
  }
};

// The sums of a panel's queries.
template <class Word, int D>
struct PromptPanel {
  Word query[D / PER<Word> * PANEL];
  float output[D * PANEL];
  Floats top[LANES], mass[LANES];
  Ints last[LANES];  // the last key that a query sees
};

template <class Word, int D>
struct PromptScratch {
  PromptBlock<Word, D> block;
  PromptPanel<Word, D> panels[PROMPT_ROWS / PANEL];
  float scores[BLOCK * PANEL];
};

// The keys and values of a call: float32, or bfloat16 (`narrow`).
struct Dense {
  const View &key, &value;
  bool narrow;

  template <int D>
  void put(int row, int head, int start, int n, PromptBlock<float, D>& to) const {
    float copy[D];
    for (int i = 0; i < n; i++) {
      copy_row<D>(key, row, head, start + i, to.keys + i * D);
      copy_row<D>(value, row, head, start + i, copy);
      for (int d = 0; d < D; d += W) to.put_value(i, d, load<Floats>(copy + d));
    }
  }
  template <int D>
  void put(int row, int head, int start, int n, PromptBlock<int32_t, D>& to) const {
    bf16 copies[2][D];
    for (int i = 0; i < n; i += 2) {
      memset(copies, 0, sizeof copies);
      for (int j = i; j < std::min(i + 2, n); j++) {
        bf16 copy[D];
        copy_row<D>(key, row, head, start + j, copy);
        memcpy(to.keys + j * (D / 2), copy, sizeof copy);
        copy_row<D>(value, row, head, start + j, copies[j - i]);
      }
      for (int d = 0; d < D; d += W) to.put_value(i / 2, d, paired(widen(copies[0] + d), widen(copies[1] + d)));
    }
  }

  template <int D>
  void copy_row(const View& from, int row, int head, int token, float* to) const {
    if (from.strides[3] != 1) return read_row<D>(from, narrow, row, head, token, 1, to);
    const size_t at = from.at(row, head, token);
    for (int d = 0; d < D; d += W) store(to + d, narrow ? widen((const bf16*)from.address + at + d) : widen((const float*)from.address + at + d));
  }
  template <int D>
  void copy_row(const View& from, int row, int head, int token, bf16* to) const {
    const size_t at = from.at(row, head, token), step = from.strides[3];
    if (narrow && step == 1) memcpy(to, (const bf16*)from.address + at, D * sizeof(bf16));
    else if (narrow)
      for (int d = 0; d < D; d++) to[d] = ((const bf16*)from.address)[at + d * step];
    else
      for (int d = 0; d < D; d++) to[d] = nearest(((const float*)from.address)[at + d * step]);
  }
};

// The tokens that a packed cache holds: those of its blocks, and then those in float32.
struct Held {
  const Buffers& cache;

  // Tokens of a block before its gap, which ends with the block.
  int block_tokens(int row, int block) const {
    const int *gap = cache.gap + 2 * row, start = block * BLOCK, n = std::min(BLOCK, cache.slots[row] - start);
    return gap[1] > gap[0] && gap[0] / BLOCK == block ? gap[0] - start : n;
  }

  // Codes of keys [D / 4, 64, 4] and of values [32, D, 2] with their scales, in float32.
  template <int D>
  static void put_codes(const uint8_t* keys, const bf16* scales, const uint8_t* values, const float* value_scales, PromptBlock<float, D>& to) {
    float low[D], step[D];
    for (int d = 0; d < D; d++) step[d] = widen_one(scales + D + d), low[d] = widen_one(scales + d) - 127.5f * step[d];
    for (int t = 0; t < BLOCK; t++)
      for (int d = 0; d < D; d += 4) {
        const int32_t four = load<int32_t>(keys + (d / 4 * BLOCK + t) * 4);
        const Ints4 codes = (Ints4{four, four, four, four} >> Ints4{0, 8, 16, 24}) & 255;
        store(to.keys + t * D + d, load<Floats4>(low + d) + load<Floats4>(step + d) * __builtin_convertvector(codes, Floats4));
      }
    for (int t = 0; t < BLOCK; t += 2)
      for (int d = 0; d < D; d += W) {
        const Ints pairs = (Ints)widen((const bf16*)values + t / 2 * D + d);  // in the upper half of each lane
        to.put_value(t, d, to_floats(pairs << 8 >> 24) * value_scales[t]);
        to.put_value(t + 1, d, to_floats(pairs >> 24) * value_scales[t + 1]);
      }
  }

  template <int D>
  void put_block(size_t block, PromptBlock<float, D>& to) const {
    const bf16* scales = cache.scales + block * 2 * D;
    if (cache.bits == 8) return put_codes<D>(cache.keys + block * BLOCK * D, scales, cache.values + block * BLOCK * D, cache.value_scales + block * BLOCK, to);
    if (cache.bits == 4) {
      uint8_t keys[BLOCK * D], values[BLOCK * D];
      float value_scales[BLOCK];
      Planes<D>::unpack(cache.keys + block * (BLOCK * D / 2), cache.rows + block * BLOCK * (D / 2 + D + 2), keys, values, value_scales);
      return put_codes<D>(keys, scales, values, value_scales, to);
    }
    const uint8_t *keys = cache.keys + block * BLOCK * D * 2, *values = cache.values + block * BLOCK * D * 2;
    for (int t = 0; t < BLOCK; t++)
      for (int d = 0; d < D; d++) to.keys[t * D + d] = widen_one(keys + ((d / 2 * BLOCK + t) * 2 + d % 2) * 2);
    for (int t = 0; t < BLOCK; t += 2)
      for (int d = 0; d < D; d += W) {
        const Ints pairs = load<Ints>(values + (t / 2 * D + d) * 4);
        to.put_value(t, d, first(pairs)), to.put_value(t + 1, d, second(pairs));
      }
  }
  template <int D>
  void put_block(size_t block, PromptBlock<int32_t, D>& to) const {
    const uint8_t *keys = cache.keys + block * BLOCK * D * 2, *values = cache.values + block * BLOCK * D * 2;
    for (int j = 0; j < D / 2; j++)
      for (int t = 0; t < BLOCK; t++) to.keys[t * (D / 2) + j] = load<int32_t>(keys + (j * BLOCK + t) * 4);
    for (int t = 0; t < BLOCK / 2; t++)
      for (int d = 0; d < D; d += W) to.put_value(t, d, load<Ints>(values + (t * D + d) * 4));
  }
};

// What one call asks. Query t sees keys up to t + keys - tokens, and of these the last `window`.
struct Prompt {
  View query, output, log_mass;               // [B, H G, T, D], [B, T, H G, D], and [B, T, H G, 1] or null
  int batch, heads, group, tokens, keys, window;
  bool narrow;                                // queries and outputs are bfloat16
  float factor;

  int tiles() const { return (tokens * group + PROMPT_ROWS - 1) / PROMPT_ROWS; }
};

template <class Word, int D>
struct PromptTile {
  typedef PromptPanel<Word, D> Panel;
  static constexpr int P = PER<Word>;
  const Prompt& of;
  PromptScratch<Word, D>& own;
  const int row, head, first_row, rows;  // of the batch; KV head; first query of the tile, and their number

  int panels() const { return (rows + PANEL - 1) / PANEL; }
  int token(int query) const { return (first_row + std::min(query, rows - 1)) / of.group; }
  int query_head(int query) const { return head * of.group + (first_row + query) % of.group; }
  int last_key(int query) const { return token(query) + of.keys - of.tokens; }

  void begin() const {
    for (int p = 0; p < panels(); p++) {
      Panel& to = own.panels[p];
      memset(&to, 0, sizeof to);
      for (int j = 0; j < PANEL; j++) {
        const int query = p * PANEL + j;
        to.top[j / W][j % W] = LOWEST, to.last[j / W][j % W] = last_key(query);
        if (query >= rows) continue;
        std::conditional_t<P == 1, float, bf16> copy[D];
        if constexpr (P == 1) read_row<D>(of.query, of.narrow, row, query_head(query), token(query), of.factor, copy);
        else Dense{of.query, of.query, true}.copy_row<D>(of.query, row, query_head(query), token(query), copy);
        for (int d = 0; d < D / P; d++) to.query[d * PANEL + j] = load<Word>(copy + d * P);
      }
    }
  }

  // Scores of n keys, those that a query does not see set to LOWEST. `start`: number of the block's first key.
  void score(const Panel& panel, int n, int start, bool masked) const {
    for (int i = 0; i < n; i += SIDE) panel_product<D / P, 1, false>(own.block.keys + i * (D / P), D / P, panel.query, nullptr, own.scores + i * PANEL);
    if (!masked) return;
    for (int i = 0; i < n; i++)
      for (int l = 0; l < LANES; l++) {
        const Ints before = panel.last[l] - (start + i), seen = (before >= 0) & (before < of.window);
        float* at = own.scores + i * PANEL + l * W;
        store(at, seen ? load<Floats>(at) : all(LOWEST));
      }
  }

  // Turns scores into weights; `by` is what earlier sums are multiplied by. Weights below 2^-126 are 0, or 2^-125 where
  // pairs are multiplied: products with numbers below the normal ones are slow.
  void weigh(Panel& panel, int n, Floats* by) const {
    for (int l = 0; l < LANES; l++) {
      float* scores = own.scores + l * W;
      if (P == 2 && n % 2) store(scores + n * PANEL, all(LOWEST));  // the second of the last pair, whose value is 0
      Floats most = all(LOWEST), others = most;  // two, so that one does not wait for the other
      for (int i = 0; i < n; i += 2) {
        most = largest(load<Floats>(scores + i * PANEL), most);
        if (P == 2 || i + 1 < n) others = largest(load<Floats>(scores + (i + 1) * PANEL), others);
      }
      most = largest(most, others);
      const Floats factor = all(of.factor);
      if (P == 2) most *= factor;
      most = largest(most, panel.top[l]);
      by[l] = exp2(panel.top[l] - most);
      const auto weight = [&](int i) {
        Floats x = load<Floats>(scores + i * PANEL);
        if (P == 2) return exp2_rough(x * factor - most);
        x -= most;
        return x < -126.f ? Floats{} : exp2(x);
      };
      Floats total = {};
#pragma GCC unroll 4
      for (int i = 0; i < n; i += P) {
        const Floats one = weight(i);
        if constexpr (P == 1) total += one, store(scores + i * PANEL, one);
        else {
          const Floats two = weight(i + 1);
          total += one + two;
          store(scores + i / 2 * PANEL, rounded_pairs(one, two));
        }
      }
      panel.top[l] = most, panel.mass[l] = panel.mass[l] * by[l] + total;
    }
  }

  // Adds the n keys of the block to all panels; of a causal call start .. start + n.
  void add(int n, int start, bool causal) const {
    for (int p = 0; p < panels(); p++) {
      Panel& panel = own.panels[p];
      const int oldest = last_key(p * PANEL), newest = last_key(p * PANEL + PANEL - 1);
      const int count = causal ? std::min(n, newest + 1 - start) : n;
      if (count <= 0 || (causal && start + n + of.window <= oldest + 1)) continue;
      const bool masked = causal && (start + count - 1 > oldest || start + of.window <= newest);
      Floats by[LANES];
      score(panel, count, start, masked);
      weigh(panel, count, by);
      for (int d = 0; d < D; d += SIDE)
        panel_product<1, SIDE, true>(own.block.values + d * (BLOCK / P), (count + P - 1) / P, (const Word*)own.scores, by, panel.output + d * PANEL);
    }
  }

  void add_held(const Held& held) const {
    const Buffers& cache = held.cache;
    const size_t unit = (size_t)row * cache.heads + head;
    for (int block = 0; block * BLOCK < cache.slots[row]; block++) {
      held.put_block(unit * cache.blocks + block, own.block);
      add(held.block_tokens(row, block), 0, false);
    }
    const int64_t at = (int64_t)(cache.recent + unit * cache.room * 2 * D);
    const View key{at, {0, 0, 2 * D, 1}}, value{at + D * (int64_t)sizeof(float), {0, 0, 2 * D, 1}};
    for (int start = 0; start < cache.recents[row]; start += BLOCK) {
      const int n = std::min(BLOCK, cache.recents[row] - start);
      Dense{key, value, false}.put(0, 0, start, n, own.block);
      add(n, 0, false);
    }
  }

  void add_new(const Dense& from) const {
    const int end = last_key(rows - 1) + 1;
    for (int start = std::max(0, last_key(0) + 1 - of.window); start < end; start += BLOCK) {
      const int n = std::min(BLOCK, end - start);
      from.put(row, head, start, n, own.block);
      add(n, start, true);
    }
  }

  void write() const {
    for (int query = 0; query < rows; query++) {
      const Panel& panel = own.panels[query / PANEL];
      const int j = query % PANEL;
      const float mass = panel.mass[j / W][j % W], by = 1 / mass;
      const size_t at = of.output.at(row, token(query), query_head(query));
      float copy[D];
      for (int d = 0; d < D; d++) copy[d] = panel.output[d * PANEL + j] * by;
      if (of.narrow)
        for (int d = 0; d < D; d++) ((bf16*)of.output.address)[at + d] = copy[d] == copy[d] ? nearest(copy[d]) : 0x7fc0;
      else memcpy((float*)of.output.address + at, copy, sizeof copy);
      if (of.log_mass.address)
        ((float*)of.log_mass.address)[of.log_mass.at(row, token(query), query_head(query))] = 0.69314718f * (panel.top[j / W][j % W] + __builtin_log2f(mass));
    }
  }
};

// Attention of all tiles: to the tokens held, if there are some, and to the new ones. `scratch` has a PromptScratch for
// each thread.
template <class Word, int D>
void read_prompt(const Prompt& of, const Buffers* held, const Dense& from, int threads, void* scratch) {
  parallel(threads, of.batch * of.heads * of.tiles(), [&](int task, int thread) {
    const int unit = task / of.tiles(), first = (of.tiles() - 1 - task % of.tiles()) * PROMPT_ROWS;  // the longest first
    const PromptTile<Word, D> tile{of, ((PromptScratch<Word, D>*)scratch)[thread], unit / of.heads, unit % of.heads, first, std::min(PROMPT_ROWS, of.tokens * of.group - first)};
    tile.begin();
    if (held) tile.add_held(Held{*held});
    tile.add_new(from);
    tile.write();
  });
}

}  // namespace
