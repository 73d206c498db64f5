// A prompt read in part, as core/prompts.py defines it: the tiles of prompt.hpp with fewer keys, and pseudo-tokens.
//
// A tile is a block of queries of one query head. The means of blocks are a prompt of their own, whose panels hold the
// query heads of a KV head side by side, block by block: their scores of all keys are a table [keys, PANEL], from which
// the keys that a block reads, and the sums of those that it does not, come for all lanes of the panel at once.
#pragma once
#include "prompt.hpp"

namespace {

constexpr int OCTAVES = 24;      // of thresholds of weights
constexpr int FINEST = 21;       // bits of a float below a step of thresholds: a quarter of an octave
constexpr float NO_MASS = 1e-37f;

// How a prompt is read in part, the same as `Cut` of library.py.
struct Cut {
  int32_t block, window, sink, part;  // at most PROMPT_ROWS queries of a mean; numbers of keys, `part` of a pseudo-token, 0 for none
  int32_t first;                      // of the blocks to read: those before are not written
  float left;                         // share of a mean's mass that may stay unread
  const uint8_t* whole;               // [H G], 1 for heads that read all keys
};

// Keys and values of a list.
struct Listed {
  const Dense& from;
  const int32_t* list;

  template <int D>
  void put(int row, int head, int n, PromptBlock<float, D>& to) const {
    float copy[D];
    for (int i = 0; i < n; i++) {
      from.copy_row<D>(from.key, row, head, list[i], to.keys + i * D);
      from.copy_row<D>(from.value, row, head, list[i], copy);
      for (int d = 0; d < D; d += W) to.put_value(i, d, load<Floats>(copy + d));
    }
  }
  template <int D>
  void put(int row, int head, int n, PromptBlock<int32_t, D>& to) const {
    bf16 copies[2][D];
    for (int i = 0; i < n; i += 2) {
      memset(copies, 0, sizeof copies);
      for (int j = i; j < std::min(i + 2, n); j++) {
        bf16 copy[D];
        from.copy_row<D>(from.key, row, head, list[j], copy);
        memcpy(to.keys + j * (D / 2), copy, sizeof copy);
        from.copy_row<D>(from.value, row, head, list[j], copies[j - i]);
      }
      for (int d = 0; d < D; d += W) to.put_value(i / 2, d, paired(widen(copies[0] + d), widen(copies[1] + d)));
    }
  }
};

// Scratch of a thread; what depends on the numbers of keys and parts follows it.
template <class Word, int D>
struct PartScratch {
  PromptScratch<Word, D> tile;
  PromptBlock<float, D> block, turned;  // `turned` has the keys in the place of values
  float mean[D * PANEL], sums[2][D * PANEL];
  int32_t found[PANEL], stand_ins[PANEL];  // numbers of keys to read and of pseudo-tokens
};

template <class Word, int D>
struct PartPanel {
  typedef PromptTile<Word, D> Tile;
  const Prompt& of;  // its heads are query heads, in groups of one
  const Dense& from;
  const Cut& cut;
  const int group, head, panel;  // query heads of a KV head; KV head; number of the panel
  PartScratch<Word, D>& own;

  static size_t keys_of(const Prompt& of) { return (size_t)(of.keys + BLOCK - 1) / BLOCK * BLOCK; }
  static size_t parts_of(const Prompt& of, const Cut& cut) { return cut.part ? (of.keys + cut.part - 1) / cut.part : 0; }
  static size_t bytes(const Prompt& of, const Cut& cut) {
    return sizeof(PartScratch<Word, D>) + sizeof(float) * PANEL * (2 * keys_of(of) + (2 * D + 16) * parts_of(of, cut));
  }
  float* table() const { return (float*)(&own + 1); }                                 // [keys, PANEL]
  int32_t* list(int j) const { return (int32_t*)table() + PANEL * keys_of(of) + j * keys_of(of); }
  float* stand_in(int j, int p) const { return table() + 2 * PANEL * keys_of(of) + (j * parts_of(of, cut) + p) * (2 * D + 16); }  // key, value, bias

  int blocks() const { return (of.tokens + cut.block - 1) / cut.block; }
  int lanes() const { return std::min(PANEL, blocks() * group - panel * PANEL); }
  int block_of(int j) const { return (panel * PANEL + j) / group; }
  int head_of(int j) const { return head * group + (panel * PANEL + j) % group; }
  int begin(int j) const { return block_of(j) * cut.block; }
  int end(int j) const { return std::min(of.tokens, begin(j) + cut.block); }
  int stop(int j) const { return std::max(0, begin(j) - cut.window); }  // keys from here on, and those before
  int start(int j) const { return std::min(cut.sink, stop(j)); }        // here, are read by all
  bool reads(int j) const { return block_of(j) >= cut.first && !cut.whole[head_of(j)]; }

  void run() const {
    const int last = lanes() - 1;
    bool some = false;
    for (int j = 0; j <= last; j++) some |= reads(j);
    if (!some) return;
    Ints starts[LANES] = {}, stops[LANES] = {}, ends[LANES] = {};
    memset(own.mean, 0, sizeof own.mean);
    for (int j = 0; j <= last; j++) {
      if (!reads(j)) continue;
      starts[j / W][j % W] = start(j), stops[j / W][j % W] = stop(j), ends[j / W][j % W] = end(j);
      float copy[D];
      for (int t = begin(j); t < end(j); t++) {
        read_row<D>(of.query, of.narrow, 0, head_of(j), t, of.factor / (end(j) - begin(j)), copy);
        for (int d = 0; d < D; d++) own.mean[d * PANEL + j] += copy[d];
      }
    }
    score(end(last));
    Floats top[LANES], mass[LANES], threshold[LANES];
    weigh(end(last), starts, stops, ends, top, mass);
    for (int l = 0; l < LANES; l++) threshold[l] = least_read(l, stop(last), mass[l]);
    choose(stop(last), threshold);
    std::fill(own.stand_ins, own.stand_ins + PANEL, 0);
    for (int first = 0; cut.part && first < stop(last); first += cut.part) stand_for(first, std::min(stop(last), first + cut.part), top);
    for (int j = 0; j <= last; j++)
      if (reads(j)) read(j);
  }

  // Scores of the means by keys 0 .. n.
  void score(int n) const {
    for (int s = 0; s < n; s += BLOCK) {
      for (int i = 0; i < std::min(BLOCK, n - s); i++) from.copy_row<D>(from.key, 0, head, s + i, own.block.keys + i * D);
      for (int i = 0; i < BLOCK; i += SIDE) panel_product<D, 1, false>(own.block.keys + i * D, D, own.mean, nullptr, table() + (s + i) * PANEL);
    }
  }

  // Turns scores into weights in units of the largest, and those of keys that are read by all into 0. `mass`: of all.
  void weigh(int n, const Ints* starts, const Ints* stops, const Ints* ends, Floats* top, Floats* mass) const {
    for (int l = 0; l < LANES; l++) {
      float* at = table() + l * W;
      top[l] = all(LOWEST), mass[l] = Floats{};
      for (int i = 0; i < n; i++) top[l] = largest(i < ends[l] ? load<Floats>(at + i * PANEL) : all(LOWEST), top[l]);
      for (int i = 0; i < n; i++) {
        const Floats x = load<Floats>(at + i * PANEL) - top[l], weight = (i < ends[l]) & ~(x < -126.f) ? exp2(x) : Floats{};
        mass[l] += weight;
        store(at + i * PANEL, (i >= starts[l]) & (i < stops[l]) ? weight : Floats{});
      }
    }
  }

  // The largest threshold of weights below which no more than the share is left, by halving the steps where it may be.
  Floats least_read(int l, int n, Floats mass) const {
    const int one = bits_of(1.f) >> FINEST;
    Ints low = all((int32_t)(one - OCTAVES * (1 << (23 - FINEST)))), high = all((int32_t)(one + 1));
    while (any(low < high)) {
      const Ints middle = (low + high + 1) >> 1;
      const Floats threshold = (Floats)(middle << FINEST);
      Floats below = {};
      for (int i = 0; i < n; i++) {
        const Floats weight = load<Floats>(table() + i * PANEL + l * W);
        below += weight < threshold ? weight : Floats{};
      }
      const Ints fits = below <= cut.left * mass;
      low = fits ? middle : low, high = fits ? high : middle - 1;
    }
    return (Floats)(low << FINEST);
  }

  // Lists the keys to read; their weights become 0. NaN is read.
  void choose(int n, const Floats* threshold) const {
    std::fill(own.found, own.found + PANEL, 0);
    for (int i = 0; i < n; i++)
      for (int l = 0; l < LANES; l++) {
        float* at = table() + i * PANEL + l * W;
        const Ints chosen = ~(load<Floats>(at) < threshold[l]);
        if (!any(chosen)) continue;
        for (int j = 0; j < W; j++)
          if (chosen[j]) list(l * W + j)[own.found[l * W + j]++] = i, at[j] = 0;
      }
  }

  // Pseudo-tokens of the part first .. end.
  void stand_for(int first, int end, const Floats* top) const {
    Floats mass[LANES] = {}, ones[LANES];
    for (Floats& x : ones) x = all(1.f);
    memset(own.sums, 0, sizeof own.sums);
    for (int s = first; s < end; s += BLOCK) {
      const int n = std::min(BLOCK, end - s);
      const float* weights = table() + s * PANEL;
      for (int i = 0; i < n; i++) {
        float rows[2][D];
        from.copy_row<D>(from.key, 0, head, s + i, rows[0]);
        from.copy_row<D>(from.value, 0, head, s + i, rows[1]);
        for (int d = 0; d < D; d += W) own.turned.put_value(i, d, load<Floats>(rows[0] + d)), own.block.put_value(i, d, load<Floats>(rows[1] + d));
        for (int l = 0; l < LANES; l++) mass[l] += load<Floats>(weights + i * PANEL + l * W);
      }
      for (int d = 0; d < D; d += SIDE) {
        panel_product<1, SIDE, true>(own.turned.values + d * BLOCK, n, weights, ones, own.sums[0] + d * PANEL);
        panel_product<1, SIDE, true>(own.block.values + d * BLOCK, n, weights, ones, own.sums[1] + d * PANEL);
      }
    }
    for (int j = 0; j < lanes(); j++) {
      const float whole = mass[j / W][j % W];
      if (!reads(j) || whole < NO_MASS) continue;
      float *key = stand_in(j, own.stand_ins[j]++), *value = key + D, along = 0;
      for (int d = 0; d < D; d++) {
        key[d] = own.sums[0][d * PANEL + j] / whole, value[d] = own.sums[1][d * PANEL + j] / whole;
        if (PER<Word> == 2) { const bf16 rounded = nearest(key[d]); key[d] = widen_one(&rounded); }  // as it is read
        along += key[d] * own.mean[d * PANEL + j];
      }
      key[2 * D] = __builtin_log2f(whole) + top[j / W][j % W] - along;
    }
  }

  void read(int j) const {
    const Tile tile{of, own.tile, 0, head_of(j), begin(j), end(j) - begin(j)};
    tile.begin();
    add_span(tile, from, head, 0, start(j));
    add_span(tile, from, head, stop(j), end(j));
    for (int i = 0; i < own.found[j]; i += BLOCK) {
      const int n = std::min(BLOCK, own.found[j] - i);
      Listed{from, list(j) + i}.template put<D>(0, head, n, own.tile.block);
      tile.add(n, 0, false);
    }
    const View key{(int64_t)stand_in(j, 0), {0, 0, 2 * D + 16, 1}}, value{key.address + D * (int64_t)sizeof(float), {0, 0, 2 * D + 16, 1}};
    for (int p = 0; p < own.stand_ins[j]; p += BLOCK) {
      const int n = std::min(BLOCK, own.stand_ins[j] - p);
      float biases[BLOCK];
      for (int i = 0; i < n; i++) biases[i] = stand_in(j, p + i)[2 * D];
      Dense{key, value, false}.put(0, 0, p, n, own.tile.block);
      tile.add(n, 0, false, biases);
    }
    tile.write();
  }

  static void add_span(const Tile& tile, const Dense& from, int head, int first, int end) {
    for (int s = first; s < end; s += BLOCK) {
      const int n = std::min(BLOCK, end - s);
      from.put(0, head, s, n, tile.own.block);
      tile.add(n, s, true);
    }
  }
};

// Attention of one prompt. `scratch` has PartPanel::bytes for each thread.
template <class Word, int D>
void read_prompt_part(const Prompt& of, const Dense& from, const Cut& cut, int threads, uint8_t* scratch, size_t bytes) {
  const int heads = of.heads * of.group, blocks = (of.tokens + cut.block - 1) / cut.block;
  const int panels = (blocks * of.group + PANEL - 1) / PANEL, tiles = (of.tokens + PROMPT_ROWS - 1) / PROMPT_ROWS;
  Prompt by_head = of;
  by_head.heads = heads, by_head.group = 1;
  parallel(threads, of.heads * panels + heads * tiles, [&](int task, int thread) {
    auto& own = *(PartScratch<Word, D>*)(scratch + bytes * thread);
    if (task < of.heads * panels) {  // the longest first
      PartPanel<Word, D>{by_head, from, cut, of.group, task % of.heads, panels - 1 - task / of.heads, own}.run();
      return;
    }
    task -= of.heads * panels;
    const int head = task % heads, first = (tiles - 1 - task / heads) * PROMPT_ROWS;
    if (!cut.whole[head]) return;
    const PromptTile<Word, D> tile{by_head, own.tile, 0, head, first, std::min(PROMPT_ROWS, of.tokens - first)};
    tile.begin();
    PartPanel<Word, D>::add_span(tile, from, head / of.group, 0, first + tile.rows);
    tile.write();
  });
}

}  // namespace
